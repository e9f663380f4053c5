"""Looks references up: which columns the tables have, and of what kind their values are."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.core.tables import qualified_name, quote_name
from penstock.core.text import closest
from penstock.expressions.catalog import Columns, ColumnType
from penstock.expressions.errors import ExpressionError
from penstock.expressions.types import INT, JSON, NUMERIC, TEXT, TIMESTAMPTZ, Kind, Reference, Type

_METADATA: Final = {
    "commit_timestamp": TIMESTAMPTZ,
    "commit_lsn": INT,
    "commit_idx": INT,
    "transaction_id": INT,
}


class Names:
    """Looks up in some tables' columns."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def type(self, reference: Reference, position: int) -> Type:
        """Return what a reference leads to; raises `ExpressionError`."""
        if reference.root == "action":
            return TEXT
        if reference.root == "metadata":
            return _METADATA.get(reference.column, TEXT)
        column = reference.column
        if not self._columns:
            raise ExpressionError(
                position, f"{reference} can't be looked up: there is no table to look in"
            )
        found = {table: c[column] for table, c in self._columns.items() if column in c}
        if not found:
            raise ExpressionError(position, self._unknown(reference))
        for table, of in found.items():
            if of.withheld:
                raise ExpressionError(
                    position, f"messages of {qualified_name(*table)} never have {reference}: "
                    f"{of.withheld}",
                )  # fmt: skip
        return self._joined(reference, found, position)

    def check_json(self, reference: Reference, position: int, of: str = "") -> None:
        """Raise `ExpressionError` unless a column is of type json or jsonb, or `of` alone."""
        if reference.root in ("action", "metadata"):
            raise ExpressionError(position, f"{reference} is no JSON")
        self.type(Reference(reference.root, reference.column), position)
        known = (of,) if of else ("json", "jsonb")
        for columns in self._columns.values():
            column = columns.get(reference.column)
            if column is None:
                continue
            if column.schema != "pg_catalog" or column.name not in known:
                whole = Reference(reference.root, reference.column)
                name = f"{column.element.name}[]" if column.element is not None else column.name
                hint = ""
                if column.element is not None:
                    hint = f"; an element is {whole}[0]"
                raise ExpressionError(
                    position,
                    f"this takes {' or '.join(known)}, and {whole} is of type {name}{hint}",
                )

    def is_array(self, reference: Reference) -> bool:
        """Return whether a column is an array, in some table."""
        found = (of.get(reference.column) for of in self._columns.values())
        of_row = reference.root in ("record", "changes")
        return of_row and any(c is not None and c.element is not None for c in found)

    def element(self, reference: Reference, position: int) -> Type:
        """Return the type of a column's elements; raises `ExpressionError` for what is no array."""
        whole = Reference(reference.root, reference.column)
        type_ = self.type(reference, position)
        if reference.root in ("action", "metadata"):
            raise ExpressionError(position, f"an array is expected here, and {whole} is {type_}")
        for columns in self._columns.values():
            column = columns.get(reference.column)
            if column is not None and column.element is None:
                hint = "; of JSON ask by @> or ?" if type_ == JSON else ""
                raise ExpressionError(
                    position,
                    f"an array is expected here, and {whole} is of type {column.name}{hint}",
                )
        if reference.path:
            raise ExpressionError(position, f"an array is expected here: {whole}, without an index")
        element = self.type(replace(whole, path=(0,)), position)
        if element.kind is Kind.JSON:
            raise ExpressionError(
                position, f"the elements of {whole} are JSON or rows, which are not taken here"
            )
        return element

    def lacking(self, reference: Reference) -> tuple[tuple[str, str], ...]:
        """Return the tables that lack the column of a reference."""
        if reference.root in ("action", "metadata"):
            return ()
        return tuple(t for t, of in self._columns.items() if reference.column not in of)

    def _unknown(self, reference: Reference) -> str:
        head = f"{reference.root}." if reference.root else ""
        name = f"{head}{quote_name(reference.column)}"
        known = dict.fromkeys(c for columns in self._columns.values() for c in columns)
        near = ""
        if (close := closest(reference.column, known)) is not None:
            near = f"; did you mean {head}{quote_name(close)}?"
        elif known:
            near = "; there are " + ", ".join(quote_name(c) for c in list(known)[:10])
            near += " and others" if len(known) > 10 else ""
        if len(self._columns) == 1:
            table = next(iter(self._columns))
            of = f" of {qualified_name(*table)}" if table[1] else ""
            return f"unknown column {name}{of}{near}"
        return f"unknown column {name}: none of the {len(self._columns)} tables has it{near}"

    def _joined(
        self, reference: Reference, found: dict[tuple[str, str], ColumnType], position: int
    ) -> Type:
        joined: Type | None = None
        first: tuple[str, str] | None = None
        for table, column in found.items():
            type_ = _at(reference, column, position)
            together = type_ if joined is None else _join(joined, type_)
            if together is None or first is None:
                if first is not None:
                    raise ExpressionError(
                        position,
                        f"{reference} is {joined} in {qualified_name(*first)}, {type_} in "
                        f"{qualified_name(*table)}; filter these tables by sinks of their own",
                    )
                first = table
            joined = together
        assert joined is not None  # noqa: S101 - `found` is not empty
        return joined


def _at(reference: Reference, column: ColumnType, position: int) -> Type:
    """Return the type of what the reference's path leads to in a column."""
    type_ = column.type
    if not reference.path:
        return type_
    if type_.kind is not Kind.JSON:
        whole = Reference(reference.root, reference.column)
        raise ExpressionError(position, f"{whole} is {type_}, which has no parts")
    if isinstance(reference.path[0], str) and column.element is not None:
        whole = Reference(reference.root, reference.column)
        raise ExpressionError(position, f"{whole} is an array; its first element is {whole}[0]")
    # Arrays of any number of dimensions are of one type: an index for each leads to an element.
    if all(isinstance(part, int) for part in reference.path):
        return column.indexed
    return JSON


def _join(a: Type, b: Type) -> Type | None:
    """Return the type that values of both have in common, None if there is none."""
    if a == b:
        return a
    kinds = {a.kind, b.kind}
    if kinds <= {Kind.INT, Kind.NUMERIC}:
        return NUMERIC
    if kinds == {Kind.FLOAT}:
        return Type(Kind.FLOAT)
    if kinds == {Kind.TEXT}:
        form = a.form if a.form == b.form else ""
        if "" not in (a.form, b.form) and a.form != b.form:
            form = "opaque"
        ordered = a.ordered and b.ordered
        return Type(Kind.TEXT, ordered=ordered, form=form)
    return None
