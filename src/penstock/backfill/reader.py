"""The backfills of one reader, which runs the capture: does what the run commands, and reports to it.

The run commands the desired state: which backfill, from which cursor, paused or not. It gives each start
a token, which is in all reports about it, so that a late report is recognised.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

from penstock.backfill.chunks.backfiller import Backfiller
from penstock.backfill.events import Done, Event, Failed
from penstock.core.monitor import Report
from penstock.postgres.capture import Capture
from penstock.postgres.reads import BackfillSpec, Reads, cursor_from_json


class ReaderBackfills:
    """Drives a `Backfiller` as the run commands, and sends the run its events."""

    def __init__(self, capture: Capture, send: Callable[[Report], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._token: int | None = None
        self._attempt = 0
        self._name = secrets.token_hex(8)
        self._commanded = False
        self._ended: Report | None = None
        self._backfiller = Backfiller(capture, self._send_event)

    def report_ready(self) -> None:
        """Report that this reader is there, until a command came: a report may be lost."""
        if not self._commanded:
            self._send({"backfill": {"event": "ready", "reader": self._name}})

    def command(self, desired: dict[str, Any] | None) -> None:
        """Run the desired backfill in the place of any other; None: run none."""
        self._commanded = True
        with self._lock:
            if desired is None:
                if self._token is not None:
                    self._token = None
                    self._backfiller.cancel()
                return
            if desired["token"] != self._token:
                spec = BackfillSpec.from_json(desired["spec"])
                self._attempt = self._backfiller.start(spec, cursor_from_json(desired["cursor"]))
                self._token = desired["token"]
                self._ended = None
            ended = self._ended
            if desired["paused"]:
                self._backfiller.pause()
            else:
                self._backfiller.resume()
        if ended is not None:  # the run does not know, or its desired state would be another
            self._send(ended)

    def pause(self) -> None:
        """Plan nothing more; what is planned is delivered."""
        self._backfiller.pause()

    def failed(self, reads: Reads, error: Exception) -> None:
        """Note that no messages could be made of a chunk."""
        self._backfiller.failed(reads, error)

    def _token_of(self, attempt: int) -> int | None:
        # Where the backfiller goes back by itself, its attempts have higher numbers.
        return self._token if attempt >= self._attempt else None

    def close(self) -> None:
        """End whatever is under way."""
        self._backfiller.close()

    def _send_event(self, event: Event) -> None:
        with self._lock:  # the token is set before the first event of a start
            token = self._token_of(event.attempt)
            if token is None:
                return
            report = {"backfill": {**event.to_json(), "token": token}}
            if isinstance(event, Done | Failed):
                self._ended = report
        self._send(report)
