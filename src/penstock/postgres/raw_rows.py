"""Rows as pgoutput sent them, into messages: many of one table at once, few of them row by row.

Most changes are inserts, and updates that left the key as it was. Their rows wait as they came until
their chunk is handed out; then Arrow finds the values of one column after the other in all of them
("Logical Replication Message Formats" in the PostgreSQL manual: TupleData), and joins them to messages.

Budget: of 4,000 rows of 8 columns each takes a third of what `Table` takes row by row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from itertools import compress
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.message import INSERT, UPDATE
from penstock.postgres.columns import ColumnEncoder, Encoded, stamp
from penstock.postgres.kernels import has_kernel
from penstock.postgres.pgoutput import Insert, Update, parse
from penstock.postgres.table import Table, WireRow
from penstock.postgres.transaction import Transaction
from penstock.postgres.types import is_built_in

FEW: Final = 300
"""Rows for which the calls of kernels cost more than they save."""
_INSERT, _TEXT, _NULL = (pa.scalar(byte, pa.uint8()) for byte in b"Itn")
_TUPLE: Final = pa.scalar(6, pa.int64())
"""Where the row stands in an insert, and in an update without an old one."""
_ONE, _TWO, _FIVE, _BYTE = (pa.scalar(number, pa.int64()) for number in (1, 2, 5, 256))
_NOTHING: Final = pa.scalar(None, pa.binary())
_PAD: Final = bytes(8)


class RawRows:
    """Changes of a table, as pgoutput sent them, in commit order.

    Each is its message, its index in its transaction, and the transaction's commit LSN, time and id:
    numbers in lists, so that the garbage collector has nothing to walk in thousands of rows.
    """

    __slots__ = ("data", "encoder", "indexes", "lsns", "microseconds", "table", "xids")

    def __init__(self, table: Table, encoder: ColumnEncoder) -> None:
        self.table = table
        self.encoder = encoder
        self._clear()

    def _clear(self) -> None:
        self.data: list[bytes] = []
        self.indexes: list[int] = []
        self.lsns: list[int] = []
        self.microseconds: list[int] = []
        self.xids: list[int] = []

    def take(self) -> RawRows:
        """Return the rows apart, and have none."""
        taken = copy(self)
        self._clear()
        return taken

    def encode(self) -> tuple[list[Encoded], list[WireRow]]:
        """Return the messages of what was made at once, and the wire rows of the rest, both in order.

        Raises `ProtocolError` where one is no row of the table.
        """
        data, stamps = self.data, [self.indexes, self.lsns, self.microseconds, self.xids]
        if len(data) < FEW:
            return [], self._wire_rows(data, stamps)
        found = _TupleData(data, len(self.table.columns))
        if found.all_whole:
            return [self._encoded(found, stamps)], []
        whole = found.whole.to_pylist()
        others = [not one for one in whole]
        wires = self._wire_rows(
            list(compress(data, others)), [[*compress(s, others)] for s in stamps]
        )
        data, stamps = list(compress(data, whole)), [[*compress(s, whole)] for s in stamps]
        if not data:
            return [], wires
        return [self._encoded(_TupleData(data, len(self.table.columns)), stamps)], wires

    def _wire_rows(
        self, messages: Sequence[bytes], stamps: Sequence[Sequence[int]]
    ) -> list[WireRow]:
        made = []
        transaction: Transaction | None = None
        for message, idx, lsn, microseconds, xid in zip(messages, *stamps, strict=True):
            if transaction is None or lsn != transaction.lsn:
                transaction = Transaction(lsn, microseconds, xid, self.table.tag)
            event = parse(message)
            assert isinstance(event, Insert | Update)  # noqa: S101 - no other waits
            made.append(self.table.change(event, transaction, idx))
        return made

    def _encoded(self, found: _TupleData, stamps: Sequence[Sequence[int]]) -> Encoded:
        action: str | pa.StringArray = INSERT
        changes = None
        if not pc.all(found.inserts).as_py():
            action = pc.if_else(found.inserts, INSERT, UPDATE)
            changes = pc.if_else(found.inserts, pa.scalar(None, pa.string()), "{}")
        values = self.encoder.values(found.columns())
        return self.encoder.messages(values, stamp(self.table, *stamps), action, changes)


def raw_rows(table: Table, *, utf8: bool) -> RawRows | None:
    """Return where rows of a table wait, None for a table whose rows may not.

    `utf8`: their text is UTF-8 for certain.
    A composite type's converter asks for the transaction under
    way, and where rows are tied to their first key, a hash depends on the changes before it.
    """
    columns = table.relation.columns
    alone = all(
        is_built_in(column.type_oid) or has_kernel(convert)
        for column, convert in zip(columns, table.converters, strict=True)
    )
    if not columns or not alone or table.groups.tied:
        return None
    return RawRows(table, ColumnEncoder(table, utf8=utf8))


class _TupleData:
    """The TupleData of messages of one table: where the values stand.

    Attributes:
        whole: Whether a message is whole, and has all of its row's `width` values.
        all_whole: Whether all are.
        inserts: Whether it is an insert, otherwise an update.
    """

    def __init__(self, messages: Sequence[bytes], width: int) -> None:
        self._text = pa.py_buffer(b"".join((*messages, _PAD)))
        self._bytes = pa.Array.from_buffers(pa.uint8(), len(self._text), [None, self._text])
        sizes = pa.array(map(len, messages), pa.int64())
        ends = pc.cumulative_sum(sizes)
        starts = pc.subtract(ends, sizes)
        self.inserts = pc.equal(self._bytes.take(starts), _INSERT)
        at = pc.add(starts, _TUPLE)
        self.whole = pc.equal(self._number(at, 2), pa.scalar(width, pa.int64()))
        at = pc.add(at, _TWO)
        self._places: list[tuple[pa.Int64Array, pa.Int64Array, pa.BooleanArray | None]] = []
        for _ in range(width):
            # Where a message is not whole, what is read lies in the next one.
            here = pc.min_element_wise(at, ends)
            kind = self._bytes.take(here)
            is_text, is_null = pc.equal(kind, _TEXT), None
            after = pc.add(at, _ONE)
            start = pc.add(at, _FIVE)
            at = pc.add(start, self._number(pc.add(here, _ONE), 4))
            if not pc.all(is_text).as_py():
                is_null = pc.equal(kind, _NULL)
                self.whole = pc.and_(self.whole, pc.or_(is_text, is_null))
                start, at = pc.if_else(is_text, start, after), pc.if_else(is_text, at, after)
            self._places.append((start, at, is_null))
        self.whole = pc.and_(self.whole, pc.equal(at, ends))
        self.all_whole = pc.all(self.whole).as_py()

    def _number(self, at: pa.Int64Array, size: int) -> pa.Int64Array:
        """Return the big-endian integers at these places."""
        number = self._bytes.take(at).cast(pa.int64())
        for _ in range(1, size):
            at = pc.add(at, _ONE)
            number = pc.add(pc.multiply(number, _BYTE), self._bytes.take(at))
        return number

    def columns(self) -> list[pa.BinaryArray]:
        """Return the values of each column; all messages are whole."""
        evens = pa.array(range(0, 2 * len(self.inserts), 2), pa.int64())
        return [self._column(*places, evens) for places in self._places]

    def _column(
        self,
        start: pa.Int64Array,
        end: pa.Int64Array,
        is_null: pa.BooleanArray | None,
        evens: pa.Int64Array,
    ) -> pa.BinaryArray:
        # An array of the values, and of what stands between each two.
        offsets = array("q", bytes(16 * len(start)))
        offsets[::2] = array("q", start.buffers()[1].to_pybytes())
        offsets[1::2] = array("q", end.buffers()[1].to_pybytes())
        buffers = [None, pa.py_buffer(offsets), self._text]
        both = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
        values = both.take(evens).cast(pa.binary())
        return values if is_null is None else pc.if_else(is_null, _NOTHING, values)
