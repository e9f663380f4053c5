"""How far a backfill is, from what its reader reports.

Nothing counts behind a report that is missing, so that no row is lost.
"""

from __future__ import annotations

from penstock.backfill.events import Delayed, Delivered, Done, Event, Failed
from penstock.core.health import Failure
from penstock.postgres.reads import SavedCursor


class BackfillProgress:
    """One start of a backfill at `cursor`, where `rows` were done.

    The reader may go back by itself, to the last chunk that it reported: then its chunks have a higher
    `attempt`, and are counted from 0 again.
    """

    def __init__(self, cursor: SavedCursor, rows: int) -> None:
        self.cursor = cursor
        self.rows = rows
        self.finished = False
        self.failure: Failure | None = None
        """Why this start ended."""
        self.transient = False
        """Whether another start may succeed, after a failure."""
        self.delayed: str | None = None
        """Why the reader waits now, or tries again by itself."""
        self.moved = False
        """Whether a chunk has counted."""
        self._last = 0, -1

    def take_event(self, event: Event) -> None:
        """Take an event of the reader's."""
        match event:
            case Delivered():
                self._take_chunk(event)
            case Done():
                self.finished = self._follows(event.attempt, event.chunks) and self.failure is None
            case Delayed():
                self.delayed = event.message
            case Failed():
                failure = Failure(event.code, event.message, event.remedy)
                self._fail(failure, transient=False)

    def _take_chunk(self, event: Delivered) -> None:
        if self._follows(event.attempt, event.chunk) and self.failure is None:
            self._last = event.attempt, event.chunk
            self.cursor = event.cursor
            self.rows += event.rows
            self.moved = True

    def _follows(self, attempt: int, number: int) -> bool:
        """Return whether no chunk is missing before this one; else no chunk counts any more."""
        last_attempt, last = self._last
        follows = number == (last + 1 if attempt == last_attempt else 0)
        if not follows:
            lost = Failure("event_lost", "A report of the reader's about a chunk is missing.")
            self._fail(lost, transient=True)
        return follows

    def _fail(self, failure: Failure, *, transient: bool) -> None:
        # The first failure is the cause of the others; but a permanent one ends the backfill.
        if self.failure is None or (self.transient and not transient):
            self.failure, self.transient = failure, transient
