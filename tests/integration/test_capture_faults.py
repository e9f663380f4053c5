"""A capture whose connection, server, slot or publication fails: it goes on, or reports what to do."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.integration.capturing import (
    PATIENCE,
    Message,
    Reader,
    capturing,
    confirmed,
    of,
    prepare,
    walsender,
)
from tests.waits import await_true

from penstock.core.errors import CaptureError
from penstock.core.message import Position, parse_lsn
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres, StopMode
from penstock.postgres import capture_loop
from penstock.postgres.capture import MAX_UNREAD
from penstock.postgres.catalog import CaptureCatalog
from penstock.postgres.replication import Known, ReplicationStream

TABLE = "CREATE TABLE t (id int PRIMARY KEY, a text)"


@pytest.fixture(scope="module")
def server(server_dir: Path) -> Iterator[EmbeddedPostgres]:
    settings = {"wal_sender_timeout": "4s", "max_slot_wal_keep_size": "1MB"}
    with EmbeddedPostgres(server_dir / "faults", settings) as server:
        yield server


@pytest.fixture
def own(server: EmbeddedPostgres, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database of the server that may be stopped."""
    server.start()
    name = re.sub(r"\W", "_", request.node.name)
    database = Database(name, server.create_database(name))
    yield database
    server.start()
    database.drop(server.url)


def insert(database: Database, first: int, last: int) -> None:
    database.execute(
        "INSERT INTO t SELECT i, 'x' FROM generate_series(%s::int, %s) i", [first, last]
    )


def ids(messages: list[Message]) -> list[int]:
    return [message.record["id"] for message in messages]


def code_of(reader: Reader) -> CaptureError:
    """Return the error with which the capture ended."""
    with pytest.raises(CaptureError) as caught:
        reader.capture.available(reader.position, 10, PATIENCE, 1 << 62)
    return caught.value


# -- what it survives


def test_a_terminated_walsender(database: Database) -> None:
    with capturing(database, TABLE) as reader:
        insert(database, 1, 10)
        found = reader.read()
        reader.confirm()
        insert(database, 11, 20)
        found += reader.read()
        for i in range(2):
            seen = len(reader.states)
            pid = walsender(database)
            database.execute("SELECT pg_terminate_backend(%s)", [pid])
            insert(database, 21 + 10 * i, 30 + 10 * i)
            reader.await_state("error", "connection_lost", seen)
            reader.await_state("streaming", None, seen)
            found += reader.read()
        reader.confirm()
        assert ids(found) == list(range(1, 41))
        assert len({message.key for message in found}) == 40
        assert reader.capture.stats.reconnects == 2


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_restarts(server: EmbeddedPostgres, own: Database, mode: StopMode) -> None:
    with capturing(own, TABLE) as reader:
        insert(own, 1, 10)
        found = reader.read()
        reader.confirm()
        insert(own, 11, 20)
        found += reader.read()
        # A fast stop does not wait for what a sink that is down has not confirmed.
        started = time.monotonic()
        server.stop(mode)
        assert time.monotonic() - started < 5
        reader.await_state("error", "connection_refused")
        # Spark may confirm while nobody is connected.
        reader.capture.confirm(reader.position)
        seen = len(reader.states)
        server.start()
        own.close()
        insert(own, 21, 30)
        reader.await_state("streaming", None, seen)
        found += reader.read()
        reader.confirm()
        assert ids(found) == list(range(1, 31))
        await_true(lambda: confirmed(own) > found[-1].position.lsn)


def test_a_connection_lost_inside_a_transaction(database: Database) -> None:
    """The buffer is full in the middle of it, and what was confirmed of it is not read again."""
    rows, size = 400, 200_000
    with capturing(database, TABLE, splits=1) as reader:
        database.execute(
            "INSERT INTO t SELECT i, repeat('x', %s) FROM generate_series(1, %s::int) i",
            [size, rows],
        )
        await_true(lambda: reader.capture.stats.unread_bytes > MAX_UNREAD)
        assert reader.capture.stats.unread_bytes < MAX_UNREAD + (2 << 20)
        start = confirmed(database)
        found = of(reader.batch())
        assert 0 < len(found) < rows
        assert reader.position.idx == len(found) - 1
        reader.capture.confirm(reader.position)
        database.execute("SELECT pg_terminate_backend(%s)", [walsender(database)])
        while len(found) < rows:
            found += of(reader.batch())
            assert reader.capture.stats.unread_bytes < MAX_UNREAD + (2 << 20)
            reader.capture.confirm(reader.position)
            if len(found) < rows:
                assert start <= confirmed(database) <= found[0].position.lsn
        assert ids(found) == list(range(1, rows + 1))
        assert reader.capture.stats.reconnects == 1
        reader.confirm()
        await_true(lambda: confirmed(database) > found[0].position.lsn)


