"""The chunks of a capture, from when they are sealed until they are confirmed. No lock of its own.

Memory is bounded by what is unread, see `is_full`. Chunks that were handed out stay until they are
confirmed, so that a task can be retried; `empty` drops their messages where another keeps them.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Final

from penstock.core.message import Position
from penstock.postgres.capture_stats import CaptureStats
from penstock.postgres.chunk import Chunk
from penstock.postgres.reads import Reads

MAX_UNREAD: Final = 16 << 20  # bytes of WAL; in memory a message takes about four times that


class ChunkQueue:
    """The chunks behind `start`, in order; `stats` counts what comes in and what is confirmed."""

    def __init__(self, start: Position, stats: CaptureStats) -> None:
        self.handed_out = start
        """The end of what Spark has taken."""
        self._stats = stats
        self._needed = start  # up to here all is read, however large it is
        self._chunks: deque[Chunk] = deque()
        self._unread = 0  # bytes in chunks that were not handed out
        self._waiting = 0  # messages in chunks
        self._unsealed_since: float | None = None

    # -- in

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        if chunk.reads is None:
            since, self._unsealed_since = self._unsealed_since, None
            chunk = replace(chunk, captured_at=time.monotonic() if since is None else since)
            self._stats.captured += chunk.rows
            self._waiting += chunk.rows
        self._chunks.append(chunk)
        self._unread += chunk.bytes

    def note_unsealed(self) -> None:
        """Note that there are messages that are in no chunk yet."""
        if self._unsealed_since is None:
            self._unsealed_since = time.monotonic()

    def unread(self, unsealed: int) -> int:
        """Return the bytes of what is unread, with `unsealed` bytes that are in no chunk yet."""
        return self._unread + unsealed

    def is_full(self, unsealed: int, read: Position) -> bool:
        """Return whether reading has to stop; `read` is how far it is."""
        return self.unread(unsealed) > MAX_UNREAD and read >= self._needed

    def need(self, end: Position) -> None:
        """Have all be read up to `end`, however large it is."""
        self._needed = max(self._needed, end)

    # -- out

    def fitting(self, after: Position, max_rows: int, last: Position | None) -> Position:
        """Return the end of the messages behind `after` that fit into one batch.

        It does not pass `last`, where that is given.
        """
        end, rows, size = after, 0, 0
        for chunk in self._chunks:
            if chunk.end <= after:
                continue
            if last is not None and chunk.end > last:
                break
            if rows and (chunk.barrier or rows + chunk.rows > max_rows or size > MAX_UNREAD // 4):
                break
            end, rows, size = chunk.end, rows + chunk.rows, size + chunk.bytes
            if chunk.barrier:
                break
        return end

    def between(self, start: Position, end: Position) -> list[Chunk]:
        """Return the chunks of `(start, end]`, cut where they reach over it."""
        found = []
        for chunk in self._chunks:
            if chunk.end > start and chunk.start < end:
                part = chunk if chunk.start >= start else chunk.after(start)
                found.append(part if part.end <= end else part.until(end))
        return found

    def hand_out(self, end: Position) -> bool:
        """Note that Spark has taken all up to `end`; return whether that is new."""
        if end <= self.handed_out:
            return False
        self.handed_out = end
        self._unread = sum(chunk.bytes for chunk in self._chunks if chunk.end > end)
        return True

    def empty(self, start: Position, end: Position) -> None:
        """Drop the messages of the chunks in (start, end], which were handed out; they still count."""
        for i, chunk in enumerate(self._chunks):
            if chunk.start >= end:
                break
            if chunk.end > start and chunk.end <= end and chunk.content:
                self._chunks[i] = replace(chunk, content=())

    def confirm(self, position: Position) -> list[Reads]:
        """Drop what is durable up to `position`; return the backfill's chunks among it."""
        reads = []
        while self._chunks and self._chunks[0].end <= position:
            chunk = self._chunks.popleft()
            self._unread -= chunk.bytes if chunk.end > self.handed_out else 0
            self._stats.confirmed += chunk.rows
            if chunk.reads is not None:
                reads.append(chunk.reads)
            else:
                self._waiting -= chunk.rows
        return reads

    def withdraw(self, attempt: int) -> None:
        """Empty the chunks of a backfill's attempt that were not handed out."""
        for i, chunk in enumerate(self._chunks):
            if chunk.reads is not None and chunk.reads.attempt == attempt:
                self._chunks[i] = chunk if chunk.end <= self.handed_out else chunk.emptied()

    def waiting(self, unsealed_rows: int) -> tuple[int, float | None]:
        """Return how many captured messages are not confirmed, and the oldest one's age in seconds.

        `unsealed_rows` are in no chunk yet. What a backfill reads is not counted.
        """
        captured = (c.captured_at for c in self._chunks if c.reads is None and c.rows)
        since = next(captured, self._unsealed_since)
        rows = self._waiting + unsealed_rows
        return rows, None if since is None or not rows else time.monotonic() - since
