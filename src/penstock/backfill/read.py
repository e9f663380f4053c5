"""Reads one range of a chunk, in a task: the rows of a snapshot as batches of `WIRE_SCHEMA`.

Budget: 3 µs a row of 8 columns. COPY prints the rows as CSV, Arrow parses them by the thousand, and
kernels put the JSON together, so that Python sees a row only where it is received and hashed.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import orjson
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import pq, sql
from pyarrow import csv

from penstock.backfill import ranges, sizing
from penstock.backfill.inspect import table_of
from penstock.backfill.kernels import Values, as_text, join, kernel
from penstock.backfill.session import SQL, Connection, asking, open_session
from penstock.core.errors import BackfillError
from penstock.core.message import NO_PART, OLD_KEY, READ, WIRE_SCHEMA
from penstock.postgres.reads import RANGE_BITS, Reads
from penstock.postgres.table import Table, Transaction
from penstock.postgres.values import Types

_ROWS: Final = 4_000
_BYTES: Final = 4 << 20
_IDLE: Final = "60s"
_HELD_SECONDS: Final = 60.0
# As in all other messages, a transaction's id is the 32 bits that the WAL has of it.
_XID_MASK: Final = pa.scalar((1 << 32) - 1, pa.int64())
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
    with asking():
        writer, weigher = _Writer(reads, index), _Weigher(reads)
        with _session(reads.url) as connection:
            _import(connection, reads)
            statement = ranges.copy(reads.source, reads.spec, reads.ranges[index])
            for rows in _copied(connection, statement):
                weigher.add(rows)
                batch = writer.batch(rows)
                if batch.num_rows:
                    with _patience(connection, reads):
                        yield batch
            connection.execute("COMMIT")


@contextlib.contextmanager
def _patience(connection: Connection, reads: Reads) -> Iterator[None]:
    """Close the connection if the body, in which nothing uses it, takes too long; then raise.

    A server that has rows to send to nobody waits for ever, and keeps its snapshot and its lock: no
    timeout of its own ends that. Only a close does, as a socket that was shut down still takes data.
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
            f"Nobody took more rows of chunk {reads.chunk} for {_HELD_SECONDS:.0f} s: its snapshot "
            "was given up.",
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


class _Weigher:
    """Ends a range whose rows are heavier than the first ones let expect, before memory does."""

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
                f"{self._rows} rows of {table} weigh {self._bytes >> 20} MiB, more than was expected.",
                remedy="They are read again in smaller chunks.",
                transient=True,
            )


