"""What a pipeline writes to a stream: whole, once, in order, and never with a gap for a reader."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, LiteralString

import orjson
import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.streams_help import (
    START,
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
from tests.waits import Later, at_once, await_end, await_true

from penstock.core.errors import SinkError
from penstock.core.message import Position, RoundPart
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.streams import maintenance
from penstock.streams.maintenance import close_segment, run_once
from penstock.streams.records import StreamRecord, commit_position, stream_idx
from penstock.streams.segments import lock_writers, segments_of
from penstock.streams.store import Store


def numbered(count: int, per_transaction: int = 7) -> pa.RecordBatch:
    """Return `count` messages in transactions, with their numbers as ids."""
    return wire(
        [
            Change(
                {"id": n},
                position=Position(101 + n // per_transaction, n % per_transaction),
                group=n % 5,
            )
            for n in range(count)
        ]
    )


def at(batch: pa.RecordBatch, row: int) -> Position:
    """Return the position of a row, the start of all before the first."""
    if row < 0:
        return START
    return Position(batch["commit_lsn"][row].as_py(), batch["commit_idx"][row].as_py())


def parts_of(batch: pa.RecordBatch, first: int, end: int, parts: int) -> list[pa.RecordBatch]:
    """Return rows first to end as a micro-batch's parts, every group in one of them."""
    rows = batch.slice(first, end - first)
    groups = rows["group_hash"].to_pylist()
    return [rows.filter(pa.array([g % parts == part for g in groups])) for part in range(parts)]


def ids(store: Store, stream: StreamRecord) -> list[int]:
    return [stored.message["record"]["id"] for stored in read(store, stream)]


def test_messages_are_what_the_contract_says(store: Store, database: Database) -> None:
    stream = make_stream(store)
    positions = publish(store, stream, [inserted(1, name="é"), updated(1, name="b"), deleted(1)])
    rows = database.execute("SELECT * FROM penstock.segment_1 ORDER BY lsn, idx")
    assert [commit_position(*row[:2]) for row in rows] == positions
    assert [row[4:8] for row in rows] == [
        (None, "public", "items", action) for action in ("insert", "update", "delete")
    ]
    message = orjson.loads(rows[0][8])
    assert list(message) == ["record", "changes", "action", "metadata"]
    assert message["record"] == {"id": 1, "name": "é"}
    assert message["changes"] is None
    assert message["metadata"]["commit_lsn"] == 101
    assert all(row[8].endswith("}}") for row in rows)
    assert store.head(1) == end_of(positions[-1])


def test_a_part_is_there_as_a_whole_or_not_at_all(store: Store) -> None:
    streams = [make_stream(store, name) for name in ("a", "b")]
    writer = writer_of(store, *streams)
    batch = numbered(10)
    writer.begin()
    writer.write(0, batch)
    writer.rollback()
    writer.begin()
    assert [writer.write(index, batch).new for index in (0, 1)] == [10, 10]
    assert [ids(store, stream) for stream in streams] == [[], []]
    writer.commit(RoundPart(START, at(batch, 9), 0, 1))
    assert [ids(store, stream) for stream in streams] == [list(range(10))] * 2
    writer.close()


def test_what_goes_into_the_transaction_beside_messages_stays(
    store: Store, database: Database
) -> None:
    """Also where some of these are there already, which fails their copy and is taken back."""
    stream = make_stream(store)
    writer, batch = writer_of(store, stream), numbered(10)
    writer.begin()
    writer.write(0, batch.slice(0, 4))
    writer.commit(RoundPart(START, at(batch, 9), 0, 2))
    writer.begin()
    with writer.statements() as connection:
        connection.execute("CREATE TABLE beside ()")
    assert writer.write(0, batch).new == 6
    with writer.statements() as connection:
        connection.execute("CREATE TABLE behind ()")
    assert writer.write(0, batch).new == 0
    writer.commit(RoundPart(START, at(batch, 9), 0, 1))
    assert ids(store, stream) == list(range(10))
    there = database.execute("SELECT to_regclass('beside'), to_regclass('behind')")
    assert there == [("beside", "behind")]
    writer.close()


def test_a_changed_key_is_two_messages_of_a_rows_stream_and_none_a_repeat(store: Store) -> None:
    writer = writer_of(store, make_stream(store, kind="rows"))
    batch = wire([inserted("a"), moved("a", "b")])
    for new in (3, 0):
        writer.begin()
        assert writer.write(0, batch) == (3, new)
        writer.commit(RoundPart(START, at(batch, 1), 0, 1, new))
    writer.close()


