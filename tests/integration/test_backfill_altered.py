"""A table that is altered while a backfill of it runs: what comes next is as the table is then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from tests.integration.backfilling import Backfilling, backfilling, before_watermarks, fold
from tests.integration.test_backfill_attempts import TABLE, changing, expected

from penstock.backfill.chunks import sizing
from penstock.backfill.chunks.next_chunk import ReadChunk
from penstock.backfill.events import Delayed, Failed
from penstock.core.message import parse_lsn
from penstock.embedded.handles import Database
from penstock.postgres.reads import cursor_from_json

INDEXED = (
    *TABLE,
    "ALTER TABLE t ALTER at SET NOT NULL",
    "UPDATE t SET at = at + 1000",
    "CREATE UNIQUE INDEX u ON t (at)",
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "FEWEST", 4)
    monkeypatch.setattr(sizing, "MOST", 4)


def paused(driver: Backfilling) -> None:
    """Pause when the first chunk, or some, is delivered."""
    driver.run(lambda: driver.cursor is not None)
    driver.pause()


def altered(database: Database, driver: Backfilling, *statements: str, **spec: Any) -> None:
    """Start a backfill, and alter the table in the middle."""
    driver.start(**spec)
    paused(driver)
    for statement in statements:
        database.execute(statement)
    driver.backfiller.resume()


def delays(driver: Backfilling) -> list[str | None]:
    return [event.code for event in driver.events if isinstance(event, Delayed)]


@pytest.mark.parametrize(
    "statements",
    [
        ["ALTER TABLE t ALTER v TYPE text USING 'abc\"' || v"],
        ["ALTER TABLE t ADD c int DEFAULT 7"],
        ["ALTER TABLE t DROP v"],
        ["ALTER TABLE t RENAME v TO w"],
    ],
)
def test_the_rest_comes_as_it_is_then(database: Database, statements: Sequence[str]) -> None:
    setup = "CREATE TABLE t (id int PRIMARY KEY, v int)"
    rows = "INSERT INTO t SELECT n, n FROM generate_series(1, 40) n"
    with backfilling(database, setup, rows) as driver:
        altered(database, driver, *statements)
        driver.run()
        assert delays(driver) == ["table_changed", None]
        now = expected(database)
        assert fold(driver.received).keys() == now.keys()
        assert driver.reads()[-1].record == now[40,]


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ("ALTER TABLE t REPLICA IDENTITY USING INDEX u", "ALTER TABLE t REPLICA IDENTITY DEFAULT"),
        ("SELECT 1", "ALTER TABLE t REPLICA IDENTITY USING INDEX u"),
        ("SELECT 1", "ALTER TABLE t REPLICA IDENTITY FULL"),
    ],
)
def test_no_deleted_row_comes_back_when_rows_are_known_by_something_else(
    database: Database, monkeypatch: pytest.MonkeyPatch, before: str, change: str
) -> None:
    with backfilling(database, *INDEXED, before) as driver:
        driver.start()
        paused(driver)
        database.execute(change)
        todo = ["DELETE FROM t"]

        def delete_first(_: ReadChunk) -> None:
            if todo:
                database.execute(todo.pop())

        before_watermarks(monkeypatch, delete_first)
        driver.backfiller.resume()
        driver.run()
        driver.drain()
        assert todo == []
        assert driver.received[-1].action == "delete"


def test_columns_that_are_published_no_more_are_read_no_more(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the publication is altered after the snapshot: no lock keeps that off."""
    for statement in (*TABLE, "CREATE PUBLICATION p FOR TABLE t"):
        database.execute(statement)
    database.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    with Backfilling(database.url) as driver:
        at = [0]

        def alter_first(chunk: ReadChunk) -> None:
            if chunk.number == 2 and not at[0]:
                database.execute("ALTER PUBLICATION p SET TABLE t (id, v)")
                ((lsn,),) = database.execute("SELECT pg_current_wal_lsn()::text")
                at[0] = parse_lsn(lsn)

        before_watermarks(monkeypatch, alter_first)
        driver.start()
        driver.run()
        whole = [m for m in driver.reads() if "big" in m.record]
        assert whole
        assert all(m.position.lsn < at[0] for m in whole)
        assert {m.record["id"] for m in driver.reads()} == set(range(1, 41))
        assert "table_changed" in delays(driver)


