"""The order of the rows of one batch: each waits for the newest earlier row of each of its groups.

No I/O and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.nats import OutboxForm
from penstock.core.json_members import members
from penstock.sinks.nats.outbox_formats import groups_of
from penstock.sinks.nats.rows import DONE, WAITING


def row_groups(
    batch: pa.RecordBatch, group_by: Sequence[str] | None, form: OutboxForm | None
) -> Iterable[tuple[Any, ...]] | None:
    """Return the groups of each row, or None if no two rows share one, as is common."""
    if batch.num_rows == 1:
        return None
    if form is not None:
        return groups_of(batch, form)
    if group_by:
        return group_keys(batch, group_by)
    new, old = batch.column("group_hash"), batch.column("old_group_hash")
    if old.null_count == len(old) and pc.count_distinct(new, mode="all").as_py() == len(new):
        return None
    return zip(new.to_pylist(), old.to_pylist(), strict=True)


def waits_of(keys: Iterable[tuple[Any, ...]]) -> tuple[list[int], dict[int, list[int]]]:
    """Return for each row how many earlier rows it waits for, and for each row which wait for it.

    A row waits for the newest earlier row of each of its groups; `None` is no group.
    """
    newest: dict[Any, int] = {}
    waits: list[int] = []
    followers: dict[int, list[int]] = {}
    for row, groups in enumerate(keys):
        before = {newest.get(group) for group in groups if group is not None}
        before.discard(None)
        for group in groups:
            if group is not None:
                newest[group] = row
        for earlier in before:
            followers.setdefault(earlier, []).append(row)  # type: ignore[arg-type]  # None is discarded
        waits.append(len(before))
    return waits, followers


def group_keys(batch: pa.RecordBatch, columns: Sequence[str]) -> Iterable[tuple[Any, ...]]:
    """Yield the groups of each row for a sink's own `group_by`: the new one, the one it has left.

    The source's groups are among them, so that a row whose column is not in the WAL keeps its place
    too.
    """
    names = zip(
        batch.column("table_schema").to_pylist(),
        batch.column("table_name").to_pylist(),
        strict=True,
    )
    rows = zip(
        names,
        batch.column("record").to_pylist(),
        batch.column("changes").to_pylist(),
        batch.column("group_hash").to_pylist(),
        batch.column("old_group_hash").to_pylist(),
        strict=True,
    )
    read = members(*columns)
    for name, record, changes, group, old_group in rows:
        new = [value for value in read(record).values() if value is not None]
        if len(new) < len(columns):
            yield group, old_group
            continue
        key = (*name, b"[%b]" % b",".join(new))
        old = read(changes).values()
        if any(value is not None for value in old):
            before = [was if was is not None else now for was, now in zip(old, new, strict=True)]
            yield key, (*name, b"[%b]" % b",".join(before)), group, old_group
        else:
            yield key, group, old_group


class GroupOrder:
    """Which rows wait for which earlier rows; empty where no two rows share a group.

    Args:
        groups: The groups of each row, None where no two rows share one.
    """

    def __init__(self, groups: Iterable[tuple[Any, ...]] | None) -> None:
        self.waits: list[int] = []
        """Of each row, how many earlier rows it waits for."""
        self.followers: dict[int, list[int]] = {}
        """Of each row that is not done, the rows that wait for it."""
        self._in_stream: set[int] = set()
        self._before: dict[int, list[int]] = {}  # row -> those it waits for, once that is asked
        if groups:
            self.waits, self.followers = waits_of(groups)

    def first_rows(self) -> Iterable[int]:
        """Return the rows that wait for none."""
        return (row for row, count in enumerate(self.waits) if not count)

    def is_early(self, row: int) -> bool:
        """Return whether a row of its group before this one is not done yet."""
        return bool(self.waits and self.waits[row])

    def note_in_stream(self, row: int) -> None:
        """Note that the stream has a row, behind some in doubt that it has too."""
        self._in_stream.add(row)

    def is_in_place(self, row: int) -> bool:
        """Return whether the stream has all that `row` waits for, though some may be in doubt."""
        if not self.is_early(row):
            return True
        if not self._before:
            for earlier, followers in self.followers.items():
                for follower in followers:
                    self._before.setdefault(follower, []).append(earlier)
        return all(
            earlier in self._in_stream or earlier not in self.followers
            for earlier in self._before[row]
        )

    def release(self, row: int, state: bytearray, ready: deque[int]) -> None:
        """Add to `ready` the waiting rows that wait for none any more, as `row` is done.

        Those behind a row that is early go when all before it are done, too.
        """
        waits, followers = self.waits, self.followers
        if waits and waits[row]:
            return
        done = [row]
        while done:
            for follower in followers.pop(done.pop(), ()):
                waits[follower] -= 1
                if waits[follower]:
                    continue
                # One in flight is behind this one in the same chain.
                if state[follower] == WAITING:
                    ready.append(follower)
                elif state[follower] == DONE:
                    done.append(follower)
