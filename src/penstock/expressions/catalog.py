"""What the catalog has of the columns that expressions name, and what kind of value each has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg
from psycopg.rows import tuple_row

from penstock.core.queries import load
from penstock.expressions.types import (
    BOOL,
    DATE,
    FLOAT,
    INT,
    INTERVAL,
    JSON,
    NUMERIC,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMPTZ,
    Kind,
    Type,
)

_SQL = load("penstock.expressions", "catalog.sql")
_VARHDRSZ: Final = 4


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column's type, a domain's base type in the domain's place.

    Attributes:
        schema: The type's schema.
        name: The type's name as `pg_type` has it: `int8`, `numeric`, `_text`.
        kind: `pg_type.typtype`: b base, e enum, c composite, r range, m multirange, p pseudo.
        typmod: The type modifier, -1 where there is none.
        labels: An enum's labels, in order.
        element: An array's elements' type.
        oid: The oid of the column's own type: a domain's where it is one.
        modifier: The column's own type modifier.
        generated: s for a stored generated column, v for a virtual one.
        definition: What a generated column is made of, as SQL.
        withheld: Why messages never have the column; empty where they do.
    """

    schema: str
    name: str
    kind: str = "b"
    typmod: int = -1
    labels: tuple[str, ...] = ()
    element: ColumnType | None = None
    oid: int = 0
    modifier: int = -1
    generated: str = ""
    definition: str = ""
    withheld: str = ""

    @property
    def type(self) -> Type:
        """The kind of the column's values in expressions."""
        if self.element is not None or self.kind == "c":
            return JSON
        if self.kind == "e":
            return Type(Kind.TEXT, ordered=False, form="enum", labels=self.labels)
        if self.schema == "pg_catalog":
            if self.name == "numeric":
                return _numeric(self.typmod)
            if self.name == "bpchar":
                width = self.typmod - _VARHDRSZ if self.typmod >= _VARHDRSZ else 0
                return Type(Kind.TEXT, width=width) if width else TEXT
            if self.name in _BUILT_IN:
                return _BUILT_IN[self.name]
        elif self.name == "citext":
            return Type(Kind.TEXT, folded=True)
        elif self.name in ("hstore", "vector", "halfvec"):
            return JSON
        return _OPAQUE

    @property
    def indexed(self) -> Type:
        """The kind of what a path into the column leads to."""
        if self.element is not None:
            return self.element.type
        if self.schema != "pg_catalog" and self.name in ("vector", "halfvec"):
            return FLOAT
        return JSON


Columns = Mapping[tuple[str, str], Mapping[str, ColumnType]]
"""Each table's columns and their types; a table by schema and name."""

_OPAQUE: Final = Type(Kind.TEXT, ordered=False, form="opaque")
_BUILT_IN: Final[dict[str, Type]] = {
    "bool": BOOL,
    "int2": INT,
    "int4": INT,
    "int8": INT,
    "oid": INT,
    "float4": Type(Kind.FLOAT, single=True),
    "float8": FLOAT,
    "text": TEXT,
    "varchar": TEXT,
    "name": TEXT,
    "uuid": Type(Kind.TEXT, form="uuid"),
    "bytea": Type(Kind.TEXT, form="bytea"),
    "inet": Type(Kind.TEXT, ordered=False, form="inet"),
    "cidr": Type(Kind.TEXT, ordered=False, form="inet"),
    "date": DATE,
    "timestamp": TIMESTAMP,
    "timestamptz": TIMESTAMPTZ,
    "time": TIME,
    "timetz": _OPAQUE,
    "interval": INTERVAL,
    "json": JSON,
    "jsonb": JSON,
}


def _numeric(typmod: int) -> Type:
    """Return numeric(p,s) as a decimal that holds as much of it as 38 digits can."""
    if typmod < _VARHDRSZ:
        return NUMERIC
    packed = typmod - _VARHDRSZ
    precision, scale = packed >> 16, ((packed & 0x7FF) ^ 0x400) - 0x400
    if scale < 0:  # 1200 as a numeric(2,-2): no digit after the point, more before it
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    fixed = scale <= 38
    return Type(Kind.NUMERIC, min(precision, 38), min(scale, 38), fixed=fixed)


def load_columns(connection: psycopg.Connection[Any], tables: Iterable[tuple[str, str]]) -> Columns:
    """Return the columns of tables, given by schema and name, in one round trip.

    A table that does not exist is left out. All columns are there, whatever a publication sends.
    The connection is an ordinary one. Raises `psycopg.Error`.
    """
    asked = list(dict.fromkeys(tables))
    if not asked:
        return {}
    parameters = {"schemas": [s for s, _ in asked], "tables": [t for _, t in asked]}
    with connection.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(_SQL["columns"], parameters).fetchall()
    found: dict[tuple[str, str], dict[str, ColumnType]] = {}
    for schema, table, column, *type_ in rows:
        own, of, (oid, modifier, generated, definition) = type_[:5], type_[5:10], type_[10:]
        element = None if of[0] is None else _column_type(of)
        found.setdefault((schema, table), {})[column] = replace(
            _column_type(own), element=element, oid=oid, modifier=modifier, generated=generated,
            definition=definition or "",
        )  # fmt: skip
    return found


def _column_type(row: list[Any]) -> ColumnType:
    schema, name, kind, typmod, labels = row
    return ColumnType(schema, name, kind, typmod, tuple(labels))
