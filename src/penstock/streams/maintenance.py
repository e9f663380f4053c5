"""What keeps the streams small: segments are closed, dropped when their time is over, and merged.

It works beside writers and readers. Closing a segment waits for the writers and keeps new ones
waiting, for milliseconds; a table that is locked (by a dump of the database, say) is left for the next
time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import structlog
from psycopg import sql

from penstock.core import queries
from penstock.core.errors import StoreError
from penstock.core.message import Position
from penstock.streams.names import batches_table, segment_table
from penstock.streams.nats_consumers import low_watermarks, note_dropped
from penstock.streams.records import START, SourceRecord, StreamRecord
from penstock.streams.rows import forgettable, is_worth_it, merge, to_merge
from penstock.streams.segments import (
    SQL,
    Connection,
    Segment,
    all_segments,
    lock_writers,
    low_watermark,
    readers_of,
    segments_of,
    short_locks,
)
from penstock.streams.store import Store, create_segment

INTERVAL: Final = 10.0
"""Seconds from one look at the streams to the next."""
PARTS: Final = 5_000
"""A source's table of batches is emptied when it has more rows."""
SEGMENT_BYTES: Final = {"changes": 512 * 1024 * 1024, "rows": 64 * 1024 * 1024}
_STOP_SECONDS: Final = 2.0
_AGE: Final = timedelta(days=1)
_LEAST_AGE: Final = timedelta(minutes=1)
_WRITE_SQL: Final = queries.load("penstock.streams", "write.sql")
_log = structlog.get_logger()


class Maintenance:
    """Looks after all streams of a store every `INTERVAL` seconds, in a thread; a context manager."""

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self._stopped = threading.Event()
        self._left: dict[int, list[int]] = {}
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)

    def __enter__(self) -> Maintenance:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)
        self._store.close()  # which ends what it waits for
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL):
            try:
                run_once(self._store, self._left)
            except StoreError as error:
                if not self._stopped.is_set():
                    _log.warning("streams not maintained", error=str(error), code=error.code)
            except Exception:
                if not self._stopped.is_set():
                    _log.exception("streams not maintained")


def run_once(store: Store, left: dict[int, list[int]] | None = None) -> None:
    """Do what is due. What is locked by others is left for the next time; raises `StoreError`.

    `left` has the runs of segments, by stream, that were not worth merging: these are left alone.
    """
    left = {} if left is None else left
    streams, heads = store.streams(), dict[int, Position]()
    for source in store.sources():
        with _unless_locked(store) as connection:
            _empty_batches(store, connection, source)
        heads[source.id] = store.head(source.id)
    surveyed = _survey(store, streams)
    for stream in streams:  # one look at all of them shows that most have nothing to do
        found, head = surveyed.get(stream.id), heads.get(stream.source_id, START)
        if found is None or _may_close(stream, found):
            found = None
            with _unless_locked(store) as connection:
                _close_if_due(connection, stream)
        if found is None or _expired(stream, found, head):
            found = None
            with _unless_locked(store) as connection:
                _expire(store, connection, stream)
        if found is None or _ids(_mergeable(stream, found, head)) != left.get(stream.id, []):
            with _unless_locked(store) as connection:
                _merge(store, connection, stream, left)
    with store.connection() as connection:
        orphans = [row[0] for row in connection.execute(SQL["orphans"])]
    for segment_id in orphans:
        with _unless_locked(store) as connection:
            table = segment_table(segment_id)
            connection.execute(sql.SQL(SQL["drop_table"]).format(table=table))


def _survey(store: Store, streams: Sequence[StreamRecord]) -> dict[int, list[Segment]]:
    """Return the segments of all streams; none where one is locked: each stream is then read alone."""
    with _unless_locked(store) as connection:
        return all_segments(connection, [stream.id for stream in streams])
    return {}


@contextlib.contextmanager
def _unless_locked(store: Store) -> Iterator[Connection]:
    """Open a transaction for a step, which is given up where others hold what it must lock."""
    try:
        with store.connection() as connection, short_locks(connection):
            yield connection
    except StoreError as error:
        if error.code != "locked":
            raise


