"""Webhooks over a real store: order, retries, several processes, crashes, `penstock push`."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from tests.pipeline import PATIENCE
from tests.push_help import HANG, OK, Request, answer, receiver
from tests.streams_help import Change, make_stream, publish

from penstock.embedded.handles import Database
from penstock.push import retry
from penstock.push.pusher import Pusher
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerInfo, ConsumerSpec
from penstock.streams.records import StreamRecord, stream_idx
from penstock.streams.store import Store


@dataclass
class Stream:
    """A stream to publish to, and its store."""

    store: Store
    record: StreamRecord

    def publish(self, *keys: Any, group: Callable[[Any], int] | None = None) -> None:
        changes = [Change({"id": key}, group=group(key) if group else None) for key in keys]
        publish(self.store, self.record, changes)

    async def webhook(self, consumers: Consumers, url: str, **others: Any) -> ConsumerInfo:
        settings = {"url": url, "allow_private": True, **others}
        return await consumers.create(ConsumerSpec("billing", "events", "webhook", settings))


@pytest.fixture
def stream(database: Database) -> Iterator[Stream]:
    with Store.open(database.url) as store:
        yield Stream(store, make_stream(store))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backoff from 20 ms on instead of a second."""
    monkeypatch.setattr(retry, "LEAST", 0.02)


@asynccontextmanager
async def pushing(stream: Stream) -> AsyncIterator[Consumers]:
    """Push as a process of its own would."""
    consumers, stop = Consumers(stream.store.url), asyncio.Event()
    await consumers.open()
    task = asyncio.create_task(Pusher(consumers).run(stop))
    try:
        yield consumers
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)
        await consumers.close()


SERVE = "import sys; from penstock.push.serve import serve; sys.exit(serve(sys.argv[1]))"


@contextmanager
def started(stream: Stream) -> Iterator[subprocess.Popen[bytes]]:
    """Run `penstock push` in a process of its own."""
    command = [sys.executable, "-c", SERVE, stream.store.url]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


async def all_acked(consumers: Consumers) -> None:
    consumer = await consumers.get("billing")
    async with asyncio.timeout(60):
        while await consumer.messages("delivered", 1) or await consumer.messages("pending", 1):
            await asyncio.sleep(0.02)


def fails_at_first(request: Request, seen: set[Any]) -> bytes:
    new = set(request.records) - seen
    seen.update(new)
    return answer(500) if new else OK


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.usefixtures("quick")
def test_each_group_in_order_through_failures_and_restarts(stream: Stream, batch: bool) -> None:
    async def test() -> None:
        seen: set[Any] = set()
        async with receiver(lambda r: fails_at_first(r, seen)) as to:
            async with pushing(stream) as consumers:
                await stream.webhook(consumers, to.url, batch=batch)
                stream.publish(*range(60), group=lambda key: key % 7)
                await to.until(lambda: len(seen) >= 20)
            async with pushing(stream) as consumers:  # a process that goes on
                await to.until(lambda: len(seen) == 60)
                await all_acked(consumers)
            for group in range(7):
                keys = [key for key in to.delivered() if key % 7 == group]
                assert keys == sorted(keys)
                assert set(keys) == {key for key in range(60) if key % 7 == group}
            ids: dict[Any, set[str]] = {}
            for request in to.requests:
                if len(request.records) == 1:
                    ids.setdefault(request.records[0], set()).add(request.id)
            assert all(len(of) == 1 for of in ids.values())

    asyncio.run(test())


def test_the_message_is_whole(stream: Stream) -> None:
    async def test() -> None:
        async with receiver() as to, pushing(stream) as consumers:
            info = await stream.webhook(consumers, to.url)
            stream.publish("a")
            (request,) = await to.got(1)
            message = orjson.loads(request.body)
            assert message["record"] == {"id": "a"}
            assert message["action"] == "insert"
            assert message["metadata"]["consumer"] == {"id": info.uuid, "name": "billing"}
            lsn, idx = message["metadata"]["commit_lsn"], message["metadata"]["commit_idx"]
            assert request.id == f"msg_{info.id}_{lsn}_{stream_idx(idx)}"
            await all_acked(consumers)

    asyncio.run(test())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("batch", [False, True])
def test_a_route_leads_to_a_path(stream: Stream, batch: bool) -> None:
    async def test() -> None:
        async with receiver() as to, pushing(stream) as consumers:
            routes = [f"orders/{n % 3}" for n in range(9)]
            listed = [Change({"id": n}, metadata={"route": r}) for n, r in enumerate(routes)]
            publish(stream.store, stream.record, [*listed, Change({"id": 9})])
            await stream.webhook(consumers, f"{to.url}/?key=1", batch=batch)
            await to.until(lambda: len(to.delivered()) == 10)
            await all_acked(consumers)
            found = {id_: request.target for request in to.requests for id_ in request.records}
            paths = [f"/hook/{route}?key=1" for route in routes]
            assert [found[n] for n in range(10)] == [*paths, "/hook/?key=1"]
            assert len(to.requests) == (4 if batch else 10)

    asyncio.run(test())


