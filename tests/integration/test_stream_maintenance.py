"""Segments closed, dropped and merged: nothing that somebody still needs goes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql
from structlog.testing import capture_logs
from tests.integration.nats_servers import freeze
from tests.streams_help import (
    Change,
    deleted,
    end_of,
    in_stream,
    inserted,
    make_stream,
    moved,
    publish,
    read,
    updated,
    wire,
    write_part,
    writer_of,
)
from tests.waits import Later, await_end, await_true

from penstock.core.errors import StoreError
from penstock.core.message import DELETE, Position, RoundPart
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.streams import maintenance, rows
from penstock.streams.consumers.entry import Entry
from penstock.streams.maintenance import Maintenance, close_segment, run_once
from penstock.streams.names import consumer_table
from penstock.streams.records import START, StreamRecord, commit_position
from penstock.streams.rows import forgettable, merge, to_merge
from penstock.streams.segments import Segment, low_watermark, readers_of, segments_of
from penstock.streams.store import Store


@pytest.fixture(scope="module")
def shared_store(postgres: EmbeddedPostgres) -> Iterator[Store]:
    with Store.open(postgres.create_database("merges")) as store:
        yield store


def close(store: Store, stream: StreamRecord) -> None:
    with store.connection() as connection:
        close_segment(connection, stream)


def segments(store: Store, stream: StreamRecord) -> int:
    with store.connection() as connection:
        return len(segments_of(connection, stream.id))


def age(database: Database, **by: float) -> None:
    """Make all segments older."""
    database.execute(
        "UPDATE penstock.segments SET opened_at = opened_at - %(by)s, closed_at = closed_at - %(by)s",
        {"by": timedelta(**by)},
    )


def reads_to(store: Store, name: str, position: Position) -> None:
    """Write a step to a consumer's log that moves its cursor."""
    (consumer,) = (consumer for consumer in store.consumers() if consumer.name == name)
    query = "INSERT INTO {0} SELECT coalesce(max(seq), 0) + 1, %s FROM {0}"
    with store.connection() as connection:
        entry = Entry(cursor=(position.lsn, position.idx)).encode().decode()
        connection.execute(sql.SQL(query).format(consumer_table(consumer.id)), [entry])


@pytest.mark.parametrize(
    ("retention", "old"),
    [
        (timedelta(days=7), timedelta(hours=21)),
        (timedelta(days=70), timedelta(days=1)),
        (timedelta(seconds=90), timedelta(minutes=1)),
        (None, timedelta(days=1)),
    ],
)
def test_an_old_segment_is_closed(
    store: Store, database: Database, retention: timedelta | None, old: timedelta
) -> None:
    stream = make_stream(store, retention=retention)
    age(database, seconds=old.total_seconds() + 1)
    run_once(store)
    assert segments(store, stream) == 1  # there is nothing in it
    publish(store, stream, [inserted(1)])
    database.execute("UPDATE penstock.segments SET opened_at = now()")
    age(database, seconds=old.total_seconds() - 5)
    run_once(store)
    assert segments(store, stream) == 1
    age(database, seconds=6)
    run_once(store)
    assert segments(store, stream) == 2
    publish(store, stream, [inserted(2)])
    assert [stored.message["record"]["id"] for stored in read(store, stream)] == [1, 2]


def test_a_large_segment_is_closed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream(store)
    publish(store, stream, [inserted(1)])
    run_once(store)
    assert segments(store, stream) == 1
    monkeypatch.setitem(maintenance.SEGMENT_BYTES, "changes", 1_000)
    run_once(store)
    assert segments(store, stream) == 2


def test_retention_drops_what_is_old_and_nothing_else(store: Store, database: Database) -> None:
    stream = make_stream(store, retention=timedelta(hours=1))
    kept = make_stream(store, "kept", retention=timedelta(days=1))
    for of in (stream, kept):
        publish(store, of, [inserted(1)])
        close(store, of)
    age(database, minutes=59)
    run_once(store)
    assert segments(store, stream) == 2
    age(database, minutes=2)
    run_once(store)
    assert segments(store, stream) == 1
    assert database.execute("SELECT to_regclass('penstock.segment_1')") == [(None,)]
    assert len(read(store, kept)) == 1
    publish(store, stream, [inserted(2)])
    assert [stored.message["record"]["id"] for stored in read(store, stream)] == [2]


