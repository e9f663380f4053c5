"""What keeps the streams small: segments are closed, dropped when their time is over, and merged.

It works beside writers and readers. Closing a segment waits for the writers and keeps new ones
waiting, for milliseconds; a table that is locked (by a dump of the database, say) is left for the next
time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
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
from penstock.streams.rows import forgettable, merge, to_merge
from penstock.streams.segments import (
    SQL,
    Connection,
    Segment,
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
                run_once(self._store)
            except StoreError as error:
                if not self._stopped.is_set():
                    _log.warning("streams not maintained", error=str(error), code=error.code)
            except Exception:
                if not self._stopped.is_set():
                    _log.exception("streams not maintained")


def run_once(store: Store) -> None:
    """Do what is due. What is locked by others is left for the next time; raises `StoreError`."""
    sources = {source.id: source for source in store.sources()}
    for source in sources.values():
        with _unless_locked(store) as connection:
            _empty_batches(store, connection, source)
    for stream in store.streams():
        with _unless_locked(store) as connection:
            _close_if_due(connection, stream)
        with _unless_locked(store) as connection:
            _expire(store, connection, stream)
        with _unless_locked(store) as connection:
            _merge(store, connection, stream)
    with store.connection() as connection:
        orphans = [row[0] for row in connection.execute(SQL["orphans"])]
    for segment_id in orphans:
        with _unless_locked(store) as connection:
            table = segment_table(segment_id)
            connection.execute(sql.SQL(SQL["drop_table"]).format(table=table))


@contextlib.contextmanager
def _unless_locked(store: Store) -> Iterator[Connection]:
    """Open a transaction for a step, which is given up where others hold what it must lock."""
    try:
        with store.connection() as connection, short_locks(connection):
            yield connection
    except StoreError as error:
        if error.code != "locked":
            raise


def _close_if_due(connection: Connection, stream: StreamRecord) -> None:
    age = _AGE if stream.retention is None else min(_AGE, stream.retention / 8)
    last = segments_of(connection, stream.id)[-1]
    old = last.age > max(age, _LEAST_AGE).total_seconds()
    if old or last.bytes > SEGMENT_BYTES[stream.kind]:
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


def _expire(store: Store, connection: Connection, stream: StreamRecord) -> None:
    """Take the segments whose time is over out of a stream."""
    if stream.retention is None:
        return
    head, keep = store.head(stream.source_id), stream.retention.total_seconds()
    expired = [
        segment
        for segment in segments_of(connection, stream.id)
        if segment.done(head) and (segment.closed or 0) > keep
    ]
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


def _merge(store: Store, connection: Connection, stream: StreamRecord) -> None:
    """Merge closed segments of a stream of kind rows."""
    if stream.kind != "rows":
        return
    segments = segments_of(connection, stream.id)
    run = to_merge(segments, store.head(stream.source_id))
    if run:
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
