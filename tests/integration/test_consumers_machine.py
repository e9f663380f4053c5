"""Consumers over a real store under random requests, against the model: two processes, crashes.

A process is a `Consumers` of its own with its own connections; what it has in memory is lost when it
crashes, and nothing of it may be missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.consumer_model import Model
from tests.streams_help import Change, make_stream, publish

from penstock.core.message import Position
from penstock.streams.consumers.ack_tokens import read_tokens
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerSpec
from penstock.streams.records import commit_position
from penstock.streams.store import Store

T = TypeVar("T")
Data = st.DataObject
LONG = 600.0


class Machine(RuleBasedStateMachine):
    store: Store
    loop: asyncio.AbstractEventLoop
    numbers: Iterator[int]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.name = f"stream{next(self.numbers)}"
        self.stream = make_stream(self.store, self.name, source=self.name)
        self.processes = [self.start(), self.start()]

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def start(self) -> Consumers:
        process = Consumers(self.store.url, pool_size=3)
        self.do(process.open())
        return process

    def consumer(self, process: int) -> Consumer:
        return self.do(self.processes[process].get(f"{self.name}-workers"))

    @initialize(max_deliver=st.sampled_from([-1, -1, 2]), max_held=st.sampled_from([2, 100]))
    def configure(self, max_deliver: int, max_held: int) -> None:
        settings = {
            "ack_wait_ms": 600_000,
            "max_deliver": max_deliver,
            "max_ack_pending": max_held,
            "filters": {"table": "items"},
        }
        self.max_deliver = max_deliver
        self.do(
            self.processes[0].create(
                ConsumerSpec(f"{self.name}-workers", self.name, settings=settings)
            )
        )

    @rule(
        groups=st.lists(
            st.tuples(st.integers(1, 3), st.none() | st.integers(1, 3), st.integers(0, 5)),
            min_size=1,
            max_size=6,
        )
    )
    def publish(self, groups: list[tuple[int, int | None, int]]) -> None:
        changes = [
            Change(
                group=g, old_group=None if old == g else old, table="items" if kind else "others"
            )
            for g, old, kind in groups
        ]
        positions = publish(self.store, self.stream, changes)
        for position, change in zip(positions, changes, strict=True):
            if change.table == "items":
                assert change.group is not None
                both = {change.group, change.old_group or change.group}
                self.model.publish(position, both)

    @rule(process=st.integers(0, 1), limit=st.integers(1, 5))
    def receive(self, process: int, limit: int) -> None:
        self.handed_out(process, limit)

    def handed_out(self, process: int, limit: int) -> list[str]:
        consumer = self.consumer(process)
        consumer.head_moved()  # as the notification does, a moment later
        if self.lagging is not process:
            consumer.log_moved()
        received = self.do(consumer.receive(limit, 0.0))
        assert len(received.deliveries) <= limit
        for delivery in received.deliveries:
            at = commit_position(*delivery.position)
            self.model.handed_out(at, delivery.token, delivery.deliver_count)
        assert received.num_ack_pending >= len(received.deliveries)
        return [delivery.token for delivery in received.deliveries]

    lagging: int | None = None

    @rule(process=st.none() | st.integers(0, 1))
    def lag(self, process: int | None) -> None:
        """One process does not hear of the other's steps, and finds out when it steps itself."""
        self.lagging = process

    @rule(process=st.integers(0, 1), limits=st.lists(st.integers(1, 3), min_size=2, max_size=4))
    def receive_at_once(self, process: int, limits: list[int]) -> None:
        async def gathered() -> list[Any]:
            found = [await p.get(f"{self.name}-workers") for p in self.processes]
            for consumer in found:
                consumer.head_moved()
            return await asyncio.gather(
                *(found[i % 2].receive(limit, 0.0) for i, limit in enumerate(limits))
            )

        deliveries = [d for received in self.do(gathered()) for d in received.deliveries]
        for delivery in sorted(deliveries, key=lambda d: d.position):
            at = commit_position(*delivery.position)
            self.model.handed_out(at, delivery.token, delivery.deliver_count)

    @precondition(lambda self: any(m.token for m in self.model.messages.values()))
    @rule(
        data=st.data(),
        process=st.integers(0, 1),
        kind=st.sampled_from(["ack", "ack", "ack", "nack", "later", "extend", "expire", "release"]),
    )
    def say(self, data: Data, process: int, kind: str) -> None:
        known = [t for m in self.model.messages.values() for t in (m.token, *m.old_tokens) if t]
        tokens = data.draw(
            st.lists(st.sampled_from(known + self.model.forgotten), min_size=1, max_size=3)
        )
        consumer = self.consumer(process)
        match kind:
            case "ack":
                outcome = self.do(consumer.ack(tokens))
            case "nack":
                outcome = self.do(consumer.nack(tokens))
            case "later":
                outcome = self.do(consumer.nack(tokens, LONG))
            case "extend":
                outcome = self.do(consumer.extend(tokens, LONG))
            case "expire":
                outcome = self.do(consumer.extend(tokens, 0.0))
            case _:
                outcome = self.do(consumer.release(tokens))
        refused = [token for token, _reason in outcome.refused]
        assert outcome.done == len(tokens) - len(refused)
        fates = {token: self.fate(token) for token in tokens}
        for token, (fate, position) in fates.items():
            if fate == "gone":
                assert (token in refused) == (kind in ("extend", "expire"))
                continue
            assert (token in refused) == (fate != "held"), (token, fate, outcome)
            if fate == "held":
                self.apply(kind, position)

    def fate(self, token: str) -> tuple[str, tuple[int, int]]:
        ref = read_tokens(self.consumer(0).info.id, [token])[0]
        assert ref is not None
        at = commit_position(*ref[:2])
        if token in self.model.forgotten:
            return "unknown", at
        message = self.model.messages[at]
        if message.gone:
            return "gone", at
        return ("held" if message.token == token and not message.waits else "expired"), at

    def apply(self, kind: str, position: tuple[int, int]) -> None:
        message = self.model.messages[position]
        last = 0 < self.max_deliver <= message.deliver_count
        if kind == "ack" or (kind in ("nack", "later", "expire") and last):
            self.model.done(position)
        elif kind in ("extend", "later"):
            message.out = True
        else:
            self.model.came_back(position, counted=kind != "release")

    @rule(process=st.integers(0, 1))
    def crash(self, process: int) -> None:
        async def die() -> None:
            dying = self.processes[process]
            task = asyncio.create_task((await dying.get(f"{self.name}-workers")).receive(1, 0.0))
            task.cancel()
            await asyncio.wait([task])
            await dying.close()

        self.do(die())
        self.processes[process] = self.start()

    @rule(process=st.integers(0, 1))
    def shorten(self, process: int) -> None:
        log = self.consumer(process)._steps.log
        if log.state is not None:
            self.do(self.consumer(process)._loop.alone(log.replace))

    @precondition(lambda self: self.model.messages)
    @rule(data=st.data(), process=st.integers(0, 1))
    def rewind(self, data: Data, process: int) -> None:
        choice: list[Any] = ["all", "new", *self.model.messages]
        to = data.draw(st.sampled_from(choice))
        consumer = self.consumer(process)
        cursor = self.do(consumer.rewind(Position(*to) if isinstance(to, tuple) else to))
        self.model.rewind(cursor[:2])

    @precondition(lambda self: self.max_deliver > 0)
    @rule(data=st.data(), process=st.integers(0, 1))
    def replay(self, data: Data, process: int) -> None:
        letters = self.do(self.consumer(process).dead_letters(100))
        waiting = [letter for letter in letters if letter.replayed_at is None]
        if not waiting:
            return
        letter = data.draw(st.sampled_from(waiting))
        message = self.model.messages[letter.position[:2]]
        self.do(self.consumer(process).replay(letter.id))
        if message.gone:
            self.model.replay(letter.position[:2])

    def teardown(self) -> None:
        self.lagging = None
        try:
            if not self.model.messages:
                return
            # What waits for long is made to come back.
            tokens = [m.token for m in self.model.messages.values() if m.token and not m.waits]
            self.do(self.consumer(0).release(tokens)) if tokens else None
            for position, message in self.model.messages.items():
                if message.token and not message.waits and not message.gone:
                    self.model.came_back(position, counted=False)
            turn = 0
            while self.model.left():
                turn = 1 - turn
                got = self.handed_out(turn, 50)
                assert got, f"never handed out: {self.model.left()}"
                outcome = self.do(self.consumer(1 - turn).ack(got))
                assert outcome.refused == []
                for token in got:
                    self.model.done(self.fate(token)[1])
            assert self.handed_out(0, 10) == []
        finally:
            for process in self.processes:
                self.do(process.close())


def test_no_loss_no_double_in_order(database: Any) -> None:
    loop = asyncio.new_event_loop()
    with Store.open(database.url) as store:
        Machine.store, Machine.loop, Machine.numbers = store, loop, iter(range(1_000_000))
        try:
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=25,
                    stateful_step_count=25,
                    deadline=None,
                    phases=(Phase.explicit, Phase.reuse, Phase.generate),
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            loop.close()
