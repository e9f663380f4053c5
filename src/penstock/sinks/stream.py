"""The stream sink: a part of a round into the segments of all streams of its source.

A part is written in one transaction, which notes with the messages that the part is there. So a part
is there as a whole or not at all. What comes again after a crash is left out: all up to the head,
where everything is there or was dropped in its time, and behind it what is found there.

Nothing is updated or deleted, so no snapshot that another session holds leaves dead rows here. The
lock, shared by all writers, keeps the segments as they are while messages go into them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from penstock.core import queries
from penstock.core.connect import is_lost
from penstock.core.errors import SinkError
from penstock.core.message import Position, RoundPart, is_behind
from penstock.sinks.backlog.store import STARTING
from penstock.streams import copy
from penstock.streams.connect import connect
from penstock.streams.errors import store_error
from penstock.streams.names import LOCK_WRITE, batches_table, segment_table
from penstock.streams.records import START, stream_end

_SQL: Final = queries.load("penstock.streams", "write.sql")
_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")
_FEW: Final = 100
"""So many rows are quicker looked at one by one: ten take 5 µs, and 44 by Arrow's kernels."""
_COLUMNS: Final = sql.SQL(", ").join(map(sql.Identifier, copy.COLUMNS))


@dataclass(frozen=True)
class StreamRoute:
    """A stream that is written; `kind` is the form of its messages (`core.record_forms`)."""

    name: str
    stream_id: int
    kind: str


class Backlog(NamedTuple):
    """Why a sink is not written to directly now; `drained` is its last position delivered.

    `in_stream`: it is a consumer whose messages are left in its stream.
    """

    code: str
    drained: Position
    in_stream: bool = False

    @property
    def starting(self) -> bool:
        """Whether a backfill's rows go before what waits."""
        return self.code == STARTING

    @property
    def has_first(self) -> bool:
        """Whether some of these wait themselves."""
        return self.drained < START


class Stored(NamedTuple):
    """What `write` did; a changed key is two messages in a stream of kind `rows`."""

    there: int
    new: int


class _Segment(NamedTuple):
    id: int
    after: Position
    through: Position | None


