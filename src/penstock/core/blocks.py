"""Messages on their way through Spark: thousands of them in one value, as an Arrow IPC stream.

Row by row, Spark would copy each message out of Arrow into its own row form and back into Arrow for
the sink's Python worker: 12 µs of the 40 that a message costs from slot to JetStream. A block passes
through in one piece, and the values that expressions look at stand beside it, in one array.

A value of the column `block` is a block (the length of its head, the head, the stream without its
schema, which is `WIRE_SCHEMA`), or an `Opening`, or empty. On its way a value waits for two things: the
JVM hands rows on by `ROWS_AT_ONCE`, once it has the row behind them (see `padding`), and Python's writer
keeps the last bytes of an Arrow batch where these are few (see `_whole`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa

from penstock.core.message import NO_MESSAGES, WIRE_SCHEMA, RoundPart

BLOCK_DDL: Final = "block binary"
BLOCK_SCHEMA: Final = pa.schema([pa.field("block", pa.binary())])
# LZ4 costs less than the copies that it saves: a message is copied eight times on its way. For a few
# messages it saves nothing.
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4")
_PLAIN: Final = pa.ipc.IpcWriteOptions()
_COMPRESSED_ROWS: Final = 32
_ROWS: Final = 2_000
_HEAD: Final = struct.Struct("<H")
_OPENING: Final = 0xFFFF
_SCHEMA_BYTES: Final = WIRE_SCHEMA.serialize().size
BUFFER_BYTES: Final = 1024
"""Spark's buffers between Python and the JVM (`spark.buffer.size`), for few reads and writes a block."""
_LEAST_BYTES: Final = BUFFER_BYTES + 8
ROWS_AT_ONCE: Final = 2
"""Rows in each Arrow batch from the JVM to the worker that writes: a block, and what pushed the last."""
_pack = msgspec.msgpack.Encoder().encode
_read_head = msgspec.msgpack.Decoder(tuple[RoundPart | None, bool]).decode


class Opening(NamedTuple):
    """The first value of a task: which lane it is (`lane` of batch `batch`) and where it reports to.

    `session` is another number for each attempt of the task.
    """

    address: str
    batch: int
    lane: int
    session: int


_read_opening = msgspec.msgpack.Decoder(Opening).decode


class Block(NamedTuple):
    """Messages (`WIRE_SCHEMA`), the part that they are of, and what Spark made of each of them.

    `last`: the part ends with them.
    """

    part: RoundPart | None
    messages: pa.RecordBatch
    results: pa.StructArray | None = None
    last: bool = True


def encode(batch: pa.RecordBatch) -> bytes:
    """Return `batch` as an Arrow IPC stream."""
    data: bytes = _stream(batch).to_pybytes()
    return data


def _stream(batch: pa.RecordBatch) -> pa.Buffer:
    options = _PLAIN if batch.num_rows < _COMPRESSED_ROWS else _COMPRESSED
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def decode(data: pa.Buffer | bytes) -> pa.RecordBatch:
    """Return what `encode` was given."""
    with pa.ipc.open_stream(data) as stream:
        return stream.read_next_batch()


def cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield `batch` in pieces of some thousand messages, at least one."""
    for first in range(0, max(batch.num_rows, 1), _ROWS):
        yield batch.slice(first, _ROWS)


def opening(value: Opening) -> bytes:
    """Return the value that opens a task."""
    data = _pack(value)
    return _whole(_HEAD.pack(_OPENING), _HEAD.pack(len(data)), data)


def blocks(batch: pa.RecordBatch, part: RoundPart | None = None) -> Iterator[bytes]:
    """Yield a part's messages as blocks."""
    pieces = list(cut(batch))
    for piece in pieces:
        head = _pack((part, piece is pieces[-1]))
        yield _whole(_HEAD.pack(len(head)), head, _stream(piece)[_SCHEMA_BYTES:])


def with_part(block: bytes, part: RoundPart) -> bytes:
    """Return a block with another `part`."""
    data = memoryview(block)
    end = _after_head(block)
    _, last = _read_head(data[_HEAD.size : end])
    head = _pack((part, last))
    return _whole(_HEAD.pack(len(head)), head, data[end:])


def _whole(*parts: bytes | memoryview | pa.Buffer) -> bytes:
    """Return a value that Python's writer passes on to its end.

    It keeps what it gets last where that fits into its buffer. Arrow gives it the values of the last
    column in one piece, and then what these lack to a multiple of 8 bytes.
    """
    value = b"".join(parts)
    return value + bytes(max(_LEAST_BYTES - len(value), -len(value) % 8))


def pack(batch: pa.RecordBatch, part: RoundPart | None = None) -> pa.RecordBatch:
    """Return `blocks` as rows of `BLOCK_SCHEMA`."""
    return pa.record_batch([pa.array(blocks(batch, part), pa.binary())], schema=BLOCK_SCHEMA)


def padding(rows: int) -> list[bytes]:
    """Return what pushes the last of a task's first `rows` values through.

    It fills that one's Arrow batch, and begins another.
    """
    return [b""] * (1 + rows % ROWS_AT_ONCE)


def messages_of(value: bytes) -> pa.RecordBatch:
    """Return the messages of a block."""
    return _read(pa.py_buffer(value)[_after_head(value) :])


def _read(stream: pa.Buffer) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(stream, WIRE_SCHEMA)


def with_fields(
    rows: pa.RecordBatch, extract: Callable[[pa.RecordBatch], pa.StructArray]
) -> pa.RecordBatch:
    """Return rows of `BLOCK_SCHEMA` with a column before it: what `extract` takes out of each block."""
    values = rows.column(0).to_pylist()
    arrays = [extract(messages_of(v) if _is_block(v) else NO_MESSAGES) for v in values]
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + len(array))
    fields = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.concat_arrays(arrays))
    return rows.add_column(0, "fields", fields)


def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[Block | Opening]:
    """Yield what was packed; a second column has what Spark made of each block's messages."""
    for batch in batches:
        results = batch.column(1) if batch.num_columns > 1 else None
        for row, scalar in enumerate(batch.column(0)):
            buffer = scalar.as_buffer()
            if not buffer.size:
                continue
            (size,) = _HEAD.unpack_from(buffer)
            if size == _OPENING:
                (size,) = _HEAD.unpack_from(buffer, _HEAD.size)
                yield _read_opening(memoryview(buffer)[2 * _HEAD.size :][:size])
                continue
            part, last = _read_head(memoryview(buffer)[_HEAD.size : _HEAD.size + size])
            messages = _read(buffer[_HEAD.size + size :])
            values = None if results is None else results[row].values
            yield Block(part, messages, values, last)


def _is_block(value: bytes) -> bool:
    return bool(value) and _HEAD.unpack_from(value)[0] != _OPENING


def _after_head(value: bytes) -> int:
    return _HEAD.size + int(_HEAD.unpack_from(value)[0])
