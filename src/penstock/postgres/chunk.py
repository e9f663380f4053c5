"""A run of consecutive messages, split by group: what the capture hands to Spark."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import itemgetter
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.message import NO_PART, WIRE_SCHEMA, Position, is_behind
from penstock.postgres.raw_rows import RawRows
from penstock.postgres.reads import Reads
from penstock.postgres.table import WireRow

_FIELDS: Final = tuple(WIRE_SCHEMA)[:-1]  # without `part`
_APART_ROWS: Final = 1_000
"""A chunk of fewer messages is one piece: mostly all of it goes the same way."""


class Piece(NamedTuple):
    """Messages (`WIRE_SCHEMA`) of these splits, in commit order; of several, `each` has every row's."""

    splits: frozenset[int]
    messages: pa.RecordBatch
    each: Sequence[int] | None = None

    def of(self, splits: Collection[int]) -> pa.RecordBatch | None:
        """Return the messages of some splits, None where there is none."""
        if self.splits.issubset(splits):
            return self.messages
        if self.each is None or self.splits.isdisjoint(splits):
            return None
        return self.messages.filter(pa.array([split in splits for split in self.each]))

    def where(self, mask: pa.Array) -> Piece | None:
        """Return the messages that a mask keeps, None where there is none."""
        kept = self.messages.filter(mask)
        if not kept.num_rows:
            return None
        if self.each is None:
            return Piece(self.splits, kept)
        each = list(compress(self.each, mask.to_pylist()))
        return Piece(frozenset(each), kept, each)


class Rows:
    """The rows of a chunk; their messages are made when they are first asked for.

    That takes milliseconds of the thread that hands the chunk out. The capture's own reads meanwhile.
    """

    __slots__ = ("_pieces", "_raw", "_splits", "_wire")

    def __init__(self, wire: list[WireRow], raw: list[RawRows], splits: int) -> None:
        self._wire = wire
        self._raw = raw
        self._splits = splits
        self._pieces: tuple[Piece, ...] | None = None

    def pieces(self) -> tuple[Piece, ...]:
        """Return the messages; raises `ProtocolError` where a row is none of its table."""
        if self._pieces is None:
            self._pieces = tuple(self._made())
            self._wire, self._raw = [], []
        return self._pieces

    def _made(self) -> Iterator[Piece]:
        messages, each = self._messages()
        present = sorted(set(each))
        if len(present) == 1:
            yield Piece(frozenset(present), messages)
        elif len(each) < _APART_ROWS:
            yield Piece(frozenset(present), messages, each)
        else:
            for n in present:
                places = [i for i, split in enumerate(each) if split == n]
                yield Piece(frozenset([n]), messages.take(pa.array(places, pa.int64())))

    def _messages(self) -> tuple[pa.RecordBatch, list[int]]:
        """Return the messages in commit order, and each one's split."""
        wire, found = list(self._wire), []
        for raw in self._raw:
            made, others = raw.encode()
            found += [(each.messages, each.splits.to_pylist()) for each in made]
            wire += others
        if self._raw:
            wire.sort(key=itemgetter(7, 8))  # their positions
        if wire:
            found.append((_batch(wire), [row[-1] for row in wire]))
        batches, hashes = zip(*found, strict=True)
        each = [hash_ % self._splits for some in hashes for hash_ in some]
        if len(batches) == 1:
            return batches[0], each
        whole = pa.concat_batches(batches)
        order = _order(whole)
        return whole.take(order), [each[i] for i in order.to_pylist()]


