"""A stream's messages for one consumer: read ahead of its cursor, by group, and by position."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar

import psycopg
from psycopg import sql

from penstock.config.consumers import Filters
from penstock.core import queries
from penstock.core.group_hash import group_hash
from penstock.streams.consumers.selection import ALL, matches, superseded
from penstock.streams.consumers.sessions import Sessions, composed
from penstock.streams.consumers.state import START, Parked
from penstock.streams.consumers.step import Row
from penstock.streams.names import batches_table, segment_table

_BYTES: Final = 4 << 20
_ROWS: Final = 5_000
_FIRST_ROWS: Final = 200
_LOOKED_UP: Final = 20_000
_OF_A_GROUP: Final = 50
_LOOKED_AT: Final = 20_000
_WINDOWS: Final = 10
_LAST: Final = (1 << 63) - 1
_HEAD: Final = queries.load("penstock.streams", "store.sql")["head"]

Position = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamRef:
    """What a reader needs to know of a stream."""

    id: int
    kind: str
    source_id: int


class Segment(NamedTuple):
    """A segment holds the positions behind `after` up to `through`, which is the end of all if open."""

    id: int
    after: Position
    through: Position


@dataclass(slots=True)
class _Known:
    """A group's messages from `start` on; there are no others up to `through`."""

    start: Position
    rows: list[Row]
    through: Position


