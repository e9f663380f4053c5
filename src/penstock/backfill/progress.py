"""How far a backfill is, from what its reader and its tasks tell, in whatever order that comes.

A chunk counts when its batch is confirmed and each of its ranges was read; then the backfill stands
at its cursor. Nothing after a range that failed counts, so that no row is passed over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.backfill.requests import Cursor


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a start of a backfill ended; where it is `transient`, another may do better."""

    code: str
    message: str
    transient: bool


class _Chunk(NamedTuple):
    attempt: int
    number: int
    ranges: int
    cursor: Cursor
    at: float


class Progress:
    """One start of a backfill at `cursor`, where `rows` were done. Times are `time.monotonic`'s.

    The reader may go back by itself, to the last chunk that it told of: then its chunks have a higher
    `attempt`, and are counted from 0 again.
    """

    def __init__(self, cursor: Cursor, rows: int) -> None:
        self.cursor = cursor
        self.rows = rows
        self.finished = False
        self.failure: Failure | None = None
        self.note: str | None = None
        """What keeps it up now, though it tries again by itself."""
        self.moved = False
        """Whether a chunk has counted."""
        self._read: dict[tuple[int, int], dict[int, int]] = {}
        self._delivered: deque[_Chunk] = deque()
        self._last = 0, -1
        self._attempt = 0
        self._done = False

    def take_range(self, report: dict[str, Any]) -> None:
        """Take in what a task tells of a range, after which it is silent."""
        chunk = report["attempt"], report["chunk"]
        is_delivered = any(c[:2] == chunk for c in self._delivered)
        # What an attempt that was given up has not delivered, the next one reads again.
        is_coming = chunk > self._last and report["attempt"] >= self._attempt
        if not is_delivered and not is_coming:
            return
        if "error" in report:
            self._fail(report["code"], report["error"], bool(report["transient"]))
        else:
            self._read.setdefault(chunk, {})[report["range"]] = report["rows"]
            self._count()

    def take_event(self, report: dict[str, Any], now: float) -> None:
        """Take in what the reader tells."""
        event = report["event"]
        if event == "started":
            self._attempt = report["attempt"]
        elif event == "delivered":
            self._take_chunk(report, now)
        elif event == "done":
            self._done = self._follows(report["attempt"], report["chunks"])
        elif event == "troubled":
            self.note = report["message"]
        elif event == "failed":
            message = f"{report['message']} {report['remedy']}".strip()
            self._fail(report["code"], message, False)
        self._count()

    def check(self, now: float, patience: float) -> None:
        """End it where a range of a delivered chunk has told nothing for `patience` seconds."""
        if self._delivered and now - self._delivered[0].at > patience:
            self._fail("range_lost", "A task that read a range has told nothing of it.", True)

    def _take_chunk(self, report: dict[str, Any], now: float) -> None:
        attempt, number, cursor = report["attempt"], report["chunk"], report["cursor"]
        if not self._follows(attempt, number):
            return
        self._last = attempt, number
        cursor = None if cursor is None else tuple(cursor)
        self._delivered.append(_Chunk(attempt, number, report["ranges"], cursor, now))

    def _follows(self, attempt: int, number: int) -> bool:
        """Tell whether nothing is missing before a chunk; if something is, nothing counts any more."""
        last_attempt, last = self._last
        follows: bool = number == (last + 1 if attempt == last_attempt else 0)
        if not follows:
            self._fail("event_lost", "What the reader told of a chunk has not come.", True)
        return follows

    def _fail(self, code: str, message: str, transient: bool) -> None:
        # What comes first tells most; but what can't be mended is not to be tried again.
        if self.failure is None or (self.failure.transient and not transient):
            self.failure = Failure(code, message, transient)

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
