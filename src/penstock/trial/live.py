"""The next changes of a source, read through a slot of its own that ends with its connection.

The slot is a temporary one: Postgres drops it when the session ends, however that happens. What it reads
is not taken from the pipeline, whose own slot stays where it is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import psycopg
import pyarrow as pa
from msgspec import Raw

from penstock.config.sources import PostgresSource
from penstock.core.errors import CaptureError
from penstock.core.message import TRUNCATE, Position, source_tag
from penstock.core.tables import TablePattern, matches_any
from penstock.postgres.catalog import CaptureCatalog
from penstock.postgres.chunk import Chunk
from penstock.postgres.decoder import Decoder
from penstock.postgres.replication import Keepalive, Known, ReplicationStream

_SLOT_TIMEOUT: Final = "20s"
_WAIT: Final = 1.0


class _Stream(ReplicationStream):
    """A stream of a temporary slot, made on its own connection."""

    def _prepare(self, known: Known | None) -> None:
        cursor = psycopg.ClientCursor[tuple[Any, ...]](self._connection)
        cursor.execute(f"SET statement_timeout = '{_SLOT_TIMEOUT}'")
        try:
            cursor.execute(
                "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', true)", [self.slot]
            )
        except psycopg.errors.QueryCanceled:
            raise CaptureError(
                "slot_missing",
                f"A slot for the next changes could not be made in {_SLOT_TIMEOUT}: Postgres waits for "
                "transactions that were open before.",
                remedy="End the oldest (pg_stat_activity has them), or try messages of your own:"
                " `penstock try --message`.",
            ) from None
        except psycopg.errors.ConfigurationLimitExceeded:
            raise CaptureError(
                "slots_exhausted",
                "All replication slots of the server are taken, and the next changes need one for a"
                " while.",
                remedy="Drop one that nothing reads (they are in pg_replication_slots), raise "
                "max_replication_slots, or try messages of your own: `penstock try --message`.",
            ) from None
        super()._prepare(known)


def read(
    source: PostgresSource,
    select: Callable[[pa.RecordBatch], pa.RecordBatch],
    count: int,
    seconds: float,
    ready: Callable[[], None] = lambda: None,
) -> pa.RecordBatch | None:
    """Return the next `count` messages that `select` leaves, fewer where `seconds` are over.

    Returns None where none came. `ready` is called once the slot is there: what is committed from
    then on is seen. Raises `CaptureError` where the source can't be read.
    """
    url = source.address
    slot = f"penstock_try_{os.getpid()}_{secrets.token_hex(4)}"
    found: list[pa.RecordBatch] = []

    def emit(chunk: Chunk) -> None:
        for piece in chunk.pieces:
            if (selected := select(piece.messages)).num_rows:
                found.append(selected)

    with contextlib.ExitStack() as stack:
        try:
            stream = _Stream(url, slot, source.publication)
        except CaptureError as error:
            if error.code != "publication_missing":
                raise
            raise CaptureError(
                error.code,
                f"There is no publication {source.publication} yet.",
                remedy="The first `penstock run` makes it. Until then, try messages of your own:"
                " `penstock try --message`.",
            ) from None
        stack.callback(stream.close)
        decoder = Decoder(
            Position(0, -1), splits=1, truncates=True, emit=emit,
            includes=lambda schema, table: matches_any(source.patterns, schema, table),
            grouping=lambda *_: (None, None),
        )  # fmt: skip
        # The pipeline's own tag, so that a message's key is the one that is delivered.
        tag = source_tag(stream.system_identifier, stream.database, source.slot)
        decoder.connected(stream.database, tag, utf8=stream.utf8)
        catalog = CaptureCatalog(url, lambda: decoder.lsn)
        stack.callback(catalog.close)
        ready()
        for _ in _rounds(stream, decoder, catalog, time.monotonic() + seconds):
            if sum(batch.num_rows for batch in found) >= count:
                break
    if not found:
        return None
    return pa.Table.from_batches(found).combine_chunks().to_batches()[0].slice(0, count)


def messages(
    source: PostgresSource, tables: Sequence[TablePattern], count: int, seconds: float
) -> list[dict[str, Any]]:
    """Return the same of some tables, as messages in the form that consumers get."""

    def select(batch: pa.RecordBatch) -> pa.RecordBatch:
        names = zip(
            batch.column("table_schema").to_pylist(), batch.column("table_name").to_pylist(),
            batch.column("action").to_pylist(), strict=True,
        )  # fmt: skip
        mask = [a != TRUNCATE and matches_any(tables, schema, table) for schema, table, a in names]
        return batch.filter(pa.array(mask, pa.bool_()))

    batch = read(source, select, count, seconds)
    return [] if batch is None else [_message(row) for row in batch.to_pylist()]


def _message(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "record": Raw(row["record"].encode()),
        "changes": Raw((row["changes"] or "null").encode()),
        "action": row["action"],
        "metadata": Raw(row["metadata"].encode()),
    }


def _rounds(
    stream: ReplicationStream, decoder: Decoder, catalog: CaptureCatalog, deadline: float
) -> Iterator[None]:
    """Decode what the server sends until the deadline, and yield whenever nothing more has come."""
    never, unused = os.pipe()
    try:
        while (left := deadline - time.monotonic()) > 0:
            data = stream.read()
            if data is None:
                decoder.seal()
                yield
                stream.wait(min(left, _WAIT), never)
            elif isinstance(data, Keepalive):
                if data.reply_requested:
                    stream.confirm(data.wal_end)
            elif (relation := decoder.handle(data)) is not None:
                shape = catalog.shape(relation)
                decoder.learn(relation, shape, catalog.converter)
        decoder.seal()
        yield
    finally:
        os.close(never)
        os.close(unused)
