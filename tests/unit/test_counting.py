"""Every message counts once, whatever dies, is repeated, comes late or is planned otherwise."""

from __future__ import annotations

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.blocks import Block
from penstock.core.counting import Counts, Floors, Ledger, is_counted, split
from penstock.core.message import Position, RoundPart

SINKS = ("a", "b")


def block_of(positions: list[Position]) -> Block:
    columns = {
        "commit_lsn": pa.array([p.lsn for p in positions], pa.int64()),
        "commit_idx": pa.array([p.idx for p in positions], pa.int64()),
    }
    return Block(None, pa.record_batch(columns))


class Machine(RuleBasedStateMachine):
    """Messages, and queries that deliver them in batches of parts, as `penstock.spark.writer` does."""

    @initialize(sizes=st.lists(st.integers(1, 4), min_size=3, max_size=12))
    def start(self, sizes: list[int]) -> None:
        self.messages = [
            Position(10 * n, i) for n, size in enumerate(sizes, 1) for i in range(size)
        ]
        self.wants = {"a": set(self.messages), "b": set(self.messages[::2])}
        self.ledger = Ledger()
        self.counted = dict.fromkeys(SINKS, Counts())
        self.queries = 0
        self.plans = 0
        self.confirmed = Position(0, -1)
        self.late: list[tuple[str, RoundPart, dict[str, Counts]]] = []
        self.slow: list[tuple[str, RoundPart, dict[str, Counts]]] = []
        self.restart(0)

    def restart(self, back: int) -> None:
        """Another query begins: where the slot is confirmed, which may be behind what is done."""
        self.flush()
        done = [p for p in self.messages if p <= self.confirmed]
        self.at = done[-1 - back] if back < len(done) else Position(0, -1)
        self.queries += 1
        self.query = f"q{self.queries}"
        self.floors: dict[int, Floors] = {}  # by worker, asked for when it has something to do

    def flush(self) -> None:
        while self.slow:
            self.shown(self.slow.pop())

    def batch(self, size: int, parts: int) -> list[tuple[RoundPart, list[Position]]]:
        taken = [p for p in self.messages if p > self.at][:size]
        if not taken:
            return []
        self.plans += 1
        return [
            (RoundPart(self.at, taken[-1], part, parts, self.plans), taken[part::parts])
            for part in range(parts)
        ]

    def worked(self, worker: int, positions: list[Position]) -> dict[str, Counts]:
        """What a worker reports of a part."""
        if worker not in self.floors:
            self.floors[worker] = self.ledger.begin(self.query)
        floors = self.floors[worker]
        counts = dict.fromkeys(SINKS, Counts())
        if not positions:
            return counts
        for piece in split(block_of(positions), floors.values()):
            rows = piece.messages.to_pylist()
            there = [Position(row["commit_lsn"], row["commit_idx"]) for row in rows]
            for sink in SINKS:
                if not is_counted(piece, floors.get(sink)):
                    taken = sum(p in self.wants[sink] for p in there)
                    of_piece = Counts(delivered=taken, filtered=len(there) - taken)
                    counts[sink] = counts[sink].plus(of_piece)
        return counts

    def shown(self, report: tuple[str, RoundPart, dict[str, Counts]]) -> None:
        for sink, counts in self.ledger.add(*report).items():
            assert min(counts) >= 0
            self.counted[sink] = self.counted[sink].plus(counts)

    @precondition(lambda self: bool(self.messages))
    @rule(
        size=st.integers(1, 9),
        parts=st.integers(1, 3),
        dies=st.none() | st.integers(0, 2),
        reported=st.booleans(),
        repeated=st.booleans(),
        late=st.booleans(),
        slow=st.integers(0, 5),
        back=st.integers(0, 9),
    )
    def run_batch(
        self, size: int, parts: int, dies: int | None, reported: bool, repeated: bool,
        late: bool, slow: int, back: int,
    ) -> None:  # fmt: skip
        batch = self.batch(size, parts)
        for part, positions in batch:
            report = (self.query, part, self.worked(part.part, positions))
            if part.part == dies:
                if late:
                    self.late.append(report)
                elif reported:
                    self.shown(report)
                self.restart(back)
                return
            if slow == part.part:
                self.slow.append(report)
            else:
                self.shown(report)
            if repeated:  # the task was tried again, by another worker
                self.shown((self.query, part, self.worked(part.part + 10, positions)))
        if batch:
            self.at = self.confirmed = max(self.confirmed, batch[0][0].end)
            self.at = batch[0][0].end
        if dies is not None and dies >= parts:
            self.restart(back)

    @precondition(lambda self: bool(self.late))
    @rule()
    def late_report(self) -> None:
        query = self.late[0][0]
        if query != self.query and self.floors:  # the next query's workers have begun
            self.shown(self.late.pop(0))

    @invariant()
    def nothing_counts_twice(self) -> None:
        for sink in SINKS if hasattr(self, "counted") else ():
            counts, chosen = self.counted[sink], self.wants[sink]
            assert counts.delivered <= len(chosen)
            assert counts.filtered <= len(self.messages) - len(chosen)

    def teardown(self) -> None:
        if not hasattr(self, "messages"):
            return
        self.flush()
        for _ in self.messages:
            for part, positions in self.batch(100, 2):
                self.shown((self.query, part, self.worked(part.part, positions)))
                self.at = part.end if part.part else self.at
        for sink in SINKS:
            chosen = len(self.wants[sink])
            assert self.counted[sink].delivered == chosen
            assert self.counted[sink].filtered == len(self.messages) - chosen


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_a_sink_that_is_new_counts_from_its_own_start() -> None:
    ledger = Ledger()
    start, end, later = Position(0, -1), Position(9, 0), Position(12, 3)
    ledger.begin("one")
    assert ledger.add("one", RoundPart(start, end, 0, 1), {"a": Counts(5)}) == {"a": Counts(5)}
    assert ledger.begin("two") == {"a": end}
    counts = {"a": Counts(2), "b": Counts(7)}
    assert ledger.add("two", RoundPart(start, later, 0, 1), counts) == counts
    # A task of the first query is still at it.
    assert ledger.begin("one") == {"a": later, "b": later}
    assert ledger.add("one", RoundPart(later, Position(20, 0), 0, 1), counts) == {}
    assert ledger.add("two", RoundPart(later, Position(20, 0), 0, 1), counts) == counts


def test_what_is_lost_on_the_way_does_not_keep_the_rest() -> None:
    ledger = Ledger()
    ledger.begin("one")
    counted = 0
    for number in range(200):
        for part in range(1 if number == 3 else 2):
            of = RoundPart(Position(number, 0), Position(number + 1, 0), part, 2)
            counted += sum(c.delivered for c in ledger.add("one", of, {"a": Counts(1)}).values())
    assert 398 <= counted <= 400
