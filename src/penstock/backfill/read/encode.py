"""Makes messages of the rows that COPY prints: Arrow parses them, and kernels put the JSON together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from penstock.backfill.source_table import table_of
from penstock.core.errors import BackfillError
from penstock.core.message import READ
from penstock.postgres.columns import ColumnEncoder, Stamp, Text, digits
from penstock.postgres.kernels import Values, as_text, join
from penstock.postgres.reads import RANGE_BITS, Reads
from penstock.postgres.table import Table
from penstock.postgres.transaction import Transaction

# As in all other messages, a transaction's id is the 32 bits that the WAL has of it.
_XID_MASK: Final = pa.scalar((1 << 32) - 1, pa.int64())


def messages_of(reads: Reads) -> tuple[pa.RecordBatch, list[int]]:
    """Return a chunk's messages (`WIRE_SCHEMA`), and of each the hash that its split is found by.

    Rows whose key has changed since they were read are left out. The same reads give the same messages,
    with the same keys. Budget: 3 µs a row of 8 columns.
    """
    encoder = _Encoder(reads)
    made = [encoder.range(text, index) for index, text in enumerate(reads.ranges)]
    batches, splits = zip(*made, strict=True)
    return pa.concat_batches(batches), [split for some in splits for split in some.to_pylist()]


class _Encoder:
    def __init__(self, reads: Reads) -> None:
        source = reads.source
        self._table = table = table_of(source, dict(reads.moved))
        self._encoder = ColumnEncoder(table, utf8=source.utf8)
        names = [str(i) for i in range(len(table.columns))]
        self._header = (",".join(names) + "\n").encode()
        self._convert = csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.binary()), null_values=[""],
            strings_can_be_null=True, quoted_strings_can_be_null=False,
        )  # fmt: skip
        self._parse = csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)
        transaction = Transaction(reads.lsn, reads.microseconds, reads.xid, source.tag.encode())
        self._shared, self._key_prefix = table.constants(transaction)
        self._published = _published(table)
        self._touched = pa.Array.from_buffers(
            pa.int64(), len(reads.touched) // 8, [None, pa.py_buffer(reads.touched)]
        )
        self._lsn = reads.lsn

    def range(self, text: bytes, index: int) -> tuple[pa.RecordBatch, pa.Int64Array]:
        """Return the messages of a range, and the hashes of their splits."""
        columns = self._parsed(text)
        count = len(columns[0])
        first = index << RANGE_BITS
        if count >> RANGE_BITS:
            raise BackfillError("range", f"A range has {count} rows, more than {1 << RANGE_BITS}.")
        numbers = pa.array(range(first, first + count), pa.int64())
        idx = digits(numbers)
        values = self._encoder.values(columns)
        stamp = Stamp(
            self._begin_metadata(columns, values, idx), join(self._key_prefix, idx),
            pa.repeat(pa.scalar(self._lsn, pa.int64()), count), numbers,
        )  # fmt: skip
        made = self._encoder.messages(values, stamp, READ)
        if not len(self._touched):
            return made.messages, made.splits
        kept = pc.invert(pc.is_in(made.own, value_set=self._touched))
        return made.messages.filter(kept), made.splits.filter(kept)

    def _begin_metadata(
        self, columns: Sequence[pa.BinaryArray], values: Sequence[Values], idx: pa.BinaryArray
    ) -> tuple[Text, ...]:
        """Return the parts of `metadata` before the key's values.

        A row of an outbox's table was published once. It has the time and the transaction of that, and
        no position in the WAL.
        """
        if self._published is None:
            return self._shared, idx, b'","commit_idx":', idx
        created, xid = values[self._published[0]], columns[self._published[1]]
        narrow = pc.bit_wise_and(as_text(xid).cast(pa.int64()), _XID_MASK)
        return (
            self._table.where + b'"commit_timestamp":' + created.left, created.array,
            created.right + b',"transaction_id":', digits(narrow),
            b',"idempotency_key":"' + self._key_prefix, idx, b'"',
        )  # fmt: skip

    def _parsed(self, text: bytes) -> list[pa.BinaryArray]:
        # A header first: Arrow would take a byte order mark at the start of the data for its own.
        data = self._header + text
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
