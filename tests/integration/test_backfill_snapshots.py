"""A chunk's snapshot against the WAL: what is decoded but not visible, and what is visible already.

A commit that waits for a standby that does not exist stays between the two for as long as a test
likes: its record is flushed, and so decoded, and no snapshot sees it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.integration.backfilling import Backfilling, before_watermarks, fold
from tests.integration.capturing import prepare
from tests.waits import await_end, await_true

from penstock.backfill.chunks import next_chunk, sizing
from penstock.backfill.chunks.next_chunk import ReadChunk
from penstock.backfill.events import Delayed, Delivered, Started
from penstock.core.message import Position
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres

ROWS = [(n, "old") for n in range(1, 10)]


class Standing:
    """A server whose commits, where they are asked to, wait for a standby that never comes."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.sessions: list[tuple[psycopg.Connection[object], threading.Thread]] = []

    def commit(self, *statements: str) -> None:
        """Commit a transaction; returns when its record is flushed and it waits."""
        connection = self.database.connect()
        pid = connection.info.backend_pid
        connection.execute("SET LOCAL synchronous_commit = on")
        for statement in statements:
            connection.execute(statement.encode())
        thread = threading.Thread(target=connection.commit, daemon=True)
        thread.start()
        self.sessions.append((connection, thread))
        query = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
        await_true(lambda: self.database.execute(query, [pid])[0][0] == "SyncRep")

    def release(self) -> None:
        """Let all that waits become visible."""
        for connection, thread in self.sessions:
            connection.cancel_safe()
            await_end(thread)
            connection.close()
        self.sessions.clear()


@pytest.fixture(scope="module")
def waiting_server(
    tmp_path_factory: pytest.TempPathFactory, server_dir: Path
) -> Iterator[EmbeddedPostgres]:
    settings = {"synchronous_standby_names": "ghost", "synchronous_commit": "local"}
    with EmbeddedPostgres(server_dir / "waiting", settings) as server:
        yield server


@pytest.fixture
def standing(
    waiting_server: EmbeddedPostgres, request: pytest.FixtureRequest
) -> Iterator[Standing]:
    name = f"t{abs(hash(request.node.name))}"
    database = Database(name, waiting_server.create_database(name))
    prepare(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT n, 'old' FROM generate_series(1, 9) n",
    )
    database.execute("SELECT pg_drop_replication_slot('s')")
    database.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    standing = Standing(database)
    yield standing
    standing.release()
    database.drop(waiting_server.url)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "FEWEST", 4)


CHANGES = (
    "UPDATE t SET v = 'new' WHERE id = 1",
    "UPDATE t SET id = 20, v = 'moved' WHERE id = 2",
    "DELETE FROM t WHERE id = 3",
)
AFTER = {(1,): "new", (20,): "moved"} | {(n,): "old" for n in range(4, 10)}


def folded(driver: Backfilling) -> dict[tuple[object, ...], object]:
    return {key: row["v"] for key, row in fold(driver.received).items()}


def test_a_transaction_decoded_before_the_window_is_waited_for(standing: Standing) -> None:
    with Backfilling(standing.database.url) as driver:
        standing.commit(*CHANGES)
        while len(driver.received) < 3:
            driver.batch()
        driver.start()
        driver.await_event(Started)
        assert driver.batch(0.5) == []
        assert driver.backfiller._attempt is not None
        assert not driver.backfiller._attempt.in_flight
        standing.release()
        driver.run()
        assert folded(driver) == AFTER
        assert [m.record["id"] for m in driver.reads()] == [1, *range(4, 10), 20]


def test_a_wait_for_a_transaction_is_reported(
    standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_chunk, "_REPORT_SECONDS", 0.1)
    with Backfilling(standing.database.url) as driver:
        standing.commit(*CHANGES)
        while len(driver.received) < 3:
            driver.batch()
        driver.start()
        event = driver.await_event(Delayed)
        assert isinstance(event, Delayed)
        assert event.code == "invisible"
        standing.release()
        event = driver.await_event(Delayed)
        assert isinstance(event, Delayed)
        assert event.code is None


def test_a_transaction_decoded_by_an_earlier_capture_is_waited_for(standing: Standing) -> None:
    """Its messages were delivered and confirmed, so the slot never gives them again."""
    with Backfilling(standing.database.url) as driver:
        standing.commit(*CHANGES)
        while len(driver.received) < 3:
            driver.batch()
        driver.reader.confirm()
        received = driver.received
    with Backfilling(standing.database.url) as driver:
        driver.received += received
        driver.start()
        driver.await_event(Started)
        assert driver.batch(0.5) == []
        standing.release()
        driver.run()
        assert folded(driver) == AFTER


