"""Plans one chunk: a snapshot that fits between two places of the WAL, and the ranges of its rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psycopg
import structlog
from psycopg import sql

from penstock.backfill import ranges
from penstock.backfill.session import SQL, Connection, open_session
from penstock.core.errors import BackfillError
from penstock.postgres.capture import MAX_UNREAD, Capture, CaptureStats
from penstock.postgres.reads import BackfillSpec, Cursor, Range, Source
from penstock.postgres.watermarks import Noting, Snapshot, Watch, unseen

KEYS: Final = 1_000
"""Rows that one chunk reads by their keys."""
_SCANS: Final = (20_000, 300_000)
_UNREAD_BYTES: Final = MAX_UNREAD // 2
_NEAR_BYTES: Final = 16 << 20
_PAUSES: Final = (0.0025, 0.5)

log = structlog.get_logger("penstock.backfill")


def is_near(connection: Connection, stats: CaptureStats) -> bool:
    """Tell whether a watermark will soon be decoded, and its chunk be taken, as a snapshot waits."""
    if stats.unread_bytes > _UNREAD_BYTES:
        return False
    (end,) = connection.execute(SQL["end"]).fetchone() or (0,)
    return bool(end - stats.received_lsn <= _NEAR_BYTES)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a chunk reads, about how many rows; `cursor` is where the backfill stands behind it."""

    ranges: tuple[Range, ...]
    rows: int
    cursor: Cursor


class Interrupted(Exception):  # noqa: N818 - no error
    """Somebody wants the planner to stop."""


class SnapshotHolder:
    """A transaction that keeps a snapshot, on a connection that is used again and again.

    `noting` has collected what changed in the table since before the snapshot.
    """

    def __init__(self, url: str) -> None:
        self._connection = open_session(url, statement="120s")
        self.snapshot = ""
        self.noting = Noting()
        self._missing: set[int] = set()
        self._upto = self._floor = self._tries = 0

    @property
    def connection(self) -> Connection:
        """The connection, inside the transaction."""
        return self._connection

    @property
    def waits_for(self) -> str:
        """What `take` waits for, in words."""
        xids = ", ".join(map(str, sorted(self._missing)[:9]))
        named = f" ({xids})" if xids else ""
        return (
            f"Transactions that were captured{named} are not visible: they may wait for a standby."
        )

    def note(self, capture: Capture, watch: Watch, seen: Seen) -> None:
        """Begin to note what changes; raises `psycopg.Error`."""
        self.noting, self._tries = Noting(), 0
        with capture.decoder() as decoder:
            watch.notings.append(self.noting)
            self._missing = set(decoder.recent.since(seen.upto))
            self._upto = decoder.recent.count
        self._floor = 0
        if not seen.settled:
            xids, self._floor = self._waiting()
            self._missing.update(xids)

    def take(self, capture: Capture, table: sql.Composable, seen: Seen) -> float:
        """Begin the transaction, with a snapshot that sees all that was decoded before `note`.

        Returns 0, or after how many seconds to try again: what was decoded may wait for a standby, or
        for a core, before it becomes visible. Raises `psycopg.Error`.
        """
        self.snapshot, snapshot = self._begin(table)
        missing = self._missing = unseen(snapshot, self._missing)
        if missing or snapshot.xmin < self._floor:
            self._connection.execute("ROLLBACK")
            self._tries += 1
            return min(math.ldexp(_PAUSES[0], self._tries), _PAUSES[1])
        seen.upto, seen.settled = self._upto, True
        with capture.decoder() as decoder:
            self.noting.taken(snapshot, decoder.xid)
        return 0.0

    def _waiting(self) -> tuple[list[int], int]:
        """Return what no capture will tell: transactions that an earlier one may have decoded.

        They wait for a standby. Where they can't be told from others, all that are older than the id
        that comes second may.
        """
        xids, unclear = self._connection.execute(SQL["waiting"]).fetchone() or ([], False)
        if not unclear:
            return xids, 0
        (newest,) = self._connection.execute(SQL["newest"]).fetchone() or (0,)
        return xids, newest

    def _begin(self, table: sql.Composable) -> tuple[str, Snapshot]:
        connection = self._connection
        connection.execute(SQL["begin"])
        connection.execute(sql.SQL(SQL["lock"]).format(table=table))
        row = connection.execute(SQL["snapshot"]).fetchone()
        assert row is not None  # noqa: S101 - a SELECT without FROM
        return row[0], Snapshot.parse(row[1])

    def end(self) -> None:
        """End the transaction; a connection that is lost is closed."""
        try:
            self._connection.execute("ROLLBACK")
        except psycopg.Error:
            self._connection.close()

    @property
    def lost(self) -> bool:
        """Whether the connection can't be used any more."""
        return self._connection.closed

    def close(self) -> None:
        """End the transaction, and the connection."""
        with contextlib.suppress(psycopg.Error):
            self._connection.close()


