"""One relation's changes into the rows of `WIRE_SCHEMA`.

A `Table` is built once for each Relation message and holds what the rows of that shape share:
converters, the JSON template, the positions of the key's columns. No I/O.

Budget: a change of 7 columns becomes a wire row in 3 µs. The capture is the one serial part of the
pipeline, so a row makes only the objects that travel on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

from penstock.core.group_hash import GroupKey
from penstock.core.message import DELETE, INSERT, TRUNCATE, UPDATE
from penstock.postgres.groups import RowGroups
from penstock.postgres.pgoutput import (
    UNCHANGED,
    Delete,
    Insert,
    ProtocolError,
    Relation,
    Row,
    Update,
    Value,
)
from penstock.postgres.transaction import Transaction

WireRow = tuple[
    bytes, bytes | None, bytes, bytes, bytes, bytes, bytes, int, int, int, int | None,
    dict[str, bytes] | None, int, int,
]  # fmt: skip
"""The columns of `WIRE_SCHEMA` except the last, text as UTF-8, then the hashes of two splits: the one
that the row leaves and the one that it goes to. They differ where an update changed a column that
messages are split by; those two splits are then delivered as one."""

_INSERT, _UPDATE, _DELETE, _TRUNCATE = (a.encode() for a in (INSERT, UPDATE, DELETE, TRUNCATE))


@dataclass(frozen=True, slots=True)
class Shape:
    """What the catalog adds to a Relation message.

    Attributes:
        primary_key: The primary key's columns, in key order.
        identity: The columns that every old tuple has; None where they are those of the Relation
            message. Of a partitioned table they are fewer: each partition has its own replica
            identity.
        deferrable: Two rows may have the same primary key until their transaction ends.
        absent: The generated columns that the WAL lacks, and so every message.
    """

    primary_key: tuple[str, ...]
    identity: tuple[str, ...] | None = None
    deferrable: bool = False
    absent: tuple[str, ...] = ()


class Table:
    """Turns the changes of one relation into wire rows.

    Args:
        relation: The shape, as the server sent it.
        shape: What the catalog has of it.
        converter: Returns a type's converter (`Types.converter`).
        database: The database's name, for `metadata`.
        tag: The source's part of the idempotency key (`penstock.core.message.source_tag`).
        group_by: The columns that make a group; None for the row's own key.
        split_by: The columns by whose hash messages are split, a subset of every sink's grouping;
            None for those of `group_by`.
        moved: The hash of a row's first key by that of its newest one; all tables share it.

    Where this shape lacks columns of `group_by` and `split_by` (WAL from before they were added), the
    row's own key takes their place.
    """

    def __init__(
        self,
        relation: Relation,
        *,
        shape: Shape,
        converter: Callable[[int], Callable[[bytes], bytes] | None],
        database: str,
        tag: str,
        group_by: Sequence[str] | None = None,
        split_by: Sequence[str] | None = None,
        moved: dict[int, int] | None = None,
    ) -> None:
        self.relation = relation
        self.shape = shape
        self.schema = relation.schema
        self.name = relation.name
        self.columns = tuple(c.name for c in relation.columns)
        self._schema = relation.schema.encode()
        self._name = relation.name.encode()
        self.labels = [orjson.dumps(name) for name in self.columns]
        """The columns' names, in JSON."""
        self.unavailable = b",".join(map(orjson.dumps, shape.absent))
        """The names, in JSON, of the columns that every message of a row lacks."""
        self.converters = [converter(c.type_oid) for c in relation.columns]
        self._template = (
            b"{" + b",".join(b.replace(b"%", b"%%") + b":%b" for b in self.labels) + b"}"
        )
        self.groups = groups = RowGroups(
            relation, primary_key=shape.primary_key, identity=shape.identity,
            group_by=group_by, split_by=split_by, moved={} if moved is None else moved,
        )  # fmt: skip
        self._key = groups.key
        self._key_at = self._key[0] if len(self._key) == 1 else -1
        self._whole = relation.replica_identity == "f" and shape.identity is None
        # An update of the key also deletes the old key. This takes old tuples that have the key, and
        # that no other row can have taken the key within the transaction.
        leaves_key = groups.own.positions == tuple(self._key) and not shape.deferrable
        self._leaves = frozenset(self._key if leaves_key else ())
        self.where = b'{"table_schema":%b,"table_name":%b,"database":%b,' % (
            orjson.dumps(relation.schema),
            orjson.dumps(relation.name),
            orjson.dumps(database),
        )
        """The start of `metadata`."""
        self.tag = tag.encode()
        """What all idempotency keys begin with."""
        self._transaction: Transaction | None = None
        self._shared = b""
        self._key_prefix = b""

    def same_grouping(self, other: Table) -> bool:
        """Return whether the hashes of both shapes keep the order of their messages together."""
        return self.groups.ordering() == other.groups.ordering()

    def change(
        self, event: Insert | Update | Delete, transaction: Transaction, idx: int
    ) -> WireRow:
        """Return a change's wire row; raises `ProtocolError` where its row does not fit."""
        try:
            if isinstance(event, Insert):
                return self.insert(event, transaction, idx)
            if isinstance(event, Update):
                return self.update(event, transaction, idx)
            return self.delete(event, transaction, idx)
        except ValueError as error:
            raise ProtocolError(f"a row that does not fit {self.name}: {error}") from error

    def insert(self, event: Insert, transaction: Transaction, idx: int) -> WireRow:
        """Return an insert's wire row.

        It may lack values: where an update brings a row into a publication's row filter, Postgres sends
        an insert without the large values that the update left unchanged.
        """
        row = event.new
        try:
            values: list[bytes] = [
                b"null" if v is None else v if c is None else c(v)  # type: ignore[arg-type,misc]  # UNCHANGED raises
                for v, c in zip(row, self.converters, strict=True)
            ]
            record = self._template % tuple(values)
        except (AttributeError, TypeError):
            # Only here: a search in every insert takes too long.
            if UNCHANGED not in row:
                raise
            return self._incomplete_insert(row, transaction, idx)
        groups = self.groups
        group = groups.group.hash(values)
        return self._wire(
            record, None, _INSERT, transaction, idx, values, b"",
            group, groups.tie(values) if groups.tied else None,
        )  # fmt: skip

    def _incomplete_insert(self, row: Row, transaction: Transaction, idx: int) -> WireRow:
        values = self._values(row)
        record, missing = self._object(row, values, range(len(row)))
        group, old_group = self.groups.links(row, values, values)
        return self._wire(
            record, None, _INSERT, transaction, idx, values, missing, group, old_group
        )

    def update(self, event: Update, transaction: Transaction, idx: int) -> WireRow:
        """Return an update's wire row; `changes` has the OLD values that the WAL has."""
        new, known, there = event.new, event.old or event.key, self.old_columns(event)
        missing = b""
        if UNCHANGED in new:
            new = filled(new, known, there)
            values = self._values(new)
            record, missing = self._object(new, values, range(len(new)))
        else:
            values = self._values(new)
            record = self._template % tuple(values)
        changes, before, old_key = b"{}", values, None
        if known is not None:
            changed = [i for i in there if known[i] != new[i]]
            if changed:
                known_values = self._values(known)
                changes, _ = self._object(known, known_values, changed)
                if not self.groups.hashed.isdisjoint(changed):
                    before = list(values)
                    for i in changed:
                        before[i] = known_values[i]
                    if not self._leaves.isdisjoint(changed):
                        old_key = self._old_key(event, transaction, idx)
        group, old_group = self.groups.links(new, before, values)
        old_split = None if before is values else self.groups.split.hash(before)
        return self._wire(
            record, changes, _UPDATE, transaction, idx, values, missing, group, old_group,
            old_split, old_key,
        )  # fmt: skip

    def _old_key(self, event: Update, transaction: Transaction, idx: int) -> dict[str, bytes]:
        """Return the delete of the row that was updated, with its old key."""
        wire = self.delete(Delete(event.relation, event.key, event.old), transaction, idx)
        # Two messages have the update's position, and each needs its own idempotency key.
        metadata = wire[5].replace(b'","commit_idx":', b'-old","commit_idx":', 1)
        row: Row = event.old or event.key or []
        key, _ = self._object(row, self._values(row), sorted(self._key))
        return {"record": wire[0], "metadata": metadata, "key": key}

    def delete(self, event: Delete, transaction: Transaction, idx: int) -> WireRow:
        """Return a delete's wire row: its OLD values, as far as the WAL has them."""
        row, there = event.old or event.key or [], self.old_columns(event)
        if not self._whole:
            row = [v if i in there else UNCHANGED for i, v in enumerate(row)]
        values = self._values(row)
        record, missing = self._object(row, values, range(len(row)))
        group, old_group = self.groups.links(row, values, values)
        return self._wire(
            record, None, _DELETE, transaction, idx, values, missing, group, old_group
        )

    def truncate(self, transaction: Transaction, idx: int) -> WireRow:
        """Return a truncate's wire row: an empty record, in no row's group."""
        group = GroupKey(self.schema, self.name, ()).hash(())
        return self._wire(b"{}", None, _TRUNCATE, transaction, idx, None, b"", group, None)

    def constants(self, transaction: Transaction) -> tuple[bytes, bytes]:
        """Return the start of a transaction's metadata, and that of its idempotency keys."""
        return self.where + transaction.text, transaction.key

    def own_hash(self, row: Row) -> int:
        """Return the hash of a row's own key."""
        own = self.groups.own
        # Of a row's values only the key's need their JSON here.
        values = [b""] * len(row)
        for i in own.positions:
            values[i] = self._json(i, row[i])
        return own.hash(values)

    def old_columns(self, event: Update | Delete) -> Sequence[int]:
        """Return the positions of the columns whose old values an event has."""
        if event.old is not None and self._whole:
            return range(len(event.old))
        # A key tuple has NULL for the columns outside the key, and the key's are never NULL. So has a
        # whole tuple from a partition whose identity has fewer columns than its root's.
        return [i for i, v in enumerate(event.old or event.key or ()) if v is not None]

    def _json(self, position: int, value: Value) -> bytes:
        convert = self.converters[position]
        if value is None or value is UNCHANGED:
            return b"null"
        return value if convert is None else convert(value)  # type: ignore[arg-type,return-value]  # see above

    def _values(self, row: Row) -> list[bytes]:
        """Return each value's JSON; `null` for an UNCHANGED one, which `_object` leaves out."""
        return [
            b"null" if v is None or v is UNCHANGED else v if c is None else c(v)  # type: ignore[arg-type,misc]  # mypy sees no `is`
            for v, c in zip(row, self.converters, strict=True)
        ]

    def _object(
        self, row: Row, values: Sequence[bytes], positions: Sequence[int]
    ) -> tuple[bytes, bytes]:
        """Return the JSON object of `positions`, and the names of the values that it lacks."""
        labels = self.labels
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
        old_split: int | None = None,
        old_key: dict[str, bytes] | None = None,
    ) -> WireRow:
        if transaction is not self._transaction:
            self._transaction = transaction
            self._shared, self._key_prefix = self.constants(transaction)
        if not values:
            pks = b""
        elif self._key_at >= 0:
            pks = values[self._key_at]
        else:
            pks = b",".join([values[i] for i in self._key])
        groups = self.groups
        split = 0 if values is None else group if groups.same_split else groups.split.hash(values)
        if self.unavailable and values is not None:
            absent = self.unavailable
            unavailable = b"%b,%b" % (unavailable, absent) if unavailable else absent
        position = b"%d" % idx
        return (
            record, changes, action, self._schema, self._name,
            b'%b%b","commit_idx":%b,"record_pks":[%b],"unavailable":[%b]}'
            % (self._shared, position, position, pks, unavailable),
            self._key_prefix + position, transaction.lsn, idx, group, old_group, old_key,
            split if old_split is None else old_split, split,
        )  # fmt: skip


def filled(new: Row, known: Row | None, there: Sequence[int]) -> Row:
    """Return an update's new row, with the values of the old one, `known`, that it left unchanged.

    `there` are the positions that the old row has.
    """
    if known is None:
        return new
    return [known[i] if v is UNCHANGED and i in there else v for i, v in enumerate(new)]
