"""Messages on their way through Spark: thousands of them in one value, as an Arrow IPC stream.

Row by row, Spark would copy each message out of Arrow into its own row form and back into Arrow for
the sink's Python worker: 12 µs of the 40 that a message costs from slot to JetStream. A block passes
through in one piece, and the values that expressions look at stand beside it, in one array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import orjson
import pyarrow as pa

from penstock.core.message import BatchPart

BLOCK_DDL: Final = "block binary"
BLOCK_SCHEMA: Final = pa.schema([pa.field("block", pa.binary())])
# LZ4 costs less than the copies that it saves: a message is copied eight times on its way.
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4")
_ROWS: Final = 2_000
_PART: Final = b"part"


def encode(batch: pa.RecordBatch, part: BatchPart | None = None) -> bytes:
    """Return `batch` as one block; `part`, the one of a micro-batch that it is of, travels in it."""
    schema = batch.schema.remove_metadata()
    if part is not None:
        schema = schema.with_metadata({_PART: orjson.dumps(part.to_json())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_OPTIONS) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode(block: pa.Buffer | bytes) -> tuple[BatchPart | None, pa.RecordBatch]:
    """Return what `encode` was given."""
    with pa.ipc.open_stream(block) as stream:
        return _part(stream.schema.metadata), stream.read_next_batch()


def cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield `batch` in pieces of some thousand messages, at least one."""
    for first in range(0, max(batch.num_rows, 1), _ROWS):
        yield batch.slice(first, _ROWS)


class Block(NamedTuple):
    """Messages (`WIRE_SCHEMA`), the part that they are of, and what Spark made of each of them."""

    part: BatchPart | None
    messages: pa.RecordBatch
    results: pa.StructArray | None = None


def pack(batch: pa.RecordBatch, part: BatchPart | None = None) -> pa.RecordBatch:
    """Return `batch` as rows of `BLOCK_SCHEMA`."""
    blocks = [encode(piece, part) for piece in cut(batch)]
    return pa.record_batch([pa.array(blocks, pa.binary())], schema=BLOCK_SCHEMA)


def with_fields(
    blocks: pa.RecordBatch, extract: Callable[[pa.RecordBatch], pa.StructArray]
) -> pa.RecordBatch:
    """Return rows of `BLOCK_SCHEMA` with a column more: what `extract` takes out of each block."""
    arrays = [extract(decode(block.as_buffer())[1]) for block in blocks.column(0)]
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + len(array))
    fields = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.concat_arrays(arrays))
    return blocks.append_column("fields", fields)


def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[Block]:
    """Yield the messages that were packed; a second column has what Spark made of them."""
    for batch in batches:
        results = batch.column(1) if batch.num_columns > 1 else None
        for row, block in enumerate(batch.column(0)):
            part, messages = decode(block.as_buffer())
            yield Block(part, messages, None if results is None else results[row].values)


def _part(metadata: Mapping[bytes, bytes] | None) -> BatchPart | None:
    text = (metadata or {}).get(_PART)
    return None if text is None else BatchPart.from_json(orjson.loads(text))
