"""One attempt of a backfill: its chunks from their plan to their delivery."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import orjson
import structlog

from penstock.backfill.chunks import cursors
from penstock.backfill.chunks.commands import ChunkReport, Start
from penstock.backfill.chunks.next_chunk import Context, NextChunk, PlannedChunk, Target
from penstock.backfill.chunks.sizing import LivePriority
from penstock.backfill.events import Delivered, Done, Event, Planned
from penstock.backfill.session import SQL
from penstock.postgres.reads import Cursor, SavedCursor
from penstock.postgres.watermarks import NONE, Watermark

_AHEAD: Final = 2  # chunks, and so snapshots, at a time
_SNAPSHOT_SECONDS: Final = 60.0
_LOCK_SECONDS: Final = 1.0  # for which a chunk's lock may block other sessions
_STILL_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0

log = structlog.get_logger("penstock.backfill")


class Attempt:
    """Plans chunks, writes their watermarks, and reports what is delivered.

    A chunk is planned, then in flight from its watermark on, then delivered. `name` distinguishes this
    process' watermarks from those of others. All methods may raise `BackfillError` and `psycopg.Error`.
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
        self.planned: PlannedChunk | None = None
        """Its watermark is not written yet."""
        self._context = context
        self._target = target
        self._next = chunks
        self._name = name
        self._send = send
        self._cursor: SavedCursor = target.start.cursor
        self._in_flight: deque[PlannedChunk] = deque()
        self._count = 0
        self._incomplete: deque[tuple[int, Cursor]] = deque()
        """Cursors of chunks that are delivered, but not whole."""
        self._priority = LivePriority(context.capture.stats.captured)

    @property
    def restart(self) -> Start:
        """What begins again behind the cursor that was reported last."""
        return Start(self.spec, self._cursor, self.number)

    @property
    def is_done(self) -> bool:
        """Whether no row is left to read, and all chunks are delivered."""
        return self._next.ended and not self.watch.incomplete and not self._under_way

    @property
    def _under_way(self) -> list[PlannedChunk]:
        """The chunks whose snapshots are held."""
        return [*self._in_flight, *([] if self.planned is None else [self.planned])]

    def done(self) -> Done:
        """Return the event of its end."""
        return Done(self.spec.id, self.number, self._count)

    def idle_seconds(self) -> float:
        """Return for how long there is nothing to do unless an item comes."""
        now = time.monotonic()
        if self.is_done:
            return 0.0
        if self.planned is not None and not self._in_flight:
            return max(self._priority.rest_until - now, 0.0)
        return max(self._next.retry_at - now, 0.0) if self._may_plan() else _LOOK_SECONDS

    def step(self) -> None:
        """Plan a chunk, or write the watermark of the one that is planned."""
        if self._may_plan() and time.monotonic() >= self._next.retry_at:
            self._plan()
        else:
            self._write_if_due()
            self._expire()

    def _may_plan(self) -> bool:
        if self._context.commands.paused or self.planned or len(self._in_flight) >= _AHEAD:
            return False
        if self._in_flight and time.monotonic() - self._in_flight[0].planned_at > _STILL_SECONDS:
            return False  # batches stand still: one snapshot is enough
        return not self._next.ended or bool(self.watch.incomplete)

    def _plan(self) -> None:
        chunk = self._next.plan(self._count)
        if chunk is None:
            return
        if chunk.reads.ranges:
            self._count += 1
            self.planned = chunk
            self._write_if_due()
        elif not self._next.ended and not self._in_flight:
            # A long search: a chunk without a row reports how far it is.
            self._count += 1
            self._deliver(chunk)

    def _write_if_due(self) -> None:
        """Write the watermark of the chunk that is planned, unless live changes go first."""
        if self.planned is not None and self._priority.may_write(in_flight=bool(self._in_flight)):
            self.write_watermark(self.planned)

    def write_watermark(self, chunk: PlannedChunk) -> None:
        """Write the watermark of the chunk that is planned: it is in flight from now on."""
        context = self._context
        connection = context.pool.writer()
        # The lock keeps off all but changes of the publication, and of types.
        self._target.raise_if_altered(connection, context.capture)
        self.planned = None
        content = orjson.dumps([self._name, self.number, chunk.number])
        mark = Watermark(
            content, chunk.window, chunk.reads, context.commands.passed, chunk.rows, self.number,
            chunk.completes,
        )  # fmt: skip
        self._in_flight.append(chunk)
        ranges = len(chunk.reads.ranges)
        self._send(Planned(self.spec.id, self.number, chunk.number, ranges, chunk.rows))
        with context.capture.decoder():
            self.watch.watermarks[content] = mark
        connection.execute(SQL["watermark"], {"content": content})

    def take_report(self, report: ChunkReport) -> None:
        """Take what the capture reports of a chunk in flight; others are ignored."""
        now = time.monotonic()
        chunk = next((c for c in self._in_flight if c.number == report.chunk), None)
        if chunk is None or report.attempt != self.number:
            return
        if report.event == "taken":
            chunk.taken_at = now
            return
        self._in_flight.remove(chunk)
        context = self._context
        if chunk.holder is not None:
            context.pool.free(chunk.holder)
        seconds = now - (chunk.taken_at or chunk.planned_at)
        live = self._priority.delivered(context.capture.stats.captured, seconds)
        self._next.sizing.took(chunk.rows, seconds, live=live)
        context.retries.delivered()
        with context.capture.decoder():
            self.watch.mark_read(chunk.reread)
        self._deliver(chunk)
        self._write_if_due()

    def _deliver(self, chunk: PlannedChunk) -> None:
        """Report a chunk, and the cursor behind all that are whole."""
        number, reads = chunk.number, chunk.reads
        with self._context.capture.decoder():
            self.watch.delivered = number
            cursor = self._whole(number, reads.cursor)
        if cursor is not None:
            self._cursor = cursors.to_saved(cursor, self._target.source)
        count = len(reads.ranges)
        self._send(Delivered(self.spec.id, self.number, number, count, self._cursor))

    def _whole(self, chunk: int, cursor: Cursor) -> Cursor:
        """Add a chunk; return the cursor behind all that are whole, None if it is no new one.

        The capture's lock is held.
        """
        self._incomplete.append((chunk, cursor))
        waiting = [*self.watch.incomplete.values()]
        waiting += [c.completes for c in self._under_way if c.completes < c.number]
        whole, new = min(waiting, default=NONE), None
        while self._incomplete and self._incomplete[0][0] < whole:
            new = self._incomplete.popleft()[1]
        return new

    def _expire(self) -> None:
        """Let go of snapshots that have held back the server's clean-up for long.

        Raises `BackfillError` where another session waits for a lock that one of them holds.
        """
        for chunk in self._under_way:
            if chunk.holder is not None and time.monotonic() - chunk.planned_at > _SNAPSHOT_SECONDS:
                log.warning("a backfill's snapshot was given up", chunk=chunk.number)
                chunk.holder.close()
                chunk.holder = None
        old = [c for c in self._under_way if time.monotonic() - c.planned_at > _LOCK_SECONDS]
        holders = [chunk.holder for chunk in old if chunk.holder is not None]
        self._context.pool.raise_if_blocking(holders, self.spec)

    def close(self) -> None:
        """Give up what is under way; the watch keeps which rows have to be read again."""
        context, under_way = self._context, self._under_way
        keys = [key for chunk in under_way for key in chunk.reread]
        with context.capture.decoder():
            self.watch.restart([*keys, *self._next.reread])
        context.capture.withdraw(self.number)
        for chunk in under_way:
            if chunk.holder is not None:
                context.pool.free(chunk.holder)
        self._next.close()
