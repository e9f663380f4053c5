"""The store's schema, made and brought up to date when a run starts."""

from __future__ import annotations

from typing import Any, Final

import psycopg

from penstock.core import queries
from penstock.core.errors import StoreError
from penstock.streams.names import LOCK_MIGRATE

OLDEST_VERSION: Final = 14
_SCHEMA: Final = queries.load("penstock.streams", "schema.sql")
_SQL: Final = queries.load("penstock.streams", "store.sql")
_PREFIX: Final = "migration_"
VERSION: Final = max(
    int(name.removeprefix(_PREFIX)) for name in _SCHEMA if name.startswith(_PREFIX)
)
"""The newest version of the schema, that this Penstock works with."""


def migrate(connection: psycopg.Connection[Any]) -> None:
    """Make the schema, or bring it up to `VERSION`, in one transaction under a lock.

    `connection` is in autocommit mode. Raises `StoreError` where the server or the schema in it does
    not fit this Penstock, and what psycopg raises.
    """
    number, encoding, standby = _one(connection, _SQL["server"])
    if number // 10000 < OLDEST_VERSION:
        raise StoreError(
            "server_too_old",
            f"The store's Postgres is of version {number // 10000}.",
            remedy=f"Use {OLDEST_VERSION} or newer.",
        )
    if encoding != "UTF8":
        raise StoreError(
            "encoding",
            f"The store's database has the encoding {encoding}, and messages are UTF-8.",
            remedy="Create it with ENCODING 'UTF8'.",
        )
    if _version(connection) == VERSION:
        return
    if standby:
        raise StoreError(
            "read_only",
            "The store's Postgres is a standby, and cannot be written to.",
            remedy="Point `store` at the primary server.",
        )
    with connection.transaction():
        connection.execute(_SQL["lock"], [LOCK_MIGRATE, 0])
        version = _version(connection)
        if version == 0:
            connection.execute(_SQL["create_schema"])
        for number in range(version + 1, VERSION + 1):
            connection.execute(_SCHEMA[f"{_PREFIX}{number}"])
            connection.execute(_SQL["add_migration"], [number])


def _version(connection: psycopg.Connection[Any]) -> int:
    """Return the schema's version, 0 if there is none."""
    if not _one(connection, _SQL["has_schema"])[0]:
        return 0
    version = int(_one(connection, _SQL["version"])[0])
    if version > VERSION:
        raise StoreError(
            "schema_newer",
            f"The store's schema has version {version}, and this Penstock supports {VERSION}.",
            remedy="Run the newer Penstock that made it.",
        )
    return version


def _one(connection: psycopg.Connection[Any], query: Any) -> tuple[Any, ...]:
    row: tuple[Any, ...] = connection.execute(query).fetchone() or (None,)
    return row
