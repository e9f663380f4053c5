"""`penstock try --live`: the next changes, through a slot that never stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import psycopg
import pyarrow.compute as pc
import pytest

from penstock.config.sources import PostgresSource
from penstock.core.errors import CaptureError
from penstock.embedded.handles import Database
from penstock.trial import live

TABLE = "CREATE TABLE orders (id int PRIMARY KEY, note text)"
PUBLICATION = "CREATE PUBLICATION penstock FOR TABLE orders"
SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"


def source(database: Database) -> PostgresSource:
    fields = {"type": "postgres", "url": database.url, "tables": ["public.orders"]}
    return PostgresSource.model_validate(fields)


def read(
    database: Database,
    count: int,
    seconds: float = 20,
    ready: Callable[[], None] = lambda: None,
    chosen: Callable[[Any], Any] = lambda batch: batch,
) -> list[dict[str, Any]]:
    batch = live.read(source(database), chosen, count, seconds, ready)
    return [] if batch is None else batch.to_pylist()


def insert(database: Database) -> None:
    database.execute("INSERT INTO orders VALUES (1, 'x')")


def test_the_next_changes(database: Database) -> None:
    database.execute(TABLE)
    database.execute("INSERT INTO orders VALUES (0, 'before')")
    database.execute(PUBLICATION)

    def write() -> None:
        assert len(database.execute(SLOTS)) == 1
        for number in range(1, 6):
            database.execute("INSERT INTO orders VALUES (%s, 'x')", [number])

    found = read(database, 3, ready=write)
    assert [orjson.loads(row["record"])["id"] for row in found] == [1, 2, 3]
    until_gone(database)


def test_only_what_is_selected_counts(database: Database) -> None:
    database.execute(TABLE)
    database.execute(PUBLICATION)

    def write() -> None:
        database.execute("INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 3) n")
        database.execute("DELETE FROM orders WHERE id = 2")

    def deletes(batch: Any) -> Any:
        return batch.filter(pc.equal(batch.column("action"), "delete"))

    (row,) = read(database, 1, ready=write, chosen=deletes)
    assert orjson.loads(row["record"])["id"] == 2


def test_fewer_than_asked_for(database: Database) -> None:
    database.execute(TABLE)
    database.execute(PUBLICATION)
    assert read(database, 5, 0.5) == []
    found = read(database, 5, 1.5, lambda: insert(database))
    assert len(found) == 1
    until_gone(database)


def test_the_pipelines_slot_stays_where_it_is(database: Database) -> None:
    database.execute(TABLE)
    database.execute(PUBLICATION)
    database.execute("SELECT pg_create_logical_replication_slot('penstock', 'pgoutput')")
    position = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'penstock'"
    before = database.execute(position)
    found = read(database, 1, ready=lambda: insert(database))
    assert len(found) == 1
    assert database.execute(position) == before
    until_gone(database, [("penstock",)])
    database.execute("SELECT pg_drop_replication_slot('penstock')")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_slot_goes_whatever_happens(database: Database, error: type[BaseException]) -> None:
    database.execute(TABLE)
    database.execute(PUBLICATION)

    def interrupted(_: Any) -> Any:
        assert len(database.execute(SLOTS)) == 1
        raise error

    with pytest.raises(error):
        read(
            database, 1, chosen=interrupted,
            ready=lambda: insert(database),
        )  # fmt: skip
    until_gone(database)


def until_gone(database: Database, others: Sequence[tuple[str]] = ()) -> None:
    """The server ends the session, and with it the slot, soon after the client has."""
    pause = threading.Event()
    for _ in range(200):
        if database.execute(SLOTS) == list(others):
            return
        pause.wait(0.05)
    raise AssertionError(database.execute(SLOTS))


def test_without_a_publication(database: Database) -> None:
    database.execute(TABLE)
    with pytest.raises(CaptureError) as caught:
        read(database, 1)
    assert "There is no publication penstock yet" in str(caught.value)
    assert "--message" in str(caught.value)
    until_gone(database)


def test_a_transaction_that_stays_open(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.execute(TABLE)
    database.execute(PUBLICATION)
    monkeypatch.setattr(live, "_SLOT_TIMEOUT", "500ms")
    with psycopg.connect(database.url) as open_one:
        open_one.execute("INSERT INTO orders VALUES (1, 'x')")
        with pytest.raises(CaptureError) as caught:
            read(database, 1)
        open_one.rollback()
    assert "waits for transactions" in str(caught.value)
    until_gone(database)
