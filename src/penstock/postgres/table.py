"""One relation's changes into the rows of `WIRE_SCHEMA`.

A `Table` is built once for each Relation message and holds all that the rows of that shape share:
converters, the JSON template, where the key stands. No I/O.

Budget: a change of 8 columns becomes a wire row in 4 µs. The capture is the one serial part of the
pipeline, so a row makes only the objects that travel on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import orjson

from penstock.message import DELETE, INSERT, TRUNCATE, UPDATE
from penstock.postgres.errors import CaptureError
from penstock.postgres.pgoutput import UNCHANGED, Delete, Insert, Relation, Row, Update

WireRow = tuple[bytes, bytes | None, bytes, bytes, bytes, bytes, bytes, int, int, int, int | None]
"""The columns of `WIRE_SCHEMA`, text as UTF-8."""

Encoded = tuple[WireRow, int, int]
"""A wire row, and the hashes of the splits that it comes from and goes to. They differ where an
update changed a column that messages are split by: those two splits are then delivered as one."""

_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_ACTIONS: Final = {action: action.encode() for action in (INSERT, UPDATE, DELETE, TRUNCATE)}
_INSERT, _UPDATE, _DELETE, _TRUNCATE = _ACTIONS.values()


class Transaction:
    """What the messages of one transaction share."""

    __slots__ = ("lsn", "text")

    def __init__(self, lsn: int, microseconds: int, xid: int, tag: bytes) -> None:
        at = (_EPOCH + timedelta(microseconds=microseconds)).replace(tzinfo=None)
        self.lsn = lsn
        self.text = (
            b'"commit_timestamp":"%bZ","commit_lsn":%d,"transaction_id":%d,'
            b'"idempotency_key":"%b-%d-'
            % (at.isoformat(timespec="microseconds").encode(), lsn, xid, tag, lsn)
        )


class Table:
    """Turns the changes of one relation into wire rows.

    Args:
        relation: The shape, as the server sent it.
        primary_key: The names of the primary key's columns, in key order; empty if there is none.
        converter: Gives each type's converter (`Types.converter`).
        database: The database's name, for `metadata`.
        tag: The source's part of the idempotency key (`penstock.message.source_tag`).
        group_by: The columns that make a group, or None for the primary key.
        split_by: The columns by whose hash messages are split, a subset of every sink's grouping;
            None for the same as `group_by`.

    Raises:
        CaptureError: `unknown_column`, when a grouping names a column that the table has not.
    """

    def __init__(
        self,
        relation: Relation,
        *,
        primary_key: Sequence[str],
        converter: Callable[[int], Callable[[bytes], bytes] | None],
        database: str,
        tag: str,
        group_by: Sequence[str] | None = None,
        split_by: Sequence[str] | None = None,
    ) -> None:
        self.relation = relation
        self.schema = relation.schema
        self.name = relation.name
        self.columns = tuple(c.name for c in relation.columns)
        self._schema = relation.schema.encode()
        self._name = relation.name.encode()
        self._labels = [orjson.dumps(name) for name in self.columns]
        self._converters = [converter(c.type_oid) for c in relation.columns]
        self._template = (
            b"{" + b",".join(b.replace(b"%", b"%%") + b":%b" for b in self._labels) + b"}"
        )
        self._identity = [i for i, c in enumerate(relation.columns) if c.is_key]
        self._primary_key = self._positions(primary_key)
        if not self._primary_key and relation.replica_identity in "di":
            self._primary_key = self._identity
        # Without any key a row is known only by all that it holds.
        self._own = self._primary_key or self._identity or list(range(len(self.columns)))
        self._group = self._own if group_by is None else self._positions(group_by)
        self._split = self._group if split_by is None else self._positions(split_by)
        self._same_split = self._split == self._group
        # Where a delete does not tell its group, order can only be kept by the row's own key, which
        # then ties every message beside its group; and the table stays in one split.
        told = self._identity if relation.replica_identity in "di" else range(len(self.columns))
        self._tied = not set(self._group) <= set(told)
        if self._tied:
            self._split, self._same_split = [], False
        self._where = b'{"table_schema":%b,"table_name":%b,"database":%b,' % (
            orjson.dumps(relation.schema),
            orjson.dumps(relation.name),
            orjson.dumps(database),
        )
        self._tag = tag.encode()
        self._transaction: Transaction | None = None
        self._shared = b""
        self._key_prefix = b""

    def _positions(self, names: Sequence[str]) -> list[int]:
        try:
            return [self.columns.index(name) for name in names]
        except ValueError:
            unknown = [name for name in names if name not in self.columns]
            raise CaptureError(
                "unknown_column",
                f"Table {self.schema}.{self.name} has no column {', '.join(unknown)} to group by;"
                f" it has {', '.join(self.columns)}.",
                remedy="Correct group_by.",
                transient=False,
            ) from None

    def insert(self, event: Insert, transaction: Transaction, idx: int) -> Encoded:
        """Return an insert's wire row."""
        row = event.new
        values = self._values(row)
        group, tie = self._groups(row)
        wire = self._wire(
            self._template % tuple(values), None, _INSERT, transaction, idx,
            values, b"", group, tie,
        )  # fmt: skip
        split = group if self._same_split else self._hash(row, self._split)
        return wire, split, split

    def update(self, event: Update, transaction: Transaction, idx: int) -> Encoded:
        """Return an update's wire row; `changes` has the OLD values that the WAL tells."""
        new, known = event.new, event.old or event.key
        # A key tuple has NULL for all that is not in the key: there it says nothing.
        told: Sequence[int] = range(len(new)) if event.old else self._identity if known else ()
        if UNCHANGED in new:
            if known:
                new = [known[i] if v is UNCHANGED and i in told else v for i, v in enumerate(new)]
            values = self._values(new)
            record, missing = self._object(new, values, range(len(new)))
        else:
            values, missing = self._values(new), b""
            record = self._template % tuple(values)
        changes, old_group = b"{}", None
        group, tie = self._groups(new)
        split = old_split = group if self._same_split else self._hash(new, self._split)
        if known:
            changed = [i for i in told if known[i] != new[i]]
            changes, _ = self._object(known, self._values(known), changed)
            if changed:
                before = [known[i] if i in told else v for i, v in enumerate(new)]
                old_group = self._hash(before, self._group)
                old_split = old_group if self._same_split else self._hash(before, self._split)
                if old_group == group:
                    old_group = None
                if self._tied and old_group is None:
                    # The row's key may have changed too; the old one is what others know it by.
                    tie = self._hash(before, self._own)
        wire = self._wire(
            record, changes, _UPDATE, transaction, idx,
            values, missing, group, tie if old_group is None else old_group,
        )  # fmt: skip
        return wire, old_split, split

    def delete(self, event: Delete, transaction: Transaction, idx: int) -> Encoded:
        """Return a delete's wire row: OLD values, or the replica identity's where only it is told."""
        if event.old:
            row = event.old
        else:
            key = event.key or []
            row = [v if i in self._identity else UNCHANGED for i, v in enumerate(key)]
        values = self._values(row)
        record, missing = self._object(row, values, range(len(row)))
        group, tie = self._groups(row)
        wire = self._wire(
            record,
            None,
            _DELETE,
            transaction,
            idx,
            values,
            missing,
            group if tie is None else tie,
            None,
        )
        split = group if self._same_split else self._hash(row, self._split)
        return wire, split, split

    def truncate(self, transaction: Transaction, idx: int) -> WireRow:
        """Return a truncate's wire row: an empty record, in no row's group."""
        return self._wire(
            b"{}", None, _TRUNCATE, transaction, idx, None, b"", hash((self.relation.oid,)), None
        )

    def _groups(self, row: Row) -> tuple[int, int | None]:
        return self._hash(row, self._group), self._hash(row, self._own) if self._tied else None

    def _hash(self, row: Row, positions: Sequence[int]) -> int:
        # Python's own hash: it need only agree with itself while this process lives, as the groups
        # of a batch are told apart within that batch.
        if len(positions) == 1:
            return hash((self.relation.oid, row[positions[0]]))
        return hash((self.relation.oid, *[row[i] for i in positions]))

    def _values(self, row: Row) -> list[bytes]:
        """Return each value's JSON; `null` stands for what is UNCHANGED, which `_object` leaves out."""
        return [
            b"null" if v is None or v is UNCHANGED else v if c is None else c(v)  # type: ignore[arg-type,misc]
            for v, c in zip(row, self._converters, strict=True)
        ]

    def _object(
        self, row: Row, values: Sequence[bytes], positions: Sequence[int]
    ) -> tuple[bytes, bytes]:
        """Return the JSON object of `positions`, and the names that it had to leave out."""
        labels = self._labels
        fields = [labels[i] + b":" + values[i] for i in positions if row[i] is not UNCHANGED]
        missing = [labels[i] for i in positions if row[i] is UNCHANGED]
        return b"{" + b",".join(fields) + b"}", b",".join(missing)

    def _wire(
        self,
        record: bytes,
        changes: bytes | None,
        action: bytes,
        transaction: Transaction,
        idx: int,
        values: Sequence[bytes] | None,
        unavailable: bytes,
        group: int,
        old_group: int | None,
    ) -> WireRow:
        if transaction is not self._transaction:
            self._transaction = transaction
            self._shared = self._where + transaction.text
            self._key_prefix = b"%b-%d-" % (self._tag, transaction.lsn)
        pks = b",".join([values[i] for i in self._primary_key]) if values else b""
        position = b"%d" % idx
        metadata = b'%b%b","commit_idx":%b,"record_pks":[%b],"unavailable":[%b]}' % (
            self._shared, position, position, pks, unavailable,
        )  # fmt: skip
        return (
            record, changes, action, self._schema, self._name, metadata,
            self._key_prefix + position, transaction.lsn, idx, group, old_group,
        )  # fmt: skip
