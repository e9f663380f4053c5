"""A run of consecutive messages, split by group: what the capture hands to Spark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.message import NO_PART, WIRE_SCHEMA, Position, is_behind
from penstock.postgres.reads import Reads
from penstock.postgres.table import WireRow

_FIELDS: Final = tuple(WIRE_SCHEMA)[:-1]  # without `part`


@dataclass(frozen=True, slots=True)
class Chunk:
    """All messages in `(start, end]`.

    Attributes:
        splits: A batch of `WIRE_SCHEMA` for each split, in commit order; None where a split is empty.
        links: Pairs of splits that share a group and must be delivered as one.
        barrier: Whether it is delivered apart from the chunks before and after it.
        reads: What a backfill's tasks read; then the chunk has no messages of its own.
        captured_at: When its oldest message came, in seconds of the monotonic clock.
    """

    start: Position
    end: Position
    rows: int
    bytes: int
    splits: tuple[pa.RecordBatch | None, ...]
    links: frozenset[tuple[int, int]]
    barrier: bool
    reads: Reads | None = None
    captured_at: float = 0.0

    def until(self, end: Position) -> Chunk:
        """Return the part of this chunk up to `end`, inclusive."""
        return self._where(self.start, end)

    def after(self, start: Position) -> Chunk:
        """Return the part of this chunk behind `start`."""
        return self._where(start, self.end)

    def emptied(self) -> Chunk:
        """Return a chunk of the same positions without a message."""
        empty = (None,) * len(self.splits)
        return Chunk(self.start, self.end, 0, 0, empty, frozenset(), self.barrier)

    def _where(self, start: Position, end: Position) -> Chunk:
        if self.reads is not None:
            # Only its tasks know the rows: all of them, or none. After a restart the chunk may begin
            # long before its watermark: at the position in Spark's checkpoint.
            whole = start < Position(self.reads.lsn, 0) and end >= self.reads.end
            return replace(self if whole else self.emptied(), start=start, end=end)

        def within(batch: pa.RecordBatch | None) -> pa.RecordBatch | None:
            if batch is None:
                return None
            kept = batch.filter(pc.and_not(is_behind(batch, start), is_behind(batch, end)))
            return kept if kept.num_rows else None

        splits = tuple(within(batch) for batch in self.splits)
        rows = sum(batch.num_rows for batch in splits if batch is not None)
        size = self.bytes * rows // max(self.rows, 1)
        return Chunk(start, end, rows, size, splits, self.links, self.barrier)


class ChunkBuilder:
    """Collects wire rows; `take` makes a chunk of them."""

    def __init__(self, start: Position, splits: int) -> None:
        self.start = start
        self.rows = 0
        self.bytes = 0
        self._count = splits
        self._splits: tuple[list[WireRow], ...] = tuple([] for _ in range(splits))
        self._links: set[tuple[int, int]] = set()

    def add(self, row: WireRow, size: int) -> None:
        """Append a row to its split; `size` is its bytes in the WAL, an estimate of its memory."""
        old_split, split = row[-2:]
        count = self._count
        to = split % count
        self._splits[to].append(row)
        if old_split != split and (left := old_split % count) != to:
            self._links.add((left, to))
        self.rows += 1
        self.bytes += size

    def reads(self, start: Position, reads: Reads, rows: int) -> Chunk:
        """Return the chunk of a backfill's reads; the builder, which is empty, continues at its end."""
        self.start = reads.end
        return Chunk(
            start, reads.end, max(rows, 1), 0, (None,) * self._count, frozenset(), True, reads
        )

    def take(self, end: Position, *, barrier: bool = False) -> Chunk:
        """Return the chunk of all rows added, which ends at `end`; the builder continues there."""
        chunk = Chunk(
            self.start, end, self.rows, self.bytes,
            tuple(_batch(rows) if rows else None for rows in self._splits),
            frozenset(self._links), barrier,
        )  # fmt: skip
        self.__init__(end, self._count)  # type: ignore[misc]
        return chunk


def _batch(rows: Sequence[WireRow]) -> pa.RecordBatch:
    # The rows' last two items, the splits, have no column.
    columns = zip(zip(*rows, strict=True), _FIELDS, strict=False)
    arrays = [pa.array(c, f.type) for c, f in columns]
    return pa.RecordBatch.from_arrays([*arrays, pa.repeat(NO_PART, len(rows))], schema=WIRE_SCHEMA)


def partition(chunks: Iterable[Chunk], at_most: int) -> list[pa.RecordBatch]:
    """Return the messages of `chunks` as at most `at_most` batches, every group within one of them."""
    kept = list(chunks)
    if not kept:
        return []
    count = len(kept[0].splits)
    # Union-find over splits, in its simplest form: there are only as many as cores.
    root = [i % at_most for i in range(count)]
    for chunk in kept:
        for a, b in chunk.links:
            old, new = root[a], root[b]
            root = [new if r == old else r for r in root]
    parts: dict[int, list[pa.RecordBatch]] = {}
    for index, r in enumerate(root):
        for chunk in kept:
            batch = chunk.splits[index]
            if batch is not None:
                parts.setdefault(r, []).append(batch)
    # The messages of joined splits interleave: sort them into commit order.
    return [
        _ordered(batches) if root.count(r) > 1 else _joined(batches) for r, batches in parts.items()
    ]


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _ordered(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    joined = _joined(batches)
    order = pc.sort_indices(
        joined, sort_keys=[("commit_lsn", "ascending"), ("commit_idx", "ascending")]
    )
    return joined.take(order)
