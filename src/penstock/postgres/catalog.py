"""What a capture must ask the catalog, as the WAL lacks it: keys, types, the slot.

The catalog is the one of now, while the WAL may be older; what does not fit is left to the WAL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg

from penstock.core.message import parse_lsn
from penstock.core.queries import load
from penstock.postgres.connect import capture_error, connect_source, slot_missing
from penstock.postgres.pgoutput import Relation
from penstock.postgres.table import Shape
from penstock.postgres.types import Types, load_types
from penstock.postgres.values import Converter

_SQL = load("penstock.postgres", "catalog.sql")
_BUILT_IN = Types()


class CaptureCatalog:
    """Looks things up over a connection of its own, made when first needed and again when lost.

    Every method raises `CaptureError` where Postgres can't be asked. `lsn` returns the commit LSN of
    the transaction whose values are converted. `connection` is one that another catalog has detached.
    """

    def __init__(
        self,
        url: str,
        lsn: Callable[[], int] = lambda: 0,
        connection: psycopg.Connection[Any] | None = None,
    ) -> None:
        self._url = url
        self._connection = connection
        self._types = _LiveTypes(self._load_types, lsn)

    def shape(self, relation: Relation) -> Shape:
        """Return a relation's primary key and the columns of its old tuples; loads its types anew."""
        (shape,) = self.shapes([relation])
        return shape

    def shapes(self, relations: Sequence[Relation]) -> list[Shape]:
        """Return what `shape` does, of several relations at once."""
        columns = [column for relation in relations for column in relation.columns]
        types = {oid for column in columns for oid in _BUILT_IN.unknown(column.type_oid)}
        if types:
            self._types.renew(types)
        oids = sorted({relation.oid for relation in relations})
        with self._asking() as connection:
            rows = connection.execute(_SQL["shapes"], {"oids": oids}).fetchall()
        found = {oid: row for oid, *row in rows}
        return [_shape(relation, found.get(relation.oid)) for relation in relations]

    def prepare(self, publication: str) -> None:
        """Ask about the tables of a publication once, so that the server's process knows them.

        What is answered then is not kept: a table may be altered before it is asked about again.
        """
        with self._asking() as connection:
            values = {"publication": publication}
            ((oids,),) = connection.execute(_SQL["published"], values).fetchall()
            connection.execute(_SQL["shapes"], {"oids": oids})

    def converter(self, oid: int) -> Converter | None:
        """Return what turns a type's text form into JSON; see `Types.converter`."""
        if unknown := self._types.unknown(oid):
            self._types.renew(unknown)
        return self._types.converter(oid)

    def _load_types(self, oids: set[int]) -> tuple[int, list[Any]]:
        with self._asking() as connection:
            row = connection.execute(_SQL["position"]).fetchone()
            assert row is not None  # noqa: S101 - a SELECT without FROM
            return parse_lsn(row[0]), load_types(connection, oids)

    def slot(self, name: str) -> tuple[int, int]:
        """Return a slot's confirmed LSN, and the LSN up to which the server's WAL is on disk."""
        with self._asking() as connection:
            row = connection.execute(_SQL["slot"], {"slot": name}).fetchone()
        if row is None or row[0] is None:
            raise slot_missing(name)
        return parse_lsn(row[0]), parse_lsn(row[1])

    def is_read(self, name: str) -> bool:
        """Return whether some session reads a slot."""
        with self._asking() as connection:
            row = connection.execute(_SQL["is_read"], {"slot": name}).fetchone()
        return row is not None and bool(row[0])

    def detach(self) -> psycopg.Connection[Any] | None:
        """Give the connection away, if there is one."""
        connection, self._connection = self._connection, None
        return connection

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _asking(self) -> Iterator[psycopg.Connection[Any]]:
        if self._connection is None or self._connection.closed:
            self._connection = connect_source(self._url, "penstock")
            # A look-up that hangs would keep the server from hearing of the capture.
            self._connection.execute("SET statement_timeout = '10s'")
        try:
            yield self._connection
        except psycopg.Error as error:
            self.close()
            raise capture_error(error, "catalog look-up") from None


def _shape(relation: Relation, row: Sequence[Any] | None) -> Shape:
    """Return the shape of a relation, given its row of the catalog, None where it was dropped."""
    primary_key, identities, deferrable, generated = row or ([], None, False, [])
    flagged = [c.name for c in relation.columns if c.is_key]
    if relation.replica_identity == "d" and set(primary_key) != set(flagged):
        primary_key = flagged  # the default identity is the primary key, as it was then
    elif not set(primary_key) <= {c.name for c in relation.columns}:
        primary_key = []
    identity = None
    if identities is not None and not _is_of_root(relation, identities):
        # Only the primary key is the same in every partition.
        identity = tuple(primary_key) if set(identities) <= {"d", "f", "n"} else ()
    sent = {c.name for c in relation.columns}
    absent = tuple(name for name in generated if name not in sent)
    return Shape(tuple(primary_key), identity, deferrable, absent)


def _is_of_root(relation: Relation, identities: list[str]) -> bool:
    """Return whether each partition's old tuples have what the root's Relation message announces."""
    return relation.replica_identity in ("d", "f") and set(identities) <= {
        relation.replica_identity,
        "n",
    }


class _LiveTypes(Types):
    """Types that may change while their values come in.

    No message announces that a composite type was altered, but its values show it: they have more or
    fewer fields than it had. Then it is looked up again, unless it already was after that transaction.
    """

    def __init__(
        self, load: Callable[[set[int]], tuple[int, list[Any]]], lsn: Callable[[], int]
    ) -> None:
        super().__init__()
        self._load = load
        self._lsn = lsn
        self._looked_up: dict[int, int] = {}

    def renew(self, oids: set[int]) -> None:
        """Look types up (again)."""
        at, infos = self._load(oids)
        self._looked_up.update((info.oid, at) for info in infos)
        self.add(infos)

    def _build(self, oid: int) -> Converter | None:
        convert = super()._build(oid)
        info = self._infos.get(oid)
        if convert is None or info is None or info.kind != "c":
            return convert
        return self._renewing(oid, convert)

    def _renewing(self, oid: int, convert: Converter) -> Converter:
        def row(value: bytes) -> bytes:
            nonlocal convert
            converted = convert(value)
            if converted[:1] != b"{" and self._lsn() > self._looked_up.get(oid, 0):
                self.renew({oid})
                fresh = super(_LiveTypes, self)._build(oid)
                if fresh is not None:
                    convert = fresh
                    converted = convert(value)
            return converted

        return row
