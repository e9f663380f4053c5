"""The Chinook store: every table backfilled and then changed, row by row as `row_to_json` has it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.integration.backfilling import Backfilling, fold
from tests.integration.capturing import prepare

from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres

DATA = Path(__file__).parents[3] / "shared" / "data" / "chinook.sql"
NAME = "chinook_auto_increment"

pytestmark = pytest.mark.skipif(
    not DATA.exists(), reason=f"{DATA} is missing (its README says more)"
)


@pytest.fixture(scope="module")
def chinook(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """Load the store as its own script does, into the database that it makes."""
    load: list[str | Path] = [
        postgres.bin_dir / "psql",
        "-X",
        "-q",
        "-v",
        "ON_ERROR_STOP=1",
        "-f",
        DATA,
        postgres.url,
    ]
    subprocess.run(
        load, check=True, capture_output=True, env={**os.environ, "PGCLIENTENCODING": "UTF8"}
    )
    database = Database(NAME, postgres.database_url(NAME))
    prepare(database)
    yield database
    database.drop(postgres.url)


def tables(database: Database) -> dict[str, list[str]]:
    """Return each table's primary key."""
    return dict(
        database.execute(
            "SELECT c.relname::text, array_agg(a.attname::text ORDER BY a.attnum) FROM pg_class c"
            " JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary"
            " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey)"
            " WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' GROUP BY 1"
        )
    )


def rows(database: Database, table: str, key: list[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return a table's rows as `row_to_json` has them, numerics as the design's table has them."""
    numerics = database.execute(
        "SELECT attname::text FROM pg_attribute WHERE attrelid = %s::regclass AND atttypid ="
        " 'numeric'::regtype",
        [table],
    )
    aside = "".join(f" || jsonb_build_object('{n}', {n}::text)" for (n,) in numerics)
    found = database.execute(f"SELECT (row_to_json(t)::jsonb{aside})::text FROM {table} t")
    read = [orjson.loads(row[0]) for row in found]
    return {tuple(row[k] for k in key): row for row in read}


def test_every_table_is_read_and_then_changed(chinook: Database) -> None:
    keys = tables(chinook)
    assert len(keys) == 11
    with Backfilling(chinook.url) as driver:
        for table, key in keys.items():
            driver.received.clear()
            driver.start(f"public.{table}")
            driver.run()
            expected = rows(chinook, table, key)
            assert len(driver.reads()) == len(driver.received) == len(expected)
            assert fold(driver.received, key) == expected, table

            column = next((c for c in next(iter(expected.values())) if c not in key), key[0])
            chinook.execute(f"UPDATE {table} SET {column} = {column}")
            driver.received.clear()
            driver.drain()
            assert {m.action for m in driver.received} == {"update"}
            assert fold(driver.received, key) == expected, table
