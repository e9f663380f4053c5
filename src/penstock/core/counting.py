"""How many messages a sink has taken, each of them once, whatever was tried again. No I/O.

Rounds may be delivered twice: by a task that died before it reported, or by another query that does
the work anew, in other rounds. So what is reported of (start, end] counts when all parts of one plan of
it have reported: a run's captures report whole runs of rounds, as one part. No message up to where a
sink has been counted counts again: a query's workers request where that is, with `begin`, before their
first part, and leave out what lies before. From then on reports of earlier queries are ignored.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.blocks import Block
from penstock.core.message import Position, RoundPart, is_behind

_OPEN: Final = 64
"""Batches whose reports are remembered; all but the last few lost one on the way."""

Floors = Mapping[str, Position]
"""Up to where the messages of each sink are counted."""


class Counts(NamedTuple):
    """What became of messages: of those that the sink's tables and actions let through."""

    delivered: int = 0
    bytes: int = 0
    dead_lettered: int = 0
    filtered: int = 0

    def plus(self, other: Counts) -> Counts:
        """Return the sums."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


class Ledger:
    """What the parts of a source's batches have reported, in the run's process."""

    def __init__(self) -> None:
        self._query: str | None = None
        self._past: set[str] = set()
        self._floors: dict[str, Position] = {}
        self._open: dict[tuple[Position, Position, int], dict[int, Mapping[str, Counts]]] = {}
        self._closed: dict[tuple[Position, Position], None] = {}  # of this query, the last few

    def begin(self, query: str) -> Floors:
        """Return where a query's workers count from; from now on reports of others are ignored."""
        if query != self._query and query not in self._past:
            if self._query is not None:
                self._past.add(self._query)
            self._query = query
            self._open.clear()
            self._closed.clear()
        return dict(self._floors)

    def keep(self, sinks: Container[str]) -> None:
        """Forget all sinks but these: one that comes again is another."""
        self._floors = {name: floor for name, floor in self._floors.items() if name in sinks}

    def add(self, query: str, part: RoundPart, counts: Mapping[str, Counts]) -> dict[str, Counts]:
        """Take a part's report; return what counts now, by sink."""
        if query != self._query:
            return {}
        key = (part.start, part.end, part.plan)
        reported = self._open.setdefault(key, {})
        reported[part.part] = counts
        if len(reported) == part.parts:
            return self._close(key)
        if len(self._open) > _OPEN:  # of what was lost, what is known counts
            return self._close(min(self._open))
        return {}

    def _close(self, key: tuple[Position, Position, int]) -> dict[str, Counts]:
        start, end, _plan = key
        parts = self._open.pop(key).values()
        if (start, end) in self._closed:  # it was planned twice
            return {}
        self._closed[start, end] = None
        if len(self._closed) > 2 * _OPEN:
            del self._closed[next(iter(self._closed))]
        total: dict[str, Counts] = {}
        for counts in parts:
            for sink, of_part in counts.items():
                total[sink] = total.get(sink, Counts()).plus(of_part)
        for sink in total:  # the last report of the batch before may come later
            self._floors[sink] = max(self._floors.get(sink, end), end)
        return total


def split(block: Block, floors: Iterable[Position]) -> Iterator[Block]:
    """Yield a block in pieces, none of which lies on both sides of a floor; their order stays."""
    for floor in sorted(set(floors)):
        behind = is_behind(block.messages, floor)
        if not pc.any(behind).as_py():
            break
        if not pc.all(behind).as_py():
            yield _filtered(block, pc.invert(behind))
            block = _filtered(block, behind)
    yield block


def is_counted(block: Block, floor: Position | None) -> bool:
    """Return whether a piece that `split` gave lies up to a floor."""
    if floor is None or not block.messages.num_rows:
        return False
    lsn, idx = block.messages.column("commit_lsn"), block.messages.column("commit_idx")
    return Position(lsn[0].as_py(), idx[0].as_py()) <= floor


def _filtered(block: Block, keep: pa.Array) -> Block:
    results = None if block.results is None else block.results.filter(keep)
    return Block(block.part, block.messages.filter(keep), results)
