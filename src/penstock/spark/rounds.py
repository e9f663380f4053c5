"""The rounds of a source: which messages are delivered together, by which lane, and when they may be.

A lane is a task of a long batch. Each of them delivers what it is handed in the order in which it is
handed it, and reports each part when it is durable. No I/O here, and no lock: calls in, parts out.

* A group's messages are in one split, and a split stays with its lane while that has parts of it. So a
  group is in order, however the lanes overtake each other.
* Rounds are confirmed in order: `confirmed` is the end of the last one before which all are done.
* A lane that is lost has its parts handed to another one, in their order, or to the next that joins.
* What must stand alone (a truncate) waits until all before it is done, and all behind waits for it.
* `in_step`, a round that goes to several lanes waits for those before it, and those behind it wait for
  it: the store's streams have each round whole before a newer one begins.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from penstock.core.blocks import blocks, with_part
from penstock.core.message import Position, RoundPart
from penstock.postgres.chunk import Chunk, joined, tied

_NOWHERE: Final = Position(0, -1)
ONE_LANE_ROWS: Final = 2_000
"""A round of fewer messages goes to one lane where it may: a second part costs more than it saves."""
_AHEAD: Final = 3
"""Parts that a lane has at a time: one to deliver, and others on their way."""


@dataclass(slots=True, eq=False)
class PendingPart:
    """A part of a round.

    Attributes:
        lane: The lane that has it.
        splits: The splits of its messages, and those that share a group with them.
        meta: What its blocks say of it.
        messages: Its messages (`WIRE_SCHEMA`), None once they are packed.
        falls: How many reports had named a sink that is behind, when it was handed out.
        values: Its messages as they were packed.
    """

    lane: int
    splits: frozenset[int]
    meta: RoundPart
    messages: pa.RecordBatch | None
    falls: int
    values: list[bytes] = field(default_factory=list)

    def packed(self) -> list[bytes]:
        """Return its blocks; from then on it has its messages in these alone, which are compressed."""
        if self.messages is None:  # the lane that had it is lost
            self.values = [with_part(value, self.meta) for value in self.values]
        else:
            self.values, self.messages = list(blocks(self.messages, self.meta)), None
        return self.values


@dataclass(slots=True)
class _Round:
    end: Position
    left: int
    alone: bool
    awaited: bool


class Rounds:
    """The rounds behind `start`, or where they `begin`; the lanes join, and may be lost."""

    def __init__(self, start: Position = _NOWHERE, *, in_step: bool) -> None:
        self.confirmed = start
        """All messages up to here are durable in every sink."""
        self.look = True
        """Whether a sink may be behind, so that tasks look in the store."""
        self.was_awaited = False
        """Set when a round is done that stood alone, or is of a backfill, which waits for it."""
        self._in_step = in_step
        self._falls = 0  # reports that a sink is behind
        self._lanes: dict[int, deque[PendingPart]] = {}  # what each has not reported
        self._orphans: deque[PendingPart] = deque()
        self._parts: dict[int, tuple[_Round, PendingPart]] = {}
        self._rounds: deque[_Round] = deque()
        self._home: dict[int, int] = {}
        self._busy: dict[int, int] = {}  # parts that have messages of a split
        self._next: tuple[Sequence[Chunk], Position, Position] | None = None
        self._ids = 0

    def begin(self, start: Position) -> None:
        """Begin behind `start`, before the first round."""
        self.confirmed = start

    @property
    def is_idle(self) -> bool:
        """Whether all that was handed out is done."""
        return not self._rounds and self._next is None

    @property
    def has_room(self) -> bool:
        """Whether another round may be offered now."""
        return (
            self._next is None
            and not self._orphans
            and bool(self._lanes)
            and not (self._rounds and self._rounds[-1].alone)
            and min(map(len, self._lanes.values())) < _AHEAD
        )

    @property
    def would_queue(self) -> bool:
        """Whether a small round would wait in its lane for a part before it."""
        return len(self._parts) >= (1 if self._in_step else len(self._lanes))

    def offer(self, start: Position, end: Position, chunks: Sequence[Chunk]) -> list[PendingPart]:
        """Take the next round, (start, end]; return the parts to hand out now, perhaps none yet."""
        self._next = chunks, start, end
        return self._begin()

    # -- lanes

    def join(self, lane: int) -> list[PendingPart]:
        """Note that a lane takes parts; return those to hand to it now."""
        self._lanes[lane] = deque()
        moved = self._move(self._orphans, lane)
        self._orphans.clear()
        return moved + self._begin()

    def lose(self, lane: int) -> list[PendingPart]:
        """Note that a lane is gone, with what it had not reported; return what others get instead."""
        gone = self._lanes.pop(lane, None)
        if gone is None:
            return []
        if not self._lanes:
            self._orphans.extend(gone)
            return []
        return self._move(gone, self._least(self._lanes))

    def close(self) -> None:
        """Note that all lanes end; there is nothing that they have not reported."""
        self._lanes.clear()

    def _move(self, parts: Iterable[PendingPart], lane: int) -> list[PendingPart]:
        moved = list(parts)
        for part in moved:
            part.lane = lane
            part.meta = part.meta._replace(done=self.confirmed, look=True)
            part.falls = self._falls
            self._home.update(dict.fromkeys(part.splits, lane))
        self._lanes[lane].extend(moved)
        return moved

    # -- parts

    def end_of(self, id_: int) -> Position | None:
        """Return the end of a part's round, None where it was reported before."""
        found = self._parts.get(id_)
        return None if found is None else found[0].end

    def done(self, id_: int, behind: bool | None = None) -> list[PendingPart]:
        """Note that a part is durable; return the parts to hand out now.

        `behind`: whether its task has found, or put, a sink behind; None where it did not look. What was
        reported before changes nothing, as where a lane was lost whose task had only lost a connection.
        """
        if behind:
            self._falls += 1
            self.look = True
        if (found := self._parts.pop(id_, None)) is None:
            return []
        of, part = found
        if behind is False and part.falls == self._falls:
            self.look = False
        self._lanes.get(part.lane, self._orphans).remove(part)
        for split in part.splits:
            self._busy[split] -= 1
        of.left -= 1
        self._settle()
        return self._begin()

    def _begin(self) -> list[PendingPart]:
        """Make the parts of the round that waits, if it may begin."""
        if self._next is None or not self._lanes:
            return []
        chunks, start, end = self._next
        alone = chunks[0].barrier
        if self._rounds and (alone or self._rounds[-1].alone):
            return []
        placed = self._place(chunks)
        if placed is None:
            return []
        self._next = None
        reads = chunks[0].reads
        sink = None if reads is None else reads.spec.sink
        awaited = alone or reads is not None
        return self._hand_out(_Round(end, 0, alone, awaited), start, placed, sink)

    def _hand_out(
        self,
        round_: _Round,
        start: Position,
        placed: Sequence[tuple[int, frozenset[int], pa.RecordBatch]],
        sink: str | None,
    ) -> list[PendingPart]:
        plan = secrets.randbits(63)
        made = []
        for number, (lane, splits, messages) in enumerate(placed):
            self._ids += 1
            meta = RoundPart(
                start, round_.end, number, len(placed), plan, sink, self._ids, self.confirmed,
                self.look,
            )  # fmt: skip
            part = PendingPart(lane, splits, meta, messages, self._falls)
            self._parts[self._ids] = round_, part
            self._lanes[lane].append(part)
            for split in splits:
                self._home[split] = lane
                self._busy[split] = self._busy.get(split, 0) + 1
            made.append(part)
        round_.left = len(made)
        self._rounds.append(round_)
        self._settle()  # an emptied chunk has no parts
        return made

    def _settle(self) -> None:
        while self._rounds and not self._rounds[0].left:
            done = self._rounds.popleft()
            self.confirmed = done.end
            self.was_awaited = self.was_awaited or done.awaited

    # -- placement

    def _place(
        self, chunks: Sequence[Chunk]
    ) -> list[tuple[int, frozenset[int], pa.RecordBatch]] | None:
        """Return the lane of each split that has messages, None where some must wait."""
        big = sum(chunk.rows for chunk in chunks) >= ONE_LANE_ROWS
        if self._in_step and self._rounds:
            used = {part.lane for _, part in self._parts.values()}
            if big or len(used) > 1 or not used <= self._lanes.keys():
                return None
            return self._made(chunks, {next(iter(used)): set().union(*tied(chunks))})
        lanes: dict[int, set[int]] = {}
        free: list[frozenset[int]] = []
        for group in tied(chunks):
            homes = {self._home[split] for split in group if self._busy.get(split)}
            if len(homes) > 1 or not homes <= self._lanes.keys():
                return None
            if homes:
                lanes.setdefault(homes.pop(), set()).update(group)
            else:
                free.append(group)
        if free and not big:
            lane = self._least(lanes or self._lanes)
            lanes.setdefault(lane, set()).update(*free)
        elif free:
            order = sorted(self._lanes)
            for group in free:
                lanes.setdefault(order[min(group) % len(order)], set()).update(group)
        return self._made(chunks, lanes)

    def _made(
        self, chunks: Sequence[Chunk], lanes: dict[int, set[int]]
    ) -> list[tuple[int, frozenset[int], pa.RecordBatch]] | None:
        if any(len(self._lanes[lane]) >= _AHEAD for lane in lanes):
            return None
        return [
            (lane, frozenset(splits), joined(chunks, splits))
            for lane, splits in sorted(lanes.items())
            if splits
        ]

    def _least(self, lanes: Iterable[int]) -> int:
        """Return the lane that has the least to do."""
        return min(lanes, key=lambda lane: (len(self._lanes[lane]), lane))