class Reader:
    """Reads a stream for a consumer. Used by one task, but for `fill`, which may run beside it."""

    def __init__(
        self, sessions: Sessions, stream: StreamRef, consumer: int, filters: Filters
    ) -> None:
        self._sessions = sessions
        self._stream = stream
        self._consumer = consumer
        self._matches = matches(filters)
        self.rows: list[Row] = []
        """What comes behind the cursor."""
        self.head: Position = START
        self.head_stale = True
        """Whether the head may have moved on."""
        self.segments: list[Segment] = []
        self._start: Position = START  # `rows` begin behind it
        self._end: Position = START  # and have all up to it
        self._size = _BYTES // _FIRST_ROWS  # of a message, roughly
        self._known: dict[int, _Known] = {}
        self._known_bytes = 0
        self._passable = (START, START)  # between these are none of the consumer's messages
        self._generation = 0
        self._asking = asyncio.Lock()

    @property
    def at_head(self) -> bool:
        """Whether there is nothing behind `rows`, as far as the head is known."""
        return self._end >= self.head

    @property
    def low(self) -> bool:
        """Whether it is time to read ahead."""
        return len(self.rows) < min(_ROWS, _BYTES // self._size) // 2 and not self.at_head

    async def refresh(self, cursor: Position = START) -> None:
        """Ask for the head, and for the segments up to there, if it may lie elsewhere now.

        A `cursor` behind the head that is known tells that it does.
        """
        if not self.head_stale and cursor <= self.head:
            return
        async with self._asking:  # or the older of two answers could come last
            if self.head_stale or cursor > self.head:
                await self._ask()

    async def _ask(self) -> None:
        self.head_stale = False
        try:
            async with self._sessions.session() as connection:
                query = sql.SQL(_HEAD).format(batches=batches_table(self._stream.source_id))
                head = await (await connection.execute(query)).fetchone()
                # Behind the head's look: what it speaks of is in these.
                listed = await connection.execute(composed("segments"), (self._stream.id,))
                rows = await listed.fetchall()
        except BaseException:
            self.head_stale = True
            raise
        self.segments = [
            Segment(row[0], (row[1], row[2]), (_LAST, _LAST) if row[3] is None else row[3:5])
            for row in rows
        ]
        if head is not None:
            self.head = max(self.head, (head[0], head[1]))

    def seek(self, cursor: Position) -> None:
        """Make `rows` begin behind `cursor`."""
        if cursor == self._start:
            return
        if not self._start <= cursor <= self._end:
            self.forget()
            self._end = cursor
        elif self.rows and self.rows[0][:2] <= cursor:
            passed = next((i for i, r in enumerate(self.rows) if r[:2] > cursor), len(self.rows))
            del self.rows[:passed]
        self._start = cursor

    def passed(self, count: int, cursor: Position) -> None:
        """Take the first `count` rows off: the cursor has passed them."""
        del self.rows[:count]
        self._start = cursor

    def forget(self) -> None:
        """Drop all that was read."""
        self._generation += 1
        self.rows.clear()
        self._forget_groups()
        self._end = self._start

    def expired(self, cursor: Position) -> Position | None:
        """Return where the stream begins if `cursor` lies before that."""
        first = self.segments[0].after if self.segments else cursor
        return first if first > cursor else None

    async def fill(self) -> None:
        """Read on, up to a full buffer or the head."""
        await self.whole(self._fill)

    async def _fill(self) -> None:
        limit = min(_ROWS, max(_BYTES // self._size, 1))
        while not self.at_head and limit > 0:
            generation, end = self._generation, self._end
            segment = next((s for s in self.segments if s.through > end), None)
            if segment is None:
                self._end = self.head
                return
            last = min(self.head, segment.through)
            query = composed("read", segment=segment_table(segment.id), message=self._text(segment))
            rows = await self._sessions.messages(
                query, {**self._range(max(end, segment.after), last), "limit": limit}
            )
            if generation != self._generation:
                return
            self.rows += rows
            self._end = last if len(rows) < limit else rows[-1][:2]
            limit -= len(rows)
            self._measure(rows)

    def _measure(self, rows: Sequence[Row]) -> None:
        if rows:
            # Growing with care: the next ones may be larger.
            self._size = max(_size(rows) // len(rows) + 100, self._size // 8)

    def _text(self, segment: Segment) -> sql.Composable:
        parts: list[sql.Composable] = []
        if self._matches is not ALL:
            parts.append(sql.SQL("WHEN NOT ({}) THEN NULL").format(self._matches))
        if self._stream.kind == "rows":
            parts.append(sql.SQL("WHEN {} THEN ''").format(self._superseded(segment)))
        if not parts:
            return sql.SQL("m.message")
        return sql.SQL("CASE {} ELSE m.message END").format(sql.SQL(" ").join(parts))

    def _superseded(self, segment: Segment) -> sql.Composable:
        return superseded([s.id for s in self.segments if s.after >= segment.after])

    def _wanted(self, segment: Segment, filtered: sql.Composable = ALL) -> sql.Composable:
        if self._stream.kind != "rows":
            return filtered
        return sql.SQL("{} AND NOT {}").format(filtered, self._superseded(segment))

    def _range(self, after: Position, last: Position) -> dict[str, Any]:
        names = ("lsn", "idx", "last_lsn", "last_idx", "head_lsn", "head_idx")
        return dict(zip(names, (*after, *last, *self.head), strict=True))

    async def whole(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, again with the segments as they are now where one was merged away."""
        for _ in range(10):
            try:
                return await work()
            except psycopg.errors.UndefinedTable:
                self.head_stale = True
                await self.refresh()
        return await work()

    # Groups that were parked

    def knows(self, group: int, parked: Parked) -> bool:
        """Tell whether the group's next message need not be looked up."""
        known = self._known.get(group)
        if known is None or known.start > parked[1:3]:
            return False
        while known.rows and known.rows[0][:2] < parked[1:3]:
            self._known_bytes -= len(known.rows.pop(0)[4] or b"")
        known.start = parked[1:3]
        return bool(known.rows) or known.through >= parked[3:5]

    def next(self, group: int, _parked: Parked) -> Row | None:
        """Return the group's next message, None if there is none."""
        rows = self._known[group].rows
        return rows[0] if rows else None

    def trim(self) -> None:
        """Drop what is known of groups if it has become much. Not between look-ups of one step."""
        if len(self._known) > _LOOKED_UP or self._known_bytes > _BYTES:
            self._forget_groups()

    def _forget_groups(self) -> None:
        self._known.clear()
        self._known_bytes = 0

    async def look_up(self, groups: Sequence[tuple[int, Parked]]) -> None:
        """Learn the next messages of parked groups."""
        await self.whole(lambda: self._look_up(groups))

    async def _look_up(self, groups: Sequence[tuple[int, Parked]]) -> None:
        room = max(_BYTES - self._known_bytes, _BYTES // 4)
        most = max(1, min(_OF_A_GROUP, room // self._size // max(len(groups), 1)))
        found: dict[int, list[Row]] = {group: [] for group, _parked in groups}
        wanted = {group: min(parked[0], most) for group, parked in groups}
        for segment in self.segments:
            left = [
                (group, parked, wanted[group] - len(found[group]))
                for group, parked in groups
                if parked[1:3] <= segment.through
                and parked[3:5] > segment.after
                and len(found[group]) < wanted[group]
            ]
            if not left:
                continue
            params = {
                "groups": [group for group, _p, _n in left],
                "lsns": [parked[1] for _g, parked, _n in left],
                "idxs": [parked[2] for _g, parked, _n in left],
                "last_lsns": [parked[3] for _g, parked, _n in left],
                "last_idxs": [parked[4] for _g, parked, _n in left],
                "limits": [n for _g, _p, n in left],
                "head_lsn": self.head[0],
                "head_idx": self.head[1],
            }
            query = composed(
                "look_up",
                segment=segment_table(segment.id),
                wanted=self._wanted(segment, self._matches),
            )
            for number, *row in await self._sessions.messages(query, params):
                found[left[number - 1][0]].append(tuple(row))
        self._measure([row for rows in found.values() for row in rows])
        for group, parked in groups:
            rows = found[group]
            all_there = len(rows) < wanted[group]
            through = parked[3:5] if all_there else rows[-1][:2]
            if (known := self._known.get(group)) is not None:
                self._known_bytes -= _size(known.rows)
            self._known[group] = _Known(parked[1:3], rows, through)
            self._known_bytes += _size(rows)

    # Single messages

    async def texts(self, positions: Sequence[Position]) -> dict[Position, bytes]:
        """Return messages by position; what is no longer in the stream, or superseded, is not there."""
        return await self.whole(lambda: self._texts(positions))

    async def _texts(self, positions: Sequence[Position]) -> dict[Position, bytes]:
        found: dict[Position, bytes] = {}
        for segment in self.segments:
            here = [p for p in positions if segment.after < p <= segment.through]
            if here:
                query = composed(
                    "messages", segment=segment_table(segment.id), wanted=self._wanted(segment)
                )
                params = {**self._range(START, START), **_columns(here)}
                for lsn, idx, text in await self._sessions.messages(query, params):
                    found[lsn, idx] = text
        if len(found) < len(set(positions)):
            # Replayed dead letters may have outlived their segment. Of rows, deletes alone do: another
            # version that has gone was superseded, if only by a delete that has gone as well.
            rest = [position for position in positions if position not in found]
            wanted: sql.Composable = ALL
            if self._stream.kind == "rows":
                newer = superseded([segment.id for segment in self.segments])
                wanted = sql.SQL("m.action = 'delete' AND NOT {}").format(newer)
            params = {**self._range(START, START), **_columns(rest), "consumer": self._consumer}
            query = composed("replayed", wanted=wanted)
            for lsn, idx, text in await self._sessions.messages(query, params):
                found[lsn, idx] = text
        return found

    async def behind(self, cursor: Position, parked: Mapping[int, Parked], limit: int) -> list[Row]:
        """Return the first messages that were never handed out: parked, or behind the cursor."""
        self._start = self._end = cursor
        rows: dict[Position, Row] = {}
        left = list(parked.items())[:limit]
        while left and len(rows) < limit:
            await self.look_up(left)
            rest: list[tuple[int, Parked]] = []
            for group, (count, _lsn, _idx, *last) in left:
                known = self._known[group]
                rows.update((row[:2], row) for row in known.rows)
                lsn, idx = known.through
                if (lsn, idx) < (last[0], last[1]):
                    more = max(count - len(known.rows), 1)
                    rest.append((group, (more, lsn, idx + 1, last[0], last[1])))
            left = rest
        while len(self.rows) < limit and not self.at_head:
            await self.fill()
            self.rows = [row for row in self.rows if row[4]]
        rows.update((row[:2], row) for row in self.rows)
        return [rows[position] for position in sorted(rows)[:limit]]

    async def count(self, after: Position, limit: int) -> tuple[int, Position]:
        """Count the consumer's messages behind `after`; return up to where, which may be the head.

        About `limit` messages are looked at.
        """

        async def work() -> tuple[int, Position]:
            total, looked_at, end = 0, 0, after
            head = self.head
            for segment in self.segments:
                last = min(head, segment.through)
                if last <= end or looked_at >= limit:
                    continue
                query = composed("count", segment=segment_table(segment.id), matches=self._matches)
                params = {**self._range(max(end, segment.after), last), "limit": limit - looked_at}
                rows = await self._sessions.rows(query, params)
                lsn, idx, found, seen = rows[0] if rows else (*last, 0, 0)
                total += found
                end = (lsn, idx) if looked_at + seen >= limit else last
                looked_at += seen
            return total, end

        return await self.whole(work)

    async def oldest(self, position: Position, *, behind: bool = False) -> datetime | None:
        """Return when the message at `position`, or the consumer's first one `behind` it, was committed.

        Of a position where there is none any more, that of the next one. Behind one, very many may
        come that are not the consumer's: then one of those stands for it until a later call.
        """
        after = position if behind else (position[0], position[1] - 1)

        async def work() -> datetime | None:
            begin, windows = after, _WINDOWS if behind else 0
            if behind and self._passable[0] <= after <= self._passable[1]:
                begin = self._passable[1]
            for segment in self.segments:
                table = segment_table(segment.id)
                begin, last = max(begin, segment.after), min(self.head, segment.through)
                while begin < last:
                    wanted = self._wanted(segment, self._matches) if windows else ALL
                    limit = _LOOKED_AT if windows else 1
                    params = {**self._range(begin, last), "limit": limit}
                    query = composed("oldest", segment=table, wanted=wanted)
                    for (at,) in await self._sessions.rows(query, params):
                        return None if at is None else datetime.fromisoformat(at)
                    ends = await self._sessions.rows(composed("window", segment=table), params)
                    begin = (ends[0][0], ends[0][1]) if ends else last
                    if windows:
                        windows -= 1
                        self._passable = after, begin
            return None

        return await self.whole(work)

    async def groups(self, position: Position) -> tuple[int, int | None]:
        """Return the groups of a message; one that has gone gets a group of its own."""

        async def work() -> tuple[int, int | None]:
            for segment in self.segments:
                if segment.after < position <= segment.through:
                    query = composed("groups", segment=segment_table(segment.id))
                    for group, old in await self._sessions.rows(query, position):
                        return group, old
            return group_hash(b"[%d,%d]" % position), None

        return await self.whole(work)

    async def at_time(self, time: str) -> Position:
        """Return the position before the first message committed at or after an ISO 8601 UTC time."""
        return await self.whole(lambda: self._at_time(time))

    async def _at_time(self, time: str) -> Position:
        for segment in self.segments:
            table = segment_table(segment.id)
            rows = await self._sessions.rows(composed("last_lsn", segment=table))
            if not rows:
                continue
            low, high = max(segment.after[0], 0), rows[0][0] + 1
            query = composed("at_time", segment=table)
            while low < high:  # the first LSN at or behind which all is late enough
                middle = (low + high) // 2
                probe = await self._sessions.rows(query, (middle,))
                if not probe or (probe[0][1] or "") >= time:
                    high = middle
                else:
                    low = probe[0][0] + 1
            if low <= rows[0][0]:
                return low, -1
        return self.head


def _size(rows: Sequence[Row]) -> int:
    return sum(len(row[4]) for row in rows if row[4])


def _columns(positions: Sequence[Position]) -> dict[str, Any]:
    return {"lsns": [lsn for lsn, _idx in positions], "idxs": [idx for _lsn, idx in positions]}
