"""Consumers as a process of its own would serve them, in the test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from tests.waits import until

from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerSpec, Delivery
from penstock.streams.store import Store

_BLOCKED = (
    "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 120)

    asyncio.run(bounded())


@asynccontextmanager
async def serving(store: Store) -> AsyncIterator[Consumers]:
    consumers = Consumers(store.url, pool_size=4)
    await consumers.open()
    try:
        yield consumers
    finally:
        await consumers.close()


@asynccontextmanager
async def workers(store: Store, **settings: Any) -> AsyncIterator[Consumer]:
    async with serving(store) as consumers:
        await consumers.create(ConsumerSpec("workers", "events", settings=settings))
        yield await consumers.get("workers")


async def until_waiting(consumer: Consumer) -> None:
    """Wait until a receive waits: a step had nothing for it."""
    waiters = consumer._loop._waiters
    await until(lambda: waiters and not waiters.some_new)


async def until_blocked(store: Store) -> None:
    """Wait until a statement in the store waits for a lock."""
    with store.connection() as connection:
        await until(lambda: connection.execute(_BLOCKED).fetchall())


def ids(deliveries: list[Delivery]) -> list[Any]:
    return [orjson.loads(delivery.message)["record"]["id"] for delivery in deliveries]


def tokens(deliveries: list[Delivery]) -> list[str]:
    return [delivery.token for delivery in deliveries]
