"""What a plan rests on of its tables, and whether the rows that come are of tables like these.

A plan is made by the catalog, and rows are as their table was when they were written. The Relation
message before the first row has the table's columns then; they are compared with the plan's `Shapes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

Table = tuple[str, str]
"""A table's schema and name."""
Shape = Mapping[str, tuple[int, int] | None]
"""The columns that expressions name, each with the oid of its type and its type modifier; None where the
table lacks it."""
Shapes = Mapping[Table, Shape]
"""The shapes of all tables of a source."""

NO_SHAPES: Final[Shapes] = {}


def shape_of(data: Mapping[str, Any]) -> Shape:
    """Return a shape from its JSON."""
    return {name: None if type_ is None else tuple(type_) for name, type_ in data.items()}


class Watch:
    """Finds the table whose rows the plan was not made for.

    Args:
        shapes: What the plan rests on; without any nothing is found.
        lsn: Where the WAL ended before the plan was made. It knows of all that was committed before,
            so rows from before are of no newer table, but perhaps of an older one.
    """

    def __init__(self, shapes: Shapes = NO_SHAPES, lsn: int = 0) -> None:
        self._shapes = shapes
        self._lsn = lsn

    def is_altered(self, lsn: int, table: Table, columns: Iterable[tuple[str, int, int]]) -> bool:
        """Return whether a table was altered since, given its columns' names, types and type modifiers.

        `lsn` is that of the commit of the rows that come now.
        """
        if not self._shapes or lsn < self._lsn:
            return False
        planned = self._shapes.get(table)
        if planned is None:
            return True
        found = {column: (oid, modifier) for column, oid, modifier in columns}
        return any(found.get(column) != type_ for column, type_ in planned.items())
