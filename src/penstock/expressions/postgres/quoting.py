"""Literals and types as Postgres reads them."""

from __future__ import annotations

from typing import Final

from penstock.expressions.types import Kind, Type

BYTES: Final = ' COLLATE "C"'
"""Behind a text: it is compared byte by byte."""
_TYPES: Final = {
    Kind.BOOL: "boolean",
    Kind.INT: "bigint",
    Kind.FLOAT: "float8",
    Kind.NUMERIC: "numeric",
    Kind.KEY: "numeric",
    Kind.DATE: "date",
    Kind.TIMESTAMP: "timestamp",
    Kind.TIMESTAMPTZ: "timestamptz",
    Kind.TIME: "time",
    Kind.INTERVAL: "interval",
    Kind.JSON: "text",
}


def quoted(text: str) -> str:
    """Return a literal, whatever `standard_conforming_strings` is."""
    escaped = text.replace("'", "''")
    if "\\" not in text:
        return f"'{escaped}'"
    return " E'" + escaped.replace("\\", "\\\\") + "'"


def pg_type(type_: Type) -> str:
    """Return the type that values of a column have in Postgres, as far as an expression sees it."""
    if type_.kind is Kind.FLOAT and type_.single:
        return "float4"
    if type_.kind is not Kind.TEXT:
        return _TYPES[type_.kind]
    if type_.form in ("uuid", "bytea", "inet"):
        return type_.form
    return "bpchar" if type_.width else "text"
