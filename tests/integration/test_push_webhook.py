"""What a webhook does with every way that an endpoint, or the store, can fail."""

from __future__ import annotations

import asyncio
import base64
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import structlog
from standardwebhooks.webhooks import Webhook as Verifier
from tests.bastions import SshServer
from tests.push_help import (
    HANG,
    OK,
    Behaviour,
    MemoryConsumer,
    Receiver,
    Request,
    answer,
    receiver,
    settings,
)
from tests.waits import until

from penstock.config.bastion import Bastion
from penstock.push import retry, webhook
from penstock.push.webhook import Webhook

Test = Callable[[Receiver, MemoryConsumer], Coroutine[Any, Any, None]]


@asynccontextmanager
async def delivering(
    to: Receiver, bastion: Callable[[], Awaitable[Bastion]] | None = None, **others: Any
) -> AsyncIterator[MemoryConsumer]:
    """Run a webhook for a consumer in memory; it has ended at the end."""
    of = settings(others.pop("url", to.url), **others)
    consumer = MemoryConsumer("billing", of)
    running = Webhook(consumer.whole, of, bastion)
    task = asyncio.create_task(running.run())
    try:
        yield consumer
    finally:
        running.stop()
        await task


def run(test: Test, behaviour: Behaviour = lambda _: OK, **others: Any) -> None:
    async def served() -> None:
        async with receiver(behaviour) as to, delivering(to, **others) as consumer:
            await test(to, consumer)

    asyncio.run(served())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backoff from 20 ms on instead of a second, and probes after 200 ms at the latest."""
    monkeypatch.setattr(retry, "LEAST", 0.02)
    monkeypatch.setattr(webhook, "_LONGEST_PAUSE", 0.2)


def first_time(fail: bytes | None) -> Behaviour:
    """Fail each record's first request."""
    seen: set[Any] = set()

    def behaviour(request: Request) -> bytes | None:
        new = set(request.records) - seen
        seen.update(new)
        return fail if new else OK

    return behaviour


def test_one_bare_message_a_request() -> None:
    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish(range(50))
        await consumer.all_acked()
        assert sorted(to.delivered()) == list(range(50))
        assert {request.body for request in to.requests} == {m.body for m in consumer.log}
        assert to.requests[0].headers["content-type"] == "application/json"
        assert {len(request.records) for request in to.requests} == {1}

    run(test)


def test_batches() -> None:
    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish(range(57))
        await consumer.all_acked()
        assert sorted(to.delivered()) == list(range(57))
        assert max(len(request.records) for request in to.requests) == 10
        assert all(request.body.startswith(b'{"data":[{') for request in to.requests)
        assert to.most_at_once <= 2

    run(test, batch=True, batch_size=10, concurrency=2)


@pytest.mark.parametrize("batch", [False, True])
def test_each_message_goes_to_the_path_of_its_route(batch: bool) -> None:
    def route(key: int) -> str | None:
        return None if key % 3 == 0 else f"orders/{key % 3}" if key != 4 else "../a b"

    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish(range(30), route=route)
        await consumer.all_acked()
        assert sorted(to.delivered()) == list(range(30))
        targets = {0: "/hook?a=1", 1: "/hook/orders/1?a=1", 2: "/hook/orders/2?a=1"}
        for request in to.requests:
            for key in request.records:
                special = "/hook/%252E%252E/a%20b?a=1" if key == 4 else targets[key % 3]
                assert request.target == special
        if batch:  # one for each ten of a path, and the special one
            assert sorted(len(r.records) for r in to.requests) == [1, 9, 10, 10]

    async def served() -> None:
        async with (
            receiver() as to,
            delivering(to, url=f"{to.url}?a=1", batch=batch) as consumer,
        ):
            await test(to, consumer)

    asyncio.run(served())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("batch", [False, True])
def test_a_path_that_fails_holds_back_its_own_groups_in_their_order(batch: bool) -> None:
    """Though it answers 410: that is not the whole endpoint."""
    failing = True

    def behaviour(request: Request) -> bytes:
        return answer(410) if failing and request.target == "/hook/bad" else OK

    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        nonlocal failing
        # Two groups whose messages go to two paths in turn.
        keys = [(n, g) for n in range(6) for g in "xy"]
        routes = {key: "bad" if key[0] == 2 else "good" for key in keys}
        await consumer.publish(keys, group=lambda key: key[1], route=lambda key: routes[key])
        await consumer.publish(range(20), route=lambda _: "good")
        await consumer.until(lambda: sum(message.acked for message in consumer.log) == 24)
        await to.until(lambda: sum(r.target == "/hook/bad" for r in to.requests) >= 3)
        assert consumer.disabled is None
        failing = False
        await consumer.all_acked()
        for group in "xy":
            taken = [r for r in to.delivered() if isinstance(r, list) and r[1] == group]
            order = list(dict.fromkeys(n for n, _ in taken))
            assert order == list(range(6))

    run(test, behaviour, batch=batch)


