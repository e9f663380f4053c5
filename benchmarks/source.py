"""The Postgres side of a benchmark: the table, its publication, the rows, the slots.

A workload is filled once. Its WAL is kept by one slot that nobody reads, and every run gets a
copy of that slot, so all contenders and all rounds drain the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql

PUBLICATION = "bench"
TEMPLATE_SLOT = "bench_template"

# About 200 bytes a row: two integers, a numeric, a timestamp, two texts.
_TABLE = """
    CREATE TABLE {table} (
        id bigint PRIMARY KEY,
        customer_id integer NOT NULL,
        status text NOT NULL,
        amount numeric(10, 2) NOT NULL,
        note text NOT NULL,
        created_at timestamptz NOT NULL
    )
"""
_ROWS = """
    INSERT INTO {table}
    SELECT i, i %% 1000, 'pending', (i %% 10000) / 100.0,
           repeat('a note of the order ', 6) || i, clock_timestamp()
    FROM generate_series(%s::bigint, %s::bigint) AS i
"""
_SINGLE_ROWS = """
    DO $do$
    BEGIN
        FOR i IN {first}..{last} LOOP
            INSERT INTO {table}
            VALUES (i, i % 1000, 'pending', (i % 10000) / 100.0,
                    repeat('a note of the order ', 6) || i, clock_timestamp());
            COMMIT;
        END LOOP;
    END $do$
"""


@dataclass(frozen=True, slots=True)
class Table:
    """One published table."""

    url: str
    name: str

    @property
    def qualified(self) -> str:
        """Return the name as a configuration file has it."""
        return f"public.{self.name}"

    @property
    def identifier(self) -> sql.Identifier:
        """Return the name as SQL has it."""
        return sql.Identifier("public", self.name)

    @property
    def rows(self) -> sql.Composed:
        """Return the statement that writes the rows from its first to its second parameter."""
        return sql.SQL(_ROWS).format(table=self.identifier)

    def single_rows(self, first: int, last: int) -> sql.Composed:
        """Return the statement that writes rows in a transaction each."""
        return sql.SQL(_SINGLE_ROWS).format(table=self.identifier, first=first, last=last)


def create_table(url: str, name: str) -> Table:
    """Make an empty table, alone in the publication, and a slot that keeps the WAL from here on."""
    table = Table(url, name)
    with psycopg.connect(url, autocommit=True) as connection:
        drop_slot(url, TEMPLATE_SLOT)
        connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table.identifier))
        connection.execute(sql.SQL(_TABLE).format(table=table.identifier))
        connection.execute(f"DROP PUBLICATION IF EXISTS {PUBLICATION}")
        connection.execute(
            sql.SQL(
                "CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = true)"
            ).format(sql.Identifier(PUBLICATION), table.identifier)
        )
        keep_wal(url)
    return table


def keep_wal(url: str) -> None:
    """Have the template slot keep the WAL from here on, and nothing of before."""
    drop_slot(url, TEMPLATE_SLOT)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (TEMPLATE_SLOT,)
        )


def fill(table: Table, first: int, last: int, rows_per_transaction: int) -> None:
    """Write the rows `first` to `last`, so many a transaction, and flush the WAL."""
    with psycopg.connect(table.url, autocommit=True) as connection:
        # Only the preparation is asynchronous; what is measured reads WAL that is on disk.
        connection.execute("SET synchronous_commit = off")
        if rows_per_transaction == 1:
            connection.execute(table.single_rows(first, last))
        else:
            insert = table.rows
            for start in range(first, last + 1, rows_per_transaction):
                end = min(start + rows_per_transaction - 1, last)
                connection.execute(insert, (start, end))
        # Flushes the WAL, and keeps the checkpointer out of the runs that follow.
        connection.execute("CHECKPOINT")


def copy_slot(url: str, slot: str) -> None:
    """Make `slot` stand where the template slot stands."""
    drop_slot(url, slot)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_copy_logical_replication_slot(%s, %s, false)", (TEMPLATE_SLOT, slot)
        )


def drop_slot(url: str, slot: str) -> None:
    """Drop a slot if it is there, ending whoever still reads it."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
            " WHERE slot_name = %s AND active_pid IS NOT NULL",
            (slot,),
        )
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE slot_name = %s",
            (slot,),
        )


def settings(url: str) -> dict[str, str]:
    """Return the server's version and the settings that a result depends on."""
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(
            "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)",
            (["server_version", "synchronous_commit", "fsync", "shared_buffers"],),
        ).fetchall()
    return dict(found)
