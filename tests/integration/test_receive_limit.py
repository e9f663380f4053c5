"""`max_waiting` counts the receives of all processes of a store."""

from __future__ import annotations

import asyncio
import contextlib

import psycopg
import pytest
from tests.consumers_help import ids, run, serving
from tests.streams_help import inserted, publish
from tests.waits import until

from penstock.streams.consumers import receive_limit
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerSpec, Received, TooManyWaiting
from penstock.streams.records import StreamRecord
from penstock.streams.store import Store


def waiting(consumer: Consumer, count: int) -> list[asyncio.Task[Received]]:
    return [asyncio.create_task(consumer.receive(1, 60.0)) for _ in range(count)]


def used(consumers: Consumers, consumer: Consumer) -> int:
    return consumers._limit.of(consumer.info.id).used


async def end(tasks: list[asyncio.Task[Received]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_two_processes_share_it(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        async with serving(store) as here, serving(store) as there:
            await here.create(ConsumerSpec("c", "events", settings={"max_waiting": 6}))
            a, b = await here.get("c"), await there.get("c")
            mine = waiting(a, 4)
            await until(lambda: used(here, a) == 4)
            theirs = waiting(b, 2)  # though `here` may hold more than it uses
            await until(lambda: used(there, b) == 2)
            for consumer in (a, b):
                with pytest.raises(TooManyWaiting, match="6 receives wait for 'c'"):
                    await consumer.receive(1, 60.0)
                with pytest.raises(TooManyWaiting):  # one that would not wait counts as well
                    await consumer.receive(1, 0.0)
            await end(mine[:1])
            async with asyncio.timeout(30):
                while used(there, b) < 3:  # until `here` has returned the permit
                    (task,) = waiting(b, 1)
                    await until(lambda t=task: t.done() or used(there, b) == 3)  # type: ignore[misc]  # mypy infers no lambda with a default
                    if not task.done():
                        theirs.append(task)
                    else:
                        assert isinstance(task.exception(), TooManyWaiting)
            publish(store, stream, [inserted(n) for n in range(6)])
            got = await asyncio.gather(*mine[1:], *theirs)
            assert sorted(ids([d for one in got for d in one.deliveries])) == list(range(6))
            assert (used(here, a), used(there, b)) == (0, 0)

    run(work)


def test_what_a_killed_process_held_comes_back(
    store: Store, stream: StreamRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_limit, "_EXPIRY", 0.5)
    monkeypatch.setattr(receive_limit, "_HEARTBEAT", 0.1)

    async def work() -> None:
        async with serving(store) as here, serving(store) as killed:
            await here.create(ConsumerSpec("c", "events", settings={"max_waiting": 2}))
            a, b = await here.get("c"), await killed.get("c")
            tasks = waiting(b, 2)
            await until(lambda: used(killed, b) == 2)
            with pytest.raises(TooManyWaiting):
                await a.receive(1, 60.0)
            heartbeat = killed._limit._task
            assert heartbeat is not None
            heartbeat.cancel()
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(TooManyWaiting):
                        await a.receive(1, 0.0)
                        break
                    await asyncio.sleep(0.05)
            await end(tasks)

    run(work)


def test_receives_cost_no_statement_and_what_is_not_used_is_returned(
    store: Store, stream: StreamRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_limit, "_HEARTBEAT", 0.1)
    taken = 0

    async def work() -> None:
        nonlocal taken
        async with serving(store) as consumers:
            consumer = await consumers.own("events")
            limit = consumers._limit
            take = limit.take

            async def counted(*args: int) -> int:
                nonlocal taken
                taken += 1
                return await take(*args)

            monkeypatch.setattr(limit, "take", counted)
            tasks = waiting(consumer, 20)
            await until(lambda: used(consumers, consumer) == 20)
            assert taken <= 6
            await end(tasks)
            permits = limit.of(consumer.info.id)
            await until(lambda: permits.held == 0)

    run(work)
    with psycopg.connect(store.url) as connection:
        assert connection.execute("SELECT FROM penstock.receivers").fetchall() == []