@pytest.mark.parametrize("batch", [False, True])
def test_signed_with_both_secrets(batch: bool) -> None:
    new, old = ("whsec_" + base64.b64encode(os.urandom(32)).decode() for _ in range(2))

    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish(["é", "b"])
        await consumer.all_acked()
        for request in to.requests:
            for secret in (new, old):
                Verifier(secret).verify(request.body, request.headers)

    run(test, secrets=[new, old], batch=batch)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_at_once_than_concurrency(concurrency: int) -> None:
    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        to.pause = 0.01
        await consumer.publish(range(30))
        await consumer.all_acked()
        assert to.most_at_once == concurrency

    run(test, concurrency=concurrency)


@pytest.mark.parametrize(
    "fail", [answer(500), answer(404), answer(302, "location: /"), answer(429), HANG, None, b"?"]
)
@pytest.mark.usefixtures("quick")
def test_whatever_is_no_success_is_tried_again_with_the_same_id(fail: bytes | None) -> None:
    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish(["a", "b"])
        await consumer.all_acked()
        ids = defaultdict(list)
        for request in to.requests:
            ids[request.records[0]].append(request.id)
        assert {key: len(of) for key, of in ids.items()} == {"a": 2, "b": 2}
        assert all(len(set(of)) == 1 for of in ids.values())
        assert ids["a"] != ids["b"]
        assert sorted(key for key, _ in consumer.nacks) == ["a", "b"]

    run(test, first_time(fail), timeout_ms=1_500 if fail == HANG else 30_000)


def test_backoff_and_retry_after_are_the_nack_s_delay() -> None:
    def behaviour(request: Request) -> bytes:
        key = request.records[0]
        return answer(503, f"retry-after: {key}") if key else answer(503)

    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish(["30", "7200", "", "0"])
        await consumer.until(lambda: len(consumer.nacks) == 4)
        delays = dict(consumer.nacks)
        assert (delays["30"], delays["7200"], delays["0"]) == (30.0, 600.0, 1.0)
        assert 1.0 <= delays[""] <= 1.2

    run(test, behaviour)


@pytest.mark.usefixtures("quick")
def test_a_failing_group_waits_in_order_and_others_go_on() -> None:
    failed: Counter[Any] = Counter()

    def behaviour(request: Request) -> bytes:
        key = request.records[0]
        failed[key] += 1
        return answer(500) if key == "a0" and failed[key] <= 4 else OK

    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish(["a0", "a1", "a2", *(f"b{n}" for n in range(20))], lambda k: k[0])
        await consumer.all_acked()
        delivered = to.delivered()
        assert [key for key in delivered if key[0] == "a"] == ["a0"] * 5 + ["a1", "a2"]
        assert [key for key in delivered if key[0] == "b"] == [f"b{n}" for n in range(20)]
        assert delivered.index("b19") < delivered.index("a1")

    run(test, behaviour)


@pytest.mark.usefixtures("quick")
def test_poisoned_messages_leave_the_others_their_way() -> None:
    """Also where so many fail that the endpoint seems to be gone."""

    def behaviour(request: Request) -> bytes:
        return answer(400) if str(request.records[0]).startswith("bad") else OK

    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish([*(f"bad{n}" for n in range(60)), *range(100)])
        good = [message for message in consumer.log if b"bad" not in message.body]
        await consumer.until(lambda: all(message.acked for message in good))
        assert not any(message.acked for message in consumer.log if message not in good)

    run(test, behaviour)


