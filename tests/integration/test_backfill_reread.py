"""Rows that are to be read again, as the WAL leaves their large values out, through new attempts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.backfilling import backfilling, before_watermarks, fold
from tests.integration.test_backfill_altered import delays, paused
from tests.integration.test_backfill_attempts import BACKENDS, TABLE, expected, taken
from tests.waits import await_true

from penstock.backfill.chunks import retries, sizing
from penstock.backfill.chunks.next_chunk import ReadChunk, Target
from penstock.backfill.events import Delivered
from penstock.core.errors import BackfillError
from penstock.embedded.handles import Database

MOVE = "UPDATE t SET id = -1 WHERE id = 40"  # behind the cursor, without its large value


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "FEWEST", 4)
    monkeypatch.setattr(sizing, "MOST", 4)


def test_a_lost_connection_forgets_none(database: Database) -> None:
    with backfilling(database, *TABLE) as driver:
        driver.start()
        paused(driver)
        database.execute(MOVE)
        driver.drain()
        database.execute(f"SELECT pg_terminate_backend(pid) FROM ({BACKENDS}) b")
        driver.backfiller.resume()
        driver.run()
        assert "connection_lost" in delays(driver)
        assert fold(driver.received) == expected(database)


def test_rows_that_move_between_two_attempts_are_read(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_BACKOFF_SECONDS", (1.0, 1.0))
    with backfilling(database, *TABLE) as driver:
        driver.start()
        paused(driver)
        database.execute(f"SELECT pg_terminate_backend(pid) FROM ({BACKENDS}) b")
        driver.backfiller.resume()
        driver.run(lambda: "connection_lost" in delays(driver))
        database.execute(MOVE)
        driver.run()
        assert fold(driver.received) == expected(database)


def test_a_start_from_the_last_cursor_forgets_none(database: Database) -> None:
    """As the run does where a report was lost: it cancels, and starts again a little later."""
    with backfilling(database, *TABLE) as driver:
        driver.start()
        paused(driver)
        database.execute(MOVE)
        cursor = driver.cursor
        driver.drain()
        driver.backfiller.cancel()
        driver.new_events()
        driver.start(cursor=cursor)
        driver.run()
        assert fold(driver.received) == expected(database)


def test_the_cursor_waits_for_rows_that_moved(database: Database) -> None:
    """So that a kill goes back to before them, if they went no further."""
    with backfilling(database, *TABLE) as driver:
        driver.start()
        taken(driver)
        database.execute(MOVE)
        capture, position = driver.reader.capture, driver.reader.position
        await_true(lambda: capture.available(position, 100, 1) > position)
        capture.confirm(position)
        event = driver.await_event(Delivered)
        assert isinstance(event, Delivered)
        assert (event.chunk, event.cursor) == (0, None)


def test_a_chunk_whose_watermark_is_not_written_forgets_none(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a type is altered between the chunk's snapshot and its watermark."""
    monkeypatch.setattr(retries, "_BACKOFF_SECONDS", (0.01, 0.01))
    compare = Target.raise_if_altered
    failed: list[tuple[tuple[str, ...], ...]] = []
    writing: list[ReadChunk] = []

    def fails_once(target: Target, *arguments: Any) -> None:
        if writing and writing[-1].reread and not failed:
            failed.append(writing[-1].reread)
            raise BackfillError("table_changed", "It was altered.", transient=True)
        compare(target, *arguments)

    monkeypatch.setattr(Target, "raise_if_altered", fails_once)
    with backfilling(database, *TABLE) as driver:

        def change_first(chunk: ReadChunk) -> None:
            if len(writing) == 3:
                database.execute(MOVE)
            writing.append(chunk)

        before_watermarks(monkeypatch, change_first)
        driver.start()
        driver.run()
        assert failed == [(("-1",),)]
        assert fold(driver.received) == expected(database)


def test_another_backfill_knows_nothing_of_them(database: Database) -> None:
    with backfilling(database, *TABLE) as driver:
        driver.start()
        paused(driver)
        database.execute(MOVE)
        driver.drain()
        driver.backfiller.cancel()
        driver.start(where="id = 7")
        driver.run()
        assert [m.record["id"] for m in driver.reads()[-1:]] == [7]
        with driver.reader.capture.decoder() as decoder:
            assert decoder.watch is None
