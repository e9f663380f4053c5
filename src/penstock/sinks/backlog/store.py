"""Backlogs: the messages that sinks did not take in time, kept in the store in blocks.

A task adds blocks in its transaction, under the writers' shared lock; the drainer
alone takes them away. Positions are the streams' (the source's `base` is added). Blocks of several
tasks overlap, and a replay after a crash brings messages again, so they are put in order, and taken
once each, when they are read.

A sink that is `STARTING` gets the rows of a backfill before all that waits. Those that it does not
take wait too, in negative positions, so that they are read first. The drainer does not work meanwhile.

A source's id and a name identify a sink: pipelines that share a store may use the same name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core import queries
from penstock.core.blocks import cut, decode, encode
from penstock.core.delivery import DeadLetter
from penstock.core.errors import SinkError
from penstock.core.message import NO_PART, SUBJECT_FIELD, WIRE_SCHEMA, Position, is_behind
from penstock.streams.nats_consumers import PAUSED
from penstock.streams.records import START

Connection = psycopg.Connection[Any]
_SQL: Final = queries.load("penstock.sinks.backlog", "store.sql")
_LOOK_AT: Final = 512
ROWS: Final = 20_000
"""Messages that are read from a backlog at a time, about."""
_BYTES: Final = 16 * 1024 * 1024
_SCHEMA: Final = WIRE_SCHEMA.append(SUBJECT_FIELD)
STARTING: Final = "starting"
"""The code of a sink that gets a backfill's rows before what waits for it."""
STARTED: Final = "started"
"""The code of one that has them all, and takes what waits for it now."""
RESUMED: Final = SinkError("resumed", "It was paused.")
"""Why one that was paused is still behind."""
_FIRST: Final = -(1 << 62)
_COMMITTED: Final = re.compile(r'"commit_timestamp":"([^"]+)"')
_PLACE: Final = ("commit_lsn", "commit_idx", "part")


class Behind(NamedTuple):
    """A sink that is behind: for how many seconds and why. All up to `drained` was delivered.

    With a `stream_id` it is a consumer whose messages behind `since` are left in that stream, but for
    some if it `has_ahead` (see `penstock.sinks.backlog.consumer`).
    """

    source_id: int
    sink: str
    source: str
    seconds: float
    code: str
    error: str
    drained: Position
    stream_id: int | None = None
    since: Position = START
    has_ahead: bool = False


class Taken(NamedTuple):
    """The next messages of a backlog, in order; with them all up to and with `end` are taken.

    Those that are `dead` are no more to be delivered.
    """

    messages: pa.RecordBatch
    end: Position
    dead: Sequence[DeadLetter] = ()


# -- what the tasks do


def fall_behind(
    connection: Connection,
    source_id: int,
    sink: str,
    error: SinkError,
    done: Position = START,
) -> None:
    """Note that a sink is behind, and that from here on its messages go to its backlog.

    It has all messages up to `done`: those that come again are not delivered again.
    """
    values = [source_id, sink, error.code, str(error), *done]
    connection.execute(_SQL["fall_behind"], values)


def put_behind(connection: Connection, source_id: int, sink: str, error: SinkError) -> None:
    """Note that a sink's messages wait in its backlog for this reason, in place of any before."""
    connection.execute(_SQL["put_behind"], [source_id, sink, error.code, str(error)])


def spill(
    connection: Connection,
    source_id: int,
    sink: str,
    batch: pa.RecordBatch,
    base: int,
    *,
    first: bool = False,
) -> None:
    """Add messages (`WIRE_SCHEMA`), in the order of their positions, to a sink's backlog.

    In there their `commit_lsn` is the stream's: the source's own may start anew. With `first` they
    go before all others, if the sink is still `STARTING`.
    """
    if not batch.num_rows:
        return
    if first and connection.execute(_SQL["rewind"], [_FIRST, source_id, sink, STARTING]).rowcount:
        base += _FIRST
    at = batch.schema.get_field_index("commit_lsn")
    batch = batch.set_column(at, batch.schema.field(at), pc.add(batch.column(at), base))
    for piece in cut(batch):
        lsn, idx = piece.column("commit_lsn"), piece.column("commit_idx")
        ends = [lsn[0], idx[0], lsn[-1], idx[-1]]
        values = [source_id, sink, *(end.as_py() for end in ends), piece.num_rows, encode(piece)]
        connection.execute(_SQL["add_block"], values)


# -- what the drainer does


def behind(connection: Connection, source_id: int, sink: str) -> Behind | None:
    """Return a sink's row if it is behind, None if it is not."""
    row = connection.execute(_SQL["one"], [source_id, sink]).fetchone()
    return _behind(row) if row else None


def pause_of(connection: Connection, source_id: int, sink: str) -> SinkError | None:
    """Return who has paused a sink, as the reason why it is behind; None: it is not paused."""
    row = connection.execute(_SQL["paused"], [source_id, sink]).fetchone()
    return None if row is None else SinkError(PAUSED, f"{row[0]} paused it.")


def all_behind(connection: Connection) -> list[Behind]:
    """Return all sinks that are behind."""
    return [_behind(row) for row in connection.execute(_SQL["all"])]


class Attention(NamedTuple):
    """What has something to do, each as a source's id and a name."""

    behind: set[tuple[int, str]]
    asked: set[tuple[int, str]]
    """Sinks and consumers that are paused, and consumers that are to be rewound."""