@pytest.mark.usefixtures("quick")
def test_a_batch_is_repeated_as_it_was_and_then_taken_apart() -> None:
    def behaviour(request: Request) -> bytes:
        return answer(500) if "bad" in request.records else OK

    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish(["a", "bad", "c", "d"])
        good = [message for message in consumer.log if b"bad" not in message.body]
        await consumer.until(lambda: all(message.acked for message in good))
        await consumer.publish(["e"])
        await to.until(lambda: len(to.requests) >= 8)
        whole = [request for request in to.requests if len(request.records) > 1]
        assert [request.records for request in whole] == [["a", "bad", "c", "d"]] * 3
        assert len({request.id for request in whole}) == 1
        bad = {request.id for request in to.requests if request.records == ["bad"]}
        assert len(bad) == 1
        assert bad.isdisjoint(request.id for request in to.requests if request.records != ["bad"])

    run(test, behaviour, batch=True)


def test_batches_that_come_back_at_once_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "LEAST", 60.0)

    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish(["a", "b", "c"])
        await to.got(1)
        await consumer.publish(["d", "e", "f", "g"])
        await consumer.until(lambda: len(consumer.nacks) == 7)
        consumer.clock.advance(100)  # all are due
        await consumer.all_acked()
        assert sorted(request.records for request in to.requests) == [
            ["a", "b", "c"], ["a", "b", "c"], ["d", "e", "f", "g"], ["d", "e", "f", "g"],
        ]  # fmt: skip
        assert len({request.id for request in to.requests}) == 2

    run(test, first_time(answer(500)), batch=True, batch_size=4)


@pytest.mark.usefixtures("quick")
def test_a_dead_endpoint_is_asked_with_one_request_at_a_time() -> None:
    dead = True

    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        nonlocal dead
        to.behaviour = lambda _: answer(503) if dead else OK
        with structlog.testing.capture_logs() as logs:
            await consumer.publish(range(200))
            await consumer.until(lambda: len(consumer.nacks) >= 8)
            at_first, to.most_at_once = len(to.requests), 0
            assert at_first <= 12  # as many as were under way, and few more
            assert sum(consumer.received) - at_first <= 200
            await to.got(at_first + 8)
            assert to.most_at_once == 1
            gaps = [b.at - a.at for a, b in pairwise(to.requests[at_first:])]
            assert min(gaps) >= 0.02
            assert gaps[-1] >= 0.2
            assert len(consumer.held()) <= 20  # the rest is left to other processes
            dead = False
            await consumer.all_acked()
        events = [entry["event"] for entry in logs]
        assert events.count("webhook keeps failing") == 1
        assert events.count("webhook delivers again") == 1
        failing = next(entry for entry in logs if entry["event"] == "webhook keeps failing")
        assert failing["code"] == "http_503"

    run(test)


@pytest.mark.usefixtures("quick")
def test_a_failing_endpoint_s_retry_after_counts_for_all_groups() -> None:
    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        def pauses() -> list[float]:
            return [after.at - before.at for before, after in pairwise(to.requests)]

        await consumer.publish(range(50))
        await to.until(lambda: max(pauses(), default=0.0) >= 1.0 or len(to.requests) > 12)
        assert len(to.requests) <= 12  # as many as were under way, few more, and the next one
        assert pauses()[-1] >= 1.0

    run(test, lambda _: answer(429, "retry-after: 1"))


def test_410_disables_visibly_and_keeps_the_messages() -> None:
    async def served() -> None:
        async with receiver(lambda _: answer(410)) as to:
            of = settings(to.url + "/secret?token=secret")
            consumer = MemoryConsumer("billing", of)
            await consumer.publish(range(10))
            with structlog.testing.capture_logs() as logs:
                await Webhook(consumer.whole, of).run()
            assert consumer.disabled == f"http://127.0.0.1:{to.port} answered 410 Gone"
            assert "secret" not in str(logs)
            assert [entry["event"] for entry in logs] == ["webhook disabled"]
            assert not any(message.acked or message.deliver_count for message in consumer.log)
            assert consumer.held() == []
            assert consumer.nacks == []

    asyncio.run(served())


@pytest.mark.usefixtures("quick")
def test_a_bastion_killed_in_the_middle_loses_nothing() -> None:
    async def served(ssh: SshServer) -> None:
        async def bastion() -> Bastion:
            return ssh.bastion()

        url = "http://hook.internal/hook"
        async with receiver(lambda _: OK) as to, delivering(to, bastion, url=url) as consumer:
            ssh.names["hook.internal", 80] = ("127.0.0.1", to.port)
            to.pause = 0.005
            await consumer.publish(range(300), group=lambda key: key % 10)
            await to.got(60)
            await asyncio.to_thread(ssh.kill)
            assert not all(message.acked for message in consumer.log), "it came too late"
            await consumer.until(lambda: any("bastion" in str(why) for _, why in consumer.failures))
            await asyncio.to_thread(ssh.start)
            await consumer.all_acked()
            firsts = list(dict.fromkeys(to.delivered()))
            assert sorted(firsts) == list(range(300))
            for group in range(10):
                assert [key for key in firsts if key % 10 == group] == list(range(group, 300, 10))

    with SshServer() as ssh:
        asyncio.run(served(ssh))