def test_a_batch_is_visible_when_its_last_part_is_there(store: Store) -> None:
    stream = make_stream(store)
    batch = numbered(20)
    for part, rows in enumerate(parts_of(batch, 0, 20, 3)):
        assert ids(store, stream) == []
        write_part(store, stream, rows, RoundPart(START, at(batch, 19), part, 3))
    assert ids(store, stream) == list(range(20))


def test_parts_of_two_plans_do_not_make_a_whole(store: Store) -> None:
    """After a crash the same batch is planned again, with as many parts, and split otherwise."""
    stream = make_stream(store)
    batch = numbered(20)
    end = at(batch, 19)
    old, new = parts_of(batch, 0, 20, 2), [batch.slice(0, 15), batch.slice(15)]
    write_part(store, stream, old[0], RoundPart(START, end, 0, 2, plan=1))
    write_part(store, stream, new[1], RoundPart(START, end, 1, 2, plan=2))
    assert ids(store, stream) == []
    write_part(store, stream, new[0], RoundPart(START, end, 0, 2, plan=2))
    assert ids(store, stream) == list(range(20))


def test_the_readers_are_notified(store: Store, database: Database) -> None:
    stream = make_stream(store)
    with database.connect(autocommit=True) as listener:
        listener.execute("LISTEN penstock")
        publish(store, stream, [inserted(1)])
        notice = next(listener.notifies(timeout=60))
    assert (notice.channel, notice.payload) == ("penstock", f"s{stream.source_id}")


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_a_crash_left_comes_again_with_other_boundaries(
    postgres: EmbeddedPostgres, crash_store: Store, data: st.DataObject
) -> None:
    """Random micro-batches, some given up half-way, and all that was not done written again."""
    number = data.draw(st.integers(0, 10**12))
    stream = make_stream(crash_store, f"s{number}", source=f"s{number}")
    count = 40
    batch = numbered(count)
    writer = writer_of(crash_store, stream)
    done = 0  # what the pipeline knows to be there; after a crash it may know less
    while done < count:
        end = data.draw(st.integers(done + 1, count))
        parts = data.draw(st.integers(1, 3))
        crash = data.draw(st.none() | st.integers(0, parts - 1))
        plan = data.draw(st.integers(0, 2**63 - 1))
        for part, rows in enumerate(parts_of(batch, done, end, parts)):
            writer.begin()
            writer.write(0, rows)
            if part == crash:
                break
            writer.commit(RoundPart(at(batch, done - 1), at(batch, end - 1), part, parts, plan))
            assert ids(crash_store, stream) == list(range(len(ids(crash_store, stream))))
        else:
            assert ids(crash_store, stream)[:end] == list(range(end))
            done = end
            continue
        writer.close()
        writer = writer_of(crash_store, stream)
        done = data.draw(st.integers(max(0, done - 10), done))
        if data.draw(st.booleans()):
            with crash_store.connection() as connection:
                close_segment(connection, stream)
    writer.close()
    assert ids(crash_store, stream) == list(range(count))


@pytest.fixture(scope="module")
def crash_store(postgres: EmbeddedPostgres) -> Iterator[Store]:
    with Store.open(postgres.create_database("crashes")) as store:
        yield store


