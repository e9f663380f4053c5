"""Reading ahead: the messages behind a consumer's cursor, in memory before they are handed out."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from psycopg import sql

from penstock.streams.consumers.decide import Row
from penstock.streams.consumers.entry import StreamPosition
from penstock.streams.consumers.sessions import Sessions, composed, stopped
from penstock.streams.consumers.sql_filter import FAILED, FILTER_FAILED, FILTER_SQL
from penstock.streams.consumers.state import START
from penstock.streams.consumers.types import StoreUnavailable
from penstock.streams.consumers.view import BYTES, SegmentView, StreamView
from penstock.streams.names import segment_table

_ROWS: Final = 5_000
_FEW: Final = 2_000


class ConsumerReadAhead:
    """The buffer of one consumer. Used by one task, but for the task that fills it beside the steps."""

    def __init__(self, sessions: Sessions, view: StreamView, consumer: int) -> None:
        self._sessions = sessions
        self._view = view
        self._consumer = consumer
        self.rows: list[Row] = []
        """What comes behind the cursor."""
        self._start: StreamPosition = START  # `rows` begin behind it
        self._end: StreamPosition = START  # and have all up to it
        self._generation = 0
        self._filling: asyncio.Task[None] | None = None

    @property
    def at_head(self) -> bool:
        """Whether there is nothing behind `rows`, as far as the head is known."""
        return self._end >= self._view.head

    @property
    def _low(self) -> bool:
        return len(self.rows) < min(_ROWS, BYTES // self._view.size) // 2 and not self.at_head

    def seek(self, cursor: StreamPosition) -> bool:
        """Make `rows` begin behind `cursor`; return False where that drops all of them."""
        if cursor == self._start:
            return True
        inside = self._start <= cursor <= self._end
        if not inside:
            self.forget()
            self._end = cursor
        elif self.rows and self.rows[0][:2] <= cursor:
            passed = next((i for i, r in enumerate(self.rows) if r[:2] > cursor), len(self.rows))
            del self.rows[:passed]
        self._start = cursor
        return inside

    def passed(self, count: int, cursor: StreamPosition) -> None:
        """Take the first `count` rows off: the cursor has passed them."""
        del self.rows[:count]
        self._start = cursor

    def forget(self) -> None:
        """Drop all that was read."""
        self._generation += 1
        self.rows.clear()
        self._end = self._start

    async def fill(self) -> None:
        """Read on, up to a full buffer or the head."""
        await self._view.whole(self._fill)

    async def _fill(self) -> None:
        view = self._view
        limit = min(_ROWS, max(BYTES // view.size, 1))
        while not self.at_head and limit > 0:
            generation, end = self._generation, self._end
            segment = next((s for s in view.segments if s.through > end), None)
            if segment is None:
                self._end = view.head
                return
            last = min(view.head, segment.through)
            query = composed("read", segment=segment_table(segment.id), message=view.text(segment))
            rows = await self._sessions.messages(
                query, {**view.range(max(end, segment.after), last), "limit": limit}
            )
            if view.has_sql:
                rows = await self._without_failed(segment, rows)
            if generation != self._generation:
                return
            self.rows += rows
            self._end = last if len(rows) < limit else rows[-1][:2]
            limit -= len(rows)
            view.measure(rows)

    async def _without_failed(self, segment: SegmentView, rows: list[Row]) -> list[Row]:
        """Return rows without the messages whose filter can't be evaluated: these are dead letters."""
        failed = [row for row in rows if row[4] and row[4][:1] == FAILED]
        if not failed:
            return rows
        params = {
            "consumer": self._consumer,
            "code": FILTER_FAILED,
            "lsns": [row[0] for row in failed],
            "idxs": [row[1] for row in failed],
            "reasons": [bytes(row[4] or b"")[1:].decode() for row in failed],
        }
        query = sql.SQL(FILTER_SQL["add_letters"]).format(segment=segment_table(segment.id))
        await self._sessions.execute(query, params)
        gone = {row[:2] for row in failed}
        return [(*row[:4], None) if row[:2] in gone else row for row in rows]

    def fill_beside(self, passing: int) -> None:
        """Start to read on beside the step that passes `passing` rows, if few are left then."""
        busy = self._filling is not None and not self._filling.done()
        if len(self.rows) - passing < _FEW and self._low and not busy:
            self._filling = asyncio.create_task(self._quietly())

    async def _quietly(self) -> None:
        with contextlib.suppress(StoreUnavailable):  # the next step meets it itself
            await self.fill()

    async def filled(self) -> None:
        """Wait for what `fill_beside` started."""
        if self._filling is not None:
            await self._filling

    async def close(self) -> None:
        """Stop reading."""
        await stopped(self._filling)
