"""What is in a database of the schema `tide`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.rows import args_row, class_row

from penstock.core import queries

_SQL: Final = queries.load("penstock.outbox.sql", "catalog.sql")


@dataclass(frozen=True, slots=True)
class Server:
    """A server and the database on it; `version` is Postgres' number, 180001."""

    version: int
    encoding: str
    standby: bool
    wal_level: str


@dataclass(frozen=True, slots=True)
class Schema:
    """Whether there is a schema tide, whose it is and what `role`, the session's, may do.

    `owned`: it may act as the owner; `installed`: it has Penstock's table of versions, `readable` for
    the role; `filled`: it has anything.
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


def server(connection: psycopg.Connection[Any]) -> Server:
    """Return what the server is."""
    with connection.cursor(row_factory=args_row(Server)) as cursor:
        (found,) = cursor.execute(_SQL["server"]).fetchall()
    return found


def find_schema(connection: psycopg.Connection[Any]) -> Schema:
    """Return what is there of the schema."""
    with connection.cursor(row_factory=class_row(Schema)) as cursor:
        (found,) = cursor.execute(_SQL["schema"]).fetchall()
    return found


def version_of(connection: psycopg.Connection[Any]) -> tuple[int, str] | None:
    """Return the newest version that is installed and the digest of its functions, if any is."""
    row = connection.execute(_SQL["version"]).fetchone()
    return None if row is None else (int(row[0]), str(row[1]))


def status(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """Return `outboxes`, `inboxes`, `pipelines` and `relays`, each as its function of `tide` has it."""
    ((found,),) = connection.execute(_SQL["status"]).fetchall()
    return dict(found)