def test_a_batch_that_is_not_whole_is_never_dropped(store: Store, database: Database) -> None:
    stream = make_stream(store, retention=timedelta(hours=1))
    batch = wire([inserted(1), inserted(2)])
    write_part(
        store, stream, batch.slice(0, 1), RoundPart(Position(100, -1), Position(101, 1), 0, 2)
    )
    close(store, stream)
    age(database, days=1)
    run_once(store)
    assert read(store, stream) == []
    write_part(store, stream, batch.slice(1), RoundPart(Position(100, -1), Position(101, 1), 1, 2))
    assert len(read(store, stream)) == 2


def test_consumers_that_lose_messages_are_named(store: Store, database: Database) -> None:
    stream = make_stream(store, retention=timedelta(hours=1))
    for name in ("behind", "done", "unused"):
        store.register_consumer("events", name, "pull", {})
    first, last = publish(store, stream, [inserted(1), inserted(2)])
    reads_to(store, "behind", in_stream(first))
    reads_to(store, "done", in_stream(last))
    close(store, stream)
    age(database, hours=2)
    with capture_logs() as logs:
        run_once(store)
    assert [(log["stream"], log["consumer"]) for log in logs if "dropped" in log["event"]] == [
        ("events", "behind")
    ]


def test_the_table_of_batches_is_emptied(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PARTS", 10)
    stream = make_stream(store)
    for n in range(10):
        publish(store, stream, [inserted(n)])
    run_once(store)
    assert database.execute("SELECT count(*) FROM penstock.batches_1") == [(10,)]
    head = store.head(1)
    batch = wire([inserted(10), inserted(11)], head)
    start, end = commit_position(*head), Position(head.lsn + 1, 1)
    write_part(store, stream, batch.slice(0, 1), RoundPart(start, end, 0, 2))
    run_once(store)
    assert database.execute("SELECT count(*) FROM penstock.batches_1") == [(2,)]
    assert store.head(1) == head
    write_part(store, stream, batch.slice(1), RoundPart(start, end, 1, 2))
    assert store.head(1) == end_of(end)
    assert len(read(store, stream)) == 12


def test_a_stream_with_nothing_to_do_is_left_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_stream(store)
    begun: list[str] = []
    for name in ("_close_if_due", "_expire", "_merge"):
        monkeypatch.setattr(maintenance, name, lambda *_, name=name: begun.append(name))
    run_once(store)
    assert begun == []


def test_segments_without_older_versions_are_merged_only_where_they_are_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(maintenance.SEGMENT_BYTES, "rows", 0)
    stream = make_stream(store, kind="rows")
    left: dict[int, list[int]] = {}
    counts = []
    for number in range(8):
        publish(store, stream, [inserted(40 * number + key) for key in range(40)])
        run_once(store, left)
        counts.append(segments(store, stream))
    assert counts == [2, 3, 4, 5, 6, 7, 8, 2]  # the closed ones, and the open one
    assert len(read(store, stream)) == 320
    publish(store, stream, [updated(key) for key in range(640)])
    run_once(store, left)
    assert segments(store, stream) == 2  # two of them, and half of the rows had a newer version
    assert len(read(store, stream)) == 640


def test_segments_of_like_sizes_are_merged() -> None:
    def merged(*sizes: int, head: int = 100) -> list[int]:
        listed = [
            Segment(n, Position(n, 0), Position(n + 1, 0), 0, 0, size)
            for n, size in enumerate(sizes)
        ]
        last = Segment(99, Position(len(sizes), 0), None, 0, None, 1)
        return [segment.id for segment in to_merge([*listed, last], Position(head, 0))]

    assert merged() == []
    assert merged(5) == []
    assert merged(5, 5) == [0, 1]
    assert merged(10, 5) == []
    assert merged(10, 5, 5) == [0, 1, 2]
    assert merged(100, 5, 6) == [1, 2]
    assert merged(5, 5, 5, head=2) == [0, 1]


KEYS = st.integers(1, 4)
SPARE = 9
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(KEYS, min_size=1, max_size=6)),
        st.tuples(st.just("close"), st.none()),
        st.tuples(st.just("merge"), st.tuples(st.integers(0, 5), st.integers(2, 5))),
        st.tuples(st.just("read"), st.integers(1, 8)),
    ),
    min_size=20,
    max_size=60,
)
_numbers = itertools.count()


