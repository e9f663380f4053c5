"""The source's reader driven as Spark drives it, without Spark: offsets, restarts, settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from tests.integration.capturing import PATIENCE, confirmed
from tests.waits import await_true

from penstock.core.errors import CaptureError
from penstock.core.message import Position
from penstock.embedded.handles import Database
from penstock.spark.options import SourceOptions
from penstock.spark.source import PostgresChangesReader

Offset = dict[str, Any]


@contextmanager
def reading(database: Database, **options: str) -> Iterator[PostgresChangesReader]:
    reader = PostgresChangesReader(
        SourceOptions.parse({"url": database.url, "slot": "s", "splits": "2", **options})
    )
    try:
        yield reader
    finally:
        reader.stop()
        # The server notices a moment later that the slot's reader has gone.
        active = "SELECT FROM pg_replication_slots WHERE slot_name = 's' AND active"
        await_true(lambda: not database.execute(active))


def after(reader: PostgresChangesReader, start: Offset, rows: int = 1_000) -> Offset:
    """Return the end of the next batch, asking as Spark would: each time waits for up to a second."""
    end = start
    deadline = time.monotonic() + PATIENCE
    while end == start:
        assert time.monotonic() < deadline, f"nothing behind {start}"
        end = reader.latestOffset(start, ReadMaxRows(rows))
    return end


def ids(reader: PostgresChangesReader, start: Offset, end: Offset) -> list[str]:
    """Return the records of a batch, as the executors would read them."""
    return sorted(
        record
        for partition in reader.partitions(start, end)
        for batch in reader.read(partition)
        for record in batch.column("record").to_pylist()
    )


def test_batches_and_restarts(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with reading(database) as reader:
        start = reader.initialOffset()
        database.execute("INSERT INTO t SELECT generate_series(1, 6000)")
        done, batches = start, []
        while done.get("idx") != 5_999:
            first, done = done, after(reader, done, 4_000)
            batches.append(ids(reader, first, done))
            assert ids(reader, first, done) == batches[-1], "a batch can be planned again"
        found = [record for batch in batches for record in batch]
        assert sorted(found) == sorted(f'{{"id":{i}}}' for i in range(1, 6001))
        assert all(len(batch) <= 4_000 for batch in batches)
        # Spark fails here: the last batch is planned and not done.
    assert confirmed(database) <= Position.from_offset(done).lsn
    with reading(database) as reader:
        assert ids(reader, first, done) == batches[-1]
        database.execute("INSERT INTO t VALUES (0)")
        third = after(reader, done)
        assert ids(reader, done, third) == ['{"id":0}']
    with reading(database) as reader:
        # Without a checkpoint: from the slot, which is where all before was delivered.
        again = reader.initialOffset()
        assert ids(reader, again, after(reader, again)) == ['{"id":0}']
        reader.commit(third)
        # While it reads: its last report may have been of before the transaction's end.
        await_true(lambda: confirmed(database) > Position.from_offset(third).lsn)


def test_a_position_ahead_of_the_server(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with reading(database) as reader:
        reader.initialOffset()
        with pytest.raises(CaptureError) as caught:
            reader.latestOffset(Position(1 << 60, 0).to_offset(), ReadMaxRows(10))
    assert caught.value.code == "position_ahead_of_server"
    assert caught.value.remedy
