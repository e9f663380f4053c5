"""What docs/discussion/rows-and-changes.md says of streams of both kinds, row by row of its table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import orjson
import pytest
from tests.consumers_help import run, serving, tokens
from tests.streams_help import Change, deleted, inserted, make_stream, moved, publish, updated

from penstock.core.message import READ, Position
from penstock.embedded.handles import Database
from penstock.streams import maintenance
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.maintenance import run_once
from penstock.streams.records import StreamRecord
from penstock.streams.store import Store

KINDS = ("changes", "rows")


@pytest.fixture
def store(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store whose every maintenance closes the segments, and merges those of kind rows."""
    for kind in KINDS:
        monkeypatch.setitem(maintenance.SEGMENT_BYTES, kind, 0)
    with Store.open(database.url) as store:
        yield store


async def take(consumer: Consumer) -> list[dict[str, Any]]:
    """Return all messages that there are, and ack them."""
    found: list[dict[str, Any]] = []
    consumer.head_moved()
    while got := (await consumer.receive(100, 0.0)).deliveries:
        found += [orjson.loads(delivery.message) for delivery in got]
        await consumer.ack(tokens(got))
    return found


def reported(messages: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return of each message its row, and the action and old values where it has them.

    By the rows' ids: those of one row are in the order in which they came.
    """
    found = [
        (*m["record"].values(), *(m[name] for name in ("action", "changes") if name in m))
        for m in messages
    ]
    return sorted(found, key=lambda row: int(row[0]))


@pytest.mark.parametrize(("kind", "deletes"), [*((kind, False) for kind in KINDS), ("rows", True)])
def test_a_consumer_that_was_away(store: Store, kind: str, *, deletes: bool) -> None:
    async def work() -> None:
        stream = make_stream(store, kind=kind, deletes=deletes)
        publish(store, stream, [inserted(1, n=1), inserted(2, n=1), inserted(3, n=1)])
        async with serving(store) as consumers:
            own = await consumers.get("events")
            assert len(await take(own)) == 3
        later = [replace(updated(1, n=2), changes={"n": 1}), deleted(2), moved(3, 4, n=1)]
        publish(store, stream, later)
        publish(
            store, stream, [replace(updated(1, n=3), changes={"n": 2}), Change({"id": 5}, READ)]
        )
        for _ in range(3):
            run_once(store)
        async with serving(store) as consumers:
            own = await consumers.get("events")
            found = reported(await take(own))
            if kind == "changes":
                assert found == [
                    (1, 2, "update", {"n": 1}),
                    (1, 3, "update", {"n": 2}),
                    (2, "delete", None),
                    (4, 1, "update", {"id": 3}),
                    (5, "read", None),
                ]
            elif deletes:  # the newest version of each row, and the deletes, of the key left too
                assert found == [(1, 3), (2, "delete"), (3, "delete"), (4, 1), (5,)]
            else:
                assert found == [(1, 3), (4, 1), (5,)]

    run(work)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rewind(store: Store, kind: str) -> None:
    async def work() -> None:
        stream = make_stream(store, kind=kind)
        publish(store, stream, [inserted(1, n=1), inserted(2, n=1)])
        (at, _) = publish(store, stream, [updated(1, n=2), deleted(2)])
        publish(store, stream, [inserted(3, n=1)])
        async with serving(store) as consumers:
            own = await consumers.get("events")
            await take(own)
            for _ in range(3):
                run_once(store)
                publish(store, stream, [inserted(9, n=1)])  # a segment that can be closed
            await take(own)
            await own.rewind("all")
            rows = [row for row in reported(await take(own)) if row[0] != 9]
            await own.rewind(at)
            behind = [row for row in reported(await take(own)) if row[0] != 9]
            if kind == "changes":
                assert [row[:3] for row in rows] == [
                    (1, 1, "insert"), (1, 2, "update"), (2, 1, "insert"), (2, "delete", None),
                    (3, 1, "insert"),
                ]  # fmt: skip
                assert behind == [rows[1], *rows[3:]]
            else:  # no version that was overtaken comes back, and what was deleted is forgotten
                assert rows == behind == [(1, 2), (3, 1)]

    run(work)


def test_changes_are_kept_for_their_time_and_rows_for_ever(
    store: Store, database: Database
) -> None:
    async def work() -> None:
        streams: dict[str, StreamRecord] = {}
        for kind in KINDS:
            kept = timedelta(days=7) if kind == "changes" else None
            streams[kind] = make_stream(store, kind, kind=kind, retention=kept)
            publish(store, streams[kind], [inserted(1)])
        run_once(store)
        database.execute(
            "UPDATE penstock.segments SET opened_at = opened_at - interval '8 days',"
            " closed_at = closed_at - interval '8 days'"
        )
        publish(store, streams["rows"], [inserted(2)])
        run_once(store)
        async with serving(store) as consumers:
            assert reported(await take(await consumers.get("changes"))) == []
            assert reported(await take(await consumers.get("rows"))) == [(1,), (2,)]

    run(work)


@pytest.mark.parametrize("kind", KINDS)
def test_several_messages_of_one(store: Store, kind: str) -> None:
    async def work() -> None:
        stream = make_stream(store, kind=kind)
        at = Position(101, 0)
        publish(store, stream, [replace(inserted(1, n=n), position=at, part=n) for n in range(3)])
        async with serving(store) as consumers:
            found = await take(await consumers.get("events"))
            numbers = [message["record"]["n"] for message in found]
            assert numbers == ([0, 1, 2] if kind == "changes" else [2])

    run(work)