def test_a_private_address_is_refused_with_a_remedy() -> None:
    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        with structlog.testing.capture_logs() as logs:
            await consumer.publish(["a"])
            await consumer.until(lambda: bool(consumer.nacks))
        assert to.requests == []
        assert logs[0]["code"] == "private_address"
        assert "allow_private: true" in logs[0]["error"]

    run(test, allow_private=False)


def test_no_secret_in_the_log() -> None:
    async def served() -> None:
        body = b'{"error": "no such token",\n "got": "s3cret", "query": "key=s3cret&a=b"}'
        async with receiver(lambda _: answer(500, body=body)) as to:
            url = f"http://user-s3cret:s3cret@127.0.0.1:{to.port}/s3cret?key=s3cret"
            headers = {"authorization": "Bearer s3cret"}
            async with delivering(to, url=url, headers=headers) as consumer:
                with structlog.testing.capture_logs() as logs:
                    await consumer.publish(range(10))
                    await consumer.until(lambda: len(consumer.nacks) >= 6)
            assert logs
            assert "s3cret" not in str(logs)
            status, reason = consumer.failures[0]
            assert (status, reason) == (
                500,
                f"http://127.0.0.1:{to.port} answered 500:"
                ' {"error": "no such token", "got": "***", "query": "key=***&a=b"}',
            )

    asyncio.run(served())


def test_slow_requests_are_extended_and_not_delivered_twice() -> None:
    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        to.pause = 0.9
        await consumer.publish(["a", "b"])
        await consumer.all_acked()
        assert sorted(to.delivered()) == ["a", "b"]
        assert consumer.extended >= 2

    run(test, ack_wait_ms=300)


def test_the_store_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_STORE_SECONDS", 0.02)

    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        def behaviour(_: Request) -> bytes:
            consumer.away = True  # before the acks
            return OK

        to.behaviour = behaviour
        await consumer.publish(range(3))
        await until(lambda: len(consumer.asked) == 3)
        assert not any(message.acked for message in consumer.log)
        to.behaviour, consumer.away = lambda _: OK, False
        await consumer.publish(range(3, 6))
        await consumer.all_acked()
        assert sorted(to.delivered()) == list(range(6))

    run(test)


def test_messages_are_received_ahead_only_as_far_as_the_pace_goes() -> None:
    async def test(to: Receiver, consumer: MemoryConsumer) -> None:
        await consumer.publish(range(3000))
        await to.got(1000)
        quick = max(consumer.received)
        to.pause = 0.15
        await to.got(1040)
        assert len(consumer.held()) <= 8  # of which four are under way
        assert quick > 8
        to.pause = 0
        await consumer.all_acked()

    run(test)


def test_stop_lets_requests_end_and_gives_the_rest_back() -> None:
    async def served() -> None:
        async with receiver() as to:
            to.pause = 0.2
            async with delivering(to) as consumer:
                await consumer.publish(range(50))
                await to.got(4)
            assert sum(message.acked for message in consumer.log) == len(to.requests) == 4
            assert consumer.held() == []
            assert all(m.deliver_count == m.acked for m in consumer.log)

    asyncio.run(served())


def test_stop_gives_back_what_was_received_ahead() -> None:
    async def served() -> None:
        async with receiver() as to:
            async with delivering(to) as consumer:
                await consumer.publish(range(3000))
                await to.got(1000)
                assert len(consumer.held()) > 20
            assert sum(message.acked for message in consumer.log) == len(to.requests) < 3000
            assert consumer.held() == []
            assert all(m.deliver_count == m.acked for m in consumer.log)

    asyncio.run(served())


def test_stop_cuts_off_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_STOP_SECONDS", 0.1)

    async def served() -> None:
        async with receiver(lambda _: HANG) as to:
            async with delivering(to) as consumer:
                await consumer.publish(["a"])
                await to.got(1)
            assert consumer.held() == []
            await to.until(lambda: to.open == 0)

    asyncio.run(served())
