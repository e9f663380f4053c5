"""The columns that a plan was made for, and whether the rows that come have these.

A plan is made by the catalog, and rows are as their table was when they were written. The Relation
message before the first row has the table's columns then; they are compared with the plan's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Table = tuple[str, str]
"""A table's schema and name."""
PlannedColumns = Mapping[str, tuple[int, int] | None]
"""The columns that expressions name, each with the oid of its type and its type modifier; None where the
table lacks it."""
PlannedTables = Mapping[Table, PlannedColumns]
"""All tables of a source."""


@dataclass(frozen=True)
class Planned:
    """What a plan was made for.

    Attributes:
        tables: Their columns; without any table none is found altered.
        lsn: Where the WAL ended before the plan was made. The plan knows what was committed before, so
            rows from before are of no newer table, but perhaps of an older one.
    """

    tables: PlannedTables = field(default_factory=dict)
    lsn: int = 0

    def is_altered(self, lsn: int, table: Table, columns: Iterable[tuple[str, int, int]]) -> bool:
        """Return whether a table was altered since, given its columns' names, types and type modifiers.

        `lsn` is that of the commit of the rows that come now.
        """
        if not self.tables or lsn < self.lsn:
            return False
        planned = self.tables.get(table)
        if planned is None:
            return True
        found = {column: (oid, modifier) for column, oid, modifier in columns}
        return any(found.get(column) != type_ for column, type_ in planned.items())