def test_keepalives_are_answered_while_nothing_reads(own: Database) -> None:
    """Idle and full, for more than two of the server's time-outs of four seconds."""
    query = "SELECT pg_create_logical_replication_slot('full', 'pgoutput')"
    with capturing(own, TABLE) as idle:
        own.execute(query)
        with Reader(own.url, slot="full") as full:
            idle.await_state("streaming")
            full.await_state("streaming")
            own.execute(
                "INSERT INTO t SELECT i, repeat('x', 100000) FROM generate_series(1, 400) i"
            )
            await_true(lambda: full.capture.stats.unread_bytes > MAX_UNREAD)
            assert ids(idle.read()) == list(range(1, 401))
            idle.confirm()
            pids = walsender(own), walsender(own, "full")
            # The time itself is what is tested: the server would end the connection in it.
            deadline = time.monotonic() + 9
            await_true(lambda: time.monotonic() > deadline)
            assert (walsender(own), walsender(own, "full")) == pids
            assert ids(full.read()) == list(range(1, 401))
            assert full.capture.stats.reconnects == idle.capture.stats.reconnects == 0


def test_the_slot_advances_without_messages(database: Database) -> None:
    with capturing(database, TABLE, "CREATE SCHEMA unpublished") as reader:
        reader.await_state("streaming")
        before = confirmed(database)
        database.execute("CREATE TABLE unpublished.u AS SELECT generate_series(1, 1000)")
        until = reader.written()
        await_true(lambda: confirmed(database) >= until)
        assert until > before
        # Nor does a table of the publication that the source does not want hold it.
    with Reader(database.url, includes=lambda *_: False) as reader:
        insert(database, 1, 10)
        until = reader.written()
        await_true(lambda: confirmed(database) >= until)


def test_the_slot_waits_for_what_is_not_confirmed(database: Database) -> None:
    with capturing(database, TABLE, splits=1) as reader:
        insert(database, 1, 3)
        insert(database, 4, 6)
        found = reader.read()
        first, second = found[0].position.lsn, found[-1].position.lsn
        start = confirmed(database)
        # Other WAL goes by; two statuses of a second each report nothing new.
        reader.capture.poll_server()
        reported = reader.capture.stats.received_lsn
        database.execute("CREATE SCHEMA other")
        await_true(lambda: reader.capture.stats.received_lsn > reported)
        assert confirmed(database) == start <= first
        reader.capture.confirm(Position(first, 1))
        assert reader.capture.flush(PATIENCE)
        assert confirmed(database) <= first
        reader.capture.confirm(Position(first, 2))
        assert reader.capture.flush(PATIENCE)
        await_true(lambda: confirmed(database) > first)
        assert confirmed(database) <= second
        reader.confirm()
        await_true(lambda: confirmed(database) > second)


# -- positions


def test_a_restart_goes_on_inside_a_transaction(database: Database) -> None:
    prepare(database, TABLE)
    insert(database, 1, 10_000)
    database.execute("UPDATE t SET a = 'y' WHERE id <= 10")
    with Reader(database.url) as reader:
        everything = reader.read()
    assert len(everything) == 10_010
    cut = everything[5_432].position
    with Reader(database.url, cut) as reader:
        # Spark asks for the batch that it had planned, whatever chunks it is made of now.
        end = everything[7_000].position
        again = of(reader.capture.take(cut, end))
        assert again == everything[5_433:7_001]
        reader.position = end
        assert reader.read() == everything[7_001:]
        reader.capture.confirm(cut)
    with Reader(database.url) as reader:
        assert reader.read() == everything, "positions and keys are the same after any restart"
        reader.confirm()
    with Reader(database.url) as reader:
        assert reader.read() == []


