"""Cursors with the columns that their values are of, so that no other columns take them for theirs."""

from __future__ import annotations

from typing import Final

from penstock.backfill import ranges
from penstock.core.errors import BackfillError
from penstock.postgres.reads import BackfillSpec, Cursor, Place, Source

_ORDER: Final = "order"


def saved(cursor: Cursor, source: Source) -> Place:
    """Return a cursor among a table's rows as it is told and kept."""
    return None if cursor is None else (*cursor, {_ORDER: _order(source)})


def restored(place: Place, source: Source, spec: BackfillSpec) -> Cursor:
    """Return the cursor that `saved` was given; raises `BackfillError` if the order is another now."""
    if place is None:
        return None
    values = tuple(value for value in place if not isinstance(value, dict))
    order = _order(source)
    (then,) = [value for value in place if isinstance(value, dict)] or [{_ORDER: order}]
    if then.get(_ORDER) == order and len(values) == len(order):
        return values
    raise BackfillError(
        "cursor",
        f"The backfill of {spec.schema}.{spec.table} stands at {_said(then.get(_ORDER, []))} ="
        f" {values}, but its rows are ordered by {_said(order)} now: the table has changed.",
        remedy="Cancel the backfill, and start it again: it begins anew.",
    )


def _order(source: Source) -> list[list[str]]:
    return [[c.name, c.type, c.collation] for c in ranges.ordering(source, nulls=False)]


def _said(order: list[list[str]]) -> str:
    return "(" + ", ".join(" ".join(filter(None, column)) for column in order) + ")"
