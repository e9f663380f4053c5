"""The row of a change, for a backfill of its table. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.postgres.pgoutput import UNCHANGED, Delete, Insert, Row, Update
from penstock.postgres.table import Table, filled


class ChangedRow(NamedTuple):
    """What a backfill needs of a change.

    Attributes:
        hashes: Those of the row's own key before and after; None where the WAL lacks the key.
        key: The primary key's values, as text, where the change lacks other values.
        moved: Whether the row may stand behind the backfill's cursor now: its key changed, or it
            entered the publication's row filter.
    """

    hashes: tuple[int, ...] | None
    key: tuple[str, ...] | None = None
    moved: bool = False


def changed_row(table: Table, event: Insert | Update | Delete) -> ChangedRow:
    """Return what a backfill needs of a change."""
    if isinstance(event, Delete):
        return ChangedRow((table.own_hash(event.old or event.key or []),))
    new = event.new
    known: Row | None = None
    there: Sequence[int] = ()
    if isinstance(event, Update):
        known, there = event.old or event.key, table.old_columns(event)
        new = filled(new, known, there)
    if any(new[i] is UNCHANGED for i in {*table.groups.own.positions, *table.groups.key}):
        return ChangedRow(None)
    key = _key_texts(table, new) if UNCHANGED in new else None
    after = table.own_hash(new)
    if isinstance(event, Insert):
        return ChangedRow((after,), key, key is not None)
    if known is None:
        return ChangedRow((after,), key)
    before = list(new)
    for i in there:
        before[i] = known[i]
    left = table.own_hash(before)
    return ChangedRow((after,), key) if left == after else ChangedRow((left, after), key, True)


def _key_texts(table: Table, row: Row) -> tuple[str, ...]:
    return tuple((row[i] or b"").decode(errors="replace") for i in table.groups.key)  # type: ignore[union-attr]  # a key's value is bytes
