"""Streams for tests: made in a database, and written through the real writer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from zlib import crc32

import orjson
import pyarrow as pa
from psycopg import sql
from psycopg.errors import UndefinedTable

from penstock.core.errors import StoreError
from penstock.core.message import DELETE, INSERT, UPDATE, WIRE_SCHEMA, Position, RoundPart
from penstock.sinks.stream import StreamRoute, StreamWriter
from penstock.streams.names import segment_table
from penstock.streams.records import START as BEFORE_ALL
from penstock.streams.records import (
    SourceRecord,
    StreamRecord,
    commit_position,
    stream_end,
    stream_idx,
)
from penstock.streams.segments import Segment, segments_of
from penstock.streams.store import Store

_numbers = itertools.count(1)
START = Position(100, -1)


@dataclass(frozen=True)
class Change:
    """One message to publish; `group` and `old_group` stand for the hashes of group keys.

    Without a group it is that of the `id` in the record, the primary key; without a position the
    next one. `old_key` is the `id` that an update changed, `part` which it is of those made of one.
    """

    record: dict[str, Any] = field(default_factory=lambda: {"id": next(_numbers)})
    action: str = INSERT
    changes: dict[str, Any] | None = None
    group: int | None = None
    old_group: int | None = None
    schema: str = "public"
    table: str = "items"
    position: Position | None = None
    old_key: Any = None
    part: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)  # more of it


class Stored(NamedTuple):
    """A message as a stream has it, at the stream's own position."""

    position: Position
    key: str | None
    action: str
    message: dict[str, Any]


def inserted(key: Any, **columns: Any) -> Change:
    return Change({"id": key, **columns})


def updated(key: Any, **columns: Any) -> Change:
    return Change({"id": key, **columns}, UPDATE, {})


def moved(old: Any, key: Any, **columns: Any) -> Change:
    """Return an update of the primary key."""
    return Change({"id": key, **columns}, UPDATE, {"id": old}, old_key=old)


def deleted(key: Any) -> Change:
    return Change({"id": key}, DELETE)


def wire(changes: Sequence[Change], after: Position = START) -> pa.RecordBatch:
    """Return the changes as one transaction's messages, on the LSN behind `after`'s."""
    rows: dict[str, list[Any]] = {name: [] for name in WIRE_SCHEMA.names}
    for idx, change in enumerate(changes):
        at = change.position or Position(after.lsn + 1, idx)
        pks = [change.record["id"]] if "id" in change.record else []
        metadata = {
            "table_schema": change.schema,
            "table_name": change.table,
            "database": "shop",
            "commit_timestamp": "2026-01-01T00:00:00.000000Z",
            "commit_lsn": at.lsn,
            "transaction_id": 7,
            "idempotency_key": f"tag-{at.lsn}-{at.idx}"
            + (f"-{change.part}" if change.part else ""),
            "commit_idx": at.idx,
            "record_pks": pks,
            "unavailable": [],
            **change.metadata,
        }
        group, old_group, old_key = change.group, change.old_group, None
        if group is None:
            group = crc32(f"{change.table}{pks}".encode())
        if change.old_key is not None:
            old_group = old_group or crc32(f"{change.table}{[change.old_key]}".encode())
            old = {
                **metadata,
                "idempotency_key": f"{metadata['idempotency_key']}-old",
                "record_pks": [change.old_key],
            }
            old_key = {
                "record": orjson.dumps({"id": change.old_key}),
                "metadata": orjson.dumps(old),
                "key": orjson.dumps({"id": change.old_key}),
            }
        values = (
            orjson.dumps(change.record),
            None if change.changes is None else orjson.dumps(change.changes),
            change.action,
            change.schema,
            change.table,
            orjson.dumps(metadata),
            metadata["idempotency_key"],
            at.lsn,
            at.idx,
            group,
            old_group,
            old_key,
            change.part,
        )
        for name, value in zip(rows, values, strict=True):
            rows[name].append(value)
    return pa.RecordBatch.from_arrays(
        [pa.array(rows[f.name], f.type) for f in WIRE_SCHEMA], schema=WIRE_SCHEMA
    )


