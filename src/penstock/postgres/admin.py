"""An ordinary connection to a source's server, and what its catalogs have for a capture.

It opens the connection and asks; `setup` and `penstock.check` draw the conclusions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from penstock.config.sources import PostgresSource
from penstock.core import queries
from penstock.core.connect import Connection, address, connection_error, first_line
from penstock.core.errors import SetupError
from penstock.core.message import parse_lsn
from penstock.core.tables import TablePattern, matches_any, qualified_name
from penstock.postgres.connect import connect_through

OLDEST_VERSION: Final = 14
_SQL: Final = queries.load("penstock.postgres", "setup.sql")

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The server's settings and the role's rights."""

    version_num: int
    version: str
    wal_level: str
    max_slots: int
    slots: int
    max_senders: int
    senders: int
    is_standby: bool
    database: str
    role: str
    is_superuser: bool
    may_replicate: bool
    may_create: bool

    @property
    def major(self) -> int:
        """The major version: 18 of 18.1."""
        return self.version_num // 10000


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication's options."""

    all_tables: bool
    inserts: bool
    updates: bool
    deletes: bool
    truncates: bool
    via_root: bool
    generated: str


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table, or what could be taken for one."""

    oid: int
    schema: str
    name: str
    kind: str
    persistence: str
    is_partition: bool
    root: str | None
    owned: bool
    readable: bool
    has_key: bool
    columns: list[str]
    generated: dict[str, str]
    """Its generated columns: s for stored, v for virtual."""

    def __str__(self) -> str:
        return qualified_name(self.schema, self.name)

    @property
    def can_be_published(self) -> bool:
        """Whether Postgres takes it into a publication."""
        return self.kind in "rp" and self.persistence == "p"


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """The replica identity of a table, or of one partition of the table `oid`."""

    oid: int
    schema: str
    name: str
    identity: str
    columns: list[str]


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot as the server sees it."""

    name: str
    plugin: str | None
    slot_type: str
    database: str | None
    active: bool
    active_pid: int | None
    wal_status: str | None
    invalidation_reason: str | None
    restart_lsn: str | None
    confirmed_flush_lsn: str | None
    current_lsn: str | None
    retained_bytes: int | None
    lag_bytes: int | None
    lag_seconds: float | None


class Catalog:
    """The catalog queries of a setup over one connection."""

    def __init__(self, connection: Connection, source: PostgresSource):
        self.connection = connection
        self.source = source
        self.server = self._rows(ServerSettings, "server")[0]

    def _rows(self, row: type[_R], query: str, **parameters: Any) -> list[_R]:
        with self.connection.cursor(row_factory=class_row(row)) as cursor:
            return cursor.execute(_SQL[query], parameters).fetchall()

    def _of_publication(self, query: str) -> Iterable[tuple[Any, ...]]:
        return self.connection.execute(_SQL[query], {"name": self.source.publication})

    def fingerprint(self) -> tuple[Any, ...]:
        """Return what is another value after each change of the database's tables and columns."""
        return self.connection.execute(_SQL["fingerprint"]).fetchone() or ()

    def publication(self) -> Publication | None:
        """Return the source's publication, or None."""
        found = self._rows(Publication, "publication", name=self.source.publication)
        return found[0] if found else None

    def published_schemas(self) -> set[str]:
        """Return the schemas that the publication has as a whole."""
        if self.server.major < 15:
            return set()
        return {row[0] for row in self._of_publication("published_schemas")}

    def published_tables(self) -> dict[tuple[str, str], str | None]:
        """Return the publication's tables with their row filters."""
        return {(row[0], row[1]): row[2] for row in self._of_publication("published_tables")}

    def published_columns(self) -> dict[tuple[str, str], list[str] | None]:
        """Return the publication's tables with their columns; None: all but generated ones."""
        return {(row[0], row[1]): row[2] for row in self._of_publication("published_columns")}

    def limited_tables(self) -> list[tuple[TablePattern, int | None]]:
        """Return the tables of which the publication has a row filter or a list of columns.

        With each that is a partition comes the oid of its root.
        """
        rows = self._of_publication("limited_tables")
        return [(TablePattern(schema, name), root) for schema, name, root in rows]

    def schemas(self) -> set[str]:
        """Return the names of the database's schemas."""
        return {row[0] for row in self.connection.execute(_SQL["schemas"])}

    def relations(self) -> list[TableInfo]:
        """Return all that could be a table in the schemas of the source."""
        schemas = sorted({pattern.schema for pattern in self.source.patterns})
        return self._rows(TableInfo, "relations", schemas=schemas)

    def selected(self, relations: Sequence[TableInfo]) -> list[TableInfo]:
        """Return the tables that the source's patterns select and Postgres can publish.

        Partitions are left out: their changes come under the name of their root.
        """
        patterns = self.source.patterns
        exact = {(p.schema, p.table) for p in patterns}
        return [
            relation
            for relation in relations
            if relation.can_be_published
            and matches_any(patterns, relation.schema, relation.name)
            and (not relation.is_partition or (relation.schema, relation.name) in exact)
        ]

    def identities(self, tables: Sequence[TableInfo]) -> dict[int, list[ReplicaIdentity]]:
        """Return the replica identities of tables, by oid; partitions each have their own."""
        found: dict[int, list[ReplicaIdentity]] = {table.oid: [] for table in tables}
        for identity in self._rows(ReplicaIdentity, "identities", oids=list(found)):
            found[identity.oid].append(identity)
        return found

    def slot(self) -> Slot | None:
        """Return the source's slot, or None."""
        found = self._rows(Slot, "slots", name=self.source.slot)
        return found[0] if found else None

    def slots(self) -> list[Slot]:
        """Return all slots of the server."""
        return self._rows(Slot, "slots", name=None)

    def written_lsn(self) -> int:
        """Return where the WAL ends."""
        (row,) = self.connection.execute(_SQL["written_lsn"]).fetchall()
        return parse_lsn(row[0])

    def create_slot(self) -> None:
        """Make the source's slot."""
        self.connection.execute(_SQL["create_slot"], {"name": self.source.slot})

    def drop_slot(self) -> None:
        """Drop the source's slot."""
        self.connection.execute(_SQL["drop_slot"], {"name": self.source.slot})

    def end_reader(self) -> bool:
        """End the role's own session that reads the slot; return whether there was one."""
        rows = self.connection.execute(_SQL["end_reader"], {"name": self.source.slot}).fetchall()
        return bool(rows)

    def position(self) -> tuple[int, datetime]:
        """Return up to where the server's WAL is on disk, and its clock."""
        row = self.connection.execute(_SQL["position"]).fetchone()
        assert row is not None  # noqa: S101 - the statement always returns one
        return parse_lsn(row[0]), row[1]

    def text(self, statement: sql.Composable) -> str:
        """Return a statement as a user would paste it."""
        return statement.as_string(self.connection) + ";"


@contextlib.contextmanager
def open_catalog(source: PostgresSource, **settings: Any) -> Iterator[Catalog]:
    """Connect to a source; raises `SetupError` for what goes wrong, inside the block too.

    `settings` are libpq's, as `core.connect.connect` takes them.
    """
    url = source.address
    try:
        connection = connect_through(url, application_name="penstock", **settings)
    except psycopg.Error as error:
        raise connection_error(error, url) from None
    try:
        with connection:
            yield Catalog(connection, source)
    except psycopg.Error as error:
        lost = isinstance(error, psycopg.OperationalError)
        raise SetupError(
            "connection_lost" if lost else "postgres",
            f"{address(url)}: {first_line(error, url)}.",
            transient=lost,
        ) from None
