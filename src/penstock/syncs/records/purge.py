"""Purges: records are removed for ever, on request. What they were copied from stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

import psycopg

from penstock.core.connect import Connection
from penstock.streams.connect import connect
from penstock.streams.errors import store_error
from penstock.syncs.records.schema import SQL

_TABLE_MISSING: Final = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)
_ROWS: Final = 10_000


def count(url: str, sync_id: UUID, collection_id: str | None = None) -> int:
    """Return how many records a sync has, or one of its collections; raises `StoreError`."""

    def work(connection: Connection, values: dict[str, Any]) -> int:
        row = connection.execute(SQL["count"], values).fetchone()
        return 0 if row is None else int(row[0])

    return _run(url, sync_id, collection_id, work)


def purge(url: str, sync_id: UUID, collection_id: str | None = None) -> int:
    """Remove them, and return how many these were. It is no event. Raises `StoreError`."""

    def work(connection: Connection, values: dict[str, Any]) -> int:
        total = 0
        while removed := connection.execute(SQL["purge"], values).rowcount:
            total += removed
        connection.execute(SQL["forget_missing"], values)
        return total

    return _run(url, sync_id, collection_id, work)


def _run(
    url: str,
    sync_id: UUID,
    collection_id: str | None,
    work: Callable[[Connection, dict[str, Any]], int],
) -> int:
    try:
        with connect(url) as connection:
            values = {"sync": sync_id, "collection": collection_id, "rows": _ROWS}
            return work(connection, values)
    except _TABLE_MISSING:
        return 0  # no sync has run so far
    except psycopg.Error as error:
        raise store_error(error, url) from None
