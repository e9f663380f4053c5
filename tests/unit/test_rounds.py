"""Rounds: any interleaving of rounds, reports, lost lanes and restarts keeps order, and loses nothing.

The machine plays the lanes too: each delivers what it is handed in its order. It may die before or after
it has reported, and go on for a while, as a task does that only lost its connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.message import WIRE_SCHEMA, Position
from penstock.postgres.chunk import Chunk, ChunkBuilder
from penstock.postgres.reads import BackfillSpec, Reads
from penstock.spark import rounds as module
from penstock.spark.rounds import PendingPart, Rounds

SPLITS = 3
GROUPS = 6
START = Position(10, -1)
MOVED = st.sampled_from([None, None, None, *range(GROUPS)])
RARELY = st.sampled_from([False] * 5 + [True])


def row(number: int, group: int, old_group: int | None) -> tuple[Any, ...]:
    """Return a wire row: message `number`, of a group that is in split `group % SPLITS`."""
    values: dict[str, Any] = dict.fromkeys(WIRE_SCHEMA.names[:-1])
    values |= {
        "record": str(number), "commit_lsn": 11 + number, "commit_idx": 0, "group_hash": group,
        "old_group_hash": old_group,
    }  # fmt: skip
    return (*values.values(), group if old_group is None else old_group, group)


def chunks(first: int, groups: list[tuple[int, int | None]], alone: bool) -> Chunk:
    builder = ChunkBuilder(Position(10 + first, 0) if first else START, SPLITS)
    for n, (group, old) in enumerate(groups):
        builder.add(row(first + n, group, old), 1)
    return builder.take(Position(10 + first + len(groups), 0), barrier=alone)


class Machine(RuleBasedStateMachine):
    """One source with a sink; `delivered` is what the sink has, in its order, repeats left out."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[int, int | None]] = []
        self.delivered: list[int] = []
        self.alone: set[int] = set()
        self.there: set[int] = set()
        self.lanes: dict[int, deque[PendingPart]] = {}
        self.ghosts: list[deque[PendingPart]] = []
        self.finished: list[tuple[PendingPart, int]] = []
        self.reported: dict[int, int] = {}
        self.next_lane = 0

    @initialize(
        in_step=st.booleans(),
        big=st.sampled_from([2, 3, 1000]),
        lanes=st.sampled_from([3, 3, 2, 1]),
    )
    def begin(self, in_step: bool, big: int, lanes: int) -> None:
        self.in_step, self.big = in_step, big
        self.rounds = Rounds(START, in_step=in_step)
        self.position = START
        for _ in range(lanes):
            self.join()

    def hand(self, parts: list[PendingPart]) -> None:
        for part in parts:
            self.lanes[part.lane].append(part)

    def numbers(self, part: PendingPart) -> list[int]:
        assert part.messages is not None
        return [int(text) for text in part.messages.column("record").to_pylist()]

    def deliver(self, part: PendingPart) -> None:
        if self.in_step:
            assert not [n for n in range(part.meta.start.lsn - 10) if n not in self.there] or (
                part.meta.parts == 1
            ), "a round of several parts began before all before it was whole"
        done = max(part.meta.done.lsn - 10, 0)
        assert self.there.issuperset(range(done)), "not all is there that is reported as done"
        for number in self.numbers(part):
            before = (
                range(number) if number in self.alone else {n for n in self.alone if n < number}
            )
            assert self.there.issuperset(before), "what stands alone has company"
            if number not in self.there:  # else a duplicate, which every sink knows
                self.there.add(number)
                self.delivered.append(number)

    @precondition(lambda self: self.rounds.has_room)
    @rule(
        groups=st.lists(
            st.tuples(st.integers(0, GROUPS - 1), MOVED),
            min_size=1, max_size=4,
        ),
        alone=RARELY,
    )  # fmt: skip
    def offer(self, groups: list[tuple[int, int | None]], alone: bool) -> None:
        alone = alone and len(groups) == 1
        chunk = chunks(len(self.written), groups, alone)
        if alone:
            self.alone.add(len(self.written))
        self.written += groups
        start, self.position = self.position, chunk.end
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "ONE_LANE_ROWS", self.big)
            self.hand(self.rounds.offer(start, chunk.end, [chunk]))

    @precondition(lambda self: len(self.lanes) < 3)
    @rule()
    def join(self) -> None:
        lane = next(n for n in range(3) if n not in self.lanes)
        self.lanes[lane] = deque()
        self.hand(self.rounds.join(lane))

    @rule(data=st.data())
    def deliver_next(self, data: st.DataObject) -> None:
        busy = [lane for lane, parts in self.lanes.items() if parts]
        if not busy:
            return
        lane = data.draw(st.sampled_from(busy))
        part = self.lanes[lane].popleft()
        self.deliver(part)
        self.finished.append((part, lane))

    @precondition(lambda self: self.finished)
    @rule(nth=st.integers(0, 5), behind=st.sampled_from([None, False, True]))
    def report(self, nth: int, behind: bool | None) -> None:
        """Reports of several lanes overtake each other, those of one lane don't."""
        part, lane = self.finished[nth % len(self.finished)]
        part, lane = next(f for f in self.finished if f[1] == lane)
        self.finished.remove((part, lane))
        self.hand(self.rounds.done(part.meta.id, behind))

    @precondition(lambda self: self.lanes)
    @rule(really=RARELY, nth=st.integers(0, 2), reports=st.booleans(), ghost=st.booleans())
    def lose(self, really: bool, nth: int, reports: bool, ghost: bool) -> None:
        if not really:
            return
        lane = sorted(self.lanes)[nth % len(self.lanes)]
        parts = self.lanes.pop(lane)
        if not reports:  # what it has delivered is there, and that is not known
            self.finished = [f for f in self.finished if f[1] != lane]
        else:
            self.finished = [(p, -1 - lane if n == lane else n) for p, n in self.finished]
        if ghost and parts:
            self.ghosts.append(deque([parts[0]]))
        self.hand(self.rounds.lose(lane))

    @precondition(lambda self: self.ghosts)
    @rule()
    def haunt(self) -> None:
        """A task that lost its connection ends what it was about; what it sends twice is known."""
        part = self.ghosts.pop().popleft()
        if all(n in self.there for n in self.numbers(part)):
            self.deliver(part)

    @rule(really=RARELY)
    def restart(self, really: bool) -> None:
        """The process of the capture is gone: all behind what is confirmed comes again."""
        if not really:
            return
        confirmed = max(self.rounds.confirmed.lsn - 10, 0)
        self.lanes, self.ghosts, self.finished = {}, [], []
        self.rounds = Rounds(self.rounds.confirmed, in_step=self.in_step)
        self.position = self.rounds.confirmed
        # What the sink has of it, it has again; the machine goes on as if it were new.
        del self.written[confirmed:]
        self.alone = {n for n in self.alone if n < confirmed}
        self.there = {n for n in self.there if n < confirmed}
        self.delivered = [n for n in self.delivered if n < confirmed]

    @invariant()
    def nothing_is_confirmed_that_is_not_there(self) -> None:
        if hasattr(self, "rounds"):
            assert self.there.issuperset(range(max(self.rounds.confirmed.lsn - 10, 0)))

    @invariant()
    def groups_are_in_order(self) -> None:
        of: dict[int, list[int]] = {}
        for number in self.delivered:
            group, old = self.written[number]
            for each in {group, group if old is None else old}:
                of.setdefault(each, []).append(number)
        for numbers in of.values():
            assert numbers == sorted(numbers)

    def teardown(self) -> None:
        """Whatever has happened: with one lane that lives, all is delivered and confirmed."""
        if not hasattr(self, "rounds"):
            return
        for _ in range(10_000):
            if not self.lanes:
                self.join()
            while self.finished:
                self.report(0, None)
            lane = next((n for n, parts in self.lanes.items() if parts), None)
            if lane is None:
                break
            part = self.lanes[lane].popleft()
            self.deliver(part)
            self.finished.append((part, lane))
        assert self.rounds.is_idle
        assert self.rounds.confirmed == self.position
        assert self.there == set(range(len(self.written)))
        self.groups_are_in_order()


