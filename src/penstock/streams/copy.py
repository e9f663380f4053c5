"""Messages as rows of a segment, in the binary form of COPY.

Nothing here is done row by row: numbers are turned to network order in bulk, and one join per batch
puts the rows together, as COPY takes them.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.json_members import Members
from penstock.core.message import DELETE
from penstock.core.record_forms import EVENTS
from penstock.streams.records import PLACES, stream_idx

COLUMNS: Final = (
    "lsn",
    "idx",
    "group_hash",
    "old_group_hash",
    "key",
    "table_schema",
    "table_name",
    "action",
    "message",
)
HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER: Final = b"\xff\xff"
KEY_BYTES: Final = 1000
"""A longer key is replaced by its hash: an index takes no more than 2,700 bytes."""
_POSITION: Final = ("commit_lsn", "commit_idx")
_ROWS: Final = 8192
_BYTES: Final = 64 * 1024 * 1024


def _constant(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.binary())


def _number(value: int) -> bytes:
    return value.to_bytes(4, "big", signed=True)


# Made once: each conversion of a Python value looks for optional modules, 0.1 ms a time.
_NOTHING: Final = _constant(b"")
_NULL: Final = _constant(_number(-1))
_FIRST: Final = _constant(len(COLUMNS).to_bytes(2, "big") + _number(8))
_EIGHT: Final = _constant(_number(8))
_JSON_NULL: Final = _constant(b"null")
_PLACE: Final = pa.scalar(stream_idx(0), pa.int64())
_PLACES: Final = pa.scalar(PLACES, pa.int64())
_NO_METADATA: Final = _constant(b"{}")
_RECORD: Final = _constant(b'{"record":')
_CHANGES: Final = _constant(b',"changes":')
_ACTION: Final = _constant(b',"action":"')
_METADATA: Final = _constant(b'","metadata":')
_ROW_METADATA: Final = _constant(b',"metadata":')
_DELETED: Final = _constant(b',"action":"delete","metadata":')
_END: Final = _constant(b"}")
_EVENT: Final = _constant(b'{"event":')
_EVENT_AROUND: Final = pa.scalar(len(b'{"event":,"metadata":}'), pa.int32())
_AROUND: Final = pa.scalar(len(b'{"record":,"changes":,"action":"","metadata":}'), pa.int32())
_ROW_AROUND: Final = pa.scalar(len(b'{"record":}'), pa.int32())
# In a JSON string a quote has a backslash before it, so these are names of members and no values.
_RECORD_PKS: Final = Members(["record_pks"])
_PKS: Final = r'"record_pks":(?P<pks>\[.*?\]),"unavailable":\['


def placed(batch: pa.RecordBatch, kind: str, base: int) -> pa.RecordBatch:
    """Return messages (`WIRE_SCHEMA`) with their positions in a stream for those in the source.

    `base` is added to the LSNs. In kind rows there is a delete before each update that changed the
    row's primary key: the old one is no row's any more.
    """
    lsn = pc.add(batch.column("commit_lsn"), _int64_scalar(base))
    idx = pc.add(pc.multiply(batch.column("commit_idx"), _PLACES), _PLACE)
    idx = pc.add(idx, batch.column("part").cast(pa.int64()))
    batch = _replaced(batch, commit_lsn=lsn, commit_idx=idx)
    old = batch.column("old_key")
    if kind != "rows" or old.null_count == len(old):
        return batch
    left = batch.filter(old.is_valid())
    part = left.column("part").cast(pa.int64())
    first = pc.subtract(pc.subtract(left.column("commit_idx"), part), _PLACE)
    left = _replaced(left, commit_idx=first)
    # Once, however many messages a transform made of the update, and whichever of them are here.
    left = left.filter(_first_of_each(left))
    record, metadata, _ = left.column("old_key").flatten()
    deletes = _replaced(
        left,
        record=record,
        metadata=metadata,
        action=pa.repeat(DELETE, left.num_rows),
    )
    both = pa.concat_batches([batch, deletes])
    return both.take(pc.sort_indices(both, [(name, "ascending") for name in _POSITION]))


def _first_of_each(batch: pa.RecordBatch) -> pa.Array:
    """Return of each row whether it is the first at its position; `batch` is in their order."""
    lsn, idx = map(batch.column, _POSITION)
    new = pc.or_(pc.not_equal(lsn[1:], lsn[:-1]), pc.not_equal(idx[1:], idx[:-1]))
    return pa.concat_arrays([pa.array([True]), new])


def _replaced(batch: pa.RecordBatch, **columns: pa.Array) -> pa.RecordBatch:
    arrays = [columns.get(name, batch.column(name)) for name in batch.schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def rows(batch: pa.RecordBatch, kind: str) -> Iterator[memoryview]:
    """Yield the rows of `batch` for `COPY … (COLUMNS) FROM STDIN (FORMAT binary)`.

    `batch` is what `placed` returned, `kind` the form of its messages (`core.record_forms`). Header and
    trailer are the caller's.
    """
    first = 0
    while first < batch.num_rows:
        part = batch.slice(first, _ROWS)
        while part.nbytes > _BYTES and part.num_rows > 1:
            part = part.slice(0, part.num_rows // 2)
        first += part.num_rows
        joined = pc.binary_join_element_wise(*_columns(part, kind), _NOTHING)
        _, offsets, data = joined.buffers()
        yield memoryview(data)[: memoryview(offsets).cast("i")[part.num_rows]]


def texts(batch: pa.RecordBatch, kind: str) -> list[str]:
    """Return messages (`WIRE_SCHEMA`) as a segment has them."""
    _, parts = _message(batch, kind)
    joined = pc.binary_join_element_wise(*parts, _NOTHING)
    found: list[str] = joined.cast(pa.string()).to_pylist()
    return found


def _message(batch: pa.RecordBatch, kind: str) -> tuple[pa.Array, list[pa.Array | pa.Scalar]]:
    """Return the sizes of messages, and what joins to them."""
    record, metadata = _text(batch, "record"), _text(batch, "metadata", _NO_METADATA)
    action = _text(batch, "action")
    size = pc.add(pc.binary_length(record), pc.binary_length(metadata))
    if kind == "rows":
        is_delete = pc.equal(action, _constant(DELETE.encode()))
        between = pc.if_else(is_delete, _DELETED, _ROW_METADATA)
        size = pc.add(pc.add(size, pc.binary_length(between)), _ROW_AROUND)
        return size, [_RECORD, record, between, metadata, _END]
    if kind == EVENTS:
        return pc.add(size, _EVENT_AROUND), [_EVENT, record, _ROW_METADATA, metadata, _END]
    changes = _text(batch, "changes")
    size = pc.add(pc.add(size, pc.binary_length(changes)), pc.binary_length(action))
    size = pc.add(size, _AROUND)
    return size, [_RECORD, record, _CHANGES, changes, _ACTION, action, _METADATA, metadata, _END]


def _columns(batch: pa.RecordBatch, kind: str) -> list[pa.Array | pa.Scalar]:
    size, message = _message(batch, kind)
    key = _fields(_keys(batch)) if kind == "rows" else _NULL
    # fmt: off - read it as the row it makes
    return [
        _FIRST,
        _int64(batch.column("commit_lsn")),
        _EIGHT,
        _int64(batch.column("commit_idx")),
        _EIGHT,
        _int64(batch.column("group_hash")),
        _old_group(batch.column("old_group_hash")),
        key,
        _repeated(batch.column("table_schema")),
        _repeated(batch.column("table_name")),
        _repeated(batch.column("action")),
        _int32(size),
        *message,
    ]
    # fmt: on


def _text(batch: pa.RecordBatch, name: str, null: pa.Scalar = _JSON_NULL) -> pa.Array:
    column = batch.column(name).cast(pa.binary())
    return pc.fill_null(column, null) if column.null_count else column


def _int64(column: pa.Array) -> pa.Array:
    return _network("q", column)


def _int32(column: pa.Array) -> pa.Array:
    return _network("i", column)


def _network(code: str, column: pa.Array) -> pa.Array:
    """Return the values' bytes, most significant first; `column` has no null."""
    numbers = array(code)
    size, buffer = numbers.itemsize, memoryview(column.buffers()[1]).cast("B")
    numbers.frombytes(buffer[column.offset * size : (column.offset + len(column)) * size])
    if sys.byteorder == "little":
        numbers.byteswap()
    kind = pa.binary(size)
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(numbers)]).cast(pa.binary())


