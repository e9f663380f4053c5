"""A capture that waits for its slot: another query reads it until the run commands this one to go.

There are two ways to wait (`Waits`). With `process` only the process of the capture is there. With
`lanes` the tasks of the first batch are there, too, connected to their sinks, and so are the connections
to the server: all that is left to do is to start the stream.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Final

from penstock.core.errors import CaptureError
from penstock.core.message import Position
from penstock.core.monitor import Report
from penstock.postgres.capture import Opened
from penstock.postgres.catalog import CaptureCatalog
from penstock.postgres.replication import open_replication
from penstock.spark.capture_reports import CaptureReports
from penstock.spark.options import SourceOptions

_REPORT_SECONDS: Final = 0.5
"""How often it reports that it waits: a report, or the command, may be lost."""
_LEAVING_SECONDS: Final = 5.0
"""How long the server may take to end the session that has left the slot."""
_PAUSE_SECONDS: Final = 0.002


class SlotWait:
    """Waits for the command to go, or to end."""

    def __init__(self, options: SourceOptions, reports: CaptureReports) -> None:
        self._options = options
        self._reports = reports
        self._commanded = threading.Event()
        self._ready = threading.Event()
        self._superseded = False
        self._catalog = CaptureCatalog(options.address)
        self._after = Position(*options.after)

    def command(self, report: Report) -> None:
        """Take the run's command, from any thread."""
        self._superseded |= report["command"] == "end"
        if (after := report.get("after")) is not None:
            self._after = max(self._after, Position(*after))
        self._commanded.set()

    def end(self) -> None:
        """Wait no longer: the process ends."""
        self.command({"command": "end"})

    def note_ready(self) -> None:
        """Report that all is there but the slot."""
        self._ready.set()
        self._reports.send({"waits": True})

    def until_go(self) -> None:
        """Return when the slot is this one's; raises `CaptureError` where another is to have it."""
        parent = os.getppid()
        while not self._commanded.is_set():
            if self._ready.is_set():
                self._reports.send({"waits": True})
            if not self._commanded.wait(_REPORT_SECONDS) and os.getppid() != parent:
                self._superseded = True  # Spark's JVM is gone
                break
        if self._superseded:
            raise CaptureError("superseded", "The settings have changed again.")

    def opened(self) -> tuple[Opened | None, Position]:
        """Connect, wait for the slot, and return the connections and where it stands.

        The connections are None where they could not be made before. Raises `CaptureError`.
        """
        options, replication = self._options, None
        with contextlib.suppress(CaptureError):  # it is tried again when the slot is free
            self._catalog.slot(options.slot)
            self._catalog.prepare(options.publication)
            replication = open_replication(options.address, options.slot, options.publication)
        try:
            self.until_go()
            deadline = time.monotonic() + _LEAVING_SECONDS
            while self._catalog.is_read(options.slot) and time.monotonic() < deadline:
                time.sleep(_PAUSE_SECONDS)
            confirmed, _ = self._catalog.slot(options.slot)
        except CaptureError:
            if replication is not None:
                replication.close()
            self._catalog.close()
            raise
        catalog = self._catalog.detach()
        opened = None
        if replication is not None and catalog is not None:
            opened = Opened(replication, catalog)
        return opened, max(Position(confirmed, -1), self._after)
