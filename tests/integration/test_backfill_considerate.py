"""A backfill lets go of snapshots, locks and statements that others need."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.integration.backfilling import backfilling, fold
from tests.integration.test_backfill_altered import delays
from tests.integration.test_backfill_attempts import TABLE, expected, taken
from tests.waits import await_true

from penstock.backfill.chunks import next_chunk, planner, retries, sizing, snapshots
from penstock.backfill.events import Delayed, Delivered, Failed, Started
from penstock.backfill.session import Connection
from penstock.embedded.handles import Database

SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'penstock backfill'"
OPEN = f"{SESSIONS} AND backend_xmin IS NOT NULL"
SLOW = "(SELECT pg_sleep(60)) IS NOT NULL"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "FEWEST", 4)
    monkeypatch.setattr(sizing, "MOST", 4)


def running(database: Database) -> bool:
    return database.execute(f"{SESSIONS} AND wait_event = 'PgSleep'") == [(1,)]


def test_a_long_scan_lets_go_of_its_snapshot_and_reports_how_far_it_is(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_SCANS", (20, 20))
    monkeypatch.setattr(next_chunk, "_PLAN_SECONDS", 0.05)
    rows = "INSERT INTO t SELECT n FROM generate_series(1, 20000) n"
    with backfilling(database, "CREATE TABLE t (id int PRIMARY KEY)", rows) as driver:
        driver.start(where="id > 19990")
        event = driver.await_event(Delivered)
        assert isinstance(event, Delivered)
        assert event.rows == 0
        assert event.cursor is not None
        driver.backfiller.pause()
        await_true(lambda: database.execute(OPEN) == [(0,)])
        driver.new_events()
        assert 0 < int(driver.cursor[0]) < 19990
        driver.backfiller.cancel()
        driver.start(where="id > 19990", cursor=driver.cursor)
        driver.run()
        assert [m.record["id"] for m in driver.reads()] == [*range(19991, 20001)]


def test_an_alter_table_waits_for_no_chunk(database: Database) -> None:
    """No snapshot and no lock is held while chunks wait: sinks may hang for hours."""
    with backfilling(database, *TABLE) as driver:
        driver.start()
        taken(driver)
        await_true(lambda: database.execute(OPEN) == [(0,)])
        database.execute("SET lock_timeout = '1s'; ALTER TABLE t ALTER v TYPE varchar")
        driver.run()
        assert fold(driver.received) == expected(database)


def test_no_snapshot_is_taken_while_batches_are_behind(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_UNREAD_BYTES", 1000)
    monkeypatch.setattr(next_chunk, "_REPORT_SECONDS", 0.1)
    with backfilling(database, *TABLE, "CREATE TABLE o (id int)") as driver:
        database.execute("UPDATE t SET v = 'new'")
        await_true(lambda: driver.reader.capture.stats.unread_bytes > 1000)
        driver.start()
        event = driver.await_event(Delayed)
        assert isinstance(event, Delayed)
        assert event.code == "behind"
        assert database.execute(OPEN) == [(0,)]
        driver.run()
        assert fold(driver.received) == expected(database)
        assert delays(driver)[-1] is None


@pytest.mark.parametrize("end", ["start", "cancel", "close"])
@pytest.mark.parametrize("where", [SLOW, f"CASE WHEN id > 0 THEN {SLOW} END"])
def test_a_command_ends_a_statement(database: Database, end: str, where: str) -> None:
    """The first runs as the table is looked at, the other as its rows are."""
    with backfilling(database, *TABLE, "ANALYZE t") as driver:
        driver.start(where=where)
        await_true(lambda: running(database))
        begun = time.monotonic()
        if end == "close":
            driver.backfiller.close()
        elif end == "start":
            driver.start(where="id = 7")
            driver.run()
            assert [m.record["id"] for m in driver.reads()] == [7]
        else:
            driver.backfiller.cancel()
        await_true(lambda: not running(database))
        assert time.monotonic() - begun < 10
        assert delays(driver) == []


def test_a_cancel_closes_its_sessions(database: Database) -> None:
    with backfilling(database, *TABLE) as driver:
        driver.start()
        driver.await_event(Started)
        await_true(lambda: database.execute(SESSIONS) != [(0,)])
        driver.backfiller.cancel()
        await_true(lambda: database.execute(SESSIONS) == [(0,)])


def test_a_cancel_closes_the_session_that_asks_how_far_the_wal_is(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel ends that statement. The session has no snapshot yet."""

    def asks(connection: Connection, _: object) -> bool:
        connection.execute("SELECT pg_sleep(60)")
        return True

    monkeypatch.setattr(next_chunk, "is_near", asks)
    with backfilling(database, *TABLE) as driver:
        driver.start()
        await_true(lambda: running(database))
        driver.backfiller.cancel()
        await_true(lambda: database.execute(SESSIONS) == [(0,)])


def test_a_statement_that_takes_too_long_is_tried_a_few_times(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_BACKOFF_SECONDS", (0.01, 0.01))
    with backfilling(database, *TABLE, "ANALYZE t") as driver:
        driver.start(where=SLOW)
        cancel = SESSIONS.replace("count(*)", "pg_cancel_backend(pid)")

        def failed() -> bool:
            database.execute(f"{cancel} AND wait_event = 'PgSleep'")
            return any(isinstance(event, Failed) for event in driver.new_events())

        await_true(failed)
        assert delays(driver) == ["timeout"] * 3
        assert driver.events[-1].code == "timeout"  # type: ignore[attr-defined]  # the event has one


def test_a_condition_on_a_column_that_is_gone_fails(database: Database) -> None:
    with backfilling(database, *TABLE) as driver:
        driver.start(where="nothing = 1")
        failed: Any = driver.failed()
        assert failed.code == "column_missing"
        assert delays(driver) == ["column_missing"]
