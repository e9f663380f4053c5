"""Many rows of one table at once: columns of values into messages, by Arrow kernels. No I/O.

What comes out is what `Table` makes of each row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.message import NO_PART, OLD_KEY, WIRE_SCHEMA
from penstock.postgres.kernels import Values, as_text, join, kernel
from penstock.postgres.table import Table
from penstock.postgres.transaction import Transaction, second_text

Text: TypeAlias = "bytes | pa.BinaryArray"
"""A text that all rows share, or each row's own."""

_MILLION: Final = 1_000_000
_YEARS: Final = (date(2000, 1, 1) - date(1, 1, 1)).days * 86_400 * _MILLION
"""Microseconds from the year 1 to 2000: with them no time is negative, and division rounds down."""


class Stamp(NamedTuple):
    """Where rows stand in their source.

    Attributes:
        metadata: The parts of `metadata` before `record_pks`.
        key: The idempotency keys.
        lsn: The commit LSNs.
        idx: The commit indexes.
    """

    metadata: tuple[Text, ...]
    key: pa.BinaryArray
    lsn: pa.Int64Array
    idx: pa.Int64Array


class Encoded(NamedTuple):
    """Messages (`WIRE_SCHEMA`), and of each the hash that finds its split, and that of its own key."""

    messages: pa.RecordBatch
    splits: pa.Int64Array
    own: pa.Int64Array


class ColumnEncoder:
    """Makes messages of a table's inserts, of updates that left its key as it was, and of reads.

    Args:
        table: The rows' table.
        utf8: Its text is UTF-8 for certain; in a SQL_ASCII database it may not be.
    """

    def __init__(self, table: Table, *, utf8: bool) -> None:
        self._table = table
        self._kernels = [kernel(convert, utf8=utf8) for convert in table.converters]

    def values(self, columns: Sequence[pa.BinaryArray]) -> list[Values]:
        """Return the columns' JSON, given their text as Postgres prints it."""
        return [convert(column) for convert, column in zip(self._kernels, columns, strict=True)]

    def messages(
        self,
        values: Sequence[Values],
        stamp: Stamp,
        action: str | pa.StringArray,
        changes: pa.StringArray | None = None,
    ) -> Encoded:
        """Return the messages of rows, given their columns."""
        table, groups, count = self._table, self._table.groups, len(stamp.idx)
        record: list[Text] = []
        text = b"{"
        for label, value in zip(table.labels, values, strict=True):
            record += (text + label + b":" + value.left, value.array)
            text = value.right + b","
        keys: list[Text] = []
        between = b',"record_pks":['
        for place in groups.key:
            value = values[place]
            keys += (between + value.left, value.array)
            between = value.right + b","
        end = (between[:-1] if keys else between) + b'],"unavailable":[%b]}' % table.unavailable
        hashes = groups.hashes(values, count)
        made = {
            "record": as_text(join(*record, text[:-1] + b"}")),
            "action": pa.repeat(action, count) if isinstance(action, str) else action,
            "table_schema": pa.repeat(table.schema, count),
            "table_name": pa.repeat(table.name, count),
            "metadata": as_text(join(*stamp.metadata, *keys, end)),
            "idempotency_key": as_text(stamp.key),
            "commit_lsn": stamp.lsn,
            "commit_idx": stamp.idx,
            "group_hash": hashes.group,
            "old_key": pa.nulls(count, OLD_KEY),
            "part": pa.repeat(NO_PART, count),
        }
        if changes is not None:
            made["changes"] = changes
        if hashes.tie is not None:
            made["old_group_hash"] = hashes.tie
        batch = pa.RecordBatch.from_arrays(
            [made[f.name] if f.name in made else pa.nulls(count, f.type) for f in WIRE_SCHEMA],
            schema=WIRE_SCHEMA,
        )
        splits = hashes.group if groups.same_split else groups.split.hashes(values, count)
        return Encoded(batch, splits, hashes.own)


def stamp(
    table: Table,
    indexes: Sequence[int],
    lsns: Sequence[int],
    microseconds: Sequence[int],
    xids: Sequence[int],
) -> Stamp:
    """Return where rows of the WAL stand.

    Of each row is given its index in its transaction, and that one's commit LSN, time (since 2000-01-01
    UTC) and id.
    """
    idx = pa.array(indexes, pa.int64())
    place = digits(idx)
    if lsns[0] == lsns[-1]:  # they only rise
        of_all = Transaction(lsns[0], microseconds[0], xids[0], table.tag)
        shared, prefix = table.constants(of_all)
        lsn = pa.repeat(pa.scalar(lsns[0], pa.int64()), len(idx))
        return Stamp((shared, place, b'","commit_idx":', place), join(prefix, place), lsn, idx)
    lsn, xid = pa.array(lsns, pa.int64()), pa.array(xids, pa.int64())
    since_year_one = pc.add(pa.array(microseconds, pa.int64()), _YEARS)
    seconds = pc.divide(since_year_one, _MILLION)
    fraction = pc.subtract(since_year_one, pc.multiply(seconds, _MILLION))
    found = seconds.dictionary_encode()
    texts = [second_text(s - _YEARS // _MILLION) for s in found.dictionary.to_pylist()]
    commit, prefix = digits(lsn), table.tag + b"-"
    metadata = (
        table.where + b'"commit_timestamp":"', pa.array(texts, pa.binary()).take(found.indices), b".",
        # The 1 in front keeps its zeros.
        pc.binary_slice(digits(pc.add(fraction, _MILLION)), 1, 7), b'Z","commit_lsn":', commit,
        b',"transaction_id":', digits(xid), b',"idempotency_key":"' + prefix, commit, b"-", place,
        b'","commit_idx":', place,
    )  # fmt: skip
    return Stamp(metadata, join(prefix, commit, b"-", place), lsn, idx)


def digits(numbers: pa.Int64Array) -> pa.BinaryArray:
    """Return numbers as text."""
    return numbers.cast(pa.string()).cast(pa.binary())
