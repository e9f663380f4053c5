"""What a capture must ask the catalog, for the WAL does not tell it: primary keys, types, the slot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg

from penstock.message import parse_lsn
from penstock.postgres.errors import CaptureError
from penstock.postgres.pgoutput import Relation
from penstock.postgres.replication import capture_error
from penstock.postgres.types import load_types
from penstock.postgres.values import Converter, Types
from penstock.queries import load

_SQL = load("penstock.postgres", "catalog.sql")


class Catalog:
    """Looks things up over a connection of its own, made when first needed and again when lost.

    Every method raises `CaptureError` where Postgres can't be asked.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection | None = None
        self._types = Types()

    def primary_key(self, relation: Relation) -> list[str]:
        """Return the names of the primary key's columns, in key order."""
        if relation.replica_identity == "d":
            # The default identity is the primary key, as it was when the row was written.
            flagged = [c.name for c in relation.columns if c.is_key]
            if len(flagged) <= 1:
                return flagged
        with self._asking() as connection:
            rows = connection.execute(_SQL["primary_key"], {"oid": relation.oid}).fetchall()
        names = [row[0] for row in rows]
        known = {c.name for c in relation.columns}
        return names if set(names) <= known else []

    def converter(self, oid: int) -> Converter | None:
        """Return what turns a type's text form into JSON; see `Types.converter`."""
        unknown = self._types.unknown(oid)
        if unknown:
            with self._asking() as connection:
                self._types.add(load_types(connection, unknown))
        return self._types.converter(oid)

    def slot(self, name: str) -> tuple[int, int]:
        """Return a slot's confirmed LSN, and the LSN up to which the server's WAL is on disk."""
        with self._asking() as connection:
            row = connection.execute(_SQL["slot"], {"slot": name}).fetchone()
        if row is None or row[0] is None:
            raise CaptureError(
                "slot_missing",
                f"Logical replication slot {name} does not exist.",
                remedy="Create it: SELECT pg_create_logical_replication_slot("
                f"'{name.replace(chr(39), chr(39) * 2)}', 'pgoutput').",
            )
        return parse_lsn(row[0]), parse_lsn(row[1])

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _asking(self) -> Iterator[psycopg.Connection]:
        try:
            if self._connection is None or self._connection.closed:
                self._connection = psycopg.connect(
                    self._url, autocommit=True, connect_timeout=10, application_name="penstock"
                )
            yield self._connection
        except psycopg.Error as error:
            self.close()
            raise capture_error(error, "", "") from None