def test_several_processes_share_a_consumer(stream: Stream) -> None:
    async def test() -> None:
        failed: set[Any] = set()

        def now_and_then(request: Request) -> bytes:
            key = request.records[0]
            if key % 10 == 0 and key not in failed:
                failed.add(key)
                return answer(500)
            return OK

        async with receiver(now_and_then) as to:
            to.pause = 0.005
            async with pushing(stream) as a, pushing(stream), pushing(stream):
                await stream.webhook(a, to.url)
                for first in range(0, 300, 50):
                    stream.publish(*range(first, first + 50), group=lambda key: key % 40)
                await to.until(lambda: len(set(to.delivered())) == 300)
                await all_acked(a)
            assert to.most_at_once > 4  # more than one process's
            delivered = to.delivered()
            assert len(delivered) == 300 + len(failed)
            for group in range(40):
                keys = [key for key in delivered if key % 40 == group]
                assert keys == sorted(keys)

    asyncio.run(test())


def test_a_process_that_dies_leaves_its_messages_to_another(stream: Stream) -> None:
    async def test() -> None:
        async with receiver(lambda _: HANG) as to:
            consumers = Consumers(stream.store.url)
            await consumers.open()
            await stream.webhook(consumers, to.url, ack_wait_ms=500)
            await consumers.close()
            stream.publish("a")
            with started(stream) as process:
                (first,) = await to.got(1)
                process.kill()
            to.behaviour = lambda _: OK
            async with pushing(stream) as consumers:
                _, second = await to.got(2)
                await all_acked(consumers)
            assert second.id == first.id

    asyncio.run(test())


@pytest.mark.usefixtures("quick")
def test_max_deliver_makes_a_dead_letter_and_the_group_goes_on(stream: Stream) -> None:
    async def test() -> None:
        def behaviour(request: Request) -> bytes:
            return answer(400, body=b"no such shop") if request.records == ["bad"] else OK

        async with receiver(behaviour) as to, pushing(stream) as consumers:
            await stream.webhook(consumers, to.url, max_deliver=3)
            stream.publish("bad", "good", group=lambda _: 1)
            await to.until(lambda: "good" in to.delivered())
            assert to.delivered() == ["bad", "bad", "bad", "good"]
            (letter,) = await (await consumers.get("billing")).dead_letters(10)
            assert (letter.code, letter.deliver_count) == ("max_deliver", 3)
            assert letter.reason == (
                f"The last of 3 deliveries failed: http://127.0.0.1:{to.port} answered 400:"
                " no such shop"
            )

    asyncio.run(test())


def test_410_stands_in_the_store_until_the_consumer_is_enabled(stream: Stream) -> None:
    async def test() -> None:
        async with receiver(lambda _: answer(410)) as to, pushing(stream) as consumers:
            await stream.webhook(consumers, to.url)
            stream.publish("a")
            async with asyncio.timeout(60):
                while (reason := (await consumers.get("billing")).info.disabled) is None:
                    await asyncio.sleep(0.02)
            assert reason == f"http://127.0.0.1:{to.port} answered 410 Gone"
            to.behaviour = lambda _: OK
            assert len(to.requests) == 1
            await (await consumers.get("billing")).enable()
            await to.got(2)
            await all_acked(consumers)

    asyncio.run(test())


def test_settings_take_effect_while_it_runs(stream: Stream) -> None:
    async def test() -> None:
        async with receiver() as old, receiver() as new, pushing(stream) as consumers:
            await stream.webhook(consumers, old.url)
            stream.publish("a")
            await old.got(1)
            await consumers.update("billing", {"url": new.url, "headers": {"x-a": "1"}})
            await old.until(lambda: old.open == 0)
            stream.publish("b")
            (request,) = await new.got(1)
            assert request.records == ["b"]
            assert request.headers["x-a"] == "1"
            await consumers.delete("billing")
            await new.until(lambda: new.open == 0)

    asyncio.run(test())


def test_slow_requests_hold_their_messages_beyond_ack_wait(stream: Stream) -> None:
    async def test() -> None:
        async with receiver() as to, pushing(stream) as consumers, pushing(stream):
            to.pause = 3.0
            # It is extended at a third of it: the machine may stop for a second.
            await stream.webhook(consumers, to.url, ack_wait_ms=1500)
            stream.publish("a", "b")
            await to.got(2)
            await all_acked(consumers)
            assert sorted(to.delivered()) == ["a", "b"]

    asyncio.run(test())


def test_penstock_push_alone(stream: Stream) -> None:
    async def test() -> None:
        consumers = Consumers(stream.store.url)
        await consumers.open()
        async with receiver() as to:
            await stream.webhook(consumers, to.url)
            with started(stream) as process:
                stream.publish("a")
                await to.got(1)
                await all_acked(consumers)
                process.send_signal(signal.SIGTERM)
                _, reported = await asyncio.to_thread(process.communicate, timeout=60)
            assert process.returncode == 0
            assert b"Traceback" not in reported
            assert b'"ended"' in reported
        await consumers.close()

    asyncio.run(test())
