"""The segments of a stream, and who may change them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from penstock.core import queries
from penstock.core.message import Position
from penstock.streams.consumers.state import State, replay
from penstock.streams.names import LOCK_WRITE, consumer_table
from penstock.streams.records import START, ConsumerRecord, StreamRecord

Connection = psycopg.Connection[Any]
SQL: Final = queries.load("penstock.streams", "maintenance.sql")
_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")
_WRITERS_MS: Final = "1000"
_TABLE_MS: Final = "100"


class Segment(NamedTuple):
    """A segment; `through` and `closed` are None while it is written to. Ages are in seconds."""

    id: int
    after: Position
    through: Position | None
    age: float
    closed: float | None
    bytes: int
    empty: bool = False
    """Whether nothing was ever written to it."""

    def done(self, head: Position) -> bool:
        """Return whether nothing is written to it any more, not even after a crash."""
        return self.through is not None and self.through <= head


def segments_of(connection: Connection, stream_id: int) -> list[Segment]:
    """Return a stream's segments in their order."""
    return all_segments(connection, [stream_id])[stream_id]


def all_segments(connection: Connection, streams: Sequence[int]) -> dict[int, list[Segment]]:
    """Return the segments of some streams in their order, by stream."""
    found: dict[int, list[Segment]] = {stream: [] for stream in streams}
    for stream, id_, after_lsn, after_idx, through_lsn, through_idx, *rest in connection.execute(
        SQL["segments"], [list(streams)]
    ):
        through = None if through_lsn is None else Position(through_lsn, through_idx)
        found[stream].append(Segment(id_, Position(after_lsn, after_idx), through, *rest))
    return found


def lock_writers(connection: Connection, source_id: int) -> None:
    """Keep a source's writers out until the transaction ends.

    Raises `psycopg.errors.LockNotAvailable` after a second: those that come meanwhile wait as long.
    """
    connection.execute(SQL["lock_timeout"], [_WRITERS_MS])
    connection.execute(_STORE_SQL["lock"], [LOCK_WRITE, source_id])
    connection.execute(SQL["lock_timeout"], [_TABLE_MS])


@contextlib.contextmanager
def short_locks(connection: Connection) -> Iterator[None]:
    """Open a transaction that ends soon where another session has locked one of its tables."""
    with connection.transaction():
        connection.execute(SQL["lock_timeout"], [_TABLE_MS])
        yield


def low_watermark(connection: Connection, consumer: ConsumerRecord) -> Position | None:
    """Return the position up to which a consumer is done with everything.

    None for one that has not looked at anything yet: it needs nothing that is gone when it begins.
    """
    query = sql.SQL(SQL["consumer_log"]).format(table=consumer_table(consumer.id))
    state = replay(State(START), [entry for (entry,) in connection.execute(query)])
    if state.cursor <= START:
        return None
    pending = [
        *(message[:2] for message in state.held.values()),
        *(parked[1:3] for parked in state.parked.values()),
        *state.replays,
    ]
    first = min(pending, default=None)
    if first is None or first > state.cursor:
        return Position(*state.cursor)
    return Position(first[0], first[1] - 1)


def readers_of(stream: StreamRecord, consumers: Sequence[ConsumerRecord]) -> list[ConsumerRecord]:
    """Return the consumers of a stream."""
    return [consumer for consumer in consumers if consumer.stream_id == stream.id]
