"""The tasks of a batch: a small one carries its messages, a large one names where to fetch them.

`Partitions` makes them in the process of the capture, `PartitionReader` reads them in the executors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.core.blocks import pack, with_fields
from penstock.core.message import BatchPart
from penstock.expressions.fields import extractor
from penstock.expressions.types import Field
from penstock.spark.flight import BatchServer, fetch
from penstock.spark.message_schema import to_messages

_INLINE_BYTES: Final = 256 << 10


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
    """Makes the tasks of one query's batches; `host` is where executors reach this process.

    With `blocks` a task's messages are packed into blocks.
    """

    def __init__(self, host: str, *, blocks: bool) -> None:
        self._host = host
        self._blocks = blocks
        self._server: BatchServer | None = None

    def make(self, batch: pa.RecordBatch, part: BatchPart | None = None) -> InputPartition:
        """Return the task of a batch's messages (`WIRE_SCHEMA`)."""
        if self._blocks:
            batch = pack(batch, part)
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
        batches: Iterator[pa.RecordBatch]
        if isinstance(partition, Inline):
            batches = iter(pa.ipc.open_stream(partition.data))
        elif isinstance(partition, Remote):
            batches = fetch(partition.location, partition.ticket)
        else:
            from penstock.backfill.read.task import ReadRange  # noqa: PLC0415 - of a backfill alone

            assert isinstance(partition, ReadRange)  # noqa: S101
            batches = (pack(batch, partition.part) for batch in partition.batches())
        if not self.blocks:
            return map(to_messages, batches)
        if not self.fields:
            return batches
        extract = extractor(self.fields)
        return (with_fields(blocks, extract) for blocks in batches)
