"""How far a backfill is, from what its reader and its tasks report, in whatever order that comes.

A chunk counts when its batch is confirmed and each of its ranges was read; then the backfill is at its
cursor. Nothing after a range that failed counts, so that no row is lost.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from penstock.backfill.events import Delayed, Delivered, Done, Event, Failed, RangeRead, Started
from penstock.core.health import Failure
from penstock.postgres.reads import SavedCursor


class _Chunk(NamedTuple):
    attempt: int
    number: int
    ranges: int
    cursor: SavedCursor
    at: float


class BackfillProgress:
    """One start of a backfill at `cursor`, where `rows` were done. Times are `time.monotonic`'s.

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
        self._read: dict[tuple[int, int], dict[int, int]] = {}
        self._delivered: deque[_Chunk] = deque()
        self._last = 0, -1
        self._attempt = 0
        self._done = False

    def take_range(self, report: RangeRead) -> None:
        """Take a task's report, the only one of its range."""
        chunk = report.attempt, report.chunk
        is_delivered = any(c[:2] == chunk for c in self._delivered)
        # What an attempt that was given up has not delivered, the next one reads again.
        is_coming = chunk > self._last and report.attempt >= self._attempt
        if not is_delivered and not is_coming:
            return
        if report.failure is not None:
            self._fail(report.failure, transient=report.transient)
        else:
            self._read.setdefault(chunk, {})[report.range] = report.rows
            self._count()

    def take_event(self, event: Event, now: float) -> None:
        """Take an event of the reader's."""
        match event:
            case Started():
                self._attempt = event.attempt
            case Delivered():
                self._take_chunk(event, now)
            case Done():
                self._done = self._follows(event.attempt, event.chunks)
            case Delayed():
                self.delayed = event.message
            case Failed():
                failure = Failure(event.code, event.message, event.remedy)
                self._fail(failure, transient=False)
        self._count()

    def check(self, now: float, patience: float) -> None:
        """End it where a range of a delivered chunk was not reported for `patience` seconds."""
        if self._delivered and now - self._delivered[0].at > patience:
            lost = Failure("range_lost", "A task that read a range has not reported.")
            self._fail(lost, transient=True)

    def _take_chunk(self, event: Delivered, now: float) -> None:
        if not self._follows(event.attempt, event.chunk):
            return
        self._last = event.attempt, event.chunk
        self._delivered.append(_Chunk(event.attempt, event.chunk, event.ranges, event.cursor, now))

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

    def _count(self) -> None:
        while self._delivered:
            chunk = self._delivered[0]
            read = self._read.get(chunk[:2], {})
            if len(read) < chunk.ranges:
                break
            self._delivered.popleft()
            self._read = {key: rows for key, rows in self._read.items() if key > chunk[:2]}
            self.cursor = chunk.cursor
            self.rows += sum(read.values())
            self.moved = True
        self.finished = self._done and not self._delivered and self.failure is None
