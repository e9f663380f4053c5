"""An ack's step hands out what the next receive is answered with; what none takes is given back."""

from __future__ import annotations

import asyncio

import pytest
from tests.consumers_help import ids, run, serving, tokens, workers
from tests.streams_help import inserted, publish

from penstock.streams.consumers import claims
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.names import consumer_table
from penstock.streams.records import StreamRecord
from penstock.streams.store import Store


def entries(store: Store, consumer: Consumer) -> int:
    """Return how many steps the consumer's log has."""
    table = consumer_table(consumer.info.id).as_string()
    with store.connection() as connection:
        row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    assert row is not None
    return int(row[0])


async def cycle(consumer: Consumer, limit: int = 1) -> list[int]:
    """Receive and ack as a worker does; return what came."""
    received = await consumer.receive(limit, 0.0)
    outcome = await consumer.ack(tokens(received.deliveries), followed=True)
    assert outcome.refused == []
    assert {delivery.deliver_count for delivery in received.deliveries} <= {1}
    return ids(received.deliveries)


async def out(consumer: Consumer) -> int:
    """Return how many messages are out, up to 10."""
    return sum(message.until is not None for message in await consumer.messages("delivered", 10))


async def until_back(consumer: Consumer) -> None:
    """Wait until nothing is out."""
    async with asyncio.timeout(60):
        while await out(consumer):
            await asyncio.sleep(claims.SECONDS / 2)


def test_an_ack_and_the_receive_after_it_are_one_step(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(100)])
        async with workers(store) as consumer:
            got = [i for _ in range(20) for i in await cycle(consumer, 2)]
            before = entries(store, consumer)
            for _ in range(20):
                got += await cycle(consumer, 2)
            assert got == list(range(80))
            # 20 acks, and a receive where a pause in this test was too long.
            assert 20 <= entries(store, consumer) - before < 30
            while more := await cycle(consumer, 2):
                got += more
            assert got == list(range(100))

    run(work)


def test_what_no_receive_takes_is_given_back_uncounted(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(40)])
        async with workers(store) as consumer:
            for number in range(10):
                assert await cycle(consumer) == [number]
            assert await out(consumer) == 1
            await until_back(consumer)
            assert (await consumer.facts()).failures == 0
            received = await consumer.receive(3, 0.0)
            assert ids(received.deliveries) == [10, 11, 12]
            assert {delivery.deliver_count for delivery in received.deliveries} == {1}
            # Now it is not done again for a while.
            for number in range(13, 20):
                assert await cycle(consumer) == [number]
            assert await out(consumer) == 3

    run(work)


def test_what_was_not_taken_goes_to_a_receive_of_any_size(
    store: Store, stream: StreamRecord
) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(40)])
        async with workers(store) as consumer:
            for number in range(10):
                assert await cycle(consumer) == [number]
            received = await consumer.receive(5, 0.0)
            assert ids(received.deliveries) == [10, 11, 12, 13, 14]
            assert received[1:] == (25, 5)
            await asyncio.sleep(claims.SECONDS)  # behind their timer, which is older
            assert await out(consumer) == 5

    run(work)


def test_a_rewind_forgets_it(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(40)])
        async with workers(store) as consumer:
            for number in range(10):
                assert await cycle(consumer) == [number]
            await consumer.rewind("all")
            assert [await cycle(consumer) for _ in range(12)] == [[i] for i in range(12)]

    run(work)


@pytest.mark.parametrize("settings", [{"max_deliver": 1}, {"ack_wait_ms": 900}])
def test_some_consumers_hand_out_to_receives_alone(
    store: Store, stream: StreamRecord, settings: dict[str, int]
) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(40)])
        async with workers(store, **settings) as consumer:
            for number in range(10):
                assert await cycle(consumer) == [number]
            assert await out(consumer) == 0

    run(work)


def test_an_orderly_end_gives_it_back(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(40)])
        async with workers(store) as consumer:
            for number in range(10):
                assert await cycle(consumer) == [number]
        async with serving(store) as consumers:
            consumer = await consumers.get("workers")
            assert await out(consumer) == 0
            assert await cycle(consumer) == [10]

    run(work)


def test_workers_of_two_processes_get_each_message_once(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(600)])
        got: list[int] = []

        async def worker(consumer: Consumer) -> None:
            while received := (await consumer.receive(3, 0.5)).deliveries:
                got.extend(ids(received))
                assert {delivery.deliver_count for delivery in received} == {1}
                outcome = await consumer.ack(tokens(received), followed=True)
                assert outcome.refused == []

        async with workers(store) as mine, serving(store) as others:
            theirs = await others.get("workers")
            await asyncio.gather(*[worker(c) for c in (mine, theirs, mine, theirs)])
        assert sorted(got) == list(range(600))

    run(work)