def test_no_reader_ever_sees_a_gap(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks write at once, segments change under them, and a reader follows."""
    monkeypatch.setattr(maintenance, "PARTS", 20)
    monkeypatch.setitem(maintenance.SEGMENT_BYTES, "changes", 0)
    stream = make_stream(store)
    count, size = 6_000, 40
    batch = numbered(count)
    finished = threading.Event()

    def write() -> None:
        writers = [writer_of(store, stream) for _ in range(2)]

        def one(part: int, rows: pa.RecordBatch, which: RoundPart) -> None:
            writers[part].begin()
            writers[part].write(0, rows)
            writers[part].commit(which)

        for first in range(0, count, size):
            start, end = at(batch, first - 1), at(batch, first + size - 1)
            parts = parts_of(batch, first, first + size, 2)
            at_once(*[
                partial(one, part, rows, RoundPart(start, end, part, 2))
                for part, rows in enumerate(parts)
            ])  # fmt: skip
        for writer in writers:
            writer.close()

    def maintain() -> None:
        with Store(store.url) as own:
            while not finished.is_set():
                run_once(own)

    def follow() -> tuple[int, int]:
        seen, looks, cursor = 0, 0, START
        with Store(store.url) as own:
            while seen < count:
                last = finished.is_set()
                for stored in read(own, stream, cursor):
                    assert stored.message["record"]["id"] == seen
                    seen, cursor = seen + 1, stored.position
                looks += 1
                assert seen == count or not last
        return seen, looks

    writing, following, maintaining = Later(write), Later(follow), Later(maintain)
    try:
        writing.result(120)
    finally:
        finished.set()
    maintaining.result(60)
    assert following.result(60)[0] == count
    with store.connection() as connection:
        assert len(segments_of(connection, stream.id)) > 5


def test_a_key_that_changed_comes_again_with_both_of_its_messages(store: Store) -> None:
    stream = make_stream(store, kind="rows")
    batch = wire([inserted("a"), moved("a", "b"), moved("b", "a")])
    end = at(batch, 2)
    assert write_part(store, stream, batch.slice(0, 2), RoundPart(START, end, 0, 2, plan=1)) == 3
    assert write_part(store, stream, batch, RoundPart(START, end, 0, 1, plan=2)) == 2
    assert [(s.position.idx, s.action, s.message["record"]["id"]) for s in read(store, stream)] == [
        (stream_idx(0), "insert", "a"), (stream_idx(1) - 1, "delete", "a"),
        (stream_idx(1), "update", "b"), (stream_idx(2) - 1, "delete", "b"),
        (stream_idx(2), "update", "a"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["changes", "rows"])
def test_messages_that_were_made_of_one_come_again_and_are_there_once(
    store: Store, kind: str
) -> None:
    """After a crash a transform may also make more or less of a message than before."""
    stream = make_stream(store, kind=kind)
    made = [
        replace(updated(id_, part=part), position=Position(101, idx), part=part)
        for idx, (id_, parts) in enumerate([("a", 1000), ("b", 2), ("a", 3)])
        for part in range(parts)
    ]
    batch, end = wire(made), Position(101, 2)
    assert write_part(store, stream, batch.slice(0, 600), RoundPart(START, end, 0, 2, 1)) == 600
    assert write_part(store, stream, batch.slice(500), RoundPart(START, end, 0, 1, 2)) == 405
    assert write_part(store, stream, batch, RoundPart(START, end, 0, 1, 3)) == 0
    assert store.head(1) == end_of(end)
    found = read(store, stream)
    assert [stored.message["record"] for stored in found] == [change.record for change in made]
    assert [stored.position for stored in found] == [
        in_stream(change.position, change.part) for change in made if change.position
    ]
    keys = [stored.message["metadata"]["idempotency_key"] for stored in found]
    assert keys[:3] == ["tag-101-0", "tag-101-0-1", "tag-101-0-2"]
    if kind == "rows":  # they have one key, of which the last is the newest
        with store.connection() as connection:
            close_segment(connection, stream)
            publish(store, stream, [inserted(n) for n in range(2000)])
            close_segment(connection, stream)
        run_once(store)
        left = [stored.message["record"] for stored in read(store, stream)]
        assert left[:3] == [{"id": "b", "part": 1}, {"id": "a", "part": 2}, {"id": 0}]


def test_messages_up_to_the_head_are_not_written_again(store: Store) -> None:
    stream = make_stream(store)
    batch = numbered(30)
    part = RoundPart(START, at(batch, 29), 0, 1)
    assert write_part(store, stream, batch, part) == 30
    with store.connection() as connection:
        close_segment(connection, stream)
        connection.execute("DELETE FROM penstock.segment_1 WHERE idx = 1")  # as a merge may
    assert write_part(store, stream, batch, part) == 0
    assert len(ids(store, stream)) == 25


def test_a_segment_that_is_closed_while_a_writer_waits(database: Database) -> None:
    """It sees that, also where transactions see what was there when they began."""
    database.execute(
        f"ALTER DATABASE {database.name} SET default_transaction_isolation = 'repeatable read'"
    )
    with Store.open(database.url) as store, Store.open(database.url) as other:
        stream = make_stream(store)
        publish(store, stream, [inserted(1)])
        batch = wire([inserted(2)], Position(101, 0))
        writer = writer_of(store, stream)
        with store.connection() as connection, connection.transaction():
            lock_writers(connection, stream.source_id)
            began = threading.Thread(target=writer.begin, daemon=True)
            began.start()
            query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
            await_true(lambda: other_row(other, query) == 1)
            close_segment(connection, stream)
        await_end(began)
        assert writer.write(0, batch).new == 1
        writer.commit(RoundPart(Position(101, 0), at(batch, 0), 0, 1))
        writer.close()
        assert ids(store, stream) == [1, 2]


def other_row(store: Store, query: LiteralString) -> Any:
    with store.connection() as connection:
        return (connection.execute(query).fetchone() or [None])[0]


def test_positions_go_on_in_a_new_cluster(store: Store) -> None:
    stream = make_stream(store)
    publish(store, stream, [inserted(1)])
    old = writer_of(store, stream)
    moved = store.register_source("shop", "another tag")
    assert moved.base == store.head(moved.id).lsn == 101
    batch = wire([inserted(2)], Position(1, -1))
    with pytest.raises(SinkError, match="Start the pipeline again") as refused:
        old.begin()
    assert refused.value.code == "source_changed"
    old.close()
    write_part(store, stream, batch, RoundPart(Position(0, -1), Position(2, 0), 0, 1))
    assert [(s.position, s.message["record"]["id"]) for s in read(store, stream)] == [
        ((101, 1), 1),
        ((103, 1), 2),
    ]
    assert store.register_source("shop", "another tag") == moved


def test_a_lost_connection_is_made_again(store: Store, database: Database) -> None:
    stream = make_stream(store)
    writer = writer_of(store, stream)
    batch = numbered(10)
    writer.begin()
    writer.write(0, batch)
    database.execute("SELECT pg_terminate_backend(%s)", [writer.connection.info.backend_pid])
    with pytest.raises(SinkError) as lost:
        writer.commit(RoundPart(START, at(batch, 9), 0, 1))
    assert (lost.value.code, lost.value.transient) == ("connection_lost", True)
    writer.begin()
    assert writer.write(0, batch).new == 10
    writer.commit(RoundPart(START, at(batch, 9), 0, 1))
    writer.close()
    assert ids(store, stream) == list(range(10))


def test_a_store_that_is_down_differs_from_one_that_is_broken(
    store: Store, database: Database, postgres: EmbeddedPostgres
) -> None:
    stream = make_stream(store)
    writer = writer_of(store, stream)
    writer._url = f"postgresql://postgres:hidden@127.0.0.1:1/{database.name}"
    with pytest.raises(SinkError) as down:
        writer.begin()
    assert (down.value.code, down.value.transient) == ("connection_refused", True)
    assert "hidden" not in str(down.value)
    database.execute("CREATE ROLE stranger LOGIN")
    try:
        writer._url = store.url.replace("postgres@", "stranger@")
        with pytest.raises(SinkError) as denied:
            writer.begin()
        assert (denied.value.code, denied.value.transient) == ("permission_denied", False)
        assert "GRANT" in denied.value.remedy
    finally:
        writer.close()
        database.execute("DROP ROLE stranger")
    writer._url = store.url
    database.execute("DROP TABLE penstock.segments CASCADE")
    with pytest.raises(SinkError) as missing:
        writer.begin()
    assert (missing.value.code, missing.value.transient) == ("no_table", False)
    writer.close()


def test_a_held_snapshot_leaves_no_dead_rows(store: Store, database: Database) -> None:
    stream = make_stream(store)
    with database.connect() as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT count(*) FROM penstock.batches_1")
        for _ in range(30):
            publish(store, stream, [inserted(n) for n in range(20)])
            with store.connection() as connection:
                close_segment(connection, stream)
        store.close()  # a session reports its counts when it ends
        database.execute("SELECT pg_stat_force_next_flush()")
        counts = database.execute(
            "SELECT relname, n_tup_ins, n_tup_upd + n_tup_del, n_dead_tup FROM pg_stat_user_tables"
            " WHERE relname ~ '^(segment|batches)_[0-9]'"
        )
    assert sum(row[1] for row in counts) == 30 * 20 + 30
    assert {row[2:] for row in counts} == {(0, 0)}


def test_a_dump_does_not_hold_up_writers_and_readers(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pg_dump holds ACCESS SHARE on every table while it runs."""
    monkeypatch.setattr(maintenance, "PARTS", 3)
    monkeypatch.setitem(maintenance.SEGMENT_BYTES, "rows", 0)
    stream = make_stream(store, kind="rows")
    publish(store, stream, [inserted(1)])
    with database.connect() as dump:
        dump.execute("SELECT * FROM penstock.segment_1, penstock.batches_1")
        for _ in range(4):
            publish(store, stream, [updated(1)])
            run_once(store)
        assert len(read(store, stream)) < 5  # merged all the same
        assert database.execute("SELECT to_regclass('penstock.segment_1') IS NOT NULL") == [(True,)]
        assert database.execute("SELECT count(*) FROM penstock.batches_1") == [(5,)]
    run_once(store)
    assert database.execute("SELECT to_regclass('penstock.segment_1') IS NULL") == [(True,)]
    assert database.execute("SELECT count(*) FROM penstock.batches_1") == [(1,)]
    publish(store, stream, [updated(1)])
    assert read(store, stream)[-1].position.lsn == 106