def test_what_is_decoded_and_not_visible_is_left_out(
    standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the snapshot and the watermark: the rows are newer than the snapshot shows them."""
    with Backfilling(standing.database.url) as driver:
        commit_before_the_watermark(standing, monkeypatch)
        driver.start()
        driver.run(lambda: driver.cursor is not None)
        assert [m.record["id"] for m in driver.reads()] == [4]  # of 1, 2, 3 and 4
        assert len(driver.received) == 4
        standing.release()
        driver.run()
        assert [m.record["id"] for m in driver.reads()] == [*range(4, 10), 20]
        assert folded(driver) == AFTER


def commit_before_the_watermark(
    standing: Standing, monkeypatch: pytest.MonkeyPatch, *changes: str
) -> None:
    """Have changes committed, waiting or not, after the first snapshot was taken."""
    todo = [changes or CHANGES]

    def commit_first(_: ReadChunk) -> None:
        if todo:
            standing.commit(*todo.pop())

    before_watermarks(monkeypatch, commit_first)


def test_a_truncate_between_has_the_chunk_read_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of the snapshot's transaction keeps it off; without a lock, the window would."""
    prepare(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT n, 'old' FROM generate_series(1, 9) n",
    )
    with Backfilling(database.url) as driver:
        threads: list[threading.Thread] = []

        def truncate_first(_: ReadChunk) -> None:
            if not threads:
                empty = "TRUNCATE t; INSERT INTO t VALUES (5, 'new')"
                with database.connect(autocommit=True) as connection:
                    connection.execute("SET lock_timeout = '200ms'")
                    with pytest.raises(psycopg.errors.LockNotAvailable):
                        connection.execute(empty)
                thread = threading.Thread(target=database.execute, args=(empty,), daemon=True)
                threads.append(thread)
                thread.start()

        before_watermarks(monkeypatch, truncate_first)
        driver.start()
        driver.run()
        await_end(threads[0])
        driver.drain()
        assert folded(driver) == {(5,): "new"}


def test_a_watermark_of_another_run_leaves_nothing(database: Database) -> None:
    prepare(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT n, 'old' FROM generate_series(1, 9) n",
    )
    with Backfilling(database.url) as driver:
        driver.start()
        while not driver.chunks:
            before = driver.reader.position
            driver.batch()
        after = driver.reader.position
        reads = len(driver.reads())
        assert reads
    with Backfilling(database.url, before) as again:
        found = again.take(before, after)
        assert [m.action for m in found if m.action == "read"] == []
        again.reader.position = after
        database.execute("INSERT INTO t VALUES (99, 'new')")
        again.start(cursor=driver.cursor)
        again.run()
        assert len(again.reads()) in (10, 10 - reads)


def test_the_first_chunk_of_another_run_is_read_where_nothing_else_was_written(
    database: Database,
) -> None:
    """It begins at the position of the checkpoint: before the batch that the run before had planned."""
    prepare(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT n, 'old' FROM generate_series(1, 9) n",
    )
    with Backfilling(database.url) as driver:
        driver.start()
        before = driver.reader.position
        after = driver.reader.capture.available(before, 100, 20)
        assert driver.take(before, after)
        assert driver.chunks
    with Backfilling(database.url, before) as again:
        assert again.take(before, after) == []
        again.reader.position = after
        again.start()
        again.run()
        assert folded(again) == {(n,): "old" for n in range(1, 10)}


def test_a_batch_that_is_cut_has_no_half_of_a_chunk(database: Database) -> None:
    prepare(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT n, 'old' FROM generate_series(1, 9) n",
    )
    with Backfilling(database.url) as driver:
        driver.start()
        capture, start = driver.reader.capture, driver.reader.position
        end = start
        while True:
            end = capture.available(end, 1, 20)
            chunk = capture.take(start, end)[-1]
            if chunk.reads is not None:
                break
        inside = Position(end.lsn, 1)
        assert [c.reads for c in capture.take(chunk.start, inside)] == [None]
        assert [c.reads for c in capture.take(inside, end)] == [None]
        assert [c.reads for c in capture.take(chunk.start, end)] == [chunk.reads]


def test_a_chunk_that_is_not_confirmed_holds_the_slot_back(database: Database) -> None:
    prepare(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT n, 'old' FROM generate_series(1, 9) n",
    )
    with Backfilling(database.url) as driver:
        driver.start()
        driver.await_event(Started)
        capture = driver.reader.capture
        end = capture.available(driver.reader.position, 100, 20)
        while capture.take(driver.reader.position, end)[-1].reads is None:
            capture.confirm(end)
            driver.reader.position = end
            end = capture.available(end, 100, 20)
        driver.reader.written()
        await_true(lambda: capture.stats.received_lsn > end.lsn)
        assert capture.stats.confirmed_lsn <= end.lsn
        assert not any(isinstance(event, Delivered) for event in driver.new_events())
        capture.confirm(end)
        assert capture.flush(20)
        assert capture.stats.confirmed_lsn > end.lsn
        driver.await_event(Delivered)
