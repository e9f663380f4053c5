"""Messages that no expression looks at: thousands of them in one value, as an Arrow IPC stream.

Row by row, Spark would copy each message out of Arrow into its own row form and back into Arrow for
the sink's Python worker: 12 µs of the 40 that a message costs from slot to JetStream. A block passes
through in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

BLOCK_DDL: Final = "block binary"
BLOCK_SCHEMA: Final = pa.schema([pa.field("block", pa.binary())])
# LZ4 costs less than the copies that it saves: a message is copied eight times on its way.
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4")
_ROWS: Final = 2_000


def pack(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return `batch` as rows of `BLOCK_SCHEMA`, each a stream of some thousand messages."""
    blocks = []
    for first in range(0, max(batch.num_rows, 1), _ROWS):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as writer:
            writer.write_batch(batch.slice(first, _ROWS))
        blocks.append(sink.getvalue().to_pybytes())
    return pa.record_batch([pa.array(blocks, pa.binary())], schema=BLOCK_SCHEMA)


def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches that were packed."""
    for batch in batches:
        for block in batch.column(0):
            yield from pa.ipc.open_stream(block.as_buffer())
