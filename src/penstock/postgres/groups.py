"""The groups of one table's rows: the columns that make them, and the hashes of each change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.group_hash import GroupKey
from penstock.postgres.pgoutput import UNCHANGED, Relation, Row


class RowHashes(NamedTuple):
    """The hashes of many rows: of their own keys, `group_hash`, and `old_group_hash` as `tie`."""

    own: pa.Int64Array
    group: pa.Int64Array
    tie: pa.Int64Array | None


class RowGroups:
    """The groups of a table's rows.

    Args:
        relation: The shape, as the server sent it.
        primary_key: The primary key's columns, in key order.
        identity: The columns that every old tuple has; None for those of the Relation message.
        group_by: The columns that make a group; None for the row's own key.
        split_by: The columns by whose hash messages are split; None for those of `group_by`.
        moved: The hash of a row's first key by that of its newest one.

    Attributes:
        key: The positions of the primary key's columns, or of the replica identity's index.
        own: The row's own key, which deletes have too. In a table without any key it is the whole row.
        group: The key of the row's group.
        split: The key by whose hash messages are split.
        same_split: Whether `split` and `group` are the same.
        tied: Whether a row's own key orders its messages too, as its deletes lack the group's columns.
        hashed: The positions of all columns that make a hash.
        missing: The columns of `group_by` and `split_by` that the relation lacks.
    """

    __slots__ = (
        "_moved", "_relation", "group", "hashed", "key", "missing", "own",
        "same_split", "split", "tied",
    )  # fmt: skip

    def __init__(
        self,
        relation: Relation,
        *,
        primary_key: Sequence[str],
        identity: Sequence[str] | None,
        group_by: Sequence[str] | None,
        split_by: Sequence[str] | None,
        moved: dict[int, int],
    ) -> None:
        self._relation = relation
        self._moved = moved
        flagged = [i for i, c in enumerate(relation.columns) if c.is_key]
        by_key = relation.replica_identity in "di" and bool(flagged)
        primary = self._positions(primary_key) or []
        if identity is not None:
            old = self._positions(identity) or []
        else:
            old = flagged if by_key else list(range(len(relation.columns)))
        self.key = primary or (flagged if by_key else [])
        own = primary if primary and set(primary) <= set(old) else old
        group = own if group_by is None else self._positions(group_by)
        split = group if split_by is None else self._positions(split_by)
        names = {c.name for c in relation.columns}
        named = dict.fromkeys([*(group_by or ()), *(split_by or ())])
        self.missing = [name for name in named if name not in names]
        group = own if group is None else group
        # Where deletes lack the group's columns, only the row's own key keeps their order. Then every
        # message has its own key's group as a second one, and the table stays in one split.
        self.tied = not set(group) <= set(old)
        one_split = self.tied or split is None or not set(split) <= set(old)
        self.own = GroupKey(relation.schema, relation.name, own)
        self.group = self._group_key(group)
        self.split = self._group_key([] if one_split else split or [])
        self.same_split = self.split.positions == self.group.positions
        self.hashed = frozenset((*own, *self.group.positions, *self.split.positions))

    def _positions(self, names: Sequence[str]) -> list[int] | None:
        columns = [c.name for c in self._relation.columns]
        try:
            return [columns.index(name) for name in names]
        except ValueError:
            return None

    def _group_key(self, positions: Sequence[int]) -> GroupKey:
        if tuple(positions) == self.own.positions:
            return self.own
        relation = self._relation
        names = [relation.columns[i].name for i in positions]
        return GroupKey(relation.schema, relation.name, positions, names)

    def ordering(self) -> tuple[Any, ...]:
        """Return what is equal for two shapes whose hashes keep the order of their messages together."""
        relation = self._relation
        columns = [
            [(relation.columns[i].name, relation.columns[i].type_oid) for i in key.positions]
            for key in (self.own, self.group, self.split)
        ]
        return relation.schema, relation.name, self.tied, *columns

    def links(
        self, row: Row, before: Sequence[bytes], values: Sequence[bytes]
    ) -> tuple[int, int | None]:
        """Return the hash of a row's group, and that of a second group; None if there is none.

        `values` are the row's, in JSON, and `before` its old ones: the same list if no hash changes.
        """
        if not self.tied:
            group = self.group.hash(values)
            old_group = group if before is values else self.group.hash(before)
            return group, None if old_group == group else old_group
        tie = self.tie(before)
        key = self.own.hash(values)
        if before is not values and key != self.own.hash(before):
            # A message has two groups, not three (its group, its key, its old key): so the row stays
            # in the group of its first key.
            self._moved[key] = tie
        if any(row[i] is UNCHANGED for i in self.group.positions):
            return tie, None
        group = self.group.hash(values)
        return group, None if tie == group else tie

    def tie(self, values: Sequence[bytes]) -> int:
        """Return the hash of a row's first key."""
        key = self.own.hash(values)
        return self._moved.get(key, key)

    def hashes(
        self, columns: Sequence[tuple[bytes, pa.BinaryArray, bytes]], rows: int
    ) -> RowHashes:
        """Return the hashes of rows; `columns` has their values, as `GroupKey.hashes` takes them."""
        own = self.own.hashes(columns, rows)
        group = own if self.group is self.own else self.group.hashes(columns, rows)
        if not self.tied:
            return RowHashes(own, group, None)
        moved = self._moved
        ties = pa.array([moved.get(key, key) for key in own.to_pylist()], pa.int64())
        same = pc.equal(ties, group)
        return RowHashes(own, group, pc.if_else(same, pa.scalar(None, pa.int64()), ties))
