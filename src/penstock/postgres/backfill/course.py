"""Where a backfill under way is: its chunks from their plan to their delivery. No I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from penstock.postgres.backfill.noting import Noting, Watch
from penstock.postgres.backfill.planner import Planner, SnapshotHolder
from penstock.postgres.backfill.spec import BackfillSpec, Cursor, Place, Reads, Source


@dataclass
class Flight:
    """A chunk between its plan and its delivery."""

    chunk: int
    rows: int
    reads: Reads
    noting: Noting
    holder: SnapshotHolder | None
    owed: int
    """The oldest chunk that is whole only with this one."""
    keys: tuple[tuple[str, ...], ...]
    """Of rows that it reads once more."""
    made: float
    taken: float = 0.0


@dataclass
class Run:
    """A backfill under way, in one attempt."""

    spec: BackfillSpec
    attempt: int
    cursor: Place
    """What was told last: where to go back to."""
    source: Source
    fingerprint: tuple[Any, ...] | None
    """What `source` was made from."""
    planner: Planner
    watch: Watch
    flights: deque[Flight] = field(default_factory=deque)
    planned: Flight | None = None
    """Its watermark is not written yet."""
    taking: SnapshotHolder | None = None
    """It is to take the next chunk's snapshot, from `retry_at` on."""
    retry_at: float = 0.0
    waits_since: float | None = None
    """Since when no snapshot could be taken."""
    chunks: int = 0
    owed: tuple[tuple[str, ...], ...] = ()
    """Keys that the chunk that is being planned will have."""
    untold: deque[tuple[int, Cursor]] = field(default_factory=deque)
    """Cursors of chunks that are delivered, but not whole."""

    @property
    def under_way(self) -> list[Flight]:
        """The chunks whose snapshots are held."""
        return [*self.flights, *([] if self.planned is None else [self.planned])]
