"""The records table's schema, made and brought up to date."""

from __future__ import annotations

from typing import Any, Final, LiteralString

import psycopg

from penstock.core import connect as postgres
from penstock.core import queries
from penstock.core.conflicts import again_after_conflict
from penstock.core.connect import Connection
from penstock.core.errors import StoreError
from penstock.streams.errors import store_error

OLDEST_VERSION: Final = 14
SQL: Final = queries.load("penstock.syncs.records", "records.sql")
_PREFIX: Final = "migration_"
VERSION: Final = max(int(n.removeprefix(_PREFIX)) for n in SQL if n.startswith(_PREFIX))


def migrate(connection: Connection) -> None:
    """Make the records table, or bring it up to `VERSION`; `connection` is in autocommit mode.

    Raises `StoreError` where the server does not fit, and what psycopg raises.
    """
    standby = _check(connection)
    if _version(connection) == VERSION:
        return
    if standby:
        raise StoreError(
            "read_only",
            "The records store's Postgres is a standby, and cannot be written to.",
            remedy="Point `records.store` at the primary server.",
        )
    with connection.transaction():
        connection.execute(SQL["lock"])
        connection.execute(SQL["begin_migrations"])
        for number in range(_version(connection) + 1, VERSION + 1):
            connection.execute(SQL[f"{_PREFIX}{number}"])
            connection.execute(SQL["add_migration"], [number])


def prepare(url: str) -> None:
    """Do the same in the records store at `url`; raises `StoreError`."""
    try:
        with postgres.connect(url, application_name="penstock syncs") as connection:
            again_after_conflict(lambda: migrate(connection))
    except psycopg.Error as error:
        raise store_error(error, url) from None


def is_made(url: str) -> bool:
    """Return whether the records table is there, as this Penstock has it; raises `StoreError`."""
    try:
        with postgres.connect(url, application_name="penstock syncs") as connection:
            _check(connection)
            return _version(connection) == VERSION
    except psycopg.Error as error:
        raise store_error(error, url) from None


def _check(connection: Connection) -> bool:
    """Return whether the server is a standby; raises `StoreError` where it does not fit."""
    row = connection.execute(SQL["server"]).fetchone()
    number, encoding, standby, wal_level = row or (0, "", False, "")
    if number // 10000 < OLDEST_VERSION:
        raise StoreError(
            "server_too_old",
            f"The records store's Postgres is of version {number // 10000}.",
            remedy=f"Use {OLDEST_VERSION} or newer.",
        )
    if encoding != "UTF8":
        raise StoreError(
            "encoding",
            f"The records store's database has the encoding {encoding}, and records are UTF-8.",
            remedy="Create it with ENCODING 'UTF8'.",
        )
    if wal_level != "logical":
        raise StoreError(
            "wal_level",
            f"The records store's wal_level is {wal_level}, and must be logical: changes of records "
            "are read from the WAL.",
            remedy="ALTER SYSTEM SET wal_level = 'logical'; then restart that Postgres. Or name another "
            "one in `records.store`.",
        )
    return bool(standby)


def _version(connection: Connection) -> int:
    if not _one(connection, SQL["has_table"]):
        return 0
    version = int(_one(connection, SQL["version"]))
    if version > VERSION:
        raise StoreError(
            "schema_newer",
            f"The records table has version {version}, and this Penstock supports {VERSION}.",
            remedy="Run the newer Penstock that made it.",
        )
    return version


def _one(connection: Connection, query: LiteralString) -> Any:
    row = connection.execute(query).fetchone()
    return None if row is None else row[0]
