"""Consumers whose stream, log or dead letters change behind the process's back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from psycopg.pq.abc import PGresult
from structlog.testing import capture_logs
from tests.consumers_help import (
    ids,
    run,
    serving,
    tokens,
    until_blocked,
    until_waiting,
    workers,
)
from tests.streams_help import (
    START,
    Change,
    deleted,
    inserted,
    make_stream,
    publish,
    wire,
    write_part,
)

from penstock.core.message import Position, RoundPart
from penstock.streams import maintenance
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.line import Call
from penstock.streams.consumers.sessions import Sessions
from penstock.streams.consumers.types import StoreUnavailable, UnknownConsumer
from penstock.streams.names import consumer_table, segment_table
from penstock.streams.records import StreamRecord
from penstock.streams.store import Store


def close_segment(store: Store, stream: StreamRecord) -> None:
    with store.connection() as connection:
        maintenance.close_segment(connection, stream)


async def take_all(consumer: Consumer, *, ack: bool = True) -> list[Any]:
    taken = []
    while got := (await consumer.receive(100, 0.0)).deliveries:
        taken += ids(got)
        await (consumer.ack if ack else consumer.nack)(tokens(got))
    return taken


async def bury(consumer: Consumer) -> list[int]:
    """Make dead letters of all that there is, and return their numbers."""
    await take_all(consumer, ack=False)
    return [letter.id for letter in await consumer.dead_letters(100)]


@pytest.mark.parametrize("nacked", [True, False])
def test_a_process_that_missed_a_new_segment_finds_what_is_in_it(
    store: Store, stream: StreamRecord, nacked: bool
) -> None:
    async def work() -> None:
        publish(store, stream, [inserted("x")])
        async with workers(store) as here, serving(store) as other:
            there = await other.get("workers")
            await take_all(here)
            assert await take_all(there) == []
            there.head_moved = lambda: None  # type: ignore[method-assign] # its listener is away
            close_segment(store, stream)
            publish(store, stream, [Change({"id": i}, group=1) for i in range(3)])
            here.head_moved()
            first = (await here.receive(10, 0.0)).deliveries
            assert ids(first) == [0]
            await (there.nack if nacked else there.ack)(tokens(first))
            assert await take_all(there) == [*([0] if nacked else []), 1, 2]

    run(work)


def test_replays_of_busy_groups_wait(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [Change({"id": "a1"}, group=1), Change({"id": "b1"}, group=2)])
        async with workers(store, max_deliver=1) as consumer:
            letters = await bury(consumer)
            publish(store, stream, [Change({"id": "a2"}, group=1)])
            held = (await consumer.receive(1, 5.0)).deliveries
            for letter in letters:
                await consumer.replay(letter)
            free = (await consumer.receive(1, 0.0)).deliveries
            assert ids(free) == ["b1"]
            await consumer.ack(tokens(held + free))
            assert await take_all(consumer) == ["a1"]

    run(work)


def test_replays_of_one_group_come_one_by_one(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [Change({"id": i}, group=i % 2) for i in range(6)])
        async with workers(store, max_deliver=1) as consumer:
            for letter in await bury(consumer):
                await consumer.replay(letter)
            assert ids((await consumer.receive(10, 0.0)).deliveries) == [0, 1]

    run(work)


def test_a_replay_that_fails_is_not_noted(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with workers(store, max_deliver=1) as consumer:
            (letter,) = await bury(consumer)
            with psycopg.connect(store.url) as locking:
                log = consumer_table(consumer.info.id)
                locking.execute(sql.SQL("LOCK TABLE {} IN SHARE MODE").format(log))
                waiting = asyncio.create_task(consumer.replay(letter))
                await until_blocked(store)  # it has looked for the letter, and waits to write
                assert [x.replayed_at for x in store.letters.page(consumer="workers")] == [None]
            await waiting
            assert [x.replayed_at is None for x in await consumer.dead_letters(1)] == [False]
            assert await take_all(consumer) == [1]

    run(work)


def test_waiting_dead_letters_are_found_behind_replayed_ones(
    store: Store, stream: StreamRecord
) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(4)])
        async with workers(store, max_deliver=1) as consumer:
            for letter in (await bury(consumer))[:2]:
                await consumer.replay(letter)
            await take_all(consumer)
            dead = await consumer.messages("dead", 2)
            assert [seen.position.idx for seen in dead] == [2, 3]

    run(work)


def test_a_dead_letter_from_a_merged_segment(store: Store) -> None:
    stream = make_stream(store, kind="rows")

    async def work() -> None:
        async with workers(store, max_deliver=1) as consumer:
            publish(store, stream, [inserted("a")])
            held = (await consumer.receive(1, 5.0)).deliveries
            for key in ("b", "c"):
                close_segment(store, stream)
                publish(store, stream, [inserted(key)])
            consumer.head_moved()
            assert await take_all(consumer, ack=True) == ["b", "c"]
            maintenance.run_once(store)
            await consumer.nack(tokens(held))
            assert len(await consumer.dead_letters(10)) == 1

    run(work)


@pytest.mark.parametrize("key", ["a", "long" * 300, 'q"\\/\n\ue000é\\'])
@pytest.mark.parametrize("again", [False, True])
def test_a_delete_is_replayed_unless_the_row_is_there_again(
    store: Store, again: bool, key: str
) -> None:
    stream = make_stream(store, kind="rows")

    async def work() -> None:
        async with workers(store, max_deliver=1, deletes=True) as consumer:
            table = 'odd "name\\'
            publish(
                store, stream, [replace(change(key), table=table) for change in (inserted, deleted)]
            )
            async with serving(store) as consumers:
                own = await consumers.own("events")
                (letter,) = await bury(consumer)
                for other in ("b", "c"):
                    close_segment(store, stream)
                    publish(store, stream, [inserted(other)])
                    for each in (consumer, own):
                        each.head_moved()
                        await take_all(each)
                maintenance.run_once(store)
                publish(store, stream, [replace(inserted(key if again else "d"), table=table)])
                consumer.head_moved()
                await take_all(consumer)
                await consumer.replay(letter)
                assert await take_all(consumer) == ([] if again else [key])

    run(work)


@pytest.mark.parametrize("kind", ["changes", "rows"])
@pytest.mark.parametrize("hard", [r'"\ud800"', r'"\u0000"', "1e999", "[" * 2000 + "]" * 2000])
def test_json_that_postgres_reads_in_no_other_form(store: Store, hard: str, kind: str) -> None:
    """A column of type json may hold it: dead letters, replays and rewinds to a time go on."""

    async def work() -> None:
        stream = make_stream(store, kind=kind)
        batch = wire([inserted(1), inserted(2)])
        records = [f'{{"id":1,"j":{hard}}}', '{"id":2}']
        at = batch.schema.get_field_index("record")
        batch = batch.set_column(at, batch.schema.field(at), pa.array(records))
        write_part(store, stream, batch, RoundPart(START, Position(101, 1), 0, 1))
        async with workers(store, max_deliver=1) as consumer:
            first, second = (await consumer.receive(2, 0.0)).deliveries
            await consumer.nack([first.token])
            await consumer.ack([second.token])
            (letter,) = await consumer.dead_letters(10)
            (stored,) = store.letters.page(consumer="workers")
            assert stored.idempotency_key == "tag-101-0"
            await consumer.replay(letter.id)
            assert [d.message for d in (await consumer.receive(2, 0.0)).deliveries] == [
                first.message
            ]
            for year, count in ((2025, 2), (2027, 0)):
                await consumer.rewind(datetime(year, 1, 1, tzinfo=UTC))
                assert len((await consumer.receive(2, 0.0)).deliveries) == count

    run(work)


def test_what_expired_is_no_dead_letter(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with workers(store, max_deliver=1) as consumer:
            held = (await consumer.receive(1, 0.0)).deliveries
            close_segment(store, stream)
            with store.connection() as connection:
                query = "DELETE FROM penstock.segments WHERE through_lsn IS NOT NULL RETURNING id"
                row = connection.execute(query).fetchone()
                assert row is not None
                connection.execute(sql.SQL("DROP TABLE {}").format(segment_table(row[0])))
            with capture_logs() as logs:
                await consumer.nack(tokens(held))
            events = [log["event"] for log in logs]
            assert events == ["messages left their stream before they could become dead letters"]
            assert await consumer.dead_letters(1) == []

    run(work)


def test_a_request_is_answered_when_its_consumer_is_dropped(
    store: Store, stream: StreamRecord
) -> None:
    async def work() -> None:
        publish(store, stream, [inserted(1)])
        async with workers(store) as consumer:
            held = (await consumer.receive(1, 0.0)).deliveries
            log = consumer_table(consumer.info.id)
            with psycopg.connect(store.url) as dropping:
                dropping.execute(sql.SQL("LOCK TABLE {} IN SHARE MODE").format(log))
                waiting = asyncio.create_task(consumer.ack(tokens(held)))
                await until_blocked(store)
                await consumer.close(UnknownConsumer("gone"))
            with pytest.raises(UnknownConsumer, match="gone"):
                await asyncio.wait_for(waiting, 60)

    run(work)


def test_a_long_state_is_not_written_at_every_step(
    store: Store, stream: StreamRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.streams.consumers.log._BYTES", 3_000)

    async def work() -> None:
        publish(store, stream, [inserted(i) for i in range(200)])
        async with workers(store) as consumer, serving(store) as other:
            held = (await consumer.receive(1_000, 0.0)).deliveries
            await consumer.ack(tokens(held[:1]))  # after which the log has been replaced
            there = await other.get("workers")
            for process in (consumer, there):
                replaced = 0
                replace = process._steps.log.replace

                async def counted(replace: Any = replace) -> None:
                    nonlocal replaced
                    replaced += 1
                    await replace()

                process._steps.log.replace = counted  # type: ignore[method-assign]  # for the test
                for token in tokens(held[1:6]):
                    await process.ack([token])
                assert replaced == 0

    run(work)


def test_a_rewind_ends_at_the_head(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        async with workers(store) as consumer:
            (at,) = publish(store, stream, [inserted(1)])
            assert await consumer.rewind(Position(at.lsn + 1_000, 0)) == at
            await consumer.rewind(datetime.now(UTC) + timedelta(days=999))
            publish(store, stream, [inserted(2)])
            assert ids((await consumer.receive(5, 5.0)).deliveries) == [2]

    run(work)


def test_a_request_that_fails_fails_alone(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        async with workers(store) as consumer:
            waiting = asyncio.create_task(consumer.receive(1, 20.0))
            await until_waiting(consumer)
            with pytest.raises(StoreUnavailable, match="OverflowError"):
                await consumer.rewind(datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))))
            publish(store, stream, [inserted(1)])
            assert ids((await waiting).deliveries) == [1]

    run(work)


def test_look_ups_are_bounded(store: Store, stream: StreamRecord) -> None:
    async def work() -> None:
        big = "x" * 20_000
        groups = [Change({"id": g, "v": big}, group=g) for g in range(1, 41)]
        publish(store, stream, groups * 20)
        async with workers(store) as consumer:
            held = (await consumer.receive(1_000, 0.0)).deliveries
            assert (await consumer.receive(1_000, 0.0)).deliveries == []  # all are parked
            for _ in range(19):
                await consumer.ack(tokens(held))
                held = (await consumer.receive(1_000, 0.0)).deliveries
                assert len(held) == 40
                known = consumer._steps.reader.groups._known.values()
                kept = sum(len(row[4] or b"") for found in known for row in found.rows)
                assert kept == consumer._steps.reader.groups._bytes < 6 << 20

    run(work)


def test_what_two_ask_at_once_belongs_together(
    store: Store, stream: StreamRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with workers(store) as consumer:
            reader = consumer._steps.reader.view
            publish(store, stream, [inserted(1)])
            asked, go_on = asyncio.Event(), asyncio.Event()
            ask = Sessions.run

            async def slow(sessions: Sessions, *calls: Call) -> list[PGresult]:
                results = await ask(sessions, *calls)
                asked.set()
                await go_on.wait()
                return results

            monkeypatch.setattr(Sessions, "run", slow)
            older = asyncio.create_task(reader.refresh((1 << 62, 0)))
            await asked.wait()
            monkeypatch.setattr(Sessions, "run", ask)
            await asyncio.to_thread(close_segment, store, stream)
            await asyncio.to_thread(publish, store, stream, [inserted(2)])
            newer = asyncio.create_task(reader.refresh((1 << 62, 0)))
            await asyncio.wait([newer], timeout=0.2)
            go_on.set()
            await asyncio.gather(older, newer)
            assert len(reader.segments) == 2

    run(work)
