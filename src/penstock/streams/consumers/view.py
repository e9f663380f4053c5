"""A stream as one consumer sees it: its head, its segments, and the conditions on their messages."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import psycopg
from psycopg import sql

from penstock.config.consumers import ConsumerSettings
from penstock.core import queries
from penstock.streams.consumers.decide import Row
from penstock.streams.consumers.entry import StreamPosition
from penstock.streams.consumers.line import Call, Statement, numbers
from penstock.streams.consumers.selection import ALL, matches, superseded
from penstock.streams.consumers.sessions import Sessions, composed
from penstock.streams.consumers.sql_filter import passed
from penstock.streams.consumers.state import START
from penstock.streams.names import batches_table

BYTES: Final = 4 << 20
"""How many bytes of messages are read at once."""

_FIRST_ROWS: Final = 200
_LAST: Final = (1 << 63) - 1
_HEAD: Final = queries.load("penstock.streams", "store.sql")["head"]
_SEGMENTS: Final = Statement(composed("segments"))

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamRef:
    """What a consumer needs to know of its stream."""

    id: int
    kind: str
    source_id: int


class SegmentView(NamedTuple):
    """A segment holds the positions behind `after` up to `through`, which is the end of all if open."""

    id: int
    after: StreamPosition
    through: StreamPosition


class StreamView:
    """The head and the segments of a stream as last read, and a consumer's conditions on them."""

    def __init__(
        self, sessions: Sessions, stream: StreamRef, settings: ConsumerSettings, consumer: int
    ) -> None:
        self._sessions = sessions
        self._stream = stream
        deletes = settings.deletes or stream.kind != "rows"
        named = matches(settings.filters, deletes=deletes)
        self._named = named
        self._passed = None if settings.filters.sql is None else passed(consumer)
        self.matches: sql.Composable = named
        """The condition that a message is one of the consumer's."""
        self.parked: sql.Composable = named
        """The condition that one is that was taken as one before, by another filter perhaps."""
        if self._passed is not None:
            good = "{} AND coalesce(left({}, 1) <> '!', false)"
            self.matches = sql.SQL(good).format(named, self._passed)
            self.parked = sql.SQL("{} AND {} IS NOT NULL").format(named, self._passed)
        self.head: StreamPosition = START
        self.head_stale = True
        """Whether the head may have moved on."""
        self.segments: list[SegmentView] = []
        self.size = BYTES // _FIRST_ROWS
        """The bytes of a message, roughly."""
        self._reading = asyncio.Lock()
        # After the head: these segments hold all up to it.
        self._calls = (
            Call(_head_of(stream.source_id), {}),
            Call(_SEGMENTS, {"stream": stream.id}),
        )

    @property
    def of_rows(self) -> bool:
        """Whether the stream keeps the newest version of each row alone."""
        return self._stream.kind == "rows"

    @property
    def has_sql(self) -> bool:
        """Whether a condition in SQL is evaluated, which may fail."""
        return self._passed is not None

    async def refresh(self, cursor: StreamPosition = START) -> None:
        """Read the head, and the segments up to there, if the head may have moved.

        A `cursor` behind the known head shows that it has.
        """
        if not self.head_stale and cursor <= self.head:
            return
        async with self._reading:  # or the older of two answers could come last
            if self.head_stale or cursor > self.head:
                await self._read()

    async def _read(self) -> None:
        self.head_stale = False
        try:
            head, listed = await self._sessions.run(*self._calls)
        except BaseException:
            self.head_stale = True
            raise
        self.segments = []
        for id_, after_lsn, after_idx, *through in numbers(listed):
            last = (_LAST, _LAST) if None in through else (through[0], through[1])
            self.segments.append(SegmentView(id_, (after_lsn, after_idx), last))
        for lsn, idx in numbers(head):
            self.head = max(self.head, (lsn, idx))

    async def whole(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`; repeat it with the newest segments where one was merged away."""
        for _ in range(10):
            try:
                return await work()
            except psycopg.errors.UndefinedTable:
                self.head_stale = True
                await self.refresh()
        return await work()

    def measure(self, rows: Sequence[Row]) -> None:
        """Estimate `size` from messages that were read; it shrinks slowly, as the next may be larger."""
        if rows:
            self.size = max(size_of(rows) // len(rows) + 100, self.size // 8)

    def text(self, segment: SegmentView) -> sql.Composable:
        """Return the expression for the JSON of `Row`."""
        parts: list[sql.Composable] = []
        message = self._passed or sql.SQL("m.message")
        if self._named is not ALL:
            parts.append(sql.SQL("WHEN NOT ({}) THEN NULL").format(self._named))
        if self.of_rows:
            # What the filter leaves out is null, superseded or not.
            text = sql.SQL("left({}, 0)").format(message)
            parts.append(sql.SQL("WHEN {} THEN {}").format(self._superseded(segment), text))
        if not parts:
            return message
        return sql.SQL("CASE {} ELSE {} END").format(sql.SQL(" ").join(parts), message)

    def newest(self, segment: SegmentView, condition: sql.Composable = ALL) -> sql.Composable:
        """Return the condition that a message fulfils `condition` and is not superseded."""
        if not self.of_rows:
            return condition
        return sql.SQL("{} AND NOT {}").format(condition, self._superseded(segment))

    def _superseded(self, segment: SegmentView) -> sql.Composable:
        return superseded([s.id for s in self.segments if s.after >= segment.after])

    def range(self, after: StreamPosition, last: StreamPosition) -> dict[str, Any]:
        """Return the parameters of queries about positions behind `after` up to `last`."""
        names = ("lsn", "idx", "last_lsn", "last_idx", "head_lsn", "head_idx")
        return dict(zip(names, (*after, *last, *self.head), strict=True))


@functools.lru_cache(maxsize=1024)
def _head_of(source_id: int) -> Statement:
    """Return what reads a source's head, which its thousands of consumers share."""
    return Statement(sql.SQL(_HEAD).format(batches=batches_table(source_id)))


def size_of(rows: Sequence[Row]) -> int:
    """Return the bytes of the messages."""
    return sum(len(row[4]) for row in rows if row[4])