def test_a_composite_type_that_is_altered_is_looked_up_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = "CREATE TABLE t (id int PRIMARY KEY, v pair)"
    rows = "INSERT INTO t SELECT n, ROW(n, 'x')::pair FROM generate_series(1, 40) n"
    with backfilling(database, "CREATE TYPE pair AS (a int, b text)", setup, rows) as driver:
        changing(database, monkeypatch, {1: "ALTER TYPE pair ADD ATTRIBUTE c int"})
        driver.start()
        driver.run()
        assert driver.reads()[-1].record["v"] == {"a": 40, "b": "x", "c": None}


def test_another_table_of_the_name_is_not_taken_for_it(database: Database) -> None:
    with backfilling(database, *TABLE) as driver:
        altered(
            database, driver, "ALTER TABLE t RENAME TO t_old",
            "CREATE TABLE t (id text PRIMARY KEY, v jsonb, big text, at int)",
            "INSERT INTO t SELECT 'x' || n, '{}', 'b', n FROM generate_series(1, 40) n",
        )  # fmt: skip
        with pytest.raises(AssertionError, match="Failed"):
            driver.run()
        failed = driver.events[-1]
        assert isinstance(failed, Failed)
        assert failed.code == "cursor"


@pytest.mark.parametrize(
    "statements",
    [
        ["ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ADD PRIMARY KEY (v)"],
        ["ALTER TABLE t RENAME id TO number"],
        ["ALTER TABLE t ALTER id TYPE text"],
    ],
)
@pytest.mark.parametrize("spec", [{}, {"sort_by": "v"}])
def test_a_cursor_is_not_taken_for_one_of_other_columns(
    database: Database, statements: Sequence[str], spec: dict[str, str]
) -> None:
    setup = "CREATE TABLE t (id int PRIMARY KEY, v int NOT NULL)"
    rows = "INSERT INTO t SELECT n, n - 30 FROM generate_series(1, 40) n"
    with backfilling(database, setup, rows) as driver:
        driver.start(**spec)  # type: ignore[arg-type]  # the test's own settings
        paused(driver)
        cursor, position = driver.cursor, driver.reader.position
        driver.reader.confirm()
    for statement in statements:
        database.execute(statement)
    cursor = cursor_from_json(orjson.loads(orjson.dumps(cursor)))
    with Backfilling(database.url, position) as again:
        again.start(cursor=cursor, **spec)
        failed = again.failed()
        assert (failed.code, "start it again" in failed.remedy) == ("cursor", True)
        again.start(**spec)  # type: ignore[arg-type]  # the test's own settings
        again.run()
        assert len(again.reads()) == 40


def test_a_cursor_of_a_collation_is_none_of_another(database: Database) -> None:
    setup = "CREATE TABLE t (id text PRIMARY KEY)"
    rows = "INSERT INTO t SELECT n FROM generate_series(1, 40) n"
    with backfilling(database, setup, rows) as driver:
        altered(database, driver, 'ALTER TABLE t ALTER id TYPE text COLLATE "C"')
        assert driver.failed().code == "cursor"


def test_a_cursor_without_columns_is_taken_as_it_is(database: Database) -> None:
    with backfilling(database, *TABLE) as driver:
        driver.start(cursor=("36",))
        driver.run()
        assert [m.record["id"] for m in driver.reads()] == [37, 38, 39, 40]
        driver.start(cursor=("36", "1"))
        assert driver.failed().code == "cursor"
