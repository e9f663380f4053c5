"""One attempt of a backfill: its chunks from their snapshot to their delivery."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import orjson

from penstock.backfill.chunks import cursors
from penstock.backfill.chunks.commands import ChunkReport, Start
from penstock.backfill.chunks.next_chunk import Context, NextChunk, ReadChunk, Target
from penstock.backfill.events import Delivered, Done, Event
from penstock.backfill.session import SQL
from penstock.postgres.reads import Cursor, SavedCursor
from penstock.postgres.watermarks import NONE, Watermark

_AHEAD: Final = 2
"""Chunks in flight at a time."""
_LOOK_SECONDS: Final = 1.0


class Attempt:
    """Reads chunks, writes their watermarks, and reports what is delivered.

    A chunk is in flight from its watermark on, then delivered. `name` distinguishes this process'
    watermarks from those of others. All methods may raise `BackfillError` and `psycopg.Error`.
    """

    def __init__(
        self,
        context: Context,
        target: Target,
        chunks: NextChunk,
        name: str,
        send: Callable[[Event], None],
    ) -> None:
        self.number = target.start.attempt
        self.spec = target.start.spec
        self.watch = target.watch
        self.in_flight: deque[ReadChunk] = deque()
        """The chunks that are not delivered yet."""
        self._context = context
        self._target = target
        self._next = chunks
        self._name = name
        self._send = send
        self._cursor: SavedCursor = target.start.cursor
        self._count = 0
        self._incomplete: deque[tuple[int, Cursor]] = deque()
        """Cursors of chunks that are delivered, but not whole."""
        self._live = True
        """Whether live changes came between the last two chunks."""
        self._captured = context.capture.stats.captured

    @property
    def restart(self) -> Start:
        """What begins again behind the cursor that was reported last."""
        return Start(self.spec, self._cursor, self.number)

    @property
    def is_done(self) -> bool:
        """Whether no row is left to read, and all chunks are delivered."""
        return self._next.ended and not self.watch.incomplete and not self.in_flight

    def done(self) -> Done:
        """Return the event of its end."""
        return Done(self.spec.id, self.number, self._count)

    def idle_seconds(self) -> float:
        """Return for how long there is nothing to do unless an item comes."""
        if self.is_done:
            return 0.0
        if not self._has_room:
            return _LOOK_SECONDS
        return max(self._next.retry_at - time.monotonic(), 0.0)

    @property
    def _has_room(self) -> bool:
        # While live changes come, they are alone from a chunk's end to the next one's watermark.
        most = 1 if self._live else _AHEAD
        if self._context.commands.paused or len(self.in_flight) >= most:
            return False
        return not self._next.ended or bool(self.watch.incomplete)

    def step(self) -> None:
        """Read a chunk and write its watermark, if it may be now."""
        if not self._has_room or time.monotonic() < self._next.retry_at:
            return
        chunk = self._next.read(self._count)
        if chunk is None:
            return
        if chunk.reads.ranges:
            self._count += 1
            self.write_watermark(chunk)
            self._next.release()
        elif not self._next.ended and not self.in_flight:
            # A long search: a chunk without a row reports how far it is.
            self._count += 1
            self._deliver(chunk)

    def write_watermark(self, chunk: ReadChunk) -> None:
        """Write the watermark of a chunk: it is in flight from now on."""
        context = self._context
        self.in_flight.append(chunk)
        connection = context.pool.writer()
        # The snapshot's lock keeps off all but changes of the publication, and of types.
        self._target.raise_if_altered(connection, context.capture)
        content = orjson.dumps([self._name, self.number, chunk.number])
        mark = Watermark(
            content, chunk.window, chunk.reads, context.commands.passed, chunk.rows, self.number,
            chunk.completes,
        )  # fmt: skip
        with context.capture.decoder():
            self.watch.watermarks[content] = mark
        connection.execute(SQL["watermark"], {"content": content})

    def take_report(self, report: ChunkReport) -> None:
        """Take what the capture reports of a chunk in flight; others are ignored.

        Raises the error of a chunk that failed.
        """
        now = time.monotonic()
        chunk = next((c for c in self.in_flight if c.number == report.chunk), None)
        if chunk is None or report.attempt != self.number:
            return
        if report.error is not None:
            raise report.error
        if report.event == "taken":
            chunk.taken_at = now
            return
        self.in_flight.remove(chunk)
        context = self._context
        captured = context.capture.stats.captured
        self._live, self._captured = captured > self._captured, captured
        self._next.sizing.took(chunk.rows, now - (chunk.taken_at or now), live=self._live)
        context.retries.delivered()
        self._deliver(chunk)

    def _deliver(self, chunk: ReadChunk) -> None:
        """Report a chunk, and the cursor behind all that are whole."""
        number, reads = chunk.number, chunk.reads
        with self._context.capture.decoder():
            self.watch.delivered = number
            cursor = self._whole(number, reads.cursor)
        if cursor is not None:
            self._cursor = cursors.to_saved(cursor, self._target.source)
        self._send(Delivered(self.spec.id, self.number, number, chunk.rows, self._cursor))

    def _whole(self, chunk: int, cursor: Cursor) -> Cursor:
        """Add a chunk; return the cursor behind all that are whole, None if it is no new one.

        The capture's lock is held.
        """
        self._incomplete.append((chunk, cursor))
        waiting = [*self.watch.incomplete.values()]
        waiting += [c.completes for c in self.in_flight if c.completes < c.number]
        whole, new = min(waiting, default=NONE), None
        while self._incomplete and self._incomplete[0][0] < whole:
            new = self._incomplete.popleft()[1]
        return new

    def close(self) -> None:
        """Give up what is under way; the watch keeps which rows have to be read again."""
        context = self._context
        keys = [key for chunk in self.in_flight for key in chunk.reread]
        with context.capture.decoder():
            self.watch.restart([*keys, *self._next.reread])
        context.capture.withdraw(self.number)
        self._next.release()