@settings(max_examples=30, deadline=None)
@given(operations=OPERATIONS, actions=st.randoms(use_true_random=False))
def test_what_is_left_folds_to_the_newest_version_of_each_row(
    shared_store: Store, operations: list[tuple[str, object]], actions: Random
) -> None:
    """A consumer that is always there, one that comes last, and merges at any time between."""
    store, name = shared_store, f"rows{next(_numbers)}"
    stream = make_stream(store, name, source=name, kind="rows")
    table: dict[int, int] = {}
    seen: dict[int, int] = {}
    cursor, versions = START, itertools.count()

    def follow(limit: int | None) -> None:
        """Read on as a consumer does: what has a newer version is passed over."""
        nonlocal cursor
        found = read(store, stream)
        newest = {stored.key: stored.position for stored in found}
        ahead = [stored for stored in found if stored.position > cursor][:limit]
        for stored in ahead:
            record = stored.message["record"]
            if newest[stored.key] == stored.position:
                if stored.action == DELETE:
                    seen.pop(record["id"], None)
                else:
                    seen[record["id"]] = record["version"]
            cursor = stored.position
        if ahead:
            reads_to(store, name, cursor)

    def write(keys: list[int]) -> None:
        changes: list[Change] = []

        def delete(key: int) -> None:
            del table[key]
            changes.append(deleted(key))

        def move(old: int, key: int) -> None:
            del table[old]
            assert key not in table
            table[key] = next(versions)
            changes.append(moved(old, key, version=table[key]))

        for key in keys:
            others = [other for other in table if other != key]
            what = actions.choice(["write", "write", "delete", "move", "back", "onto", "swap"])
            if what == "delete" and key in table:
                delete(key)
            elif what == "move" and key not in table and others:
                move(actions.choice(others), key)
            elif what == "back" and key in table:
                move(key, SPARE)
                move(SPARE, key)
            elif what == "onto" and key in table and others:
                delete(key)
                move(actions.choice(others), key)
            elif what == "swap" and key in table and others:
                other = actions.choice(others)
                move(key, SPARE)
                move(other, key)
                move(SPARE, other)
            else:
                make = updated if key in table else inserted
                table[key] = next(versions)
                changes.append(make(key, version=table[key]))
        publish(store, stream, changes)

    def merge_some(first: int, count: int) -> None:
        with store.connection() as connection:
            listed = segments_of(connection, stream.id)
            run = listed[:-1][first : first + count]
            if run:
                consumers = readers_of(stream, store.consumers())
                watermarks = [low_watermark(connection, reader) for reader in consumers]
                merge(connection, stream, run, forgettable(listed, run, watermarks))

    for operation, value in operations:
        if operation == "write":
            write(value)  # type: ignore[arg-type]  # as drawn for the operation
        elif operation == "close":
            close(store, stream)
        elif operation == "merge":
            close(store, stream)
            merge_some(*value)  # type: ignore[misc]  # as drawn for the operation
        else:
            follow(value)  # type: ignore[arg-type]  # as drawn for the operation
    follow(None)
    assert seen == table
    left: dict[int, int] = {}
    for stored in read(store, stream):
        record = stored.message["record"]
        if stored.action == DELETE:
            left.pop(record["id"], None)
        else:
            left[record["id"]] = record["version"]
    assert left == table
    close(store, stream)
    merge_some(0, 1_000)
    found = read(store, stream)
    assert len({stored.key for stored in found}) == len(found)
    assert not [stored for stored in found if stored.action == DELETE]
    assert len(found) == len(table)