def make_stream(
    store: Store,
    name: str = "events",
    *,
    source: str = "shop",
    kind: str = "changes",
    retention: timedelta | None = None,
    **group: Any,
) -> StreamRecord:
    """Register a source and a stream of it, whose own group has the settings in `group`."""
    of = store.register_source(source, "tag")
    return store.register_stream(name, of, kind, retention, group)


def source_of(store: Store, stream: StreamRecord) -> SourceRecord:
    source = store.source(stream.source)
    assert source is not None
    return source


def writer_of(store: Store, *streams: StreamRecord) -> StreamWriter:
    """Return a writer for streams of one source; stream i has the index i."""
    source = source_of(store, streams[0])
    routes = [StreamRoute(s.name, s.id, s.kind) for s in streams]
    return StreamWriter(store.url, source.id, source.base, routes)


def publish(
    store: Store, stream: StreamRecord, changes: Iterable[Change | dict[str, Any]]
) -> list[Position]:
    """Write changes (or records, as inserts) as the stream's next micro-batch.

    Returns their positions as users know them. A transaction of their own, behind all that is there.
    """
    listed = [change if isinstance(change, Change) else Change(change) for change in changes]
    source, head = source_of(store, stream), store.head(source_of(store, stream).id)
    start = commit_position(head.lsn - source.base, head.idx) if head.lsn else START
    batch = wire(listed, start)
    lsns, idxs = batch.column("commit_lsn").to_pylist(), batch.column("commit_idx").to_pylist()
    positions = [Position(lsn, idx) for lsn, idx in zip(lsns, idxs, strict=True)]
    write_part(store, stream, batch, RoundPart(start, max(positions, default=start), 0, 1))
    return [source.position(position) for position in positions]


def in_stream(position: Position, part: int = 0) -> Position:
    """Return the stream's own position of a message."""
    return Position(position.lsn, stream_idx(position.idx, part))


def end_of(position: Position) -> Position:
    """Return where a batch that ends with a message ends in a stream."""
    return Position(position.lsn, stream_end(position.idx))


def write_part(store: Store, stream: StreamRecord, batch: pa.RecordBatch, part: RoundPart) -> int:
    """Write one part of a micro-batch and return how many of its messages were new."""
    writer = writer_of(store, stream)
    try:
        writer.begin()
        written = writer.write(0, batch).new
        writer.commit(part)
    finally:
        writer.close()
    return written


def read(store: Store, stream: StreamRecord, after: Position = BEFORE_ALL) -> list[Stored]:
    """Return what a reader finds in a stream behind `after`, in order, up to the head."""
    while True:
        head = store.head(stream.source_id)
        with store.connection() as connection:
            segments = segments_of(connection, stream.id)
        try:
            return _read_segments(store, segments, after, head)
        except StoreError as error:
            with store.connection() as connection:
                left = {segment.id for segment in segments_of(connection, stream.id)}
            # The maintenance may have merged one meanwhile; one that is listed must be there.
            merged = {segment.id for segment in segments} - left
            if not merged or not isinstance(error.__context__, UndefinedTable):
                raise


def _read_segments(
    store: Store, segments: Sequence[Segment], after: Position, head: Position
) -> list[Stored]:
    found: list[Stored] = []
    with store.connection() as connection:
        for segment in segments:
            query = sql.SQL(
                "SELECT lsn, idx, key, action, message FROM {} WHERE (lsn, idx) > (%s, %s)"
                " AND (lsn, idx) <= (%s, %s) ORDER BY lsn, idx"
            ).format(segment_table(segment.id))
            end = head if segment.through is None else min(head, segment.through)
            for lsn, idx, key, action, message in connection.execute(query, [*after, *end]):
                found.append(Stored(Position(lsn, idx), key, action, orjson.loads(message)))
    return found
