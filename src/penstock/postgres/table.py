"""One relation's changes into the rows of `WIRE_SCHEMA`.

A `Table` is built once for each Relation message and holds all that the rows of that shape share:
converters, the JSON template, where the key stands. No I/O.

Budget: a change of 7 columns becomes a wire row in 3 µs. The capture is the one serial part of the
pipeline, so a row makes only the objects that travel on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.group_hash import GroupKey
from penstock.core.message import DELETE, INSERT, TRUNCATE, UPDATE
from penstock.postgres.pgoutput import UNCHANGED, Delete, Insert, Relation, Row, Update, Value

WireRow = tuple[
    bytes, bytes | None, bytes, bytes, bytes, bytes, bytes, int, int, int, int | None,
    dict[str, bytes] | None, int, int,
]  # fmt: skip
"""The columns of `WIRE_SCHEMA` but for the last, text as UTF-8, and the hashes of the splits that the
message leaves and goes to. They differ where an update changed a column that messages are split by:
those two splits are then delivered as one."""

_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_INSERT, _UPDATE, _DELETE, _TRUNCATE = (a.encode() for a in (INSERT, UPDATE, DELETE, TRUNCATE))


class Transaction:
    """What the messages of one transaction share."""

    __slots__ = ("lsn", "text")

    def __init__(self, lsn: int, microseconds: int, xid: int, tag: bytes) -> None:
        seconds, fraction = divmod(microseconds, 1_000_000)
        self.lsn = lsn
        self.text = (
            b'"commit_timestamp":"%b.%06dZ","commit_lsn":%d,"transaction_id":%d,'
            b'"idempotency_key":"%b-%d-' % (_second(seconds), fraction, lsn, xid, tag, lsn)
        )


@lru_cache(maxsize=4)
def _second(since_epoch: int) -> bytes:
    # Formatting a time costs as much as a row's values do; transactions share their seconds.
    at = (_EPOCH + timedelta(seconds=since_epoch)).replace(tzinfo=None)
    return at.isoformat(timespec="seconds").encode()


@dataclass(frozen=True, slots=True)
class Shape:
    """What the catalog adds to a Relation message.

    `primary_key` has the key's columns in key order. `told` names the columns that the old tuple of
    an update or delete has for certain; None where the Relation message can be believed, which it
    can't for a partitioned table: each partition has a replica identity of its own. `deferrable`:
    two rows may have the same primary key before their transaction ends. `absent` names the generated
    columns that are not in the WAL: no message has them.
    """

    primary_key: tuple[str, ...]
    told: tuple[str, ...] | None = None
    deferrable: bool = False
    absent: tuple[str, ...] = ()


class Noted(NamedTuple):
    """Which rows a change concerns, for a backfill of its table.

    `hashes` are those of the row's own key before and after (None: the WAL does not tell); `key` is
    the primary key, as text, of a change that lacks values; `moved` tells whether the row is where the
    backfill may have been already: its key changed, or it came into the publication's row filter.
    """

    hashes: tuple[int, ...] | None
    key: tuple[str, ...] | None = None
    moved: bool = False


class RowHashes(NamedTuple):
    """The hashes of many rows: `own` of what they are known by, `group`, `tie` (`old_group_hash`)."""

    own: pa.Int64Array
    group: pa.Int64Array
    tie: pa.Int64Array | None


class Table:
    """Turns the changes of one relation into wire rows.

    Args:
        relation: The shape, as the server sent it.
        shape: What the catalog says about it.
        converter: Gives each type's converter (`Types.converter`).
        database: The database's name, for `metadata`.
        tag: The source's part of the idempotency key (`penstock.core.message.source_tag`).
        group_by: The columns that make a group, or None for the primary key.
        split_by: The columns by whose hash messages are split, a subset of every sink's grouping;
            None for the same as `group_by`.
        moved: Shared by all tables: by a row's newest key, the one that it was first known by.

    Columns to group or split by that this shape has not (WAL from before they were added) are
    named in `missing`, and the row's own key takes their place.
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
        self._labels = [orjson.dumps(name) for name in self.columns]
        self.unavailable = b",".join(map(orjson.dumps, shape.absent))
        """The names, in JSON, of the columns that no message of a row has."""
        self._converters = [converter(c.type_oid) for c in relation.columns]
        self._template = (
            b"{" + b",".join(b.replace(b"%", b"%%") + b":%b" for b in self._labels) + b"}"
        )
        self._choose_columns(group_by, split_by)
        self._moved = {} if moved is None else moved
        self._where = b'{"table_schema":%b,"table_name":%b,"database":%b,' % (
            orjson.dumps(relation.schema),
            orjson.dumps(relation.name),
            orjson.dumps(database),
        )
        self._tag = tag.encode()
        self._transaction: Transaction | None = None
        self._shared = b""
        self._key_prefix = b""

    def _choose_columns(
        self, group_by: Sequence[str] | None, split_by: Sequence[str] | None
    ) -> None:
        every = list(range(len(self.columns)))
        flagged = [i for i, c in enumerate(self.relation.columns) if c.is_key]
        by_key = self.relation.replica_identity in "di" and bool(flagged)
        primary_key = self._positions(self.shape.primary_key) or []
        # What every old tuple tells.
        if self.shape.told is not None:
            told = self._positions(self.shape.told) or []
        else:
            told = flagged if by_key else every
        self._whole = self.relation.replica_identity == "f" and self.shape.told is None
        self._key = primary_key or (flagged if by_key else [])
        # What a row is known by, in deletes too. Without any key that is all that it holds.
        own = primary_key if primary_key and set(primary_key) <= set(told) else told
        # That a row has left its key is told where every old tuple has the key, and where nobody can
        # have taken the key before.
        told_apart = own == self._key and not self.shape.deferrable
        self._leaves = frozenset(self._key if told_apart else ())
        group = own if group_by is None else self._positions(group_by)
        split = group if split_by is None else self._positions(split_by)
        self.missing = [
            n
            for n in dict.fromkeys([*(group_by or ()), *(split_by or ())])
            if n not in self.columns
        ]
        group = own if group is None else group
        # Where a delete does not tell its group, order can only be kept by the row's own key, which
        # then ties every message beside its group; and the table stays in one split.
        self._tied = not set(group) <= set(told)
        one_split = self._tied or split is None or not set(split) <= set(told)
        self._own = GroupKey(self.schema, self.name, own)
        self._group = self._group_key(group)
        self._split = self._group_key([] if one_split else split or [])
        self._same_split = self._split.positions == self._group.positions
        self._hashed = frozenset((*own, *self._group.positions, *self._split.positions))
        self._key_at = self._key[0] if len(self._key) == 1 else -1

    def _group_key(self, positions: Sequence[int]) -> GroupKey:
        if tuple(positions) == self._own.positions:
            return self._own
        return GroupKey(self.schema, self.name, positions, [self.columns[i] for i in positions])

    def _positions(self, names: Sequence[str]) -> list[int] | None:
        try:
            return [self.columns.index(name) for name in names]
        except ValueError:
            return None

    def same_grouping(self, other: Table) -> bool:
        """Tell whether messages of both shapes can be ordered by their hashes together."""
        return self._ordering() == other._ordering()

    def _ordering(self) -> tuple[Any, ...]:
        names = [
            [(self.columns[i], self.relation.columns[i].type_oid) for i in key.positions]
            for key in (self._own, self._group, self._split)
        ]
        return self.schema, self.name, self._tied, *names

    def insert(self, event: Insert, transaction: Transaction, idx: int) -> WireRow:
        """Return an insert's wire row.

        It may lack values: where an update brings a row into a publication's row filter, Postgres sends
        it as an insert, without the large values that it left as they were.
        """
        row = event.new
        try:
            values: list[bytes] = [
                b"null" if v is None else v if c is None else c(v)  # type: ignore[arg-type,misc]
                for v, c in zip(row, self._converters, strict=True)
            ]
            record = self._template % tuple(values)
        except (AttributeError, TypeError):
            # Looked for only here: an insert has no time for it.
            if UNCHANGED not in row:
                raise
            return self._incomplete_insert(row, transaction, idx)
        group = self._group.hash(values)
        return self._wire(
            record, None, _INSERT, transaction, idx, values, b"",
            group, self._tie(values) if self._tied else None,
            group if self._same_split else self._split.hash(values),
        )  # fmt: skip

    def _incomplete_insert(self, row: Row, transaction: Transaction, idx: int) -> WireRow:
        values = self._values(row)
        record, missing = self._object(row, values, range(len(row)))
        group, old_group = self._links(row, values, values)
        return self._wire(
            record, None, _INSERT, transaction, idx, values, missing, group, old_group,
            group if self._same_split else self._split.hash(values),
        )  # fmt: skip

    def update(self, event: Update, transaction: Transaction, idx: int) -> WireRow:
        """Return an update's wire row; `changes` has the OLD values that the WAL tells."""
        new, known, told = event.new, event.old or event.key, self._told(event)
        missing = b""
        if UNCHANGED in new:
            if known is not None:
                new = [known[i] if v is UNCHANGED and i in told else v for i, v in enumerate(new)]
            values = self._values(new)
            record, missing = self._object(new, values, range(len(new)))
        else:
            values = self._values(new)
            record = self._template % tuple(values)
        changes, before, old_key = b"{}", values, None
        if known is not None:
            changed = [i for i in told if known[i] != new[i]]
            if changed:
                known_values = self._values(known)
                changes, _ = self._object(known, known_values, changed)
                if not self._hashed.isdisjoint(changed):
                    before = list(values)
                    for i in changed:
                        before[i] = known_values[i]
                    if not self._leaves.isdisjoint(changed):
                        old_key = self._old_key(event, transaction, idx)
        group, old_group = self._links(new, before, values)
        split = group if self._same_split else self._split.hash(values)
        return self._wire(
            record, changes, _UPDATE, transaction, idx, values, missing, group, old_group, split,
            split if before is values else self._split.hash(before), old_key,
        )  # fmt: skip

    def _old_key(self, event: Update, transaction: Transaction, idx: int) -> dict[str, bytes]:
        """Return what a delete of the row that was updated would have been."""
        wire = self.delete(Delete(event.relation, event.key, event.old), transaction, idx)
        # Two messages have the update's place, and each needs an idempotency key of its own.
        metadata = wire[5].replace(b'","commit_idx":', b'-old","commit_idx":', 1)
        row: Row = event.old or event.key or []
        key, _ = self._object(row, self._values(row), sorted(self._key))
        return {"record": wire[0], "metadata": metadata, "key": key}

    def delete(self, event: Delete, transaction: Transaction, idx: int) -> WireRow:
        """Return a delete's wire row: OLD values, or the replica identity's where only it is told."""
        row, told = event.old or event.key or [], self._told(event)
        if not self._whole:
            row = [v if i in told else UNCHANGED for i, v in enumerate(row)]
        values = self._values(row)
        record, missing = self._object(row, values, range(len(row)))
        group, old_group = self._links(row, values, values)
        return self._wire(
            record, None, _DELETE, transaction, idx, values, missing, group, old_group,
            group if self._same_split else self._split.hash(values),
        )  # fmt: skip

    def truncate(self, transaction: Transaction, idx: int) -> WireRow:
        """Return a truncate's wire row: an empty record, in no row's group."""
        group = GroupKey(self.schema, self.name, ()).hash(())
        return self._wire(b"{}", None, _TRUNCATE, transaction, idx, None, b"", group, None, 0)

    def noted(self, event: Insert | Update | Delete) -> Noted:
        """Return what a backfill must know of a change."""
        own = self._own.positions
        if isinstance(event, Insert):
            if UNCHANGED not in event.new:
                return Noted((self._own_hash(event.new),))
            if any(event.new[i] is UNCHANGED for i in {*own, *self._key}):
                return Noted(None)
            return Noted((self._own_hash(event.new),), self._key_texts(event.new), True)
        if isinstance(event, Delete):
            return Noted((self._own_hash(event.old or event.key or []),))
        new, known, told = event.new, event.old or event.key, self._told(event)
        if UNCHANGED in new and known is not None:
            new = [known[i] if v is UNCHANGED and i in told else v for i, v in enumerate(new)]
        keyed = [new[i] for i in {*own, *self._key}]
        if UNCHANGED in keyed:
            return Noted(None)
        key = None
        if UNCHANGED in new:
            key = self._key_texts(new)
        after = self._own_hash(new)
        if known is None:
            return Noted((after,), key)
        before = list(new)
        for i in told:
            before[i] = known[i]
        left = self._own_hash(before)
        return Noted((after,), key) if left == after else Noted((left, after), key, True)

    def _own_hash(self, row: Row) -> int:
        own = self._own.positions
        # Of a row's values only the key's need their JSON here.
        values = [b""] * len(row)
        for i in own:
            values[i] = self._json(i, row[i])
        return self._own.hash(values)

    def _key_texts(self, row: Row) -> tuple[str, ...]:
        return tuple((row[i] or b"").decode(errors="replace") for i in self._key)  # type: ignore[union-attr]

    @property
    def tied(self) -> bool:
        """Whether a row's own key orders its messages too, as its deletes do not tell its group."""
        return self._tied

    @property
    def key(self) -> Sequence[int]:
        """The places of the primary key's columns, in key order."""
        return self._key

    def constants(self, transaction: Transaction) -> tuple[bytes, bytes]:
        """Return what a transaction's metadata begin with, and what their idempotency keys do."""
        return self._where + transaction.text, b"%b-%d-" % (self._tag, transaction.lsn)

    def row_hashes(
        self, columns: Sequence[tuple[bytes, pa.BinaryArray, bytes]], rows: int
    ) -> RowHashes:
        """Return the hashes that many rows are grouped, ordered and known by.

        `columns` has the rows' values, as `GroupKey.hashes` takes them.
        """
        own = self._own.hashes(columns, rows)
        group = own if self._group is self._own else self._group.hashes(columns, rows)
        if not self._tied:
            return RowHashes(own, group, None)
        moved = self._moved
        ties = pa.array([moved.get(key, key) for key in own.to_pylist()], pa.int64())
        same = pc.equal(ties, group)
        return RowHashes(own, group, pc.if_else(same, pa.scalar(None, pa.int64()), ties))

    def _told(self, event: Update | Delete) -> Sequence[int]:
        """Return the columns whose old values an event tells."""
        if event.old is not None and self._whole:
            return range(len(event.old))
        # A key tuple has NULL for all that is not in the key, whose own columns are never NULL; the
        # same goes for a whole tuple from a partition whose identity is less than its root's.
        return [i for i, v in enumerate(event.old or event.key or ()) if v is not None]

    def _links(
        self, row: Row, before: Sequence[bytes], values: Sequence[bytes]
    ) -> tuple[int, int | None]:
        """Return the group of a row, and what else it must stay in order with.

        `values` are the row's, in JSON, and `before` those that it had (the same list if they are).
        """
        if not self._tied:
            group = self._group.hash(values)
            old_group = group if before is values else self._group.hash(before)
            return group, None if old_group == group else old_group
        tie = self._tie(before)
        key = self._own.hash(values)
        if before is not values and key != self._own.hash(before):
            # Two hashes can't tie a message to its group, its key and its old key: the row goes on
            # under the key that it was known by first.
            self._moved[key] = tie
        if any(row[i] is UNCHANGED for i in self._group.positions):
            return tie, None
        group = self._group.hash(values)
        return group, None if tie == group else tie

    def _tie(self, values: Sequence[bytes]) -> int:
        key = self._own.hash(values)
        return self._moved.get(key, key)

    def _json(self, position: int, value: Value) -> bytes:
        convert = self._converters[position]
        if value is None or value is UNCHANGED:
            return b"null"
        return value if convert is None else convert(value)  # type: ignore[arg-type,return-value]

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
        split: int,
        old_split: int | None = None,
        old_key: dict[str, bytes] | None = None,
    ) -> WireRow:
        if transaction is not self._transaction:
            self._transaction = transaction
            self._shared = self._where + transaction.text
            self._key_prefix = b"%b-%d-" % (self._tag, transaction.lsn)
        if not values:
            pks = b""
        elif self._key_at >= 0:
            pks = values[self._key_at]
        else:
            pks = b",".join([values[i] for i in self._key])
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