def test_rows_come_to_one_version_each_and_deletes_are_forgotten(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(maintenance.SEGMENT_BYTES, "rows", 0)
    stream = make_stream(store, kind="rows")
    for _ in range(6):
        publish(store, stream, [updated(key) for key in range(3)])
        run_once(store)
    last = publish(store, stream, [deleted(0), deleted(1), Change({"x": 1}, DELETE)])[-1]
    reads_to(store, "events", Position(last.lsn - 1, 0))
    run_once(store)
    run_once(store)
    found = read(store, stream)
    assert sorted(stored.message["record"].get("id", 9) for stored in found) == [0, 1, 2, 9]
    assert len([stored for stored in found if stored.action == DELETE]) == 3
    reads_to(store, "events", in_stream(last))
    publish(store, stream, [updated(key) for key in range(2, 40)])
    run_once(store)
    run_once(store)
    # Without a primary key nothing tells which row it was: such a message stays.
    left = [stored for stored in read(store, stream) if stored.action == DELETE]
    assert [(stored.key, stored.message["record"]) for stored in left] == [(None, {"x": 1})]
    tables = "SELECT count(*) FROM pg_tables WHERE tablename ~ '^segment_[0-9]'"
    assert database.execute(tables) == [(segments(store, stream),)]


def test_two_that_merge_at_once_do_it_once(store: Store) -> None:
    stream = make_stream(store, kind="rows")
    for _ in range(2):
        publish(store, stream, [updated(1)])
        close(store, stream)
    with store.connection() as connection:
        run = segments_of(connection, stream.id)[:-1]
        merge(connection, stream, run, START)
        with pytest.raises(StoreError) as late:
            merge(connection, stream, run, START)
    assert (late.value.code, late.value.transient) == ("segments_changed", True)
    assert len(read(store, stream)) == 1


def test_it_runs_by_itself(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "INTERVAL", 0.02)
    monkeypatch.setitem(maintenance.SEGMENT_BYTES, "changes", 0)
    stream = make_stream(store)
    publish(store, stream, [inserted(1)])
    with Maintenance(store.url):
        await_true(lambda: segments(store, stream) > 1, what="the maintenance closes a segment")


def test_it_outlives_an_unforeseen_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "INTERVAL", 0.01)
    runs = threading.Semaphore(0)

    def broken(*_: object) -> None:
        runs.release()
        raise ValueError

    monkeypatch.setattr(maintenance, "run_once", broken)
    with capture_logs() as logs, Maintenance(store.url):
        assert runs.acquire(timeout=60)
        assert runs.acquire(timeout=60)
    assert [entry["event"] for entry in logs][:1] == ["streams not maintained"]


def test_a_merge_outlasts_a_long_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not begun anew, and whoever writes meanwhile is let through."""
    monkeypatch.setattr(rows, "_PAUSES", (0.2,) * 50)
    monkeypatch.setitem(maintenance.SEGMENT_BYTES, "rows", 0)
    stream = make_stream(store, kind="rows")
    for _ in range(2):
        publish(store, stream, [updated(1)])
        close(store, stream)
    with Store.open(store.url) as other, contextlib.closing(writer_of(store, stream)) as writer:
        with contextlib.closing(writer_of(store, stream)) as long:
            long.begin()
            maintained = threading.Thread(target=run_once, args=(other,), daemon=True)
            maintained.start()
            await_true(lambda: waits_for_lock(store))
            started = time.monotonic()
            writer.begin()
            writer.rollback()
            assert time.monotonic() - started < 1.5
            assert segments(store, stream) == 3
            long.rollback()
        await_end(maintained)
        assert segments(store, stream) == 2
        assert len(read(store, stream)) == 1


def test_a_merge_that_cannot_have_a_table_leaves_it(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(maintenance.SEGMENT_BYTES, "rows", 0)
    stream = make_stream(store, kind="rows")
    for _ in range(2):
        publish(store, stream, [updated(1)])
        close(store, stream)
    with database.connect() as other:
        other.execute("LOCK penstock.segment_1 IN ACCESS EXCLUSIVE MODE")
        Later(lambda: run_once(store)).result(60)
    run_once(store)
    assert segments(store, stream) == 2


def test_it_ends_where_the_store_hangs(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "INTERVAL", 0.01)
    make_stream(store)
    busy = threading.Event()
    original = run_once

    def noted(of: Store, _: object) -> None:
        original(of)
        busy.set()

    monkeypatch.setattr(maintenance, "run_once", noted)
    with Maintenance(store.url) as maintained:
        assert busy.wait(60)
        pids = "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        pids += " AND application_name = 'penstock' AND pid <> %s"
        with store.connection() as connection:
            own = connection.info.backend_pid
        ((pid,),) = database.execute(pids, [own])
        freeze(pid)
        try:
            busy.clear()
            assert not busy.wait(0.3)
            started = time.monotonic()
            maintained.__exit__()
            assert time.monotonic() - started < 8
            assert not maintained._thread.is_alive()
        finally:
            os.kill(pid, signal.SIGCONT)


def waits_for_lock(store: Store) -> bool:
    """Whether somebody waits for the writers' lock, to keep them out."""
    query = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with store.connection() as connection:
        return connection.execute(query).fetchone() is not None
