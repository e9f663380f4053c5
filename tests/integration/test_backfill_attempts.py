"""A backfill's attempts: pauses, cancels, lost connections, and values that the WAL leaves out."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.backfilling import Backfilling, backfilling, before_watermarks, fold
from tests.waits import await_true

from penstock.backfill.chunks import retries, sizing
from penstock.backfill.chunks.next_chunk import ReadChunk
from penstock.backfill.events import Delayed, Delivered, Done, Failed, Started
from penstock.embedded.handles import Database
from penstock.postgres import watermarks
from penstock.postgres.reads import Reads

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, v text, big text, at int)",
    "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
    "INSERT INTO t SELECT n, 'old', repeat('b', 3000) || n, n FROM generate_series(1, 40) n",
)
BACKENDS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'penstock backfill'"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "FEWEST", 4)
    monkeypatch.setattr(sizing, "MOST", 4)


def kinds(driver: Backfilling) -> list[type]:
    return [type(event) for event in driver.events]


def expected(database: Database) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(row[0]["id"],): row[0] for row in database.execute("SELECT to_json(t) FROM t")}


def holding(database: Database) -> int:
    """Return how many of the backfill's sessions hold a snapshot."""
    query = BACKENDS.replace("pid", "count(*)") + " AND backend_xmin IS NOT NULL"
    return int(database.execute(query)[0][0])


def taken(driver: Backfilling) -> Reads:
    """Deliver what comes up to the next chunk, and this, without confirming it."""
    capture, reader, before = driver.reader.capture, driver.reader, len(driver.chunks)
    while len(driver.chunks) == before:
        capture.confirm(reader.position)
        end = capture.available(reader.position, 10_000, 20)
        driver.take(reader.position, end)
        reader.position = end
    return driver.chunks[-1]


def test_a_pause_delivers_what_is_read_and_nothing_more(database: Database) -> None:
    with backfilling(database, *TABLE) as driver:
        driver.start()
        driver.run(lambda: driver.cursor is not None)
        driver.pause()
        assert 4 * kinds(driver).count(Delivered) == len(driver.reads()) < 40
        assert holding(database) == 0
        database.execute("ALTER TABLE t ALTER v TYPE varchar")  # nothing holds a lock
        driver.backfiller.resume()
        driver.run()
        assert len(driver.reads()) == 40


def test_a_cancel_ends_its_snapshots_without_a_word(database: Database) -> None:
    with backfilling(database, *TABLE) as driver:
        driver.start()
        taken(driver)
        driver.backfiller.cancel()
        await_true(lambda: holding(database) == 0)
        driver.reader.capture.confirm(driver.reader.position)
        assert not driver.batch(0.5)
        assert not any(isinstance(e, Delivered | Done) for e in driver.new_events())
        driver.start(cursor=("36",))
        driver.run()
        assert [m.record["id"] for m in driver.reads()] == [1, 2, 3, 4, 37, 38, 39, 40]


def test_a_start_takes_the_place_of_the_one_before(database: Database) -> None:
    with backfilling(database, *TABLE) as driver:
        first = driver.start()
        taken(driver)
        second = driver.start(where="id < 3")
        assert second > first
        driver.run()
        assert [m.record["id"] for m in driver.reads()[4:]] == [1, 2]
        assert {e.attempt for e in driver.events if isinstance(e, Delivered)} == {second}


def test_lost_connections_are_made_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_BACKOFF_SECONDS", (0.01, 0.1))
    with backfilling(database, *TABLE) as driver:
        attempt = driver.start()
        for restarts in range(1, 4):
            delivered = driver.cursor
            driver.run(lambda: driver.cursor != delivered)  # noqa: B023 - it is called at once
            database.execute(f"SELECT pg_terminate_backend(pid) FROM ({BACKENDS}) b")
            driver.run(lambda: kinds(driver).count(Started) > restarts)  # noqa: B023 - it is called at once
        driver.run()
        delays = [e for e in driver.events if isinstance(e, Delayed)]
        assert {e.code for e in delays} == {"connection_lost", None}
        assert delays[-1].code is None
        assert driver.events[-1].attempt > attempt
        assert fold(driver.received) == expected(database)
        assert len(driver.reads()) >= 40


def test_a_chunk_of_which_no_messages_can_be_made_ends_the_backfill(database: Database) -> None:
    with backfilling(database, *TABLE) as driver:
        driver.start()
        driver.backfiller.failed(taken(driver), ZeroDivisionError("of mine"))
        found = driver.failed()
        assert (found.code, "ZeroDivisionError: of mine" in found.message) == ("internal", True)
        driver.reader.capture.confirm(driver.reader.position)
        assert not any(isinstance(e, Delivered | Done) for e in driver.new_events())


