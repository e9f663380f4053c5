"""Consumers that several processes change or drop at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psycopg
import pytest
from psycopg import sql
from tests.consumers_help import run, until_blocked
from tests.streams_help import make_stream

from penstock.embedded.handles import Database
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerInfo, ConsumerSpec, UnknownConsumer
from penstock.streams.names import consumer_table
from penstock.streams.store import Store


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    with Store.open(database.url) as store:
        make_stream(store)
        yield store


@asynccontextmanager
async def two(store: Store, spec: ConsumerSpec) -> AsyncIterator[tuple[Consumers, Consumers]]:
    """Two processes that both know the consumer."""
    one, other = Consumers(store.url, pool_size=4), Consumers(store.url, pool_size=4)
    await one.open()
    await other.open()
    try:
        await one.create(spec)
        await other.list()
        yield one, other
    finally:
        await one.close()
        await other.close()


async def read(consumers: Consumers, name: str) -> ConsumerInfo:
    return next(info for info in await consumers.list() if info.name == name)


def test_changes_at_the_same_time_are_all_made(store: Store) -> None:
    async def work() -> None:
        async with two(store, ConsumerSpec("workers", "events")) as (one, other):
            await asyncio.gather(
                one.update("workers", {"max_deliver": 5}),
                other.update("workers", {"ack_wait_ms": 1234}),
            )
            settings = (await read(one, "workers")).settings
            assert (settings.max_deliver, settings.ack_wait_ms) == (5, 1234)

    run(work)


def test_disabling_and_changing_at_the_same_time(store: Store) -> None:
    spec = ConsumerSpec("hook", "events", "webhook", {"url": "https://example.com/"})

    async def work() -> None:
        async with two(store, spec) as (one, other):
            hook = await other.get("hook")
            await asyncio.gather(hook.disable("410 Gone"), one.update("hook", {"timeout_ms": 5}))
            info = await read(one, "hook")
            assert info.settings.shown()["timeout_ms"] == 5
            assert info.disabled == "410 Gone"
            await asyncio.gather(one.update("hook", {"timeout_ms": 6}), hook.enable())
            info = await read(one, "hook")
            assert info.settings.shown()["timeout_ms"] == 6
            assert info.disabled is None

    run(work)


def test_one_of_two_that_drop_it_learns_that_it_is_gone(store: Store) -> None:
    async def work() -> None:
        async with two(store, ConsumerSpec("workers", "events")) as (one, other):
            consumer = await other.get("workers")
            ends = await asyncio.gather(
                one.delete("workers"), other.delete("workers"), return_exceptions=True
            )
            assert [type(end) for end in ends if end is not None] == [UnknownConsumer]
            for late in (other.update("workers", {}), consumer.enable()):
                with pytest.raises(UnknownConsumer):
                    await late

    run(work)


def test_dropping_meets_a_step_that_buries(store: Store) -> None:
    async def work() -> None:
        async with two(store, ConsumerSpec("workers", "events")) as (one, _):
            number = (await one.get("workers")).info.id
            with psycopg.connect(store.url) as step:
                log = sql.SQL("INSERT INTO {} VALUES (99, '{{}}')").format(consumer_table(number))
                step.execute(log)
                dropping = asyncio.create_task(one.delete("workers"))
                await until_blocked(store)
                step.execute(
                    "INSERT INTO penstock.dead_letters (consumer_id, lsn, idx, code, reason, message)"
                    " VALUES (%s, 1, 1, 'max_deliver', 'test', '{}')",
                    [number],
                )
                step.commit()
            await dropping

    run(work)
