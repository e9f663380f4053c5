"""Finds the ranges of a chunk: where each begins and ends, in one snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from penstock.backfill import ranges
from penstock.backfill.session import SQL, Connection
from penstock.core.errors import BackfillError
from penstock.postgres.reads import BackfillSpec, Cursor, Range, SourceTable

_SCANS: Final = (20_000, 300_000)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What a chunk reads, about how many rows; `cursor` is where the backfill is behind it."""

    ranges: tuple[Range, ...]
    rows: int
    cursor: Cursor


class ChunkPlanner:
    """Finds the ranges of one attempt's chunks, one after the other.

    The first begins behind `cursor`; each has up to `splits` ranges.
    """

    def __init__(
        self, source: SourceTable, spec: BackfillSpec, cursor: Cursor, splits: int
    ) -> None:
        self._source = source
        self._spec = spec
        self._splits = splits
        self._cursor = self._after = cursor
        sorts = source.sort is not None
        self._nulls = sorts and cursor is not None and cursor[0] is None
        self.ended = False
        """Whether no row is behind the last chunk."""
        self._scan = _SCANS[0]

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
    ) -> ChunkPlan:
        """Return the next chunk of about `rows` rows, and of those with `keys` besides.

        It may be empty: at the table's end, and where `stop` returns true before a row was found. Raises
        `psycopg.Error`.
        """
        found: list[Range] = []
        count = 0
        while not self.ended and not found:
            found, count = self._ahead(connection, rows)
            if stop():
                break
        again = (Range(None, None, keys=keys),) if keys else ()
        return ChunkPlan((*found, *again), count + len(keys), self._cursor)

    def _ahead(self, connection: Connection, rows: int) -> tuple[list[Range], int]:
        """Return ranges behind the cursor and go on behind them; none where the filters pass no row."""
        step = max(-(-rows // self._splits), 1)
        filters = ranges.filters(self._source, self._spec)
        if filters is None:
            bounds, more, count = self._bounds(connection, step)
        else:
            bounds, more, count = self._scanned(connection, filters, step * self._splits, step)
        found = []
        for bound in bounds:
            found.append(Range(self._after, bound, self._nulls))
            if bound is not None:
                self._after = self._cursor = bound
        if not more:
            self._next_phase()
        return (found if count else []), count

    def _next_phase(self) -> None:
        """Go on from the last row that has a value to sort by to those that have none, or end."""
        sorts = self._source.sort is not None and self._spec.start is None
        if sorts and not self._nulls:
            self._nulls, self._after = True, None
        else:
            self.ended = True

    def _bounds(self, connection: Connection, step: int) -> tuple[list[Cursor], bool, int]:
        bounds: list[Cursor] = []
        after = self._after
        for _ in range(self._splits):
            after = self._bound(connection, after, step)
            if after is None:
                break
            bounds.append(after)
        else:
            return bounds, True, step * len(bounds)
        if self._bound(connection, bounds[-1] if bounds else self._after, 1) is not None:
            bounds.append(None)  # their number is not known
        return bounds, False, step * len(bounds)

    def _bound(self, connection: Connection, after: Cursor, step: int) -> Cursor:
        """Return the key of the row `step` rows further on, None if there are not as many."""
        offset = sql.Literal(step - 1)
        query = sql.SQL(SQL["bound"]).format(offset=offset, **self._parts(after))
        result = connection.execute(query).pgresult
        assert result is not None  # noqa: S101 - it was executed
        return self._key(result, 0, 0) if result.ntuples else None

    def _scanned(
        self, connection: Connection, filters: sql.Composable, rows: int, step: int
    ) -> tuple[list[Cursor], bool, int]:
        """Scan some rows for those that the filters pass, which may be few."""
        scanned = max(self._scan, rows)
        order = ranges.ordering(self._source, nulls=self._nulls)
        names = [sql.Identifier(f"k{i}") for i in range(len(order))]
        query = sql.SQL(SQL["scan"]).format(
            names=sql.SQL(", ").join(names),
            named=sql.SQL(", ").join(
                sql.SQL("{} AS {}").format(sql.Identifier(c.name), name)
                for c, name in zip(order, names, strict=True)
            ),
            filter=filters, scanned=sql.Literal(scanned), step=sql.Literal(step),
            rows=sql.Literal(rows), **self._parts(self._after),
        )  # fmt: skip
        result = connection.execute(query).pgresult
        assert result is not None  # noqa: S101 - it was executed
        if not result.ntuples:
            return [], False, 0
        bounds = [self._key(result, i, 2) for i in range(result.ntuples)]
        last = result.ntuples - 1
        matched = int(result.get_value(last, 0) or 0)
        more = result.get_value(last, 1) == b"t"
        if matched >= rows:
            # The rows that pass end before the last one that was scanned.
            if last and int(result.get_value(last - 1, 0) or 0) >= rows:
                bounds, more = bounds[:-1], True
            self._scan = max(self._scan // 2, _SCANS[0])
            return bounds, more, min(matched, rows)
        self._scan = min(self._scan * 2, _SCANS[1])
        return bounds, more, matched

    def _parts(self, after: Cursor) -> dict[str, sql.Composable]:
        source = self._source
        where = ranges.condition(source, self._spec, Range(after, None, self._nulls))
        key = ranges.key(source, nulls=self._nulls)
        return {"key": key, "order": key, "table": ranges.table(source), "condition": where}

    def _key(self, result: psycopg.pq.abc.PGresult, row: int, first: int) -> Cursor:
        values = [result.get_value(row, i) for i in range(first, result.nfields)]
        try:
            key = tuple(None if v is None else v.decode() for v in values)
        except UnicodeDecodeError:
            raise BackfillError(
                "key_not_utf8",
                f"A key of {self._spec.schema}.{self._spec.table} is no UTF-8: {values}.",
                remedy="The database's encoding is SQL_ASCII; write its keys in UTF-8.",
            ) from None
        return (None, *key) if self._nulls else key
