"""The next messages of parked groups, looked up in the stream's index and remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.streams.consumers.decide import Row
from penstock.streams.consumers.entry import Parked, StreamPosition
from penstock.streams.consumers.sessions import Sessions, composed
from penstock.streams.consumers.view import BYTES, StreamView, size_of
from penstock.streams.names import segment_table

_GROUPS: Final = 20_000
_OF_A_GROUP: Final = 50


@dataclass(slots=True)
class _Known:
    """A group's messages from `start` on; there are no others up to `through`."""

    start: StreamPosition
    rows: list[Row]
    through: StreamPosition


class ParkedGroups:
    """The known messages of parked groups, a `GroupRows`. Used by one task."""

    def __init__(self, sessions: Sessions, view: StreamView) -> None:
        self._sessions = sessions
        self._view = view
        self._known: dict[int, _Known] = {}
        self._bytes = 0

    def knows(self, group: int, parked: Parked) -> bool:
        """Return whether the group's next message was looked up."""
        known = self._known.get(group)
        if known is None or known.start > parked[1:3]:
            return False
        while known.rows and known.rows[0][:2] < parked[1:3]:
            self._bytes -= len(known.rows.pop(0)[4] or b"")
        known.start = parked[1:3]
        return bool(known.rows) or known.through >= parked[3:5]

    def next(self, group: int, _parked: Parked) -> Row | None:
        """Return the group's next message, None if there is none."""
        rows = self._known[group].rows
        return rows[0] if rows else None

    def of(self, group: int) -> tuple[list[Row], StreamPosition]:
        """Return what is known of a group that was looked up, and up to where that is all."""
        known = self._known[group]
        return known.rows, known.through

    def trim(self) -> None:
        """Drop all if it has become much. Not between look-ups of one step."""
        if len(self._known) > _GROUPS or self._bytes > BYTES:
            self.forget()

    def forget(self) -> None:
        """Drop all."""
        self._known.clear()
        self._bytes = 0

    async def look_up(self, groups: Sequence[tuple[int, Parked]]) -> None:
        """Read the next messages of parked groups."""
        await self._view.whole(lambda: self._look_up(groups))

    async def _look_up(self, groups: Sequence[tuple[int, Parked]]) -> None:
        view = self._view
        room = max(BYTES - self._bytes, BYTES // 4)
        most = max(1, min(_OF_A_GROUP, room // view.size // max(len(groups), 1)))
        found: dict[int, list[Row]] = {group: [] for group, _parked in groups}
        limits = {group: min(parked[0], most) for group, parked in groups}
        for segment in view.segments:
            left = [
                (group, parked, limits[group] - len(found[group]))
                for group, parked in groups
                if parked[1:3] <= segment.through
                and parked[3:5] > segment.after
                and len(found[group]) < limits[group]
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
                "head_lsn": view.head[0],
                "head_idx": view.head[1],
            }
            query = composed(
                "look_up",
                segment=segment_table(segment.id),
                condition=view.newest(segment, view.parked),
            )
            for number, *row in await self._sessions.messages(query, params):
                found[left[number - 1][0]].append(tuple(row))
        view.measure([row for rows in found.values() for row in rows])
        for group, parked in groups:
            rows = found[group]
            complete = len(rows) < limits[group]
            through = parked[3:5] if complete else rows[-1][:2]
            if (known := self._known.get(group)) is not None:
                self._bytes -= size_of(known.rows)
            self._known[group] = _Known(parked[1:3], rows, through)
            self._bytes += size_of(rows)