@dataclass(frozen=True, slots=True)
class Chunk:
    """All messages in `(start, end]`.

    Attributes:
        content: The messages, or the rows to make them of.
        links: Pairs of splits that share a group and must be delivered as one.
        barrier: Whether it is delivered apart from the chunks before and after it.
        reads: The rows that a backfill has read; their messages are made when it is handed out.
        captured_at: When its oldest message came, in seconds of the monotonic clock.
    """

    start: Position
    end: Position
    rows: int
    bytes: int
    content: tuple[Piece, ...] | Rows
    links: frozenset[tuple[int, int]]
    barrier: bool
    reads: Reads | None = None
    captured_at: float = 0.0

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The messages; raises `ProtocolError` where a row is none of its table."""
        return self.content.pieces() if isinstance(self.content, Rows) else self.content

    @property
    def splits(self) -> frozenset[int]:
        """The splits that have messages."""
        return frozenset().union(*(piece.splits for piece in self.pieces))

    def made(self) -> Chunk:
        """Return the chunk with its messages made; raises `ProtocolError` as `pieces` does."""
        return replace(self, content=self.pieces)

    def until(self, end: Position) -> Chunk:
        """Return the part of this chunk up to `end`, inclusive."""
        return self._where(self.start, end)

    def after(self, start: Position) -> Chunk:
        """Return the part of this chunk behind `start`."""
        return self._where(start, self.end)

    def emptied(self) -> Chunk:
        """Return a chunk of the same positions without a message."""
        return Chunk(self.start, self.end, 0, 0, (), frozenset(), self.barrier)

    def _where(self, start: Position, end: Position) -> Chunk:
        if self.reads is not None:
            # Its messages are not made yet: all of them, or none. After a restart the chunk may begin
            # long before its watermark: at the position in Spark's checkpoint.
            whole = start < Position(self.reads.lsn, 0) and end >= self.reads.end
            return replace(self if whole else self.emptied(), start=start, end=end)

        def within(piece: Piece) -> Piece | None:
            messages = piece.messages
            return piece.where(pc.and_not(is_behind(messages, start), is_behind(messages, end)))

        pieces = tuple(kept for piece in self.pieces if (kept := within(piece)) is not None)
        rows = sum(piece.messages.num_rows for piece in pieces)
        size = self.bytes * rows // max(self.rows, 1)
        return Chunk(start, end, rows, size, pieces, self.links, self.barrier)


class ChunkBuilder:
    """Collects the rows of changes; `take` makes a chunk of them."""

    def __init__(self, start: Position, splits: int) -> None:
        self.start = start
        self.bytes = 0
        self._count = splits
        self._rows: list[WireRow] = []
        self._raw: list[RawRows] = []
        self._waiting = 0
        self._links: set[tuple[int, int]] = set()

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return len(self._rows) + self._waiting

    def add(self, row: WireRow, size: int) -> None:
        """Append a row; `size` is its bytes in the WAL, an estimate of its memory."""
        self._rows.append(row)
        old_split, split = row[-2:]
        if old_split != split and (left := old_split % self._count) != split % self._count:
            self._links.add((left, split % self._count))
        self.bytes += size

    def add_raw(self, rows: RawRows, size: int) -> None:
        """Note that a row waits in `rows`; `size` is its bytes in the WAL."""
        if len(rows.data) == 1:
            self._raw.append(rows)
        self._waiting += 1
        self.bytes += size

    def reads(self, start: Position, reads: Reads, rows: int) -> Chunk:
        """Return the chunk of a backfill's reads; the builder, which is empty, continues at its end."""
        self.start = reads.end
        return Chunk(start, reads.end, max(rows, 1), 0, (), frozenset(), True, reads)

    def take(self, end: Position, *, barrier: bool = False) -> Chunk:
        """Return the chunk of all rows added, which ends at `end`; the builder continues there."""
        rows = Rows(self._rows, [raw.take() for raw in self._raw], self._count)
        chunk = Chunk(
            self.start, end, self.rows, self.bytes, rows if self.rows else (),
            frozenset(self._links), barrier,
        )  # fmt: skip
        self.__init__(end, self._count)  # type: ignore[misc]  # a builder has no subclass
        return chunk


def _batch(rows: Sequence[WireRow]) -> pa.RecordBatch:
    # The rows' last two items, the splits, have no column.
    columns = zip(zip(*rows, strict=True), _FIELDS, strict=False)
    arrays = [pa.array(c, f.type) for c, f in columns]
    return pa.RecordBatch.from_arrays([*arrays, pa.repeat(NO_PART, len(rows))], schema=WIRE_SCHEMA)


def tied(chunks: Iterable[Chunk]) -> list[frozenset[int]]:
    """Return the splits that have messages in `chunks`, those together that share a group."""
    kept = list(chunks)
    found = {split: frozenset([split]) for chunk in kept for split in chunk.splits}
    for chunk in kept:
        for a, b in chunk.links:
            both = found.get(a, frozenset([a])) | found.get(b, frozenset([b]))
            found.update(dict.fromkeys(both, both))
    return list(dict.fromkeys(found.values()))


def joined(chunks: Iterable[Chunk], splits: Collection[int]) -> pa.RecordBatch:
    """Return the messages that `chunks` have of some splits, in commit order where these are several."""
    batches, in_order = [], True
    for chunk in chunks:
        found = [b for piece in chunk.pieces if (b := piece.of(splits)) is not None]
        in_order = in_order and len(found) < 2
        batches += found
    if len(batches) == 1:
        return batches[0]
    whole = pa.concat_batches(batches)
    return whole if in_order else _ordered(whole)


def partition(chunks: Iterable[Chunk], at_most: int) -> list[pa.RecordBatch]:
    """Return the messages of `chunks` as at most `at_most` batches, every group within one of them."""
    kept = list(chunks)
    parts: dict[int, frozenset[int]] = {}
    for splits in tied(kept):
        to = min(splits) % at_most
        parts[to] = parts.get(to, frozenset()) | splits
    return [joined(kept, splits) for splits in parts.values()]


def _ordered(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(_order(batch))


def _order(batch: pa.RecordBatch) -> pa.UInt64Array:
    return pc.sort_indices(
        batch, sort_keys=[("commit_lsn", "ascending"), ("commit_idx", "ascending")]
    )