@dataclass
class Seen:
    """Up to which of the decoded transactions a snapshot has seen: later ones see them too.

    `settled`: and all that were decoded by whoever read the slot before this capture.
    """

    upto: int = 0
    settled: bool = False


class Planner:
    """Finds the ranges of one backfill's chunks, one after the other.

    The first begins behind `cursor`; each has up to `splits` ranges.
    """

    def __init__(self, source: Source, spec: BackfillSpec, cursor: Cursor, splits: int) -> None:
        self._source = source
        self._spec = spec
        self._splits = splits
        self._cursor = self._after = cursor
        sorts = source.sort is not None
        self._nulls = sorts and cursor is not None and cursor[0] is None
        self._ended = False
        self._scan = _SCANS[0]

    @property
    def ended(self) -> bool:
        """Whether no row is behind the last chunk."""
        return self._ended

    def weight(self, connection: Connection) -> float | None:
        """Return what one of the next rows weighs, in bytes of its text; None if there is none.

        Sizes of tables would not do, as they are those of compressed values.
        """
        if self._ended:
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
    ) -> Plan:
        """Return the next chunk of about `rows` rows, and of those with `keys` besides.

        It may be empty: at the table's end, and where `stop` says so before a row was found. Raises
        `psycopg.Error`.
        """
        found: list[Range] = []
        count = 0
        while not self._ended and not found:
            found, count = self._ahead(connection, rows)
            if stop():
                break
        again = (Range(None, None, keys=keys),) if keys else ()
        return Plan((*found, *again), count + len(keys), self._cursor)

    def _ahead(self, connection: Connection, rows: int) -> tuple[list[Range], int]:
        """Return ranges behind the cursor and go on behind them; none where no row was wanted."""
        step = max(-(-rows // self._splits), 1)
        wanted = ranges.filters(self._source, self._spec)
        if wanted is None:
            bounds, more, count = self._bounds(connection, step)
        else:
            bounds, more, count = self._scanned(connection, wanted, step * self._splits, step)
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
            self._ended = True

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
            bounds.append(None)  # how many are left nobody has counted
        return bounds, False, step * len(bounds)

    def _bound(self, connection: Connection, after: Cursor, step: int) -> Cursor:
        """Return the key of the row `step` rows further on, None if there are not as many."""
        offset = sql.Literal(step - 1)
        query = sql.SQL(SQL["bound"]).format(offset=offset, **self._parts(after))
        result = connection.execute(query).pgresult
        assert result is not None  # noqa: S101 - it was executed
        return self._key(result, 0, 0) if result.ntuples else None

    def _scanned(
        self, connection: Connection, wanted: sql.Composable, rows: int, step: int
    ) -> tuple[list[Cursor], bool, int]:
        """Look through some rows for those that are wanted, of which there may be few."""
        scanned = max(self._scan, rows)
        order = ranges.ordering(self._source, nulls=self._nulls)
        names = [sql.Identifier(f"k{i}") for i in range(len(order))]
        query = sql.SQL(SQL["scan"]).format(
            names=sql.SQL(", ").join(names),
            named=sql.SQL(", ").join(
                sql.SQL("{} AS {}").format(sql.Identifier(c.name), name)
                for c, name in zip(order, names, strict=True)
            ),
            filter=wanted, scanned=sql.Literal(scanned), step=sql.Literal(step),
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
            # The rows wanted end before the last one that was looked at.
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
