"""Reads one range of a chunk, in a task: the rows of a snapshot as batches of `WIRE_SCHEMA`.

Budget: 3 µs a row of 8 columns. COPY prints the rows as CSV, and `encode` makes messages of them by the
thousand, so that Python sees a row only where it is received and hashed.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Iterator, Sequence
from typing import Final

import psycopg
import pyarrow as pa
from psycopg import pq, sql

from penstock.backfill import ranges
from penstock.backfill.chunks import sizing
from penstock.backfill.read.encode import RangeEncoder
from penstock.backfill.session import SQL, Connection, open_session, reading
from penstock.core.errors import BackfillError
from penstock.postgres.reads import Reads

_ROWS: Final = 4_000
_BYTES: Final = 4 << 20
_IDLE: Final = "60s"
_HELD_SECONDS: Final = 60.0
# A snapshot whose session is gone: which of them depends on the server's version.
_LOST: Final = frozenset({"22023", "42704", "55000", "58P01"})


def read_range(reads: Reads, index: int) -> Iterator[pa.RecordBatch]:
    """Yield the messages of `reads.ranges[index]`, in batches of some thousand rows.

    Deterministic while the snapshot lives: a task that is run again gives the same messages, with the
    same keys. An empty range gives no batch. Connects by itself.

    Raises:
        BackfillError: The rows could not be read; `transient` where the chunk can be read again from
            the cursor before it (a lost snapshot, say).
    """
    with reading():
        encoder, limit = RangeEncoder(reads, index), _SizeLimit(reads)
        with _session(reads.url) as connection:
            _import(connection, reads)
            statement = ranges.copy(reads.source, reads.spec, reads.ranges[index])
            for rows in _copied(connection, statement):
                limit.add(rows)
                batch = encoder.batch(rows)
                if batch.num_rows:
                    with _closing_in_time(connection, reads):
                        yield batch
            connection.execute("COMMIT")


@contextlib.contextmanager
def _closing_in_time(connection: Connection, reads: Reads) -> Iterator[None]:
    """Close the connection if the body, in which nothing uses it, takes too long; then raise.

    A server whose rows are not received waits for ever, and keeps its snapshot and its lock: it has no
    timeout for that. Only a close ends it, as a socket that was shut down still takes data.
    """
    lock = threading.Lock()
    over = closed = False

    def close() -> None:
        nonlocal closed
        with lock:
            if not over:
                connection.close()
                closed = True

    timer = threading.Timer(_HELD_SECONDS, close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
    if closed:
        raise BackfillError(
            "snapshot_lost",
            f"Chunk {reads.chunk} was not read on for {_HELD_SECONDS:.0f} s: its snapshot was given up.",
            remedy="The chunk is read again.",
            transient=True,
        )


def _import(connection: Connection, reads: Reads) -> None:
    connection.execute(SQL["begin"])
    # Locked before the import shows that the snapshot's own transaction still holds its lock: so the
    # table was not rewritten since, and has the rows that the snapshot sees.
    connection.execute(sql.SQL(SQL["lock"]).format(table=ranges.table(reads.source)))
    try:
        query = sql.SQL(SQL["import"]).format(snapshot=sql.Literal(reads.snapshot))
        connection.execute(query)
    except psycopg.Error as error:
        if error.sqlstate not in _LOST:
            raise
        raise BackfillError(
            "snapshot_lost",
            f"The snapshot of chunk {reads.chunk} is gone: its session ended.",
            remedy="The chunk is read again.",
            transient=True,
        ) from None


def _copied(connection: Connection, statement: sql.Composed) -> Iterator[list[memoryview]]:
    """Yield what COPY sends, each item a row, some thousand or some MiB of them at a time."""
    pgconn = connection.pgconn
    pgconn.send_query(statement.as_bytes(connection))
    result = None
    while result is None:
        _await_result(pgconn)
        result = pgconn.get_result()
    if result.status != pq.ExecStatus.COPY_OUT:
        raise psycopg.errors.error_from_result(result)
    rows: list[memoryview] = []
    size, get = 0, pgconn.get_copy_data
    while True:
        length, data = get(1)
        if length > 0:
            rows.append(data)
            size += length
            if len(rows) >= _ROWS or size >= _BYTES:
                yield rows
                rows, size = [], 0
        elif length == 0:
            # The blocking form would hold the GIL.
            select.select([pgconn.socket], [], [])
            pgconn.consume_input()
        else:
            break
    while (result := pgconn.get_result()) is not None:
        if result.status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result)
    if rows:
        yield rows


def _await_result(pgconn: pq.abc.PGconn) -> None:
    pgconn.flush()
    while pgconn.is_busy():
        select.select([pgconn.socket], [], [])
        pgconn.consume_input()


class _SizeLimit:
    """Ends a range whose rows are larger than expected from the first ones, before memory is full."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._rows = self._bytes = 0

    def add(self, rows: Sequence[memoryview]) -> None:
        """Count rows. A backfill's first range, of the fewest, always goes through."""
        self._rows += len(rows)
        self._bytes += sum(map(len, rows))
        if self._bytes > sizing.TOO_HEAVY and self._rows > sizing.FEWEST:
            table = f"{self._reads.spec.schema}.{self._reads.spec.table}"
            raise BackfillError(
                "range_too_heavy",
                f"{self._rows} rows of {table} have {self._bytes >> 20} MiB, more than expected.",
                remedy="They are read again in smaller chunks.",
                transient=True,
            )


# Idle sessions of this process: a worker reads many ranges one after the other. The server ends them
# when they are not needed any more.
_free: dict[str, list[Connection]] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def _session(url: str) -> Iterator[Connection]:
    with _lock:
        kept = _free.setdefault(url, [])
        connection = kept.pop() if kept else None
    if connection is not None and not _alive(connection):
        connection.close()
        connection = None
    if connection is None:
        connection = open_session(url, statement="600s", idle=_IDLE, lock="1s")
    done = False
    try:
        yield connection
        done = True
    finally:
        if done and not connection.closed:
            with _lock:
                _free[url].append(connection)
        else:
            connection.close()


def _alive(connection: Connection) -> bool:
    try:
        connection.execute("")
    except psycopg.Error:
        return False
    return True
