"""Chunks: cut anywhere without loss, and put together into tasks that keep every group whole."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, cast

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.message import WIRE_SCHEMA, Position
from penstock.postgres.chunk import Chunk, ChunkBuilder, partition
from penstock.postgres.reads import BackfillSpec, Reads, SourceTable
from penstock.postgres.table import WireRow

START = Position(5, -1)


class Change(NamedTuple):
    """A message's place and groups; a group is its own split's hash."""

    position: Position
    old_group: int
    group: int


def wire(change: Change) -> WireRow:
    old = None if change.old_group == change.group else change.old_group
    return (
        b"{}", None, b"insert", b"public", b"t", b"{}", b"key",
        *change.position, change.group, old, None, change.old_group, change.group,
    )  # fmt: skip


@st.composite
def changes(draw: st.DrawFn) -> list[Change]:
    sizes = draw(st.lists(st.integers(1, 5), max_size=8))
    groups = st.integers(-9, 9)
    found = []
    for i, size in enumerate(sizes):
        for idx in range(size):
            group = draw(groups)
            old = draw(groups) if draw(st.integers(0, 4)) == 0 else group
            found.append(Change(Position(10 + i, idx), old, group))
    return found


def build(given_changes: list[Change], splits: int, cuts: set[int]) -> list[Chunk]:
    """Return chunks that end after the changes numbered in `cuts`."""
    builder, chunks = ChunkBuilder(START, splits), []
    for number, change in enumerate(given_changes):
        builder.add(wire(change), 10)
        if number in cuts:
            chunks.append(builder.take(change.position))
    if builder.rows:
        chunks.append(builder.take(given_changes[-1].position))
    return chunks


def positions(batch: pa.RecordBatch | None) -> list[Position]:
    if batch is None:
        return []
    pairs = zip(batch["commit_lsn"].to_pylist(), batch["commit_idx"].to_pylist(), strict=True)
    return [Position(*pair) for pair in pairs]


def of_split(chunk: Chunk, split: int) -> pa.RecordBatch | None:
    found = [m for piece in chunk.pieces if (m := piece.of({split})) is not None and m.num_rows]
    assert len(found) < 2
    return found[0] if found else None


cuts = st.sets(st.integers(0, 40))


@given(changes(), st.integers(1, 5), st.integers(1, 5), cuts)
def test_partition(made: list[Change], splits: int, tasks: int, at: set[int]) -> None:
    batches = partition(build(made, splits, at), tasks)
    assert len(batches) <= tasks
    found = [positions(batch) for batch in batches]
    everything = [position for task in found for position in task]
    assert sorted(everything) == [change.position for change in made], "nothing lost, none twice"
    for task in found:
        assert task == sorted(task)
        assert task
    task_of = {position: number for number, task in enumerate(found) for position in task}
    of_group: dict[int, set[int]] = {}
    for change in made:
        for group in (change.old_group, change.group):
            of_group.setdefault(group, set()).add(task_of[change.position])
    assert all(len(tasks) == 1 for tasks in of_group.values()), "a group is in one task"
    for batch in batches:
        assert batch.schema == WIRE_SCHEMA


@given(changes(), st.integers(1, 3), cuts, st.data())
def test_until_and_after(
    made: list[Change], splits: int, at: set[int], data: st.DataObject
) -> None:
    # Any cut will do, at a message or between two, outside of the chunk too.
    known = [change.position for change in made]
    between = st.builds(Position, st.integers(4, 20), st.integers(-1, 6))
    cut = data.draw(st.sampled_from(known) | between if known else between)
    for chunk in build(made, splits, at):
        left, right = chunk.until(cut), chunk.after(cut)
        assert (left.end, right.start) == (cut, cut)
        for split in range(splits):
            whole, one, other = (of_split(each, split) for each in (chunk, left, right))
            assert positions(one) + positions(other) == positions(whole)
            assert all(position <= cut for position in positions(one))
            assert all(position > cut for position in positions(other))
        assert left.rows + right.rows == chunk.rows
        assert left.bytes + right.bytes <= chunk.bytes
        assert left.links == right.links == chunk.links


def test_reads_are_whole_where_none_of_them_is_cut_off() -> None:
    """After a restart a chunk may begin before the position that its batch begins at."""
    spec = BackfillSpec(1, "sink", "public", "t")
    source = cast("SourceTable", None)
    reads = Reads(spec, 1, 0, None, (b"1\n",), source, lsn=20)
    chunk = ChunkBuilder(START, 1).reads(START, reads, 9)
    for start in START, Position(12, 3), Position(20, -1):
        part = chunk.after(start)
        assert (part.start, part.end, part.reads, part.rows) == (start, chunk.end, reads, 9)
    assert chunk.until(Position(21, -1)).reads is reads
    inside = Position(20, 0)
    for part in chunk.after(inside), chunk.until(inside), chunk.until(Position(19, 0)):
        assert (part.reads, part.rows, part.barrier) == (None, 0, True)


@given(changes(), st.integers(1, 3), cuts)
def test_a_builder_goes_on_where_it_was(made: list[Change], splits: int, at: set[int]) -> None:
    chunks = build(made, splits, at)
    assert sum(chunk.rows for chunk in chunks) == len(made)
    assert sum(chunk.bytes for chunk in chunks) == 10 * len(made)
    if chunks:
        assert chunks[0].start == START
        assert all(before.end == after.start for before, after in pairwise(chunks))


def test_nothing() -> None:
    assert partition([], 2) == []
    empty = ChunkBuilder(START, 2).take(START)
    assert partition([empty], 2) == []