def attention(connection: Connection) -> Attention:
    """Return which sinks are behind, and of which sinks and consumers something is asked."""
    found = Attention(set(), set())
    for source_id, sink, is_behind_ in connection.execute(_SQL["attention"]):
        (found.behind if is_behind_ else found.asked).add((source_id, sink))
    return found


def size(connection: Connection, source_id: int, sink: str) -> tuple[int, int]:
    """Return how many messages wait, and their bytes."""
    messages, size = connection.execute(_SQL["size"], [source_id, sink]).fetchone() or (0, 0)
    return messages, size


def take(
    connection: Connection, of: Behind, until: Position | None = None, *, look_at: int = _LOOK_AT
) -> Taken | None:
    """Return some of the first messages behind `of.drained` and up to `until` (None: all there are).

    Returns None if there is no block that could have any.
    """
    found = connection.execute(_SQL["first"], [of.source_id, of.sink, look_at]).fetchall()
    reached = [row for row in found if until is None or Position(*row[1:3]) <= until]
    if not reached:
        return None
    more = len(found) == look_at
    count = _enough(reached)
    while True:
        # A block that was not read may begin anywhere behind the last one that was found.
        next_ = found[count] if count < len(found) else found[-1] if more else None
        end = _before(None if next_ is None else Position(*next_[1:3]), until)
        ids = [row[0] for row in found[:count]]
        blocks = [block for (block,) in connection.execute(_SQL["blocks"], [ids])]
        messages = in_order([decode(block) for block in blocks], of.drained, end)
        if messages.num_rows:
            return Taken(messages, end or last_position(messages))
        if count == len(reached) and not more:
            # Blocks that hold what was delivered before as well as what may not be yet.
            return None
        if count == len(reached):
            return take(connection, of, until, look_at=4 * look_at)
        count = min(len(reached), 2 * count)


def drained(connection: Connection, source_id: int, sink: str, end: Position) -> None:
    """Note that all up to and with `end` is delivered, and drop it."""
    with connection.transaction():
        connection.execute(_SQL["drained"], [*end, source_id, sink])
        drop(connection, source_id, sink, end)


def drop(connection: Connection, source_id: int, sink: str, end: Position) -> None:
    """Drop the blocks that have nothing behind `end`."""
    values = {"source": source_id, "sink": sink, "lsn": end.lsn, "idx": end.idx}
    connection.execute(_SQL["drop"], values)


def join(connection: Connection, source_id: int, sink: str) -> None:
    """Note that a sink is not behind any more."""
    connection.execute(_SQL["join"], [source_id, sink])


def _behind(row: tuple[Any, ...]) -> Behind:
    source_id, sink, source, seconds, code, error, lsn, idx, *of_stream = row
    behind = Behind(source_id, sink, source, seconds, code, error, Position(lsn, idx))
    if not of_stream:
        return behind
    stream_id, from_lsn, from_idx, has_ahead = of_stream
    since = Position(from_lsn, from_idx)
    return behind._replace(stream_id=stream_id, since=since, has_ahead=has_ahead)


def _enough(found: list[tuple[Any, ...]]) -> int:
    rows = total = 0
    for count, (*_, block_rows, block_bytes) in enumerate(found, 1):
        rows, total = rows + block_rows, total + block_bytes
        if rows >= ROWS or total >= _BYTES:
            return count
    return len(found)


def _before(next_: Position | None, until: Position | None) -> Position | None:
    """Return the last position that lies before `next_`, and not behind `until`."""
    if next_ is None:
        return until
    last = Position(next_.lsn, next_.idx - 1)
    return last if until is None else min(last, until)


def in_order(
    batches: list[pa.RecordBatch], after: Position, end: Position | None
) -> pa.RecordBatch:
    """Return the messages in (after, end], once each, in the order of their positions."""
    batch = pa.concat_batches([_today(each) for each in batches])
    keep = is_behind(batch, after)
    if end is not None:
        keep = pc.and_(keep, pc.invert(is_behind(batch, end)))
    batch = batch.filter(keep)
    batch = batch.take(pc.sort_indices(batch, sort_keys=[(name, "ascending") for name in _PLACE]))
    if batch.num_rows < 2:
        return batch
    new = pa.array([False] * (batch.num_rows - 1))
    for column in map(batch.column, _PLACE):
        new = pc.or_(new, pc.not_equal(column[1:], column[:-1]))
    return batch.filter(pa.concat_arrays([pa.array([True]), new]))


def _today(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return messages with all columns, whether the writer knew them (an older version) or not."""
    if batch.schema.equals(_SCHEMA):
        return batch
    have = set(batch.schema.names)

    def column(field: pa.Field) -> pa.Array:
        if field.name in have:
            return batch.column(field.name)
        if field.name == "part":
            return pa.repeat(NO_PART, batch.num_rows)
        return pa.nulls(batch.num_rows, field.type)

    columns = [column(field) for field in _SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def last_position(messages: pa.RecordBatch) -> Position:
    """Return the position of the last message."""
    return position_of(messages, -1)


def commit_time(messages: pa.RecordBatch, row: int) -> float | None:
    """Return when a message was committed, in Unix time; None where it does not say."""
    at = _COMMITTED.search(messages.column("metadata")[row].as_py())
    return None if at is None else datetime.fromisoformat(at[1]).timestamp()


def position_of(messages: pa.RecordBatch, row: int) -> Position:
    """Return the position of a message."""
    lsn, idx = messages.column("commit_lsn")[row], messages.column("commit_idx")[row]
    return Position(lsn.as_py(), idx.as_py())
