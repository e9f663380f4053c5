"""The data of a backfill: what is read, how far it is, and the rows of a chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from penstock.core.message import Position
from penstock.postgres.pgoutput import Relation
from penstock.postgres.table import Shape
from penstock.postgres.types import TypeInfo

Cursor = tuple[str | None, ...] | None
"""Where a backfill is: the last row's `sort_by` value, if it sorts, and its primary key, as
Postgres prints them; None before the first row."""

SavedCursor = tuple[str | dict[str, list[list[str]]] | None, ...] | None
"""A cursor as it is reported and stored: the same values, and last
`{"order": [[name, type, collation], …]}`, their columns. In JSON a list, or null. Without the last item
the columns are not compared."""

RANGE_BITS: Final = 24
"""A read's `commit_idx` is its range's number above these bits, and its row's number in them."""


@dataclass(frozen=True, slots=True)
class BackfillSpec:
    """One table's backfill, for one sink.

    `where` is a condition that `penstock.backfill.condition` has checked. `sort_by` names a column: rows
    come in its order, nulls last, from the value `start` on, which leaves nulls out. Without it they
    come in the order of the primary key, and `start` must be None.
    """

    id: int
    sink: str
    schema: str
    table: str
    where: str | None = None
    sort_by: str | None = None
    start: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read `to_json`'s form back; raises `TypeError` on anything else."""
        return cls(**fields)


def cursor_from_json(value: list[Any] | None) -> SavedCursor:
    """Return a stored cursor from its JSON list."""
    return None if value is None else tuple(value)


@dataclass(frozen=True, slots=True)
class Range:
    """The rows behind the cursor `after` up to and with `until`; None: from the start, to the end.

    Where a backfill sorts, `nulls` are the rows without a value to sort by: they come last. With
    `keys` the range has the rows with these primary keys instead.
    """

    after: Cursor
    until: Cursor
    nulls: bool = False
    keys: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class OrderColumn:
    """A column that rows are ordered by.

    `type` is the SQL name of the type that its text is cast to, `operators` the schema of what
    compares it. `domain`: the column's type is a domain over it. `collation` is empty where it has
    none.
    """

    name: str
    type: str
    operators: str
    domain: bool = False
    collation: str = ""


@dataclass(frozen=True, slots=True)
class SourceTable:
    """What reading a range needs to know of the table, so that its rows are as those of the WAL.

    `relation`, `shape`, `group_by` and `split_by` are what `Table` takes; `relation` has the columns
    that the publication has, `types` describes their types. `row_filter` is the
    publication's, as SQL. `partitioned`: the rows are in partitions. `key` is the primary key, `sort`
    the column of `sort_by`. `utf8`: text is UTF-8 for certain.
    """

    relation: Relation
    shape: Shape
    types: tuple[TypeInfo, ...]
    database: str
    tag: str
    group_by: tuple[str, ...] | None
    split_by: tuple[str, ...] | None
    row_filter: str | None
    partitioned: bool
    key: tuple[OrderColumn, ...]
    sort: OrderColumn | None
    utf8: bool


@dataclass(frozen=True, slots=True)
class Reads:
    """A chunk of a backfill: rows that were read in one snapshot.

    `attempt` is another number each time that the backfill starts or goes back to a cursor, and `chunk`
    counts from 0 within one: a report of an older attempt is ignored. `cursor` is where the backfill is
    when all rows are delivered. All messages have the commit LSN `lsn`.
    """

    spec: BackfillSpec
    attempt: int
    chunk: int
    cursor: Cursor
    ranges: tuple[bytes, ...] = field(repr=False)
    """The rows of each range, as COPY prints them in CSV; those that are read again are the last."""
    source: SourceTable
    lsn: int = 0
    microseconds: int = 0
    """When the watermark was committed, since 2000-01-01 UTC."""
    xid: int = 0
    touched: bytes = field(default=b"", repr=False)
    """Hashes (64 bits each, native order) of the keys whose rows changed since: those are left out."""
    moved: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """What `Table` takes under this name."""

    @property
    def end(self) -> Position:
        """The last position that a message of this chunk could have."""
        return Position(self.lsn, (len(self.ranges) << RANGE_BITS) - 1)
