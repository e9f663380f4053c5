"""Checks the store: changes nothing, and names the remedy of each fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from penstock.config.settings import Config
from penstock.core import queries
from penstock.core.connect import Connection, address, connect
from penstock.core.finding import Finding
from penstock.streams.errors import OLD_STREAMS, store_error
from penstock.streams.migrate import OLDEST_VERSION, VERSION

_SQL: Final = queries.load("penstock.check", "streams.sql")
_PLACES_VERSION: Final = 3
"""Of the schema from which on messages are where they are now; streams of before are refused."""


@dataclass(frozen=True, slots=True)
class _Server:
    version_num: int
    version: str
    encoding: str
    is_standby: bool
    database: str
    role: str
    may_create: bool
    has_schema: bool
    has_tables: bool
    owner: str | None
    owned: bool


def inspect(url: str, config: Config) -> list[Finding]:
    """Return the findings of the store at `url`, and of the streams and consumers of `config`."""
    try:
        with connect(url, application_name="penstock") as connection:
            return list(_findings(connection, url, config))
    except psycopg.Error as error:
        known = store_error(error, url)
        return [Finding("error", "store", known.message, known.remedy)]


def _findings(connection: Connection, url: str, config: Config) -> Iterator[Finding]:
    with connection.cursor(row_factory=class_row(_Server)) as cursor:
        server = cursor.execute(_SQL["server"]).fetchone()
    assert server is not None  # noqa: S101 - this statement always returns one
    faults = list(_faults(connection, server))
    yield from faults
    if not faults:
        where = f"Postgres {server.version} at {address(url)}, role {server.role}"
        there = f"schema of version {_version(connection)}" if server.has_tables else "empty so far"
        yield Finding("ok", "store", f"{where}, {there}")
        if server.has_tables:
            yield from _contents(connection, config)


def _faults(connection: Connection, server: _Server) -> Iterator[Finding]:
    role, database = sql.Identifier(server.role), sql.Identifier(server.database)
    if server.version_num // 10_000 < OLDEST_VERSION:
        message = f"Postgres {server.version}: Penstock needs {OLDEST_VERSION} or newer"
        yield Finding("error", "store", message)
    if server.encoding != "UTF8":
        message = f"database {server.database} has encoding {server.encoding}: messages are UTF-8"
        fix = "CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0;"
        yield Finding("error", "store", message, fix)
    if server.is_standby:
        message = "this server is a standby, and nothing can be written to it"
        yield Finding("error", "store", message, "point `store` at the primary")
    elif not server.has_schema and not server.may_create:
        grant = sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(database, role)
        message = f"role {server.role} may not make the schema penstock there"
        yield Finding("error", "store", message, f"{grant.as_string(connection)};")
    elif server.has_schema and not server.owned:
        owner = server.owner or "another role"
        grant = sql.SQL("GRANT {} TO {}").format(sql.Identifier(owner), role)
        message = f"role {server.role} may not change the schema penstock, which is {owner}'s"
        yield Finding("error", "store", message, f"{grant.as_string(connection)};")
    elif server.has_tables and (version := _version(connection)) > VERSION:
        message = f"its schema has version {version}, and this Penstock supports {VERSION}"
        yield Finding("error", "store", message, "run the newer Penstock that made it")
    elif (
        server.has_tables
        and version < _PLACES_VERSION
        and connection.execute(_SQL["streams"]).rowcount
    ):
        yield Finding("error", "store", *OLD_STREAMS)


def _contents(connection: Connection, config: Config) -> Iterator[Finding]:
    """Compare streams and consumers of the same names."""
    streams = {row[0]: row[1:] for row in connection.execute(_SQL["streams"])}
    for name, stream in config.streams.items():
        source, kind = streams.get(name, (stream.source, stream.kind))
        for what, old, new in (("source", source, stream.source), ("kind", kind, stream.kind)):
            if old != new:
                message = f"the stream exists, with {what} {old}, not {new}"
                yield Finding("error", f"sink {name}", message, "give the sink another name")
    consumers = {row[0]: row[1:] for row in connection.execute(_SQL["consumers"])}
    for name, consumer in config.consumers.items():
        of, own = consumers.get(name, (consumer.stream, False))
        if own or of != consumer.stream:
            message = f"the name is taken by a consumer of stream {of}"
            yield Finding("error", f"consumer {name}", message, "give the consumer another name")
    for name in config.streams:
        of, own = consumers.get(name, (name, True))
        if not own:
            message = f"the name is taken by a consumer of stream {of}"
            yield Finding("error", f"sink {name}", message, "give the sink another name")


def _version(connection: Connection) -> int:
    row = connection.execute(_SQL["version"]).fetchone()
    assert row is not None  # noqa: S101 - this statement always returns one
    return int(row[0])
