"""Reads what a database has of the schema `tide`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.rows import args_row, class_row

from penstock.core import queries

_SQL: Final = queries.load("penstock.outbox.sql", "catalog.sql")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server and the database on it; `version` is Postgres' number, 180001."""

    version: int
    encoding: str
    standby: bool
    wal_level: str


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema tide of a database, and what the session's `role` may do.

    Attributes:
        there: Whether there is a schema of this name.
        owned: Whether the role may act as its owner.
        installed: Whether it has Penstock's table of versions.
        filled: Whether it has any table.
        readable: Whether the role may read the table of versions.
        may_create: Whether the role may make a schema in the database.
    """

    there: bool
    owner: str | None
    owned: bool
    installed: bool
    filled: bool
    readable: bool
    role: str
    database: str
    may_create: bool


def server(connection: psycopg.Connection[Any]) -> ServerInfo:
    """Return the server's version and settings."""
    with connection.cursor(row_factory=args_row(ServerInfo)) as cursor:
        (found,) = cursor.execute(_SQL["server"]).fetchall()
    return found


def find_schema(connection: psycopg.Connection[Any]) -> Schema:
    """Return the schema and its rights."""
    with connection.cursor(row_factory=class_row(Schema)) as cursor:
        (found,) = cursor.execute(_SQL["schema"]).fetchall()
    return found


def version_of(connection: psycopg.Connection[Any]) -> tuple[int, str] | None:
    """Return the installed version and the digest of its functions, None where there is none."""
    row = connection.execute(_SQL["version"]).fetchone()
    return None if row is None else (int(row[0]), str(row[1]))


def status(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """Return `outboxes`, `inboxes`, `pipelines` and `relays`, each as its function returns it."""
    ((found,),) = connection.execute(_SQL["status"]).fetchall()
    return dict(found)