def changing(database: Database, monkeypatch: pytest.MonkeyPatch, changes: dict[int, str]) -> None:
    """Run statements after the snapshot of a chunk (by number) was taken, before its watermark."""

    def change_first(chunk: ReadChunk) -> None:
        if statement := changes.pop(chunk.number, None):
            database.execute(statement)

    before_watermarks(monkeypatch, change_first)


def test_values_that_the_wal_leaves_out_are_read_after_all(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's read is left out, and the update before it has not what it did not change."""
    with backfilling(database, *TABLE) as driver:
        update = "UPDATE t SET v = v || '!' WHERE id IN (2, 3)"
        changing(database, monkeypatch, {0: update, 1: update, 2: update})
        driver.start()
        driver.run()
        assert any(m.metadata["unavailable"] for m in driver.received)
        assert fold(driver.received) == expected(database)
        assert len(driver.reads()) == 40
        # Until they were read, the backfill could not report that it is further.
        reported = [(e.chunk, e.cursor) for e in driver.events if isinstance(e, Delivered)]
        assert reported[:2] == [(0, None), (1, None)]
        assert reported[-1][1] is not None


def test_a_kill_before_they_are_read_goes_back(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backfilling(database, *TABLE) as driver:
        changing(database, monkeypatch, {0: "UPDATE t SET v = 'new' WHERE id = 2"})
        driver.start()
        driver.run(lambda: any(isinstance(e, Delivered) for e in driver.events))
        received, position, cursor = driver.received, driver.reader.position, driver.cursor
    with Backfilling(database.url, position) as again:
        again.received += received
        again.start(cursor=cursor)
        again.run()
        assert fold(again.received) == expected(database)


@pytest.mark.parametrize(
    ("spec", "move"),
    [
        ({}, "UPDATE t SET id = id - 1000 WHERE id = 30"),
        ({"sort_by": "at"}, "UPDATE t SET at = -1 WHERE id = 30"),
    ],
)
def test_a_row_that_moves_behind_the_cursor_is_read_there(
    database: Database, monkeypatch: pytest.MonkeyPatch, spec: dict[str, str], move: str
) -> None:
    with backfilling(database, *TABLE) as driver:
        changing(database, monkeypatch, {2: move})
        driver.start(**spec)  # type: ignore[arg-type]  # the test's own settings
        driver.run()
        assert fold(driver.received) == expected(database)


def test_more_of_them_than_can_be_kept_end_the_backfill(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watermarks, "INCOMPLETE", 3)
    with backfilling(database, *TABLE) as driver:
        changing(database, monkeypatch, {0: "UPDATE t SET v = 'new'"})
        driver.start()
        with pytest.raises(AssertionError, match="too_many_incomplete"):
            driver.run()
        failed = driver.events[-1]
        assert isinstance(failed, Failed)
        assert "REPLICA IDENTITY FULL" in failed.remedy


def test_more_changes_than_are_kept_have_the_chunk_planned_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watermarks, "TOUCHED", 3)
    with backfilling(database, *TABLE) as driver:
        changing(database, monkeypatch, {1: "UPDATE t SET v = 'new', big = 'b'"})
        first = driver.start()
        driver.run()
        assert fold(driver.received) == expected(database)
        assert driver.events[-1].attempt > first
        assert kinds(driver).count(Started) == 2


def test_a_whole_old_tuple_fills_in_what_is_left_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backfilling(database, *TABLE, "ALTER TABLE t REPLICA IDENTITY FULL") as driver:
        changing(database, monkeypatch, {0: "UPDATE t SET v = 'new' WHERE id = 2"})
        driver.start()
        driver.run()
        assert fold(driver.received) == expected(database)
        assert len(driver.reads()) == 39


def test_an_empty_table_is_done_at_once(database: Database) -> None:
    with backfilling(database, "CREATE TABLE t (id int PRIMARY KEY)") as driver:
        driver.start()
        driver.run()
        assert driver.received == []
        assert isinstance(driver.events[-1], Done)
        assert driver.events[-1].chunks == 0


def test_a_row_that_enters_the_row_filter_behind_the_backfill_comes_whole(
    database: Database,
) -> None:
    """It comes as an insert, without the large value that the update left as it was."""
    for statement in TABLE:
        database.execute(statement)
    database.execute("CREATE PUBLICATION p FOR TABLE t WHERE (id % 2 = 0)")
    database.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    with Backfilling(database.url) as driver:
        driver.start()
        driver.run(lambda: driver.cursor is not None and int(driver.cursor[0] or 0) >= 12)
        database.execute("UPDATE t SET id = 0 WHERE id = 39")
        driver.run()
        (insert,) = [message for message in driver.received if message.action == "insert"]
        assert insert.metadata["unavailable"] == ["big"]
        assert insert.record == {"id": 0, "v": "old", "at": 39}
        chosen = {key: row for key, row in expected(database).items() if key[0] % 2 == 0}
        assert fold(driver.received) == chosen
