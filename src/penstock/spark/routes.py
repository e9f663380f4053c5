"""Which messages of its source go to a sink, and in which groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.sinks import NatsSinkSettings, Sink
from penstock.core.group_hash import group_hash, key_start
from penstock.core.message import ACTIONS, DELETE, READ
from penstock.core.tables import TablePattern, matches_any
from penstock.sinks.nats.order import group_keys

_FEW: Final = 64
_MOST_KNOWN: Final = 10_000


@dataclass(frozen=True)
class Route:
    """A sink, and which messages of its source it gets; `stream_id` is a stream's in the store.

    `uuid` is the sink's. Where `settings` have no `group_by`, the source's groups are the sink's. While
    a sink `starts`, what a backfill reads for it is published, though the live messages go to its
    backlog.
    """

    name: str
    settings: Sink
    stream_id: int | None = None
    starts: bool = False
    uuid: str | None = None

    def takes(self, schema: str, table: str, action: str) -> bool:
        """Return whether the messages of a table go to the sink, of one action."""
        return action in self._actions and self._has_table(schema, table)

    def _has_table(self, schema: str, table: str) -> bool:
        """Return whether the messages of a table go to the sink, of some action."""
        if (patterns := self._patterns) is None:
            return True
        found = self._known.get((schema, table))
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[schema, table] = matches_any(patterns, schema, table)
        return found

    def mask(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Return of each message whether it goes to the sink; None where all do."""
        if 0 < batch.num_rows <= _FEW and self._has_all(batch):
            return None
        keep = None
        actions = self._actions
        if actions != set(ACTIONS):
            values = pa.array(sorted(actions), pa.string())
            keep = pc.is_in(batch.column("action"), value_set=values)
        if self._patterns is not None:
            tables = self._tables(batch)
            keep = tables if keep is None else pc.and_(keep, tables)
        return None if keep is None or pc.all(keep).as_py() else keep

    @cached_property
    def _actions(self) -> set[str]:
        return actions_of(self.settings)

    @cached_property
    def _patterns(self) -> tuple[TablePattern, ...] | None:
        return self.settings.patterns  # which parses them each time

    @cached_property
    def _known(self) -> dict[tuple[str, str], bool]:
        return {}

    def _has_all(self, batch: pa.RecordBatch) -> bool:
        """Return whether all of a few messages go to the sink: the calls of kernels would cost more."""
        if not self._actions.issuperset(batch.column("action").to_pylist()):
            return False
        if self._patterns is None:
            return True
        schemas, tables = batch.column("table_schema"), batch.column("table_name")
        names = set(zip(schemas.to_pylist(), tables.to_pylist(), strict=True))
        return all(self._has_table(*name) for name in names)

    def _tables(self, batch: pa.RecordBatch) -> pa.Array:
        schemas, tables = batch.column("table_schema"), batch.column("table_name")
        names = pc.binary_join_element_wise(schemas, tables, "\0").dictionary_encode()
        chosen = [self._has_table(*name.split("\0", 1)) for name in names.dictionary.to_pylist()]
        return pa.array(chosen, pa.bool_()).take(names.indices)


def actions_of(sink: Sink) -> set[str]:
    """Return the actions of messages that a sink gets."""
    # A backfill is requested, so `actions` does not filter its reads.
    actions = {*sink.actions, READ}
    if isinstance(sink, NatsSinkSettings) and sink.kind == "rows" and not sink.deletes:
        # JetStream gets no message of a row that is gone: it must not fail on its way either.
        actions.discard(DELETE)
    return actions


def regrouped(batch: pa.RecordBatch, group_by: Sequence[str]) -> pa.RecordBatch:
    """Return `batch` with the hashes of the groups that the columns `group_by` make.

    A row is of its source's group too, or of the one that it left, so that a message without these
    columns (a delete that has the primary key alone) keeps its place behind the row's others.
    """

    def hashed(schema: str, table: str, values: bytes) -> int:
        return group_hash(key_start(schema, table, *group_by) + values + b"]")

    new: list[int] = []
    old: list[int | None] = []
    for groups in group_keys(batch, group_by):
        first, *others = [g if g is None or isinstance(g, int) else hashed(*g) for g in groups]
        assert first is not None  # noqa: S101 - a row has a group, and the one it left may be none
        new.append(first)
        old.append(next((g for g in others if g is not None and g != first), None))
    names = batch.schema.names
    columns = {"group_hash": pa.array(new, pa.int64()), "old_group_hash": pa.array(old, pa.int64())}
    arrays = [columns.get(name, batch.column(name)) for name in names]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def size(batch: pa.RecordBatch) -> int:
    """Return the bytes of the messages' values, about those of their bodies."""
    texts = ("record", "changes", "metadata")
    return sum(pc.sum(pc.binary_length(batch.column(name))).as_py() or 0 for name in texts)