class StreamWriter:
    """Writes parts of a source's rounds, one after the other, over one connection.

    A part is `begin`, any number of `write`, and `commit` or `rollback`. All of them raise
    `SinkError`, after which nothing of the part is there, and the caller may begin it anew: what
    was lost is a connection at most, which `begin` makes again. With an `epoch`, a part is refused once
    another process has the source.
    """

    def __init__(
        self,
        url: str,
        source_id: int,
        base: int,
        routes: Sequence[StreamRoute],
        epoch: int | None = None,
    ) -> None:
        self._url = url
        self._source_id = source_id
        self._base = base
        self._epoch = epoch
        self._routes = list(routes)
        self._connection: psycopg.Connection[Any] | None = None
        self._open: dict[int, _Segment] = {}
        self._head = START
        self._is_saved = False  # whether the savepoint is made, and nothing done since then
        batches = batches_table(source_id)
        self._head_query = sql.SQL(_STORE_SQL["head"]).format(batches=batches)
        self._add_part = sql.SQL(_SQL["add_part"]).format(batches=batches)

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection; between `begin` and `commit` its statements belong to the part."""
        if self._connection is None:
            raise RuntimeError("begin() comes first")
        return self._connection

    @contextlib.contextmanager
    def statements(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend the open transaction; what psycopg raises ends it, and becomes a `SinkError`."""
        self._is_saved = False
        with self._failing():
            yield self.connection

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            self._fail(error)

    def begin(self) -> Mapping[str, Backlog]:
        """Open the transaction of a part; return the sinks that are behind."""
        try:
            if self._connection is not None and is_lost(self._connection):
                self.close()
            if self._connection is None:
                self._connection = connect(self._url)
            connection = self._connection
            streams = [route.stream_id for route in self._routes]
            with connection.pipeline():
                connection.execute(_SQL["begin"])
                connection.execute(_SQL["lock"], [LOCK_WRITE, self._source_id])
                base = connection.execute(_SQL["base"], [self._source_id])
                segments = connection.execute(_SQL["open_segments"], [streams])
                backlogs = connection.execute(_SQL["backlogs"], [self._source_id])
                head = connection.execute(self._head_query)
                connection.execute(_SQL["savepoint"])
            self._is_saved = True
            self._check_base(base.fetchone())
            self._open = {row[0]: _segment(row[1:]) for row in segments}
            self._head = Position(*(head.fetchone() or START))
            return {
                sink: Backlog(code, Position(lsn, idx), in_stream)
                for sink, code, lsn, idx, in_stream in backlogs
            }
        except psycopg.Error as error:
            self._fail(error)

    def _check_base(self, row: tuple[int, int] | None) -> None:
        if row is None or row[0] != self._base:
            self.rollback()
            raise SinkError(
                "source_changed",
                "The source was registered anew in the store while this pipeline ran.",
                remedy="Start the pipeline again.",
                transient=False,
            )
        if self._epoch is not None and row[1] != self._epoch:
            self.rollback()
            raise SinkError(
                "lease_lost",
                "Another penstock run has taken the source over: nothing more is written from here.",
                remedy="This run stands by, and takes it over when that one ends.",
                transient=False,
            )

    def write(self, stream_index: int, batch: pa.RecordBatch) -> Stored:
        """Write messages (`WIRE_SCHEMA`) to a stream; return how many are there now, and are new."""
        if not batch.num_rows:
            return Stored(0, 0)
        route = self._routes[stream_index]
        batch = copy.placed(batch, route.kind, self._base)
        with self._failing():
            new = sum(
                self._write(route, segment, part) for segment, part in self._split(route, batch)
            )
        return Stored(batch.num_rows, new)

    def _split(
        self, route: StreamRoute, batch: pa.RecordBatch
    ) -> list[tuple[_Segment, pa.RecordBatch]]:
        """Return which messages go to which segment, without those up to the head."""
        first, _ = _span(batch)
        last_segment = self._open.get(route.stream_id)
        if last_segment is None:
            self.rollback()
            raise SinkError(
                "no_stream",
                f"Stream {route.name!r} is not in the store any more.",
                remedy="Start the pipeline again, which makes it.",
                transient=False,
            )
        if last_segment.after < first and self._head < first:
            return [(last_segment, batch)]
        segments = map(_segment, self.connection.execute(_SQL["segments"], [route.stream_id]))
        missing = batch.filter(is_behind(batch, self._head))
        parts = []
        for segment in segments:
            part = missing.filter(is_behind(missing, segment.after))
            if segment.through is not None:
                part = part.filter(pc.invert(is_behind(part, segment.through)))
            if part.num_rows:
                parts.append((segment, part))
        return parts

    def _write(self, route: StreamRoute, segment: _Segment, batch: pa.RecordBatch) -> int:
        connection = self.connection
        while batch.num_rows:
            if not self._is_saved:
                connection.execute(_SQL["savepoint"])
            self._is_saved = False
            try:
                self._copy(route, segment, batch)
                break
            except psycopg.errors.UniqueViolation:
                connection.execute(_SQL["to_savepoint"])
                missing = self._missing(segment, batch)
                if missing.num_rows == batch.num_rows:
                    raise
                batch = missing
        return int(batch.num_rows)

    def _copy(self, route: StreamRoute, segment: _Segment, batch: pa.RecordBatch) -> None:
        with self.connection.cursor().copy(_copy_statement(segment.id)) as to:
            to.write(copy.HEADER)
            for data in copy.rows(batch, route.kind):
                to.write(data)
            to.write(copy.TRAILER)

    def _missing(self, segment: _Segment, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages that the segment does not have yet."""
        query = sql.SQL(_SQL["present"]).format(table=segment_table(segment.id))
        first, last = _span(batch)
        present = set(self.connection.execute(query, [*first, *last]).fetchall())
        positions = zip(
            batch.column("commit_lsn").to_pylist(),
            batch.column("commit_idx").to_pylist(),
            strict=True,
        )
        return batch.filter(pa.array([position not in present for position in positions]))

    def commit(self, part: RoundPart | None) -> None:
        """Make what was written durable; with `part` it notes the part, and notifies the readers."""
        with self.statements() as connection, connection.pipeline():
            if part is not None:
                connection.execute(self._add_part, self._values(part))
                connection.execute(_SQL["notify"], [f"s{self._source_id}"])
            connection.execute(_SQL["commit"])

    def _values(self, part: RoundPart) -> list[int]:
        start, end = part.start, part.end
        bounds = [n for p in (start, end) for n in (p.lsn + self._base, stream_end(p.idx))]
        return [*bounds, part.part, part.parts, part.plan]

    def rollback(self) -> None:
        """Give the part up; nothing of it is there."""
        connection = self._connection
        if connection is None or connection.closed:
            return
        try:
            connection.execute(_SQL["rollback"])
        except psycopg.Error:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fail(self, error: psycopg.Error) -> NoReturn:
        self.rollback()
        found = store_error(error, self._url)
        raise SinkError(
            found.code, found.message, remedy=found.remedy, transient=found.transient
        ) from None


@lru_cache(1000)
def _copy_statement(segment_id: int) -> bytes:
    table = segment_table(segment_id)
    return sql.SQL(_SQL["copy"]).format(table=table, columns=_COLUMNS).as_bytes(None)


def _segment(row: Sequence[Any]) -> _Segment:
    id_, after_lsn, after_idx, through_lsn, through_idx = row
    through = None if through_lsn is None else Position(through_lsn, through_idx)
    return _Segment(id_, Position(after_lsn, after_idx), through)


def _span(batch: pa.RecordBatch) -> tuple[Position, Position]:
    """Return the least and the greatest position."""
    lsn, idx = batch.column("commit_lsn"), batch.column("commit_idx")
    if batch.num_rows <= _FEW:
        positions = list(zip(lsn.to_pylist(), idx.to_pylist(), strict=True))
        return Position(*min(positions)), Position(*max(positions))
    ends = pc.min_max(lsn).as_py()
    low = pc.min(idx.filter(pc.equal(lsn, ends["min"]))).as_py()
    high = pc.max(idx.filter(pc.equal(lsn, ends["max"]))).as_py()
    return Position(ends["min"], low), Position(ends["max"], high)