TestRounds = Machine.TestCase
TestRounds.settings = settings(max_examples=500, stateful_step_count=60, deadline=None)


def test_small_rounds_stay_with_one_lane_and_large_ones_are_spread() -> None:
    rounds = Rounds(START, in_step=False)
    assert rounds.join(0) == rounds.join(1) == []
    small = chunks(0, [(0, None), (1, None)], alone=False)
    (part,) = rounds.offer(START, small.end, [small])
    assert part.splits == {0, 1}
    many = chunks(2, [(n % 2, None) for n in range(module.ONE_LANE_ROWS)], alone=False)
    rounds.done(part.meta.id)
    parts = rounds.offer(small.end, many.end, [many])
    assert [(p.lane, p.splits) for p in parts] == [
        (0, frozenset({0})),
        (1, frozenset({1})),
    ]
    assert not rounds.is_idle


def test_a_sink_that_falls_behind_is_looked_up_until_a_newer_look_finds_none() -> None:
    rounds = Rounds(START, in_step=False)
    rounds.join(0)

    def offered(n: int) -> PendingPart:
        chunk = chunks(n, [(0, None)], alone=False)
        (part,) = rounds.offer(chunk.start, chunk.end, [chunk])
        return part

    first = offered(0)
    assert first.meta.look, "no task has looked yet"
    rounds.done(first.meta.id, False)
    second, third = offered(1), offered(2)
    assert not second.meta.look
    rounds.done(second.meta.id, True)
    rounds.done(third.meta.id, False)
    fourth = offered(3)
    assert fourth.meta.look, "the third was handed out before the second fell behind"
    rounds.done(fourth.meta.id, False)
    assert not offered(4).meta.look


def test_a_backfills_rows_go_with_the_others_and_to_its_sink_alone() -> None:
    rounds = Rounds(START, in_step=False)
    rounds.join(0)
    live = chunks(0, [(0, None)], alone=False)
    (part,) = rounds.offer(START, live.end, [live])
    assert part.meta.sink is None
    reads = Reads(BackfillSpec(1, "events", "public", "t"), 1, 0, None, (b"",), cast("Any", None))
    chunk = replace(chunks(1, [(0, None)], alone=False), reads=reads)
    assert rounds.has_room
    (other,) = rounds.offer(live.end, chunk.end, [chunk])
    assert other.meta.sink == "events"
    rounds.done(part.meta.id)
    assert not rounds.was_awaited
    rounds.done(other.meta.id)
    assert rounds.was_awaited, "the next chunk waits for it"