class _Writer:
    """Turns rows as COPY prints them into wire batches."""

    def __init__(self, reads: Reads, index: int) -> None:
        source = reads.source
        types = Types(source.types)
        self._table = table = table_of(source, dict(reads.moved))
        self._kernels = [
            kernel(types.converter(c.type_oid), utf8=source.utf8) for c in source.relation.columns
        ]
        names = [str(i) for i in range(len(table.columns))]
        self._header = (",".join(names) + "\n").encode()
        self._convert = csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.binary()), null_values=[""],
            strings_can_be_null=True, quoted_strings_can_be_null=False,
        )  # fmt: skip
        self._parse = csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)
        self._labels = [orjson.dumps(name) + b":" for name in table.columns]
        transaction = Transaction(reads.lsn, reads.microseconds, reads.xid, source.tag.encode())
        self._shared, self._key_prefix = table.constants(transaction)
        self._where = self._shared.removesuffix(transaction.text)
        self._published = _published(table)
        self._touched = pa.Array.from_buffers(
            pa.int64(), len(reads.touched) // 8, [None, pa.py_buffer(reads.touched)]
        )
        self._lsn = reads.lsn
        self._next = index << RANGE_BITS
        self._end = (index + 1) << RANGE_BITS

    def batch(self, rows: Sequence[memoryview]) -> pa.RecordBatch:
        """Return the messages of the next rows, but for those that were touched."""
        columns = self._parsed(rows)
        count = len(columns[0])
        first, self._next = self._next, self._next + count
        if self._next > self._end:
            raise BackfillError("range", f"A range has more than {self._end - first} rows.")
        numbers = pa.array(range(first, first + count), pa.int64())
        idx = numbers.cast(pa.string()).cast(pa.binary())
        values = [convert(column) for convert, column in zip(self._kernels, columns, strict=True)]
        record: list[bytes | pa.BinaryArray] = []
        text = b"{"
        for label, value in zip(self._labels, values, strict=True):
            record += (text + label + value.left, value.array)
            text = value.right + b","
        keys: list[bytes | pa.BinaryArray] = []
        between = b',"record_pks":['
        for place in self._table.groups.key:
            value = values[place]
            keys += (between + value.left, value.array)
            between = value.right + b","
        hashes = self._table.groups.hashes(values, count)
        made = {
            "record": as_text(join(*record, text[:-1] + b"}")),
            "action": pa.repeat(READ, count),
            "table_schema": pa.repeat(self._table.schema, count),
            "table_name": pa.repeat(self._table.name, count),
            "metadata": as_text(
                join(
                    *self._begin_metadata(columns, values, idx),
                    *keys,
                    between[:-1] + b'],"unavailable":[%b]}' % self._table.unavailable,
                )
            ),
            "idempotency_key": as_text(join(self._key_prefix, idx)),
            "commit_lsn": pa.repeat(pa.scalar(self._lsn, pa.int64()), count),
            "commit_idx": numbers,
            "group_hash": hashes.group,
            "old_key": pa.nulls(count, OLD_KEY),
            "part": pa.repeat(NO_PART, count),
        }
        if hashes.tie is not None:
            made["old_group_hash"] = hashes.tie
        batch = pa.RecordBatch.from_arrays(
            [made[f.name] if f.name in made else pa.nulls(count, f.type) for f in WIRE_SCHEMA],
            schema=WIRE_SCHEMA,
        )
        if not len(self._touched):
            return batch
        return batch.filter(pc.invert(pc.is_in(hashes.own, value_set=self._touched)))

    def _begin_metadata(
        self, columns: Sequence[pa.BinaryArray], values: Sequence[Values], idx: pa.BinaryArray
    ) -> Iterable[bytes | pa.BinaryArray]:
        """Return what metadata have before the key's values, in parts.

        A message in an outbox's table was published once, which its row knows the time and the
        transaction of, and not where in the WAL: it has no position.
        """
        if self._published is None:
            return self._shared, idx, b'","commit_idx":', idx
        created, xid = values[self._published[0]], columns[self._published[1]]
        narrow = pc.bit_wise_and(as_text(xid).cast(pa.int64()), _XID_MASK)
        return (
            self._where + b'"commit_timestamp":' + created.left, created.array,
            created.right + b',"transaction_id":', narrow.cast(pa.string()).cast(pa.binary()),
            b',"idempotency_key":"' + self._key_prefix, idx, b'"',
        )  # fmt: skip

    def _parsed(self, rows: Sequence[memoryview]) -> list[pa.BinaryArray]:
        # A header first: Arrow would take a byte order mark at the start of the data for its own.
        data = b"".join((self._header, *rows))
        read = csv.ReadOptions(use_threads=False, block_size=len(data) + 1)
        table = csv.read_csv(
            pa.BufferReader(data), read_options=read, parse_options=self._parse,
            convert_options=self._convert,
        )  # fmt: skip
        return [column.combine_chunks() for column in table.columns]


def _published(table: Table) -> tuple[int, int] | None:
    """Return the places of an outbox's `created_at` and `xid`; None for any other table."""
    names = table.columns
    if table.schema != "tide" or not table.name.startswith("outbox_"):
        return None
    if "created_at" not in names or "xid" not in names:
        return None
    return names.index("created_at"), names.index("xid")


# Sessions of this process that no range is being read through: a worker reads many ranges one after
# the other. The server ends them when they are not needed any more.
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