def test_a_long_transaction_in_bounded_memory(database: Database) -> None:
    rows = 200_000
    with capturing(database, TABLE) as reader:
        database.execute(
            "INSERT INTO t SELECT i, repeat('x', 180) FROM generate_series(1, %s::int) i", [rows]
        )
        # Nobody reads: the rest of the 40 MB stays with the server.
        await_true(lambda: reader.capture.stats.unread_bytes > MAX_UNREAD)
        assert reader.capture.stats.captured < rows // 2
        count, last = 0, reader.position
        until = reader.written()
        while count < rows:
            end = reader.capture.available(last, 20_000, PATIENCE, until)
            chunks = reader.capture.take(last, end)
            assert sum(chunk.rows for chunk in chunks) <= 20_000
            count += sum(chunk.rows for chunk in chunks)
            assert end.idx == count - 1
            assert reader.capture.stats.unread_bytes <= MAX_UNREAD + (2 << 20)
            reader.capture.confirm(last := end)
        reader.position = last
        reader.confirm()
        await_true(lambda: confirmed(database) > last.lsn)


# -- what ends it


def test_slot_missing(database: Database) -> None:
    with capturing(database, TABLE) as reader:
        reader.await_state("streaming")
        pid = walsender(database)
        database.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        await_true(lambda: _dropped(database))
        error = code_of(reader)
    assert error.code == "slot_missing"
    assert "backfill" in error.remedy
    with pytest.raises(CaptureError, match="slot s does not exist") as caught:
        CaptureCatalog(database.url).slot("s")
    assert caught.value.code == "slot_missing"


def test_a_publication_is_asked_about_before_its_slot_is_read(database: Database) -> None:
    prepare(database, TABLE)
    with contextlib.closing(CaptureCatalog(database.url)) as catalog:
        catalog.prepare("p")
        with pytest.raises(CaptureError, match="publication"):
            catalog.prepare("gone")


def _dropped(database: Database) -> bool:
    """Drop the slot in between two connections of the capture."""
    try:
        database.execute(
            "SELECT pg_terminate_backend(active_pid, 1000) FROM pg_replication_slots"
            " WHERE slot_name = 's' AND active_pid IS NOT NULL"
        )
        database.execute("SELECT pg_drop_replication_slot('s')")
    except psycopg.errors.ObjectInUse:
        return False
    return True


def test_slot_invalidated(own: Database) -> None:
    prepare(own, TABLE)
    for _ in range(3):
        insert(own, 1, 10)
        own.execute("DELETE FROM t")
        own.execute("SELECT pg_switch_wal()")
    own.execute("CHECKPOINT")
    with Reader(own.url, Position(0, -1)) as reader:
        error = code_of(reader)
    assert error.code == "slot_invalidated"
    assert "pg_drop_replication_slot('s')" in error.remedy


def test_slot_in_use_is_waited_for(database: Database) -> None:
    prepare(database, TABLE)
    other = ReplicationStream(database.url, "s", "p")
    with Reader(database.url) as reader:
        reader.await_state("error", "slot_in_use")
        insert(database, 1, 1)
        other.close()
        assert ids(reader.read()) == [1]


def test_slot_of_another_kind(database: Database, postgres: EmbeddedPostgres) -> None:
    prepare(database, TABLE)
    with pytest.raises(CaptureError) as caught:
        ReplicationStream(postgres.url, "s", "p")
    assert caught.value.code == "slot_unusable"
    assert database.name in caught.value.message


def test_publication_missing_at_the_start(database: Database) -> None:
    prepare(database, TABLE)
    database.execute("DROP PUBLICATION p")
    with Reader(database.url) as reader:
        error = code_of(reader)
    assert error.code == "publication_missing"
    assert "pg_drop_replication_slot('s')" in error.remedy
    command = "penstock recover shop"
    assert error.recovered_by(command).remedy.endswith(f"Run: {command}")


def test_publication_dropped_while_it_runs(database: Database) -> None:
    """Postgres 18 only warns, and leaves the changes out."""
    with capturing(database, TABLE) as reader:
        insert(database, 1, 1)
        assert ids(reader.read()) == [1]
        reader.confirm()
        database.execute("DROP PUBLICATION p")
        insert(database, 2, 2)
        (unseen,) = database.execute("SELECT pg_current_wal_insert_lsn()::text")[0]
        error = code_of(reader)
        assert error.code == "publication_missing"
        behind = "SELECT confirmed_flush_lsn < %s::pg_lsn FROM pg_replication_slots"
        assert database.execute(behind, [unseen]) == [(True,)]


