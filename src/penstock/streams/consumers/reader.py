"""A stream's messages for one consumer: read ahead of its cursor, by group, by position and by time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from psycopg import sql

from penstock.config.consumers import ConsumerSettings
from penstock.core.group_hash import group_hash
from penstock.streams.consumers.ahead import ConsumerReadAhead
from penstock.streams.consumers.decide import Row
from penstock.streams.consumers.entry import Parked, StreamPosition
from penstock.streams.consumers.groups import ParkedGroups
from penstock.streams.consumers.selection import ALL, superseded
from penstock.streams.consumers.sessions import Sessions, composed
from penstock.streams.consumers.state import START
from penstock.streams.consumers.view import StreamRef, StreamView
from penstock.streams.names import segment_table

END: Final = ((1 << 63) - 1, (1 << 63) - 1)
"""Behind all positions."""
_LOOKED_AT: Final = 20_000
_WINDOWS: Final = 10


class ConsumerReader:
    """Reads a stream for a consumer. Used by one task; `ahead` may be filled beside it."""

    def __init__(
        self, sessions: Sessions, stream: StreamRef, consumer: int, settings: ConsumerSettings
    ) -> None:
        self._sessions = sessions
        self._consumer = consumer
        self.view = StreamView(sessions, stream, settings, consumer)
        self.ahead = ConsumerReadAhead(sessions, self.view, consumer)
        self.groups = ParkedGroups(sessions, self.view)
        self._passable = (START, START)  # between these are none of the consumer's messages

    def seek(self, cursor: StreamPosition) -> None:
        """Go on behind `cursor`."""
        if not self.ahead.seek(cursor):
            self.groups.forget()

    def forget(self) -> None:
        """Drop all that was read."""
        self.ahead.forget()
        self.groups.forget()

    def expired(self, cursor: StreamPosition) -> StreamPosition | None:
        """Return where the stream begins if `cursor` lies before that."""
        first = self.view.segments[0].after if self.view.segments else cursor
        return first if first > cursor else None

    async def texts(self, positions: Sequence[StreamPosition]) -> dict[StreamPosition, bytes]:
        """Return messages by position; what is no longer in the stream, or superseded, is not there."""
        return await self.view.whole(lambda: self._texts(positions))

    async def _texts(self, positions: Sequence[StreamPosition]) -> dict[StreamPosition, bytes]:
        found: dict[StreamPosition, bytes] = {}
        for segment in self.view.segments:
            here = [p for p in positions if segment.after < p <= segment.through]
            if here:
                query = composed(
                    "messages",
                    segment=segment_table(segment.id),
                    condition=self.view.newest(segment),
                )
                params = {**self.view.range(START, START), **_columns(here)}
                for lsn, idx, text in await self._sessions.messages(query, params):
                    found[lsn, idx] = text
        if len(found) < len(set(positions)):
            # Replayed dead letters may have outlived their segment. Of rows, deletes alone do: another
            # version that has gone was superseded, if only by a delete that has gone as well.
            rest = [position for position in positions if position not in found]
            condition: sql.Composable = ALL
            if self.view.of_rows:
                newer = superseded([segment.id for segment in self.view.segments])
                condition = sql.SQL("m.action = 'delete' AND NOT {}").format(newer)
            params = {**self.view.range(START, START), **_columns(rest), "consumer": self._consumer}
            query = composed("replayed", condition=condition)
            for lsn, idx, text in await self._sessions.messages(query, params):
                found[lsn, idx] = text
        return found

    async def behind(
        self, cursor: StreamPosition, parked: Mapping[int, Parked], limit: int
    ) -> list[Row]:
        """Return the first messages that were never handed out: parked, or behind the cursor."""
        self.seek(cursor)
        rows: dict[StreamPosition, Row] = {}
        left = list(parked.items())[:limit]
        while left and len(rows) < limit:
            await self.groups.look_up(left)
            rest: list[tuple[int, Parked]] = []
            for group, (count, _lsn, _idx, *last) in left:
                found, (lsn, idx) = self.groups.of(group)
                rows.update((row[:2], row) for row in found)
                if (lsn, idx) < (last[0], last[1]):
                    more = max(count - len(found), 1)
                    rest.append((group, (more, lsn, idx + 1, last[0], last[1])))
            left = rest
        ahead = self.ahead
        while len(ahead.rows) < limit and not ahead.at_head:
            await ahead.fill()
            ahead.rows = [row for row in ahead.rows if row[4]]
        rows.update((row[:2], row) for row in ahead.rows)
        return [rows[position] for position in sorted(rows)[:limit]]

    async def count(
        self, after: StreamPosition, limit: int, until: StreamPosition = END
    ) -> tuple[int, StreamPosition]:
        """Count the consumer's messages behind `after`, up to `until` or the head; return up to where.

        About `limit` messages are looked at.
        """

        async def work() -> tuple[int, StreamPosition]:
            total, looked_at, end = 0, 0, after
            head = min(self.view.head, until)
            for segment in self.view.segments:
                last = min(head, segment.through)
                if last <= end or looked_at >= limit:
                    continue
                query = composed(
                    "count", segment=segment_table(segment.id), matches=self.view.matches
                )
                params = {
                    **self.view.range(max(end, segment.after), last),
                    "limit": limit - looked_at,
                }
                rows = await self._sessions.rows(query, params)
                lsn, idx, found, seen = rows[0] if rows else (*last, 0, 0)
                total += found
                end = (lsn, idx) if looked_at + seen >= limit else last
                looked_at += seen
            return total, end

        return await self.view.whole(work)

    async def oldest(self, position: StreamPosition, *, behind: bool = False) -> datetime | None:
        """Return when the message at `position`, or the consumer's first one `behind` it, was committed.

        Of a position where there is none any more, that of the next one. Behind one, very many may
        come that are not the consumer's: then one of those stands for it until a later call.
        """
        after = position if behind else (position[0], position[1] - 1)

        async def work() -> datetime | None:
            begin, windows = after, _WINDOWS if behind else 0
            if behind and self._passable[0] <= after <= self._passable[1]:
                begin = self._passable[1]
            for segment in self.view.segments:
                table = segment_table(segment.id)
                begin, last = max(begin, segment.after), min(self.view.head, segment.through)
                while begin < last:
                    condition = self.view.newest(segment, self.view.matches) if windows else ALL
                    limit = _LOOKED_AT if windows else 1
                    params = {**self.view.range(begin, last), "limit": limit}
                    query = composed("oldest", segment=table, condition=condition)
                    for (at,) in await self._sessions.rows(query, params):
                        return None if at is None else datetime.fromisoformat(at)
                    ends = await self._sessions.rows(composed("window", segment=table), params)
                    begin = (ends[0][0], ends[0][1]) if ends else last
                    if windows:
                        windows -= 1
                        self._passable = after, begin
            return None

        return await self.view.whole(work)

    async def groups_of(self, position: StreamPosition) -> tuple[int, int | None]:
        """Return the groups of a message; one that has gone gets a group of its own."""

        async def work() -> tuple[int, int | None]:
            for segment in self.view.segments:
                if segment.after < position <= segment.through:
                    query = composed("groups", segment=segment_table(segment.id))
                    for group, old in await self._sessions.rows(query, position):
                        return group, old
            return group_hash(b"[%d,%d]" % position), None

        return await self.view.whole(work)

    async def takes(self, position: StreamPosition) -> bool:
        """Return whether the message at a position is one of the consumer's."""

        async def work() -> bool:
            for segment in self.view.segments:
                if segment.after < position <= segment.through:
                    table = segment_table(segment.id)
                    query = composed("takes", segment=table, matches=self.view.matches)
                    for (taken,) in await self._sessions.rows(query, position):
                        return bool(taken)
            return True

        return True if self.view.matches is ALL else await self.view.whole(work)

    async def before_last(self) -> StreamPosition:
        """Return the position before the consumer's newest message, the head where it has none."""
        return await self.view.whole(self._before_last)

    async def _before_last(self) -> StreamPosition:
        view = self.view
        for segment in reversed(view.segments):
            query = composed(
                "last_message", segment=segment_table(segment.id), condition=view.matches
            )
            if rows := await self._sessions.rows(query, view.head):
                lsn, idx = rows[0]
                return lsn, idx - 1
        return view.head

    async def at_time(self, time: str) -> StreamPosition:
        """Return the position before the first message committed at or after an ISO 8601 UTC time."""
        return await self.view.whole(lambda: self._at_time(time))

    async def _at_time(self, time: str) -> StreamPosition:
        for segment in self.view.segments:
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
        return self.view.head


def _columns(positions: Sequence[StreamPosition]) -> dict[str, Any]:
    return {"lsns": [lsn for lsn, _idx in positions], "idxs": [idx for _lsn, idx in positions]}
