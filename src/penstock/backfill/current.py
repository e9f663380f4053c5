"""The backfill that a source reads now, as the run knows it."""

from __future__ import annotations

import time
from typing import Any, Final

from penstock.backfill.progress import BackfillProgress
from penstock.backfill.request import Backfill
from penstock.config.settings import Config
from penstock.core.backoff import Backoff
from penstock.core.tables import matches_any
from penstock.postgres.reads import BackfillSpec, SavedCursor, cursor_from_json

_BACKOFF_SECONDS: Final = (1.0, 60.0)


class CurrentBackfill:
    """The backfill that a source reads; each start of it has a token."""

    def __init__(self, backfill: Backfill) -> None:
        self.backfill = backfill
        self.paused = self.held = False
        cursor = cursor_from_json(backfill.cursor)
        self.saved: tuple[SavedCursor, int] = cursor, backfill.rows_done
        self.saved_error = backfill.error
        self.interrupted: str | None = None
        self.token = 0
        self.cursor = cursor
        self.progress = BackfillProgress(*self.saved)
        self._backoff = Backoff(*_BACKOFF_SECONDS)
        self.retry_at: float | None = None

    def start(self, token: int) -> None:
        """Begin again at its cursor."""
        self.token = token
        self.cursor = self.progress.cursor
        self.progress = BackfillProgress(self.cursor, self.progress.rows)
        self.retry_at = None

    def put_off(self, why: str) -> float:
        """Note that it can't go on now; return the seconds until the next try."""
        delay = self._backoff.after_failure()
        self.retry_at = time.monotonic() + delay
        self.interrupted = why
        return delay

    def progressed(self) -> None:
        """Note progress: the next failure is a new one."""
        self._backoff.reset()
        self.interrupted = None

    @property
    def desired(self) -> dict[str, Any] | None:
        """The reader's desired state; None while a retry is not due."""
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


def unfit(config: Config, backfill: Backfill) -> str | None:
    """Return why a backfill does not fit the configuration any more."""
    sink = config.sinks.get(backfill.sink)
    if sink is None:
        return f"The configuration has no sink {backfill.sink} any more."
    if sink.source != backfill.source:
        return f"Sink {backfill.sink} takes from source {sink.source} now."
    patterns = sink.patterns or config.sources[sink.source].patterns
    if not matches_any(patterns, backfill.table_schema, backfill.table_name):
        return f"Sink {backfill.sink} does not take {backfill.table} any more."
    return None
