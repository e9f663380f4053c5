"""The initial backfills of a source: requested once for each table of each sink that asks for them.

A look at the source's tables may take long: its server does not answer, or a table is locked. So a
thread of its own looks, and tries again later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from penstock.backfill import tables
from penstock.backfill.request import BackfillRequest, Backfills
from penstock.config.settings import Config
from penstock.config.sinks import Sink
from penstock.core.backoff import Backoff
from penstock.core.errors import CaptureError, StoreError

_BACKOFF_SECONDS: Final = (3.0, 60.0)
_CLOSE_SECONDS: Final = 3.0

log = structlog.get_logger("penstock")


class InitialBackfills:
    """Requests a source's initial backfills that it lacks; those that fail now, later.

    `on_made` is called, in another thread, when some were made.
    """

    def __init__(
        self, config: Config, source: str, backfills: Backfills, on_made: Callable[[], None]
    ) -> None:
        self._source = source
        self._settings = config.sources[source]
        self._sinks = {n: s for n, s in config.sinks_of(source).items() if s.initial_backfill}
        self._backfills = backfills
        self._on_made = on_made
        self._done = not self._sinks
        self._not_before = 0.0
        self._backoff = Backoff(*_BACKOFF_SECONDS)
        self._logged: set[str] = set()
        self._thread: threading.Thread | None = None

    def tend(self) -> None:
        """Request them, if that is due; does not wait."""
        if self._done or time.monotonic() < self._not_before:
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="initial", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Request no more."""
        self._done = True
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def missing(self) -> list[str]:
        """Return the sinks that lack their initial backfills; raises `StoreError`."""
        had = {sink for sink, _, _ in self._backfills.with_initial(self._source)}
        return [name for name in self._sinks if name not in had]

    def _ask(self) -> None:
        try:
            is_whole = self._ask_each()
        except StoreError:  # the supervisor of backfills reports it
            is_whole = False
        except Exception:
            log.exception("initial backfills could not be requested")
            is_whole = False
        self._not_before = time.monotonic() + self._backoff.after_failure()
        self._done = self._done or is_whole

    def _ask_each(self) -> bool:
        """Return whether nothing is left to request."""
        is_whole = True
        had = self._backfills.with_initial(self._source)
        for name, sink in self._sinks.items():
            try:
                requests, is_partial = self._requests(name, sink, had)
            except CaptureError as error:
                if self._is_new(f"{name} {error}"):
                    log.warning("initial backfill not started", source=self._source, sink=name,
                                code=error.code, error=str(error))  # fmt: skip
                is_whole &= not error.transient
                continue
            if self._done:  # closed
                return True
            is_whole &= not is_partial
            if self._backfills.create_initial(requests):
                self._on_made()
        return is_whole

    def _requests(
        self, name: str, sink: Sink, had: set[tuple[str, str, str]]
    ) -> tuple[list[BackfillRequest], bool]:
        selection = tables.Selection(
            self._settings, name, sink,
            skip=frozenset((schema, table) for of, schema, table in had if of == name),
        )  # fmt: skip
        reads, warnings, is_partial = tables.select(selection)
        for warning in warnings:
            if self._is_new(f"{name} {warning}"):
                log.warning("initial backfill", source=self._source, sink=name, note=warning)
        requests = [
            BackfillRequest(self._source, name, read.schema, read.table, sort_by=read.sort_by,
                    initial=True, rows_total=read.rows)
            for read in reads
        ]  # fmt: skip
        return requests, is_partial

    def _is_new(self, text: str) -> bool:
        is_new = text not in self._logged
        self._logged.add(text)
        return is_new