def _may_close(stream: StreamRecord, segments: Sequence[Segment]) -> bool:
    """Return whether a stream's last segment is old or large, and holds anything."""
    age = _AGE if stream.retention is None else min(_AGE, stream.retention / 8)
    old_s = max(age, _LEAST_AGE).total_seconds()
    return any(
        not last.empty and (last.age > old_s or last.bytes > SEGMENT_BYTES[stream.kind])
        for last in segments[-1:]
    )


def _close_if_due(connection: Connection, stream: StreamRecord) -> None:
    if _may_close(stream, segments_of(connection, stream.id)):
        close_segment(connection, stream)


def close_segment(connection: Connection, stream: StreamRecord) -> None:
    """Close a stream's last segment, if it holds anything, and open the next."""
    last = segments_of(connection, stream.id)[-1]
    if _last_position(connection, last) is None:
        return
    with connection.transaction():
        lock_writers(connection, stream.source_id)
        through = _last_position(connection, last)
        assert through is not None  # noqa: S101 - seen above, and nothing is deleted
        if connection.execute(SQL["close_segment"], [*through, last.id]).rowcount:
            create_segment(connection, stream.id, stream.kind, through)


def _last_position(connection: Connection, segment: Segment) -> Position | None:
    query = sql.SQL(SQL["last_position"]).format(segment=segment_table(segment.id))
    row = connection.execute(query).fetchone()
    return Position(*row) if row else None


def _expired(stream: StreamRecord, segments: Sequence[Segment], head: Position) -> list[Segment]:
    """Return the segments whose time is over."""
    if stream.retention is None:
        return []
    keep = stream.retention.total_seconds()
    return [of for of in segments if of.done(head) and (of.closed or 0) > keep]


def _mergeable(stream: StreamRecord, segments: Sequence[Segment], head: Position) -> list[Segment]:
    """Return the closed segments of a stream of kind rows that are worth merging."""
    return to_merge(segments, head) if stream.kind == "rows" else []


def _expire(store: Store, connection: Connection, stream: StreamRecord) -> None:
    """Take the segments whose time is over out of a stream."""
    head = store.head(stream.source_id)
    expired = _expired(stream, segments_of(connection, stream.id), head)
    if not expired:
        return
    through = expired[-1].through or START
    for name, count in note_dropped(connection, stream, through):
        _log.warning(
            "messages dropped that a NATS consumer had not published",
            stream=stream.name, consumer=name, messages=count, retention=str(stream.retention),
        )  # fmt: skip
    connection.execute(SQL["remove_segments"], [[segment.id for segment in expired]])
    for consumer in readers_of(stream, store.consumers()):
        position = low_watermark(connection, consumer)
        if position is not None and position < through:
            _log.warning(
                "messages dropped that a consumer had not acked",
                stream=stream.name, consumer=consumer.name, retention=str(stream.retention),
            )  # fmt: skip


def _ids(run: Sequence[Segment]) -> list[int]:
    return [segment.id for segment in run]


def _merge(
    store: Store, connection: Connection, stream: StreamRecord, left: dict[int, list[int]]
) -> None:
    """Merge closed segments of a stream of kind rows."""
    segments = segments_of(connection, stream.id)
    run = _mergeable(stream, segments, store.head(stream.source_id))
    if not run or not is_worth_it(connection, run):
        left[stream.id] = _ids(run)
        return
    readers = readers_of(stream, store.consumers())
    watermarks = [low_watermark(connection, reader) for reader in readers]
    watermarks += low_watermarks(connection, stream)
    merge(connection, stream, run, forgettable(segments, run, watermarks))


def _empty_batches(store: Store, connection: Connection, source: SourceRecord) -> None:
    """Empty a source's table of batches but for the head, and what came behind it."""
    batches = batches_table(source.id)

    def execute(name: str, *values: int) -> Any:
        return connection.execute(sql.SQL(SQL[name]).format(batches=batches), values)

    if not execute("many_parts", PARTS).fetchone()[0]:
        return
    add_part = sql.SQL(_WRITE_SQL["add_part"]).format(batches=batches)
    with connection.transaction():
        lock_writers(connection, source.id)
        head = store.head(source.id)
        unfinished = execute("unfinished_parts", *head).fetchall()
        execute("truncate")
        for part in [(*head, *head, 0, 1, 0), *unfinished]:
            connection.execute(add_part, part)
