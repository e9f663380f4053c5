"""Consumers over a real store: what each promise comes to, one test a promise."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest
from psycopg import sql
from tests.consumers_help import (
    ids,
    run,
    serving,
    tokens,
    until_blocked,
    until_waiting,
    workers,
)
from tests.streams_help import Change, deleted, inserted, make_stream, publish, updated

from penstock.core.message import Position
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.streams.consumers import loop
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import (
    ConsumerSpec,
    Delivery,
    NameTaken,
    Refused,
    StoreUnavailable,
    TooManyWaiting,
    UnknownConsumer,
    UnknownDeadLetter,
    UnknownStream,
)
from penstock.streams.names import consumer_table
from penstock.streams.records import StreamRecord, commit_position
from penstock.streams.store import Store


def idxs(deliveries: list[Delivery]) -> list[int]:
    return [commit_position(*delivery.position).idx for delivery in deliveries]


def test_messages_come_whole_and_in_order(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1, name="Ä"), inserted(2)])
        async with workers(store) as consumer:
            received = await consumer.receive(10, 0.0)
            first = orjson.loads(received.deliveries[0].message)
            assert first["record"] == {"id": 1, "name": "Ä"}
            assert first["metadata"]["consumer"] == {"id": consumer.info.uuid, "name": "workers"}
            assert first["metadata"]["commit_lsn"] == received.deliveries[0].position.lsn
            assert ids(received.deliveries) == [1, 2]
            assert received[1:] == (0, 2)
            assert (await consumer.ack(tokens(received.deliveries))).done == 2
            assert (await consumer.receive(10, 0.0))[:] == ([], 0, 0)
            assert (await consumer.ack(tokens(received.deliveries))).done == 2  # twice is fine

    run(work)


def test_the_counts(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i % 50) for i in range(510)])
        async with workers(store) as consumer:
            received = await consumer.receive(10, 0.0)
            assert received[1:] == (500, 10)
            await consumer.receive(100, 0.0)
            publish(store, stream, [inserted(i) for i in range(1_000, 1_005)])
            consumer.head_moved()
            peeked = await consumer.messages("pending", 1_000)
            assert len(peeked) == 465
            assert [message.position for message in peeked] == sorted(m.position for m in peeked)
            assert (await consumer.receive(5, 0.0))[1:] == (460, 55)

    run(work)


def test_a_waiting_receive_wakes_by_a_notice(
    store: Store, stream: StreamRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_POLL", 3600.0)

    async def work() -> None:
        async with workers(store) as consumer:
            assert (await consumer.receive(1, 0.0)).deliveries == []
            for number in range(3):
                waiting = asyncio.create_task(consumer.receive(1, 20.0))
                await until_waiting(consumer)
                await asyncio.to_thread(publish, store, stream, [inserted(number)])
                assert ids((await waiting).deliveries) == [number]

    run(work)


def test_a_receive_waits_its_time_and_no_longer(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with workers(store) as consumer:
            held = await consumer.receive(5, 0.0)
            assert len(held.deliveries) == 1
            start = time.monotonic()
            received = await consumer.receive(5, 0.3)
            assert received[:] == ([], 0, 1)
            assert 0.29 < time.monotonic() - start < 1.0

    run(work)


def test_an_ack_wakes_those_who_wait_for_the_group(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1, n=1), updated(1, n=2)])
        async with workers(store) as here, serving(store) as other:
            there = await other.get("workers")
            first = (await here.receive(10, 0.0)).deliveries
            assert len(first) == 1
            waiting = [asyncio.create_task(c.receive(10, 300.0)) for c in (here, there)]
            await until_waiting(here)
            await until_waiting(there)
            await here.ack(tokens(first))
            done, left = await asyncio.wait(waiting, timeout=60, return_when="FIRST_COMPLETED")
            assert len(done) == 1
            second = done.pop().result().deliveries
            assert idxs(second) == [1]
            await here.ack(tokens(second))
            for task in left:
                task.cancel()

    run(work)


def test_a_nack_in_one_process_wakes_another(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with workers(store) as here, serving(store) as other:
            there = await other.get("workers")
            first = (await here.receive(10, 0.0)).deliveries
            assert (await there.receive(1, 0.0)).deliveries == []
            waiting = asyncio.create_task(there.receive(1, 20.0))
            await until_waiting(there)
            await here.nack(tokens(first), 0.2)
            again = (await waiting).deliveries
            assert [d.deliver_count for d in again] == [2]
            assert (await here.ack(tokens(first))).refused == [(first[0].token, "expired")]
            assert (await here.ack(tokens(again))).done == 1

    run(work)


def test_a_timeout_makes_it_available_again(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1), updated(1), inserted(2)])
        async with workers(store, ack_wait_ms=200) as consumer:
            first = (await consumer.receive(10, 0.0)).deliveries
            assert ids(first) == [1, 2]
            again = (await consumer.receive(10, 5.0)).deliveries
            assert [d.position for d in again] == [d.position for d in first]
            assert [d.deliver_count for d in again] == [2, 2]
            outcome = await consumer.ack(tokens(first))
            assert outcome.refused == [(token, "expired") for token in tokens(first)]

    run(work)


def test_an_ack_after_the_timeout_counts_while_no_other_has_it(
    store: Store, stream: StreamRecord
) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with workers(store, ack_wait_ms=1) as consumer:
            first = (await consumer.receive(1, 0.0)).deliveries
            while (await consumer.messages("delivered", 1))[0].until is not None:
                await asyncio.sleep(0.001)
            assert (await consumer.ack(tokens(first))).refused == []
            assert (await consumer.receive(1, 0.0)).deliveries == []

    run(work)


def test_garbage_is_refused(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with workers(store) as consumer, serving(store) as consumers:
            own = await consumers.own("events")
            foreign = tokens((await own.receive(1, 0.0)).deliveries)
            bad = ["", "x", "é" * 32, "A" * 32, "!" * 32, *foreign]
            assert (await consumer.ack(bad)).refused == [(token, "unknown") for token in bad]
            assert (await own.ack(foreign)).done == 1

    run(work)


def test_cancelling_a_receive_takes_nothing(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        async with workers(store) as consumer:
            for number in range(10):
                publish(store, stream, [inserted(number)])
                consumer.head_moved()
                gone = asyncio.create_task(consumer.receive(1, 5.0))
                for _ in range(number):
                    await asyncio.sleep(0.0004)
                gone.cancel()
                await asyncio.wait([gone])
                if gone.cancelled():
                    got = (await consumer.receive(1, 5.0)).deliveries
                else:
                    got = gone.result().deliveries
                assert ids(got) == [number]
                assert got[0].deliver_count == 1
                await consumer.ack(tokens(got))

    run(work)


def test_released_messages_count_as_never_delivered(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with workers(store) as consumer:
            first = (await consumer.receive(1, 0.0)).deliveries
            await consumer.release(tokens(first))
            assert [d.deliver_count for d in (await consumer.receive(1, 0.0)).deliveries] == [1]

    run(work)


def test_extend_gives_more_time(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with workers(store, ack_wait_ms=250) as consumer:
            first = (await consumer.receive(1, 0.0)).deliveries
            assert (await consumer.extend(tokens(first), 30.0)).done == 1
            assert (await consumer.receive(1, 0.5)).deliveries == []
            out = await consumer.messages("delivered", 10)
            at = commit_position(*first[0].position)
            assert [(m.deliver_count, m.position) for m in out] == [(1, at)]
            assert out[0].until is not None
            left = out[0].until - datetime.now(UTC)
            assert timedelta(seconds=25) < left < timedelta(seconds=31)
            await consumer.ack(tokens(first))
            assert (await consumer.extend(tokens(first))).refused == [(first[0].token, "unknown")]

    run(work)


def test_one_too_many_to_wait(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        async with workers(store, max_waiting=2) as consumer:
            tasks = [asyncio.create_task(consumer.receive(1, 10.0)) for _ in range(3)]
            done, waiting = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
            assert [type(task.exception()) for task in done] == [TooManyWaiting]
            with pytest.raises(TooManyWaiting, match="max_waiting"):
                await consumer.receive(1, 1.0)
            with pytest.raises(TooManyWaiting):
                await consumer.receive(1, 0.0)  # does not wait, and counts while it is served
            publish(store, stream, [inserted(1), inserted(2)])
            got = [id_ for task in waiting for id_ in ids((await task).deliveries)]
            assert sorted(got) == [1, 2]

    run(work)


def test_a_poll_that_does_not_wait_takes_a_place_while_it_is_served(
    store: Store, stream: StreamRecord
) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1), inserted(2), inserted(3)])
        async with workers(store, max_waiting=1) as consumer:
            assert ids((await consumer.receive(1, 0.0)).deliveries) == [1]
            with psycopg.connect(store.url) as locking:
                log = consumer_table(consumer.info.id)
                locking.execute(sql.SQL("LOCK TABLE {} IN SHARE MODE").format(log))
                served = asyncio.create_task(consumer.receive(1, 0.0))
                await until_blocked(store)  # it has found its message, and waits to write its step
                with pytest.raises(TooManyWaiting, match="1 receives wait"):
                    await consumer.receive(1, 0.0)
                assert not served.done()
            assert ids((await served).deliveries) == [2]
            assert ids((await consumer.receive(1, 0.0)).deliveries) == [3]

    run(work)


def test_max_ack_pending_lets_only_redeliveries_out(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(5)])
        async with workers(store, max_ack_pending=2) as consumer:
            first = (await consumer.receive(10, 0.0)).deliveries
            assert ids(first) == [0, 1]
            assert (await consumer.receive(10, 0.0)).deliveries == []
            await consumer.nack(tokens(first[:1]))
            assert ids((await consumer.receive(10, 0.0)).deliveries) == [0]
            await consumer.ack(tokens(first[1:]))
            assert ids((await consumer.receive(10, 0.0)).deliveries) == [2]

    run(work)


def test_dead_letters_and_their_replay(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1, n=1), updated(1, n=2), inserted(2)])
        async with workers(store, max_deliver=2) as consumer:
            for count in (1, 2):
                got = (await consumer.receive(1, 0.0)).deliveries
                assert [d.deliver_count for d in got] == [count]
                assert idxs(got) == [0]
                await consumer.nack(tokens(got), 0.0)
            letters = await consumer.dead_letters(10)
            assert [(x.position.idx, x.deliver_count, x.code) for x in letters] == [
                (0, 2, "max_deliver")
            ]
            assert [m.position.idx for m in await consumer.messages("dead", 10)] == [0]
            got = (await consumer.receive(10, 0.0)).deliveries
            assert idxs(got) == [1, 2]  # the group goes on
            await consumer.replay(letters[0].id)
            assert (await consumer.receive(10, 0.0)).deliveries == []  # its group is busy
            await consumer.ack(tokens(got))
            got = (await consumer.receive(10, 0.0)).deliveries
            assert [d.deliver_count for d in got] == [1]
            assert idxs(got) == [0]
            await consumer.ack(tokens(got))
            assert [x.replayed_at is None for x in await consumer.dead_letters(10)] == [False]
            with pytest.raises(UnknownDeadLetter, match="999"):
                await consumer.replay(999)

    run(work)


def test_the_last_delivery_expires_into_a_dead_letter(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1), updated(1)])
        async with workers(store, max_deliver=1, ack_wait_ms=1) as consumer:
            await consumer.receive(1, 0.0)
            while not (letters := await consumer.dead_letters(10)):
                await asyncio.sleep(0.001)
            assert [x.position.idx for x in letters] == [0]
            assert orjson.loads(letters[0].message)["record"] == {"id": 1}

    run(work)


def test_rewind(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        at = [publish(store, stream, [inserted(i)])[0] for i in range(4)]
        with store.connection() as connection:
            segment = connection.execute("SELECT id FROM penstock.segments").fetchone()
            assert segment is not None
            for i, position in enumerate(at):
                connection.execute(
                    f"UPDATE penstock.segment_{segment[0]} SET message = replace(message, "
                    f"'2026-01-01T00:00:00', '2026-01-01T0{i}:00:00') WHERE lsn = {position.lsn}"
                )
        async with workers(store) as consumer:
            held = tokens((await consumer.receive(10, 0.0)).deliveries)
            time_ = datetime(2026, 1, 1, 1, 30, tzinfo=UTC)
            targets: list[tuple[Any, list[int]]] = [
                (at[2], [2, 3]),
                ("all", [0, 1, 2, 3]),
                (time_, [2, 3]),
                (time_ - timedelta(minutes=30), [1, 2, 3]),
                (datetime(2027, 1, 1, tzinfo=UTC), []),
                (Position(0, 0), [0, 1, 2, 3]),
                ("new", []),
            ]
            for to, expected in targets:
                await consumer.rewind(to)
                assert (await consumer.ack(held)).refused == [(t, "unknown") for t in held]
                assert ids((await consumer.receive(10, 0.0)).deliveries) == expected, to

    run(work)


def test_filters(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(
            store,
            stream,
            [
                Change({"id": 1}, table="orders"),
                Change({"id": 2}, table="100%"),
                Change({"id": 3}, table="orders", schema="shop"),
                Change({"id": 4}, "update", {}, table="orders", group=1),
                Change({"id": 5}, table="orders", group=1),
            ],
        )
        async with serving(store) as consumers:
            for number, (filters, expected) in enumerate(
                [
                    ({}, [1, 2, 3, 4]),
                    ({"table": "orders"}, [1, 3, 4]),
                    ({"collection_id": ["100%", "public.orders"]}, [1, 2, 4]),
                    ({"table": "shop.*"}, [3]),
                    ({"resource_id": "shop", "action": "*"}, [3]),
                    ({"action": ["update", "delete"]}, [4]),
                    ({"table": "none"}, []),
                ]
            ):
                name = f"c{number}"
                await consumers.create(ConsumerSpec(name, "events", settings={"filters": filters}))
                received = await (await consumers.get(name)).receive(10, 0.0)
                assert ids(received.deliveries) == expected
            await consumers.update("c6", {"filters": None})
            changed = await consumers.get("c6")
            await changed.rewind("all")
            assert ids((await changed.receive(10, 0.0)).deliveries) == [1, 2, 3, 4]

    run(work)


def test_rows_give_the_newest_version_alone(store: Store) -> None:
    async def work() -> None:
        stream = make_stream(store, kind="rows")
        publish(store, stream, [inserted(1, n=1), inserted(2, n=1), updated(1, n=2)])
        async with workers(store, deletes=True) as consumer:
            got = (await consumer.receive(10, 0.0)).deliveries
            assert idxs(got) == [1, 2]
            publish(store, stream, [updated(1, n=3), deleted(2)])  # while they are processed
            consumer.head_moved()
            assert (await consumer.receive(10, 0.0)).deliveries == []
            await consumer.nack(tokens(got[1:]))
            await consumer.ack(tokens(got[:1]))
            got = (await consumer.receive(10, 0.0)).deliveries
            bodies = [orjson.loads(d.message) for d in got]
            assert [b["record"].get("n") for b in bodies] == [None, 3]
            assert bodies[0]["action"] == "delete"

    run(work)


def made_of(key: Any, count: int, lsn: int, idx: int) -> list[Change]:
    """Return the messages that a transform made of one."""
    at = Position(lsn, idx)
    return [replace(updated(key, n=n), position=at, part=n) for n in range(count)]


def test_messages_that_were_made_of_one_come_one_after_the_other(
    store: Store, stream: StreamRecord
) -> None:
    async def work() -> None:
        publish(store, stream, [*made_of("a", 3, 101, 0), *made_of("b", 2, 101, 1)])
        async with workers(store, max_deliver=2) as consumer:
            got: list[tuple[Any, int]] = []

            async def take() -> list[Delivery]:
                found = (await consumer.receive(10, 0.0)).deliveries
                for delivery in found:
                    record = orjson.loads(delivery.message)["record"]
                    got.append((record["id"], record["n"]))
                    at = commit_position(*delivery.position)
                    assert at == (101, 0 if record["id"] == "a" else 1)
                return found

            first = await take()
            assert got == [("a", 0), ("b", 0)]
            await consumer.ack(tokens(first[1:]))
            await take()
            assert got[2:] == [("b", 1)]
            await consumer.nack(tokens(first[:1]))
            again = await take()
            assert got[3:] == [("a", 0)]
            await consumer.nack(tokens(again))  # a dead letter: the group goes on
            assert len(await consumer.dead_letters(10)) == 1
            last = await take()
            assert got[4:] == [("a", 1)]
            await consumer.ack(tokens(last))
            await take()
            assert got[5:] == [("a", 2)]
            # A rewind to a position is one to all that it has.
            assert await consumer.rewind(Position(101, 1)) == (101, 0)
            await take()
            assert got[6:] == [("b", 0)]
            assert await consumer.rewind(Position(101, 0)) == (101, -1)
            await take()
            assert got[7:] == [("a", 0), ("b", 0)]

    run(work)


def test_of_rows_that_were_made_of_one_the_last_comes(store: Store) -> None:
    async def work() -> None:
        stream = make_stream(store, kind="rows")
        publish(store, stream, [*made_of("a", 3, 101, 0), *made_of("b", 2, 101, 1)])
        async with workers(store) as consumer:
            found = (await consumer.receive(10, 0.0)).deliveries
            records = [orjson.loads(delivery.message)["record"] for delivery in found]
            assert records == [{"id": "a", "n": 2}, {"id": "b", "n": 1}]

    run(work)


def test_the_list(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with serving(store) as consumers, serving(store) as other:
            changed = asyncio.Event()
            other.on_change(changed.set)
            made = await consumers.create(
                ConsumerSpec("late", "events", settings={"deliver_policy": "new"})
            )
            await changed.wait()
            assert (await other.get("late")).info == made
            assert [info.name for info in await other.list()] == ["events", "late"]
            publish(store, stream, [inserted(2)])
            late = await other.get("late")
            assert ids((await late.receive(10, 5.0)).deliveries) == [2]
            info = await consumers.update("late", {"ack_wait_ms": 5})
            assert (info.settings.ack_wait_ms, info.settings.deliver_policy) == (5, "new")
            for name in ("late", "events"):
                with pytest.raises(NameTaken, match=name):
                    await consumers.create(ConsumerSpec(name, "events"))
            with pytest.raises(UnknownStream, match="nowhere"):
                await consumers.create(ConsumerSpec("x", "nowhere"))
            with pytest.raises(UnknownStream, match="late"):
                await consumers.own("late")
            with pytest.raises(Refused, match="events"):
                await consumers.delete("events")
            waiting = asyncio.create_task(late.receive(1, 20.0))
            await late.disable("410 Gone")
            assert (await other.get("late")).info.disabled == "410 Gone"
            await consumers.delete("late")
            with pytest.raises(UnknownConsumer, match="late"):
                await waiting
            with pytest.raises(UnknownConsumer, match="late"):
                await other.get("late")
            streams = await consumers.streams()
            assert [(s.name, s.kind, s.segments) for s in streams] == [("events", "changes", 1)]
            assert streams[0].head is not None

    run(work)


def test_a_new_consumer_of_the_configuration_starts_when_it_is_made(
    store: Store, stream: StreamRecord
) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with serving(store) as consumers:
            changed = asyncio.Event()
            consumers.on_change(changed.set)
            await asyncio.to_thread(
                store.register_consumer, "events", "late", "pull", {"deliver_policy": "new"}
            )
            await changed.wait()
            publish(store, stream, [inserted(2)])
            late = await consumers.get("late")
            assert ids((await late.receive(10, 5.0)).deliveries) == [2]

    run(work)


def test_a_store_without_its_schema_is_unavailable(database: Database) -> None:
    async def work() -> None:
        consumers = Consumers(database.url)
        await consumers.open()
        with pytest.raises(StoreUnavailable, match="missing"):
            await consumers.get("x")
        await consumers.close()

    run(work)


def test_a_long_log_is_replaced(
    store: Store, stream: StreamRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.streams.consumers.log._ENTRIES", 20)

    def entries(consumer: Consumer) -> int:
        with store.connection() as connection:
            query = f"SELECT count(*) FROM penstock.consumer_{consumer.info.id}"
            row = connection.execute(query.encode()).fetchone()
            assert row is not None
            return int(row[0])

    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(200)])
        async with workers(store) as here, serving(store) as other:
            there = await other.get("workers")
            seen: list[int] = []
            for turn in range(100):
                consumer = (here, there)[turn % 2]
                got = (await consumer.receive(2, 0.0)).deliveries
                seen += ids(got)
                await (there, here)[turn % 2].ack(tokens(got))
            assert seen == list(range(200))
            assert entries(here) < 30
            # Somebody reads the table, as pg_dump does: the log grows, and nobody waits.
            with psycopg.connect(store.url) as reading:
                reading.execute(f"SELECT FROM penstock.consumer_{here.info.id}".encode())
                publish(store, stream, [inserted(i) for i in range(60)])
                here.head_moved()
                while got := (await here.receive(1, 0.0)).deliveries:
                    await here.ack(tokens(got))
                assert entries(here) > 100

    run(work)


def test_a_process_that_missed_a_replaced_log_takes_no_step(
    store: Store, stream: StreamRecord
) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(4)])
        async with workers(store) as here, serving(store) as other:
            there = await other.get("workers")
            held = (await here.receive(1, 0.0)).deliveries
            await there.receive(1, 0.0)  # reads the log so far
            for _ in range(2):
                await here.receive(1, 0.0)
                await here._loop.alone(here._steps.log.replace)
            there._steps.stale = there._steps.crowded = False
            assert (await there.ack(tokens(held))).done == 1
            assert len(await here.messages("delivered", 10)) == 3

    run(work)


def test_a_process_that_missed_a_rewind_keeps_the_order(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [Change(group=1) for _ in range(4)])
        async with workers(store) as here, serving(store) as other:
            there = await other.get("workers")
            for _ in range(2):
                await there.ack(tokens((await there.receive(10, 0.0)).deliveries))
            await there.receive(10, 0.0)
            here._freed = lambda _id: None  # the notification comes late
            await here.rewind("all")
            await here.ack(tokens((await here.receive(10, 0.0)).deliveries))
            there.log_moved()
            assert idxs((await there.receive(10, 0.0)).deliveries) == [1]

    run(work)


def test_the_store_goes_away_and_comes_back(server_dir: Path) -> None:
    async def work() -> None:
        with EmbeddedPostgres(server_dir / "consumers-postgres") as server:
            with Store.open(server.url) as store:
                stream = make_stream(store)
                publish(store, stream, [inserted(i) for i in range(3)])
            async with workers(store) as consumer:
                got = (await consumer.receive(1, 0.0)).deliveries
                await consumer.ack(tokens(got))
                held = (await consumer.receive(1, 0.0)).deliveries
                server.kill()
                with pytest.raises(StoreUnavailable) as error:
                    await consumer.receive(1, 0.0)
                assert "postgres@" not in str(error.value)
                with pytest.raises(StoreUnavailable):
                    await consumer.ack(tokens(held))
                server.start()
                assert (await consumer.ack(tokens(held))).done == 1
                assert ids((await consumer.receive(5, 0.0)).deliveries) == [2]

    run(work)


def test_what_retention_dropped_is_passed(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1), updated(1), inserted(2)])
        async with workers(store) as consumer:
            got = (await consumer.receive(1, 0.0)).deliveries
            await consumer.receive(0 + 1, 0.0)
            with store.connection() as connection:
                connection.execute(
                    "UPDATE penstock.segments SET after_lsn = %s, after_idx = 1",
                    [got[0].position.lsn + 1],
                )
            publish(store, stream, [inserted(3)])
            publish(store, stream, [inserted(4)])
            await consumer.nack(tokens(got))
            consumer.head_moved()
            assert ids((await consumer.receive(10, 0.0)).deliveries) == [4]

    run(work)
