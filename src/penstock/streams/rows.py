"""Streams of kind `rows`: closed segments merged into one that has the newest version of each row.

Segments of like sizes are merged, so that a row is copied a number of times that grows with the
logarithm of the stream's size; few of them are left alone where their rows have no newer versions, as
after a first copy. A delete is left out when no older version is left elsewhere (the
merge takes in the stream's first segment) and every consumer is past it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Final

from psycopg import sql
from psycopg.errors import LockNotAvailable

from penstock.core import queries
from penstock.core.errors import StoreError
from penstock.core.message import Position
from penstock.streams.names import segment_table
from penstock.streams.records import START, StreamRecord
from penstock.streams.segments import SQL, Connection, Segment, lock_writers, short_locks

_SCHEMA = queries.load("penstock.streams", "schema.sql")
_FEW: Final = 8
"""A run of fewer segments is merged only where that drops rows: a reader looks into each of them."""
_SAMPLED_BYTES: Final = 1024 * 1024
_LEAST_SHARE: Final = 0.05
_PAUSES: Final = (1.0, 2.0, 4.0, 8.0)
"""Seconds between tries to keep the writers out, each of which holds them up for one."""


def to_merge(segments: Sequence[Segment], head: Position) -> list[Segment]:
    """Return the segments that are worth merging now, none if there are less than two."""
    run: list[Segment] = []
    size = 0
    for segment in reversed([segment for segment in segments if segment.done(head)]):
        if run and segment.bytes > size:
            break
        run.insert(0, segment)
        size += segment.bytes
    return run if len(run) > 1 else []


def is_worth_it(connection: Connection, run: Sequence[Segment]) -> bool:
    """Return whether a run is to be merged: it is long, or a sample of its rows shows what to drop."""
    if len(run) >= _FEW:
        return True
    rows = droppable = 0
    for index, segment in enumerate(run):
        query = sql.SQL(SQL["sample"]).format(
            segment=segment_table(segment.id),
            newest=sql.SQL(" AND ").join(map(_newest, run[index:])),
            percent=sql.Literal(100 * min(1.0, _SAMPLED_BYTES / max(segment.bytes, 1))),
        )
        found, old = connection.execute(query).fetchone() or (0, 0)
        rows, droppable = rows + found, droppable + old
    return droppable >= _LEAST_SHARE * rows


def merge(
    connection: Connection, stream: StreamRecord, run: Sequence[Segment], forget: Position
) -> None:
    """Put one segment in the place of `run`'s, without the deletes up to `forget`.

    Their tables are left: readers may still be at them. `run` is done and has no gaps between.
    """
    first, last = run[0], run[-1]
    assert last.through is not None  # noqa: S101 - it is done
    with short_locks(connection):
        row = connection.execute(SQL["new_segment_id"]).fetchone()
        segment_id = row[0] if row else 0
        into = sql.Identifier(f"segment_{segment_id}")
        connection.execute(sql.SQL(_SCHEMA["segment_table"]).format(table=into))
        _find_repeated(connection, run)
        for segment in run:
            query = sql.SQL(SQL["merge"]).format(
                into=segment_table(segment_id), segment=segment_table(segment.id)
            )
            connection.execute(query, list(forget))
        for indexes in ("segment_indexes", "segment_key_index"):
            connection.execute(sql.SQL(_SCHEMA[indexes]).format(table=into))
        ids = [segment.id for segment in run]
        _lock_writers(connection, stream.source_id)
        connection.execute(SQL["add_merged"], [segment_id, *first.after, *last.through, ids])
        if connection.execute(SQL["remove_segments"], [ids]).rowcount != len(ids):
            raise StoreError(
                "segments_changed",
                f"Another process changed the segments of stream {stream.name!r} meanwhile.",
                transient=True,
            )


def _find_repeated(connection: Connection, run: Sequence[Segment]) -> None:
    """Make the table of the keys that have more than one row; it lives as long as the transaction.

    In one pass over the keys: a look from each row into each of the later segments takes longer, and the
    more the longer the run is.
    """
    keys = [sql.SQL(SQL["keys"]).format(segment=segment_table(segment.id)) for segment in run]
    rows = sql.SQL(" UNION ALL ").join(keys)
    connection.execute(sql.SQL(SQL["repeated"]).format(rows=rows))
    connection.execute(SQL["analyze_repeated"])


def _lock_writers(connection: Connection, source_id: int) -> None:
    """Keep the writers out, letting those through that come meanwhile: there is much to lose."""
    for pause in _PAUSES:
        with contextlib.suppress(LockNotAvailable), connection.transaction():
            lock_writers(connection, source_id)
            return
        time.sleep(pause)
    lock_writers(connection, source_id)


def _newest(segment: Segment) -> sql.Composed:
    return sql.SQL(SQL["newest"]).format(segment=segment_table(segment.id))


def forgettable(
    segments: Sequence[Segment], run: Sequence[Segment], watermarks: Iterable[Position | None]
) -> Position:
    """Return up to where deletes may be left out of a merge of `run`."""
    if run[0] != segments[0]:
        return START
    passed = [position for position in watermarks if position is not None]
    return min(passed, default=run[-1].through or START)
