"""Cursors as they are stored: with their columns, so that a cursor of other columns is refused."""

from __future__ import annotations

from typing import Final

from penstock.backfill import ranges
from penstock.core.errors import BackfillError
from penstock.postgres.reads import BackfillSpec, Cursor, SavedCursor, SourceTable

_ORDER: Final = "order"


def to_saved(cursor: Cursor, source: SourceTable) -> SavedCursor:
    """Return a cursor as it is reported and stored."""
    return None if cursor is None else (*cursor, {_ORDER: _order(source)})


def from_saved(saved: SavedCursor, source: SourceTable, spec: BackfillSpec) -> Cursor:
    """Return the cursor behind `to_saved`; raises `BackfillError` if the rows' order has changed."""
    if saved is None:
        return None
    values = tuple(value for value in saved if not isinstance(value, dict))
    order = _order(source)
    (then,) = [value for value in saved if isinstance(value, dict)] or [{_ORDER: order}]
    if then.get(_ORDER) == order and len(values) == len(order):
        return values
    raise BackfillError(
        "cursor",
        f"The backfill of {spec.schema}.{spec.table} is at {_text(then.get(_ORDER, []))} ="
        f" {values}, but its rows are ordered by {_text(order)} now: the table has changed.",
        remedy="Cancel the backfill, and start it again: it begins anew.",
    )


def _order(source: SourceTable) -> list[list[str]]:
    return [[c.name, c.type, c.collation] for c in ranges.ordering(source, nulls=False)]


def _text(order: list[list[str]]) -> str:
    return "(" + ", ".join(" ".join(filter(None, column)) for column in order) + ")"
