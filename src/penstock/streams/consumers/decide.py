"""One step of a consumer, decided: what its requests come to, as an entry for its log. No I/O.

A step changes nothing. The requests go into its `reports` first. Then follows what may be handed out, up
to a limit: messages that came back, replayed dead letters, groups that were parked, and messages
behind the cursor. Once the entry is in the log, the state applies it; if another process was faster,
the step is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol

from penstock.streams.consumers.entry import Entry, Parked
from penstock.streams.consumers.reports import NOT_ACKED, Reports
from penstock.streams.consumers.state import State

_SWEPT: Final = 1_000

Row = tuple[int, int, int, int | None, bytes | None]
"""A `Message` and its JSON: None where it is filtered out, empty where a newer one supersedes it."""


class GroupRows(Protocol):
    """The next messages of parked groups, as far as they were looked up."""

    def knows(self, group: int, parked: Parked) -> bool:
        """Return whether the group's next message was looked up."""

    def next(self, group: int, parked: Parked) -> Row | None:
        """Return the group's next message, None if there is none."""


class Step:
    """What one step of a consumer does.

    Args:
        state: The consumer's, advanced to the time.
        now: The time, in µs.
        max_deliver: How often a message is handed out; -1 is for ever.
        max_held: How many messages may be held before no new ones are handed out.
    """

    def __init__(self, state: State, now: int, max_deliver: int, max_held: int) -> None:
        self._state = state
        self._now = now
        self._max_deliver = max_deliver
        self._max_held = max_held
        self.reports = Reports(state, now, max_deliver)
        """What clients report about deliveries."""
        self._gone, self._freed = self.reports.gone, self.reports.freed
        self._lapsed = 0
        self._taken: set[int] = set()
        self._parked: dict[int, Parked | None] = {}
        self._cursor: tuple[int, int] | None = None
        self._passed = 0
        self._dropped: list[tuple[int, int]] = []
        self.redelivered: list[int] = []
        """What is handed out again, by its old number."""
        self.new: list[Row] = []
        """What is handed out for the first time."""

    @property
    def taken(self) -> int:
        """How many messages are handed out."""
        return len(self.redelivered) + len(self.new)

    @property
    def full(self) -> bool:
        """Whether `max_held` messages are held."""
        return self._room <= 0

    @property
    def _room(self) -> int:
        """How many more messages may be held."""
        return self._max_held - len(self._state.held) + len(self._gone) - len(self.new)

    def expire(self) -> None:
        """Take out what came back and was delivered often enough."""
        most = self._max_deliver
        if most > 0 and self._state.ready:
            held = self._state.held
            came_back = islice(self._came_back(), _SWEPT)
            dead = [number for number in came_back if held[number][4] >= most]
            if late := [number for number in dead if number not in self._state.returned]:
                self.reports.fail(late, None, NOT_ACKED)
            self.reports.kill(dead)

    def take_redeliveries(self, limit: int) -> list[int]:
        """Hand out what came back, up to `limit` in all; return the numbers."""
        if self._state.ready and self.taken < limit:
            self.redelivered += islice(self._came_back(), limit - self.taken)
        return self.redelivered

    def drop(self, numbers: Iterable[int]) -> None:
        """Take out what was to be handed out again and is no longer in the stream."""
        dropped = set(numbers)
        self.redelivered = [number for number in self.redelivered if number not in dropped]
        self.reports.remove(dropped)
        self._lapsed += len(dropped)

    def _came_back(self) -> Iterable[int]:
        out = self._gone if not self.reports.moved else self._gone | self.reports.moved.keys()
        return (number for number in self._state.ready if number not in out)

    def free_replays(self, limit: int) -> list[tuple[int, int]]:
        """Return the replayed dead letters that can be handed out now, up to `limit` in all."""
        left = min(limit - self.taken, self._room)
        found: list[tuple[int, int]] = []
        taken: set[int] = set()
        for position, message in self._state.replays.items():
            if len(found) >= left:
                break
            groups = {group for group in message[2:] if group is not None}
            if taken.isdisjoint(groups) and not any(map(self._busy, groups)):
                taken |= groups
                found.append(position)
        return found

    def take_replays(
        self, positions: Iterable[tuple[int, int]], texts: Mapping[tuple[int, int], bytes]
    ) -> None:
        """Hand out what `free_replays` gave; drop those that are not in `texts`."""
        for position in positions:
            if position in texts:
                self._take((*self._state.replays[position], texts[position]))
            else:
                self._dropped.append(position)

    def take_parked(self, limit: int, looked_up: GroupRows) -> list[tuple[int, Parked]]:
        """Hand out the next messages of groups that are free again, up to `limit` in all.

        Return the groups whose next messages must be looked up, for another call.
        """
        missing: dict[int, Parked] = {}
        for group in self._due():
            if self.taken + len(missing) >= limit or self._room <= len(missing):
                break
            parked = self._parked_of(group)
            if parked is None or self._busy(group):
                continue
            if not looked_up.knows(group, parked):
                missing[group] = parked
            elif (row := looked_up.next(group, parked)) is None:
                self._parked[group] = None
            else:
                self._take_parked(group, parked, row, looked_up, missing)
        return list(missing.items())

    def _take_parked(
        self, group: int, parked: Parked, row: Row, looked_up: GroupRows, missing: dict[int, Parked]
    ) -> None:
        other = row[3] if row[2] == group else row[2]
        if other is not None and other != group:
            if self._busy(other):
                return
            if (waiting := self._parked_of(other)) is not None:
                if not looked_up.knows(other, waiting):
                    missing[other] = waiting
                    return
                first = looked_up.next(other, waiting)
                if first is not None and first[:2] != row[:2]:
                    return
                self._pass_parked(other, waiting, row)
        self._pass_parked(group, parked, row)
        self._take(row)

    def _pass_parked(self, group: int, parked: Parked, row: Row) -> None:
        count, _lsn, _idx, last_lsn, last_idx = parked
        left = row[:2] < (last_lsn, last_idx)
        rest = (max(count - 1, 1), row[0], row[1] + 1, last_lsn, last_idx)
        self._parked[group] = rest if left else None

    def take_new(self, limit: int, rows: Sequence[Row], start: int = 0) -> int:
        """Hand out messages behind the cursor, up to `limit` in all, and park those of busy groups.

        `rows` are those behind the cursor, of which the first `start` were passed before. Return how
        many have been passed now.
        """
        busy, parked, taken, mine = self._state.busy, self._state.parked, self._taken, self._parked
        left = min(limit - self.taken, self._room)
        count, filtered = start, 0
        new = self.new
        for row in islice(rows, start, None):
            if left <= 0:
                break
            count += 1
            if not row[4]:
                filtered += row[4] is None
                continue
            group, old = row[2], row[3]
            if old is None and not (
                group in busy or group in taken or group in parked or group in mine
            ):
                taken.add(group)
            elif any(self._blocked(g) for g in (group, old) if g is not None):
                self._park(row)
                continue
            else:
                taken.add(group)
                if old is not None:
                    taken.add(old)
            new.append(row)
            left -= 1
        if count > start:
            last = rows[count - 1]
            self._cursor = (last[0], last[1])
            self._passed += count - start - filtered
        return count

    def skip_to(self, cursor: tuple[int, int]) -> None:
        """Move the cursor on where the stream has no messages before it, or no more."""
        self._cursor = cursor

    def _due(self) -> list[int]:
        due = self._state.due
        parked = self._state.parked
        if not parked:
            return []
        return [*due, *(g for g in self._freed if g in parked and g not in due)]

    def _busy(self, group: int) -> bool:
        if group in self._taken:
            return True
        return group in self._state.busy and group not in self._freed

    def _parked_of(self, group: int) -> Parked | None:
        if group in self._parked:
            return self._parked[group]
        return self._state.parked.get(group)

    def _blocked(self, group: int) -> bool:
        return self._busy(group) or self._parked_of(group) is not None

    def _take(self, row: Row) -> None:
        self._taken.add(row[2])
        if row[3] is not None:
            self._taken.add(row[3])
        self.new.append(row)

    def _park(self, row: Row) -> None:
        lsn, idx = row[0], row[1]
        for group in {row[2], row[2] if row[3] is None else row[3]}:
            parked = self._parked_of(group)
            if parked is None:
                self._parked[group] = (1, lsn, idx, lsn, idx)
            else:
                self._parked[group] = (parked[0] + 1, parked[1], parked[2], lsn, idx)

    def entry(self, ack_wait: int) -> Entry | None:
        """Return the step for the log, None if it does nothing; deliveries have `ack_wait` µs."""
        times: dict[int, list[int]] = {}
        for number, until in self.reports.moved.items():
            if number not in self._gone:
                times.setdefault(until, []).append(number)
        returned = self._state.returned
        if late := [number for number in self.redelivered if number not in returned]:
            self.reports.fail(late, None, NOT_ACKED)
        entry = Entry(
            cursor=self._cursor,
            passed=self._passed,
            done=_ranges(self._gone),
            lapsed=self._lapsed,
            moved=list(times.items()),
            released=[n for n in self.reports.released if n not in self._gone],
            redelivered=self.redelivered,
            new=[row[:4] for row in self.new],
            until=self._now + ack_wait,
            parked=list(self._parked.items()),
            dropped=self._dropped,
            failures=list(self.reports.failed.items()),
        )
        something = (
            entry.done,
            entry.moved,
            entry.redelivered,
            entry.new,
            entry.parked,
            entry.dropped,
        )
        return entry if any(something) or entry.cursor is not None else None


def _ranges(numbers: set[int]) -> list[tuple[int, int]]:
    if not numbers:
        return []
    ordered = sorted(numbers)
    if ordered[-1] - ordered[0] + 1 == len(ordered):
        return [(ordered[0], ordered[-1])]
    ranges: list[tuple[int, int]] = []
    first = last = ordered[0]
    for number in ordered:
        if number > last + 1:
            ranges.append((first, last))
            first = number
        last = number
    ranges.append((first, last))
    return ranges
