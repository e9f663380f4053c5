"""The tasks of a batch, as the executors read them.

A task of a long batch is a lane. One of a micro-batch carries its messages if these are few, and
otherwise names where to fetch them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.core.blocks import (
    BLOCK_SCHEMA,
    Opening,
    messages_of,
    opening,
    padding,
    with_fields,
)
from penstock.expressions.fields import extractor
from penstock.expressions.types import Field
from penstock.spark import lanes
from penstock.spark.flight import BatchServer, fetch
from penstock.spark.lanes import MORE, Lane
from penstock.spark.message_schema import MESSAGE_SCHEMA, to_messages

if TYPE_CHECKING:
    pass

_INLINE_BYTES: Final = 256 << 10
_EMPTY: Final = pa.RecordBatch.from_pylist([], schema=MESSAGE_SCHEMA)


@dataclass
class Inline(InputPartition):
    """A small batch, inside the task itself, as an Arrow IPC stream."""

    data: bytes


@dataclass
class Remote(InputPartition):
    """A large batch, fetched from the process of the capture by Arrow Flight."""

    location: str
    ticket: str


class Partitions:
    """Makes the tasks of one query's micro-batches; `host` is where executors reach this process."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._server: BatchServer | None = None

    def make(self, batch: pa.RecordBatch) -> InputPartition:
        """Return the task of a batch's messages (`WIRE_SCHEMA`)."""
        if batch.nbytes <= _INLINE_BYTES:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            return Inline(sink.getvalue().to_pybytes())
        if self._server is None:
            self._server = BatchServer(self._host)
        return Remote(self._server.location, self._server.offer(batch))

    def forget(self) -> None:
        """Drop all large batches: their tasks have ended."""
        if self._server is not None:
            self._server.forget()

    def close(self) -> None:
        """Stop serving batches."""
        if self._server is not None:
            self._server.shutdown()


@dataclass(frozen=True)
class PartitionReader:
    """Reads tasks in the executors: messages, or `blocks` of them with `fields` beside."""

    blocks: bool
    fields: tuple[Field, ...]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a task's messages, or blocks of them."""
        if isinstance(partition, Lane):
            return self._values(partition) if self.blocks else _messages(partition)
        if isinstance(partition, Inline):
            return map(to_messages, pa.ipc.open_stream(partition.data))
        assert isinstance(partition, Remote)  # noqa: S101 - there is no other
        return map(to_messages, fetch(partition.location, partition.ticket))

    def _values(self, lane: Lane) -> Iterator[pa.RecordBatch]:
        rows = 0
        for value, is_last in _values(lane):
            rows += 1
            values = [value, *(padding(rows) if is_last else ())]
            rows += len(values) - 1
            yield self._rows(values)

    def _rows(self, values: Sequence[bytes]) -> pa.RecordBatch:
        rows = pa.record_batch([pa.array(values, pa.binary())], schema=BLOCK_SCHEMA)
        return with_fields(rows, extractor(self.fields)) if self.fields else rows


def _values(lane: Lane) -> Iterator[tuple[bytes, bool]]:
    """Yield a lane's values, and of each whether it is the last one of those that are there now."""
    session = secrets.randbits(63)
    yield opening(Opening(lane.address, lane.batch, lane.number, session)), True
    for kind, data in lanes.read(lane, session):
        yield data, kind != MORE


def _messages(lane: Lane) -> Iterator[pa.RecordBatch]:
    for kind, data in lanes.read(lane, secrets.randbits(63)):
        yield to_messages(messages_of(data))
        if kind != MORE:
            yield _EMPTY
            yield _EMPTY