def _old_group(column: pa.Array) -> pa.Array | pa.Scalar:
    if column.null_count == len(column):
        return _NULL
    values = pc.binary_join_element_wise(_EIGHT, _int64(pc.fill_null(column, 0)), _NOTHING)
    return pc.if_else(column.is_null(), _NULL, values)


def _fields(column: pa.Array) -> pa.Array:
    """Return texts, or null, each behind its length."""
    column = column.cast(pa.binary())
    size = _int32(pc.fill_null(pc.binary_length(column), 0))
    joined = pc.binary_join_element_wise(size, column, _NOTHING)
    return pc.fill_null(joined, _NULL) if column.null_count else joined


def _repeated(column: pa.Array) -> pa.Array | pa.Scalar:
    """Return texts, each behind its length; a batch has but a few of them, and often one."""
    found = column.dictionary_encode()
    if len(found.dictionary) == 1 and not column.null_count:
        return _field(found.dictionary[0].as_py())
    return _fields(found.dictionary).take(found.indices)


@lru_cache(10_000)
def _field(text: str) -> pa.Scalar:
    value = text.encode()
    return _constant(_number(len(value)) + value)


@lru_cache(1_000)
def _int64_scalar(value: int) -> pa.Scalar:
    return pa.scalar(value, pa.int64())


def _keys(batch: pa.RecordBatch) -> pa.Array:
    """Return what identifies rows, null for those of a table without a primary key."""
    metadata = batch.column("metadata")
    (pks,) = pc.extract_regex(metadata, _PKS).flatten()
    if pks.null_count:
        pks = pa.array([_pks(text) for text in metadata.to_pylist()], pa.string())
    pks = pc.if_else(pc.equal(pks, "[]"), None, pks)
    names = (batch.column("table_schema"), batch.column("table_name"))
    key = pc.binary_join_element_wise(pc.binary_join_element_wise(*names, "."), pks, ":")
    if (pc.max(pc.binary_length(key)).as_py() or 0) > KEY_BYTES:
        key = pa.array([_short(text) for text in key.to_pylist()], pa.string())
    return key


def _pks(metadata: str | None) -> str | None:
    found = re.search(_PKS, metadata or "")
    if found:
        return found["pks"]
    return (_RECORD_PKS(metadata)["record_pks"] or b"[]").decode()


def _short(key: str | None) -> str | None:
    data = (key or "").encode()
    return f"sha256:{hashlib.sha256(data).hexdigest()}" if len(data) > KEY_BYTES else key
