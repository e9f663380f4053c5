"""Finds the range of a chunk: where it begins and ends, in one snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from penstock.backfill import ranges
from penstock.backfill.session import SQL, Connection
from penstock.postgres.reads import BackfillSpec, Cursor, Range, SourceTable

_SCANS: Final = (20_000, 300_000)
_LOOK_EVERY: Final = 10
"""Chunks from one look for the end to the next."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The ranges that a chunk has; `cursor` is where the backfill is behind it."""

    ranges: tuple[Range, ...]
    cursor: Cursor


class ChunkPlanner:
    """Finds the ranges of one attempt's chunks; the first one begins behind `cursor`."""

    def __init__(self, source: SourceTable, spec: BackfillSpec, cursor: Cursor) -> None:
        self._source = source
        self._spec = spec
        self._cursor = self._after = cursor
        sorts = source.sort is not None
        self._nulls = sorts and cursor is not None and cursor[0] is None
        self.ended = False
        """Whether no row is behind the last chunk."""
        self._scan = _SCANS[0]
        self._chunks = 0

    def weight(self, connection: Connection) -> float | None:
        """Return the bytes of text of one of the next rows; None if there is none.

        The table's size does not help: its values are compressed.
        """
        if self.ended:
            return None
        source = self._source
        query = sql.SQL(SQL["weight"]).format(
            bytes=ranges.weight(source), columns=ranges.columns(source), **self._parts(self._after)
        )
        row = connection.execute(query).fetchone()
        return row[0] if row else None

    def next(
        self,
        connection: Connection,
        rows: int,
        keys: tuple[tuple[str, ...], ...],
        stop: Callable[[], bool],
        *,
        last: int,
    ) -> ChunkPlan:
        """Return the next chunk of about `rows` rows, and of those with `keys` besides.

        Where no more than `last` are left, a chunk has all of them now and then: writers who move rows
        behind its end, or add some, would be followed for ever otherwise.

        It may be empty: at the table's end, and where `stop` returns true before a row was found. Raises
        `psycopg.Error`.
        """
        found: Range | None = None
        while not self.ended and found is None:
            found = self._ahead(connection, rows, last)
            if stop():
                break
        ahead = () if found is None else (found,)
        again = (Range(None, None, keys=keys),) if keys else ()
        return ChunkPlan((*ahead, *again), self._cursor)

    def _ahead(self, connection: Connection, rows: int, last: int) -> Range | None:
        """Return the range behind the cursor and go on behind it; None where the filters pass no row."""
        self._chunks += 1
        bound, more, passes = None, True, True
        if rows < last and self._chunks % _LOOK_EVERY == 0:
            bound, more, passes = self._found(connection, last)
        if more:
            bound, more, passes = self._found(connection, rows)
        found = Range(self._after, bound, self._nulls)
        if bound is not None:
            self._after = self._cursor = bound
        if not more:
            self._next_phase()
        return found if passes else None

    def _next_phase(self) -> None:
        """Go on from the last row that has a value to sort by to those that have none, or end."""
        sorts = self._source.sort is not None and self._spec.start is None
        if sorts and not self._nulls:
            self._nulls, self._after = True, None
        else:
            self.ended = True

    def _found(self, connection: Connection, rows: int) -> tuple[Cursor, bool, bool]:
        """Return the key behind so many rows, whether there may be more, and whether any passes."""
        filters = ranges.filters(self._source, self._spec)
        if filters is not None:
            return self._scanned(connection, filters, rows)
        bound = self._bound(connection, rows)
        return bound, bound is not None, True

    def _bound(self, connection: Connection, rows: int) -> Cursor:
        """Return the key of the row `rows` rows further on, None if there are not as many."""
        query = sql.SQL(SQL["bound"]).format(
            offset=sql.Literal(rows - 1), **self._parts(self._after)
        )
        result = connection.execute(query).pgresult
        assert result is not None  # noqa: S101 - it was executed
        return self._key(result, 0, 0) if result.ntuples else None

    def _scanned(
        self, connection: Connection, filters: sql.Composable, rows: int
    ) -> tuple[Cursor, bool, bool]:
        """Scan some rows for those that the filters pass, which may be few.

        Returns the key to go on behind, whether there may be more rows, and whether one has passed.
        """
        order = ranges.ordering(self._source, nulls=self._nulls)
        names = [sql.Identifier(f"k{i}") for i in range(len(order))]
        query = sql.SQL(SQL["scan"]).format(
            names=sql.SQL(", ").join(names),
            named=sql.SQL(", ").join(
                sql.SQL("{} AS {}").format(sql.Identifier(c.name), name)
                for c, name in zip(order, names, strict=True)
            ),
            filter=filters, scanned=sql.Literal(max(self._scan, rows)), rows=sql.Literal(rows),
            **self._parts(self._after),
        )  # fmt: skip
        result = connection.execute(query).pgresult
        assert result is not None  # noqa: S101 - it was executed
        if not result.ntuples:
            return None, False, False
        # The first row is the last one that fits, or the last one that was scanned.
        matched = int(result.get_value(0, 0) or 0)
        more = result.ntuples > 1 or result.get_value(0, 1) == b"t"
        full = matched >= rows
        self._scan = max(self._scan // 2, _SCANS[0]) if full else min(self._scan * 2, _SCANS[1])
        return self._key(result, 0, 2), more, matched > 0

    def _parts(self, after: Cursor) -> dict[str, sql.Composable]:
        source = self._source
        where = ranges.condition(source, self._spec, Range(after, None, self._nulls))
        key = ranges.key(source, nulls=self._nulls)
        return {"key": key, "order": key, "table": ranges.table(source), "condition": where}

    def _key(self, result: psycopg.pq.abc.PGresult, row: int, first: int) -> Cursor:
        values = (result.get_value(row, i) for i in range(first, result.nfields))
        key = tuple(None if v is None else v.decode() for v in values)
        return (None, *key) if self._nulls else key
