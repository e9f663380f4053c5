"""What a run knows of a source's backfills: the one that it reads now, and what its reader was told."""

from __future__ import annotations

import time
from typing import Any, Final

from penstock.backfill.initial import InitialBackfills
from penstock.backfill.progress import Progress
from penstock.backfill.requests import Backfill, Cursor
from penstock.config.file import Config
from penstock.core.backoff import Backoff
from penstock.core.monitor import Report
from penstock.core.tables import matches_any
from penstock.postgres.reads import BackfillSpec

_BACKOFF_SECONDS: Final = (1.0, 60.0)


class Current:
    """The backfill that a source reads; each start of it has a token."""

    def __init__(self, backfill: Backfill) -> None:
        self.backfill = backfill
        self.paused = self.held = False
        cursor = None if backfill.cursor is None else tuple(backfill.cursor)
        self.saved: tuple[Cursor, int] = cursor, backfill.rows_done
        self.saved_note = backfill.error
        self.interrupted: str | None = None
        self.token = 0
        self.cursor = cursor
        self.progress = Progress(*self.saved)
        self._backoff = Backoff(*_BACKOFF_SECONDS)
        self.retry_at: float | None = None

    def start(self, token: int) -> None:
        """Begin anew where it stands."""
        self.token = token
        self.cursor = self.progress.cursor
        self.progress = Progress(self.cursor, self.progress.rows)
        self.retry_at = None

    def put_off(self, why: str) -> float:
        """Note that it can't go on now; return the seconds until the next try."""
        delay = self._backoff.after_failure()
        self.retry_at = time.monotonic() + delay
        self.interrupted = why
        return delay

    def went_on(self) -> None:
        """Note progress: the next failure is a new one."""
        self._backoff.reset()
        self.interrupted = None

    @property
    def wanted(self) -> dict[str, Any] | None:
        """What the reader is to read; nothing until it is to be tried again."""
        if self.retry_at is not None:
            return None
        b = self.backfill
        spec = BackfillSpec(
            b.id, b.sink, b.table_schema, b.table_name, b.condition, b.sort_by, b.start
        )
        return {
            "token": self.token, "spec": spec.to_json(), "cursor": self.cursor,
            "paused": self.paused or self.held,
        }  # fmt: skip


class Source:
    """A source, and what its reader was told."""

    def __init__(self, name: str, initial: InitialBackfills) -> None:
        self.name = name
        self.initial = initial
        self.current: Current | None = None
        self.reader: str | None = None
        """The reader that reported; each has a name of its own."""
        self.restarted = False
        self.told: Report | None = None
        self.told_at = 0.0


def unfit(config: Config, backfill: Backfill) -> str | None:
    """Return why the configuration has no place for a backfill any more."""
    sink = config.sinks.get(backfill.sink)
    if sink is None:
        return f"The configuration has no sink {backfill.sink} any more."
    if sink.source != backfill.source:
        return f"Sink {backfill.sink} takes from source {sink.source} now."
    patterns = sink.patterns or config.sources[sink.source].patterns
    if not matches_any(patterns, backfill.table_schema, backfill.table_name):
        return f"Sink {backfill.sink} does not take {backfill.table} any more."
    return None
