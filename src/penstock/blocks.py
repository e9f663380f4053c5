"""Messages that no expression looks at: thousands of them in one value, as an Arrow IPC stream.

Row by row, Spark would copy each message out of Arrow into its own row form and back into Arrow for
the sink's Python worker: 12 µs of the 40 that a message costs from slot to JetStream. A block passes
through in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import orjson
import pyarrow as pa

from penstock.message import BatchPart, Position

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
        schema = schema.with_metadata(
            {_PART: orjson.dumps([[*part.start], [*part.end], *part[2:]])}
        )
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


def pack(batch: pa.RecordBatch, part: BatchPart | None = None) -> pa.RecordBatch:
    """Return `batch` as rows of `BLOCK_SCHEMA`."""
    blocks = [encode(piece, part) for piece in cut(batch)]
    return pa.record_batch([pa.array(blocks, pa.binary())], schema=BLOCK_SCHEMA)


def unpack(
    batches: Iterator[pa.RecordBatch],
) -> Iterator[tuple[BatchPart | None, pa.RecordBatch]]:
    """Yield the messages that were packed, each batch with the part that it is of."""
    for batch in batches:
        for block in batch.column(0):
            yield decode(block.as_buffer())


def _part(metadata: Mapping[bytes, bytes] | None) -> BatchPart | None:
    text = (metadata or {}).get(_PART)
    if text is None:
        return None
    start, end, *rest = orjson.loads(text)
    return BatchPart(Position(*start), Position(*end), *rest)