def test_what_is_confirmed_last_counts_however_much_is_unread(database: Database) -> None:
    prepare(database, TABLE)
    stream = ReplicationStream(database.url, "s", "p")
    insert(database, 1, 1)
    (durable,) = database.execute("SELECT pg_current_wal_flush_lsn()::text")[0]
    insert(database, 2, 400_000)
    await_true(lambda: stream_is_full(database))
    ((server,),) = database.execute("SELECT active_pid FROM pg_replication_slots")
    os.kill(server, signal.SIGSTOP)
    stream.confirm(parse_lsn(durable))
    threading.Timer(0.2, os.kill, (server, signal.SIGCONT)).start()
    stream.end(PATIENCE)
    stream.close()
    await_true(lambda: walsender(database) is None)
    ((at,),) = database.execute("SELECT confirmed_flush_lsn::text FROM pg_replication_slots")
    assert parse_lsn(at) >= parse_lsn(durable)


def stream_is_full(database: Database) -> bool:
    """Whether the server waits to write, as its client does not read."""
    rows = database.execute(
        "SELECT wait_event = 'WalSenderWriteData' FROM pg_stat_activity"
        " WHERE pid = (SELECT active_pid FROM pg_replication_slots)"
    )
    return rows == [(True,)]


def test_another_server_and_other_positions(database: Database, own: Database) -> None:
    prepare(database, TABLE)
    insert(database, 1, 1)
    prepare(own, TABLE)
    stream = ReplicationStream(database.url, "s", "p")
    stream.close()
    here, at = stream.system_identifier, stream.confirmed_lsn
    await_true(lambda: walsender(database) is None)
    for url, known, code in [
        (own.url, Known(here, at, at), "other_server"),
        (database.url, Known(here, at - 8, at), "position_behind_slot"),
        (database.url, Known(here, at, 1 << 60), "position_ahead_of_server"),
    ]:
        with pytest.raises(CaptureError) as caught:
            ReplicationStream(url, "s", "p", known)
        assert caught.value.code == code
        assert not caught.value.transient
        assert caught.value.remedy


def test_a_log_that_fails_does_not_leave_spark_waiting(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __getattr__(self, _: str) -> Any:
            raise BrokenPipeError("no log")

    with capturing(database, TABLE) as reader:
        reader.await_state("streaming")
        monkeypatch.setattr(capture_loop, "log", Broken())
        database.execute("SELECT pg_terminate_backend(%s)", [walsender(database)])
        assert code_of(reader).code == "internal"


# -- connections


def test_errors_show_no_password(postgres: EmbeddedPostgres, database: Database) -> None:
    port = postgres.port
    secret = "s3cr3t"
    for url, code in [
        (f"postgresql//u:{secret}@127.0.0.1:{port}/d", "url_invalid"),
        (f"host=127.0.0.1 pass word={secret}", "url_invalid"),
        (f"postgresql://u:{secret}@127.0.0.1:{port}/d?nonsense={secret}", "url_invalid"),
        (f"postgresql://nobody:{secret}@127.0.0.1:{port}/postgres", "authentication_failed"),
        (f"postgresql://postgres:{secret}@127.0.0.1:{port}/none", "database_missing"),
        (f"postgresql://postgres:{secret}@127.0.0.1:1/postgres", "connection_refused"),
    ]:
        with pytest.raises(CaptureError) as caught:
            ReplicationStream(url, "s", "p")
        assert caught.value.code == code, url
        assert secret not in str(caught.value) + repr(caught.value)
        assert caught.value.remedy
        with pytest.raises(CaptureError) as caught:
            CaptureCatalog(url).slot("s")
        assert caught.value.code == code, url
        assert secret not in str(caught.value)


def test_a_role_that_may_not_replicate(postgres: EmbeddedPostgres, database: Database) -> None:
    prepare(database, TABLE)
    database.execute("CREATE ROLE plain LOGIN")
    try:
        url = database.url.replace("postgres@", "plain@")
        with pytest.raises(CaptureError) as caught:
            ReplicationStream(url, "s", "p")
    finally:
        database.execute("DROP ROLE plain")
    assert caught.value.code == "no_privilege"
    assert "REPLICATION" in caught.value.remedy


def test_urls_with_options_and_several_hosts(database: Database) -> None:
    port = database.url.rpartition(":")[2].partition("/")[0]
    prepare(database, TABLE)
    insert(database, 1, 1)
    url = (
        f"postgresql://postgres@127.0.0.1:1,127.0.0.1:{port}/{database.name}?sslmode=prefer"
        "&options=-cdatestyle%3DGerman%20-cstatement_timeout%3D1000&application_name=mine"
        "&connect_timeout=3&target_session_attrs=read-write"
    )
    with Reader(database.url, capture_url=url) as reader:
        assert ids(reader.read()) == [1]
        query = "SELECT application_name FROM pg_stat_replication WHERE pid = %s"
        assert database.execute(query, [walsender(database)]) == [("mine",)]
