"""All webhooks of a process: they come, change, go, are disabled, and outlive a bug."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import structlog
from tests.push_help import (
    OK,
    MemoryConsumer,
    MemoryConsumers,
    answer,
    receiver,
    settings,
)

from penstock.push.pusher import Pusher
from penstock.streams.consumers.registry import Consumers


@asynccontextmanager
async def pushing(*consumers: MemoryConsumer) -> AsyncIterator[MemoryConsumers]:
    store, stop = MemoryConsumers(*consumers), asyncio.Event()
    task = asyncio.create_task(Pusher(cast(Consumers, store)).run(stop))
    try:
        yield store
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


def test_consumers_come_change_and_go() -> None:
    async def served() -> None:
        async with receiver() as first, receiver() as second:
            a = MemoryConsumer("a", settings(first.url), 1)
            async with pushing(a) as store:
                await a.publish(["1"])
                await a.all_acked()

                b = MemoryConsumer("b", settings(second.url), 2)
                store.consumers["b"] = b
                store.changed()
                await b.publish(["2"])
                await b.all_acked()

                store.consumers["a"] = moved = MemoryConsumer("a", settings(second.url), 1)
                store.changed()
                await moved.publish(["3"])
                await moved.all_acked()

                moved.disabled = "by hand"
                await store.announce()
                del store.consumers["b"]
                b.gone = True
                store.changed()
                await second.until(lambda: second.open == 0)
                await moved.publish(["4"])
                moved.disabled = None
                store.changed()
                await moved.all_acked()
            assert first.delivered() == ["1"]
            assert second.delivered() == ["2", "3", "4"]

    asyncio.run(served())


def test_the_list_is_read_again_when_the_store_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.push.pusher._AGAIN_SECONDS", 0.02)

    async def served() -> None:
        async with receiver() as to:
            a = MemoryConsumer("a", settings(to.url))
            await a.publish(["1"])
            with structlog.testing.capture_logs() as logs:
                store, stop = MemoryConsumers(a), asyncio.Event()
                store.away = True
                task = asyncio.create_task(Pusher(cast(Consumers, store)).run(stop))
                async with asyncio.timeout(60):
                    while not logs:
                        await asyncio.sleep(0.01)
                store.away = False
                await a.all_acked()
                stop.set()
                await task
            assert [entry["event"] for entry in logs] == ["webhooks wait for the store"]

    asyncio.run(served())


def test_a_disabled_consumer_is_left_alone_after_410() -> None:
    async def served() -> None:
        async with receiver(lambda r: OK if r.target == "/hook/b" else answer(410)) as to:
            a = MemoryConsumer("a", settings(to.url), 1)
            async with pushing(a) as store:
                await a.publish(range(3))
                await a.until(lambda: a.disabled is not None)
                await to.until(lambda: to.open == 0)
                seen = len(to.requests)
                await a.publish(["more"])
                await store.announce()
                # What comes later is delivered.
                store.consumers["b"] = b = MemoryConsumer("b", settings(f"{to.url}/b"), 2)
                await store.announce()
                await b.publish(["b"])
                await b.all_acked()
                assert [request.records for request in to.requests[seen:]] == [["b"]]
                to.behaviour = lambda _: OK
                a.disabled = None
                store.changed()
                await a.all_acked()

    asyncio.run(served())


def test_a_bug_is_reported_and_the_webhook_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.push.pusher._AFTER_BUG_SECONDS", 0.2)

    async def served() -> None:
        async with receiver() as to:
            a = MemoryConsumer("a", settings(to.url))
            real, calls = a.receive, Counter[str]()

            async def receive(limit: int, wait: float) -> Any:
                calls["receive"] += 1
                if calls["receive"] == 1:
                    raise KeyError("a bug")
                return await real(limit, wait)

            monkeypatch.setattr(a, "receive", receive)
            with structlog.testing.capture_logs() as logs:
                async with pushing(a):
                    started = time.monotonic()
                    await a.publish(["1"])
                    await a.all_acked()
                    assert time.monotonic() - started >= 0.2
            assert [entry["log_level"] for entry in logs] == ["error"]

    asyncio.run(served())
