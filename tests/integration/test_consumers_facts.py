"""What a consumer's status reports: lag, what is in flight, what fails and why; across processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from tests.consumers_help import run, serving, tokens, workers
from tests.streams_help import Change, inserted, make_stream, publish

from penstock.core.health import Health, Level
from penstock.runtime.consumer_watch import ConsumerWatch
from penstock.streams.consumers import moved, notices, reader
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.facts import ConsumerFacts, facts_body
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.status import Status
from penstock.streams.consumers.types import ConsumerInfo, ConsumerSpec, StoreUnavailable
from penstock.streams.store import Store


async def facts(consumer: Consumer) -> ConsumerFacts:
    return await consumer.facts()


def test_lag_in_flight_and_retries_are_counted(store: Store) -> None:
    async def work() -> None:
        stream = make_stream(store)
        async with workers(store, ack_wait_ms=60_000) as consumer:
            none = await facts(consumer)
            assert (none.lag_messages, none.lag_seconds, none.last_failure) == (0, 0.0, None)
            old = datetime.now(UTC) - timedelta(seconds=100)
            at = {"commit_timestamp": f"{old.replace(tzinfo=None).isoformat()}Z"}
            publish(store, stream, [Change({"id": key}, metadata=at) for key in range(10)])
            while (waiting := await facts(consumer)).lag_messages < 10:
                await asyncio.sleep(0.01)
            assert waiting.lag_messages == 10
            assert 100 <= waiting.lag_seconds < 200
            got = (await consumer.receive(4, 5.0)).deliveries
            await consumer.ack(tokens(got[:1]))
            await consumer.nack(tokens(got[1:2]), 60.0, reason="no such shop")
            now = await facts(consumer)
            assert (now.lag_messages, now.in_flight, now.waiting_for_retry) == (9, 2, 1)
            assert (now.failures, now.redeliveries, now.failed_in_a_row) == (1, 0, 1)
            assert now.last_failure is not None
            assert now.last_failure.reason == "no such shop"
            assert 100 <= now.lag_seconds < 200
            await consumer.ack(tokens(got[2:3]))
            assert (await facts(consumer)).failing_since is None

    run(work)


def committed(seconds_ago: int, key: int, table: str = "items") -> Change:
    at = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    metadata = {"commit_timestamp": f"{at.replace(tzinfo=None).isoformat()}Z"}
    return Change({"id": key}, table=table, metadata=metadata)


@pytest.mark.parametrize("kind", ["changes", "rows"])
def test_the_lag_is_that_of_the_first_message_however_far_behind_the_cursor(
    store: Store, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_LOOKED_AT", 3)
    monkeypatch.setattr(reader, "_WINDOWS", 2)

    async def work() -> None:
        stream = make_stream(store, kind=kind)
        async with workers(store, filters={"table": "shops"}) as consumer:
            publish(store, stream, [committed(900, key) for key in range(10)])
            publish(store, stream, [committed(500, 1, "shops"), committed(10, 2, "shops")])
            lags = [await lag(consumer)]
            while 900 <= lags[-1] < 930:  # six messages further each time
                lags.append(await lag(consumer))
            assert len(lags) <= 2
            assert 500 <= lags[-1] < 530
            if kind == "rows":
                publish(store, stream, [committed(0, 1, "shops")])
                while 500 <= lags[-1] < 530:  # until the new head is known
                    lags.append(await lag(consumer))
                assert 10 <= lags[-1] < 40

    async def lag(consumer: Consumer) -> float:
        while not (found := await facts(consumer)).lag_messages:
            await asyncio.sleep(0.01)
        return found.lag_seconds

    run(work)


def test_what_is_not_acked_in_time_is_a_failure_and_a_redelivery(store: Store) -> None:
    async def work() -> None:
        stream = make_stream(store)
        async with workers(store, ack_wait_ms=1, max_deliver=2) as consumer:
            publish(store, stream, [inserted("a")])
            await consumer.receive(1, 5.0)
            await consumer.receive(1, 5.0)
            (letter,) = await letters(consumer)
            assert letter == (
                "The last of 2 deliveries failed: it was not acked within ack_wait_ms"
            )
            found = await facts(consumer)
            assert (found.failures, found.redeliveries, found.dead_letters) == (2, 1, 1)
            assert found.lag_messages == 0

    async def letters(consumer: Consumer) -> list[str]:
        while not (found := await consumer.dead_letters(10)):
            await asyncio.sleep(0.01)
        return [letter.reason for letter in found]

    run(work)


def test_counters_outlive_the_process_and_cover_others(store: Store) -> None:
    async def work() -> None:
        stream = make_stream(store)
        publish(store, stream, [inserted(key) for key in range(3)])
        async with workers(store) as consumer, serving(store) as others:
            got = (await consumer.receive(3, 5.0)).deliveries
            await consumer.nack(tokens(got), 0.0, reason="later")
            again = (await consumer.receive(3, 5.0)).deliveries
            assert len(again) == 3
            here = await facts(consumer)
            there = await (await others.get("workers")).facts()
            assert (there.failures, there.redeliveries, there.in_flight) == (3, 3, 3)
            assert there.last_failure == here.last_failure
        async with serving(store) as later:
            found = await (await later.get("workers")).facts()
            assert (found.failures, found.redeliveries) == (3, 3)

    run(work)


@pytest.mark.parametrize("disabled", [True, False])
def test_a_webhook_that_takes_nothing_is_a_problem(store: Store, disabled: bool) -> None:
    async def work() -> None:
        stream = make_stream(store)
        publish(store, stream, [inserted(key) for key in range(5)])
        watch = ConsumerWatch()
        async with serving(store) as consumers:
            url = {"url": "https://example.com/"}
            await consumers.create(ConsumerSpec("mail", "events", "webhook", url))
            await watch.look(consumers)
            assert Health(tuple(watch.parts())).problems == ()
            assert "penstock_consumer_up" in metrics(watch)
            consumer = await consumers.get("mail")
            if disabled:
                await consumer.disable("https://example.com answered 410 Gone")
            else:
                got = (await consumer.receive(5, 5.0)).deliveries
                why = "https://example.com answered 500: no shop"
                await consumer.nack(tokens(got), 60.0, reason=why, status=500)
            await watch.look(consumers)
            health = Health(tuple(watch.parts()))
            (problem,) = health.problems
            assert (problem.subject, health.level) == ("consumer events/mail", Level.DEGRADED)
            status = watch.as_json()["mail"]
            up = 'penstock_consumer_up{consumer="mail",stream="events"} 0.0'
            assert up in metrics(watch)
            assert 'penstock_consumer_up{consumer="events",stream="events"} 1.0' in metrics(watch)
            if disabled:
                assert problem.code == status["state"] == "disabled"
                assert "answered 410 Gone" in problem.cause
                assert "/v1/http-consumers/mail/resume" in problem.remedy
                assert status["disabled_since"] is not None
                await consumer.enable()
            else:
                assert problem.code == status["state"] == "deliveries_fail"
                assert "answered 500: no shop" in problem.cause
                assert status["last_error"]["status"] == 500
                assert (status["lag_messages"], status["waiting_for_retry"]) == (5, 5)
                info, found = consumer.info, await consumer.facts()
                assert facts_body(info, found)["failures"] == 5
                return
            await watch.look(consumers)
            assert Health(tuple(watch.parts())).problems == ()

    run(work)


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), ValueError("no time")])
def test_one_consumer_that_can_t_be_read_hides_no_other(
    store: Store, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        make_stream(store)
        watch = ConsumerWatch()
        async with workers(store) as broken, serving(store) as consumers:
            await watch.look(consumers)
            before = watch.as_json()

            async def fail(consumer: Consumer) -> ConsumerFacts:
                if consumer.info.name == broken.info.name:
                    raise error
                return await read(consumer)

            async def unreadable(_: Status, __: object) -> None:
                raise error

            read = Consumer.facts
            monkeypatch.setattr(Status, "read", unreadable)
            monkeypatch.setattr(Consumer, "facts", fail)
            found = {info.name: facts for info, facts in await consumers.facts()}
            assert found.pop(broken.info.name) is None
            assert found["events"] is not None
            await watch.look(consumers)
            assert watch.as_json() == before

    run(work)


def test_one_at_rest_is_read_again_once_something_is_noticed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        stream, watch, asked = make_stream(store), ConsumerWatch(), list[str]()
        read = Status.read

        async def noted(
            status: Status, infos: Sequence[ConsumerInfo]
        ) -> dict[int, ConsumerFacts | None]:
            asked.extend(info.name for info in infos)
            return await read(status, infos)

        async def looked(consumers: Consumers, name: str, lag: int) -> None:
            while watch.as_json()[name]["lag_messages"] != lag:
                await watch.look(consumers)
                await asyncio.sleep(0.01)

        monkeypatch.setattr(Status, "read", noted)
        monkeypatch.setattr(moved, "_UNHEARD", 0.0)
        monkeypatch.setattr(notices, "_PRESENCE", 0.05)
        async with serving(store) as others, serving(store) as consumers:
            name = "workers"
            await others.create(ConsumerSpec(name, "events"))
            other = await others.get(name)
            while others._notices._alone:  # then it sends no notices
                await asyncio.sleep(0.01)
            await watch.look(consumers)
            assert sorted(asked) == sorted(["events", name])
            asked.clear()
            await watch.look(consumers)
            assert asked == []
            publish(store, stream, [inserted(1)])
            await looked(consumers, name, 1)
            await other.ack(tokens((await other.receive(1, 5.0)).deliveries))
            await looked(consumers, name, 0)
            await watch.look(consumers)
            asked.clear()
            await watch.look(consumers)
            assert asked == ["events"]  # whose message waits
            await other.rewind("all")
            await looked(consumers, name, 1)

    run(work)


def metrics(watch: ConsumerWatch) -> str:
    registry = CollectorRegistry()
    registry.register(watch)
    return generate_latest(registry).decode()
