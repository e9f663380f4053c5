"""A consumer's state under random requests, against the model; a second process reads along."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Any

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.consumer_model import Model

from penstock.config.consumers import ConsumerSettings, Filters
from penstock.streams.consumers.ack_tokens import make_tokens, read_tokens
from penstock.streams.consumers.decide import Step
from penstock.streams.consumers.entry import DeliveryFailure, Entry
from penstock.streams.consumers.state import State, replay
from penstock.testing import InMemoryStream, StreamRow
from penstock.testing.stream import View

CONSUMER = 7
ACK_WAIT = 30


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stream = InMemoryStream(1, "events", "changes", "shop", datetime.now(UTC))
        self.view = View(self.stream, ConsumerSettings(filters=Filters(table=("items",))))
        self.model = Model()
        self.log: list[bytes] = []
        self.seen = [0, 0]
        self.states = [State(), State()]
        self.now = 1_000
        self.due: dict[tuple[int, int], int] = {}  # when what is out comes back
        self.turn = 0
        self.failures = self.redeliveries = 0
        self.returned: set[tuple[int, int]] = set()  # nacked or released since they were handed out
        self.expired: list[tuple[int, int]] = []  # dead letters of the step, not acked in time

    @initialize(max_deliver=st.sampled_from([-1, -1, 1, 2]), max_held=st.sampled_from([1, 3, 100]))
    def configure(self, max_deliver: int, max_held: int) -> None:
        self.max_deliver, self.max_held = max_deliver, max_held

    def step(self) -> Step:
        self.turn = 1 - self.turn
        state = replay(self.states[self.turn], self.log[self.seen[self.turn] :])
        self.states[self.turn] = state
        self.seen[self.turn] = len(self.log)
        state.advance(self.now)
        step = Step(state, self.now, self.max_deliver, self.max_held)
        step.expire()
        dead = [message[:2] for message in step.reports.dead.values()]
        self.expired = [position for position in dead if position not in self.returned]
        return step

    def take(self, step: Step) -> Entry | None:
        entry = step.entry(ACK_WAIT)
        if entry is not None:
            self.log_entry(entry)
        self.failures += len(self.expired)
        for number, message in step.reports.dead.items():
            assert step.reports.cause(number)
            self.model.done(message[:2])
            self.due.pop(message[:2], None)
        return entry

    def log_entry(self, entry: Entry) -> None:
        self.states[self.turn].apply(entry)
        self.log.append(entry.encode())
        self.seen[self.turn] = len(self.log)

    def pass_time(self) -> None:
        for position, until in list(self.due.items()):
            if until <= self.now:
                self.model.came_back(position)
                del self.due[position]

    @rule(
        group=st.integers(1, 4),
        old=st.none() | st.integers(1, 4),
        new_lsn=st.booleans(),
        selected=st.integers(0, 9),
    )
    def publish(self, group: int, old: int | None, new_lsn: bool, selected: int) -> None:
        lsn, idx = self.stream.rows[-1][:2] if self.stream.rows else (1, -1)
        lsn, idx = (lsn + 5, 0) if new_lsn else (lsn, idx + 1)
        old = None if old == group else old
        table = "items" if selected else "others"
        self.stream.add([StreamRow(lsn, idx, group, old, None, "public", table, "insert", b"{}")])
        if selected:
            self.model.publish((lsn, idx), [g for g in (group, old) if g is not None])

    @rule(limit=st.integers(1, 6), scanned=st.integers(1, 12))
    def receive(self, limit: int, scanned: int) -> None:
        self.handed_out(limit, scanned)

    def handed_out(self, limit: int, scanned: int) -> list[tuple[int, int]]:
        step = self.step()
        state = self.states[self.turn]
        step.take_redeliveries(limit)
        free = step.free_replays(limit)
        step.take_replays(free, dict.fromkeys(free, b"{}"))
        assert step.take_parked(limit, self.view) == []
        rows = list(islice(self.view.behind(state.cursor), scanned))
        step.take_new(limit, rows)
        first = state.next
        again = [state.held[n][:2] for n in step.redelivered]
        positions = again + [row[:2] for row in step.new]
        self.failures += len(set(again) - self.returned)
        assert len(positions) <= limit
        self.take(step)
        held = [state.held[first + i] for i in range(len(positions))]
        assert [message[:2] for message in held] == positions
        tokens = make_tokens(CONSUMER, first, positions)
        for token, message in zip(tokens, held, strict=True):
            self.model.handed_out(message[:2], token, message[4])
            self.due[message[:2]] = message[5]
            self.redeliveries += message[4] > 1
        self.returned -= set(positions)
        return positions

    def tokens(self, data: st.DataObject) -> list[str]:
        known = [t for m in self.model.messages.values() for t in (m.token, *m.old_tokens) if t]
        known += self.model.forgotten
        return data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=4))

    def expected(self, token: str) -> tuple[str, tuple[int, int]]:
        """What must become of a request with this token: held, gone, expired or unknown."""
        ref = read_tokens(CONSUMER, [token])[0]
        assert ref is not None
        position = ref[:2]
        if token in self.model.forgotten:
            return "unknown", position
        message = self.model.messages[position]
        if message.gone:
            return "gone", position
        current = message.token == token and not message.waits
        return ("held" if current else "expired"), position

    @precondition(
        lambda self: self.model.messages and any(m.token for m in self.model.messages.values())
    )
    @rule(
        data=st.data(),
        kind=st.sampled_from(["ack", "ack", "ack", "nack", "extend", "release"]),
        time=st.integers(0, 50),
    )
    def say(self, data: st.DataObject, kind: str, time: int) -> None:
        tokens = self.tokens(data)
        fates = [self.expected(token) for token in tokens]
        step = self.step()
        refs = read_tokens(CONSUMER, tokens)
        dead = set(step.reports.dead.values())
        match kind:
            case "ack":
                refused = step.reports.ack(refs)
            case "nack":
                refused = step.reports.nack(refs, time)
            case "extend":
                refused = step.reports.extend(refs, time)
            case _:
                refused = step.reports.release(refs)
        dead_before = {message[:2] for message in dead}
        fates = [
            ("gone" if p in dead_before and fate != "unknown" else fate, p) for fate, p in fates
        ]
        unknown = {"expired", "unknown"} | ({"gone"} if kind == "extend" else set())
        assert [at for at, _reason in refused] == [
            i for i, f in enumerate(fates) if f[0] in unknown
        ]
        for at, reason in refused:
            assert reason == ("expired" if fates[at][0] == "expired" else "unknown")
        self.take(step)
        held = {position for fate, position in fates if fate == "held"}
        self.failures += len(held) * (kind == "nack")
        for position in held:
            self.due.pop(position, None)
            message = self.model.messages[position]
            if kind == "ack":
                self.model.done(position)
            elif message.gone:
                assert kind == "nack"  # it was its last delivery
            elif kind == "extend":
                message.out = True
                self.due[position] = self.now + time
            else:
                self.model.came_back(position, counted=kind == "nack")
                self.returned.add(position)
                if kind == "nack":
                    message.out = True
                    self.due[position] = self.now + time
        self.pass_time()

    @rule(time=st.integers(1, 60))
    def wait(self, time: int) -> None:
        self.now += time
        self.pass_time()

    @precondition(lambda self: any(m.gone for m in self.model.messages.values()))
    @rule(data=st.data())
    def replay_letter(self, data: st.DataObject) -> None:
        gone = [p for p, m in self.model.messages.items() if m.gone]
        position = data.draw(st.sampled_from(gone))
        self.step()
        if position > self.states[self.turn].cursor:
            return
        row = next(row for row in self.stream.rows if row[:2] == position)
        self.log_entry(Entry(replays=[row[:4]]))
        self.model.replay(position)

    @precondition(lambda self: self.stream.rows)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        cursor = data.draw(st.sampled_from([(0, -1), *(row[:2] for row in self.stream.rows)]))
        self.step()
        self.log_entry(Entry(cursor=cursor, rewound=True))
        self.model.rewind(cursor)
        self.due.clear()
        self.returned.clear()

    @rule()
    def snapshot(self) -> None:
        self.step()
        self.log.append(self.states[self.turn].encode())

    @invariant()
    def replicas_agree(self) -> None:
        def essence(state: State) -> Any:
            body = orjson.loads(state.encode())
            return {name: v if name in "sn" else sorted(v) for name, v in body.items()}

        if self.log:
            other = 1 - self.turn
            self.states[other] = replay(self.states[other], self.log[self.seen[other] :])
            self.seen[other] = len(self.log)
            assert essence(self.states[0]) == essence(self.states[1])
            state = self.states[0]
            groups = [g for m in state.held.values() for g in m[2:4] if g is not None]
            assert sorted(groups) == sorted(state.busy)
            assert set(state.due) == set(state.parked) - state.busy
            assert (state.failures, state.redeliveries) == (self.failures, self.redeliveries)
            assert state.failed.keys() | state.returned <= state.held.keys()

    def teardown(self) -> None:
        for _ in range(10_000):
            if not self.model.left():
                return
            self.now += 100
            self.pass_time()
            for position in self.handed_out(limit=100, scanned=100):
                step = self.step()
                message = self.model.messages[position]
                assert message.token is not None
                assert step.reports.ack(read_tokens(CONSUMER, [message.token])) == []
                self.take(step)
                self.model.done(position)
                self.due.pop(position, None)
        raise AssertionError(f"never handed out: {self.model.left()}")


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("acked", [False, True])
def test_a_superseded_message_is_no_success(acked: bool) -> None:
    states = [State(), State()]
    failure = DeliveryFailure(1, 500, "the endpoint is down")
    log = [
        Entry(cursor=(2, 0), passed=2, new=[(1, 0, 1, None), (2, 0, 2, None)], until=50),
        Entry(failures=[(failure, [1, 2])], moved=[(0, [1, 2])]),
    ]
    for entry in log:
        states[0].apply(entry)
    states[0].advance(10)
    step = Step(states[0], 10, -1, 100)
    assert step.take_redeliveries(2) == [1, 2]
    step.drop([1])
    if acked:
        step.redelivered.clear()
        step.reports.ack(read_tokens(CONSUMER, make_tokens(CONSUMER, 2, [(2, 0)])))
    last = step.entry(ACK_WAIT)
    assert last is not None
    states[0].apply(last)
    replay(states[1], [e.encode() for e in (*log, last)])
    for state in states:
        assert state.failing == (None if acked else (1, 2))
        assert 1 not in state.held
