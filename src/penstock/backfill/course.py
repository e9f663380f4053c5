"""Where a backfill under way is: its chunks from their plan to their delivery. No I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from penstock.backfill.planner import Planner, SnapshotHolder
from penstock.core.errors import BackfillError
from penstock.postgres.capture import ReadsEvent
from penstock.postgres.reads import BackfillSpec, Cursor, Place, Reads, Source
from penstock.postgres.watermarks import NONE, Noting, Watch


@dataclass(frozen=True)
class Start:
    """Somebody, or the backfiller itself, wants an attempt."""

    spec: BackfillSpec
    cursor: Place
    attempt: int


@dataclass(frozen=True)
class Kept:
    """What has been noted of a table whose backfill stands still, and until when it is kept."""

    spec: BackfillSpec
    watch: Watch
    until: float


@dataclass(frozen=True)
class Again:
    """The watermark of an attempt's chunk was passed, but its reads can't be trusted."""

    attempt: int


@dataclass(frozen=True)
class Told:
    """The capture handed a chunk out, or it was confirmed."""

    what: ReadsEvent
    attempt: int
    chunk: int


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

    def take_owed(self, most: int) -> int:
        """Take the keys of rows to read once more into `owed`; return the oldest chunk that waits.

        Raises `BackfillError` if some could not be remembered. The capture's lock is held.
        """
        incomplete = self.watch.incomplete
        if self.watch.overflowed:
            raise BackfillError(
                "too_many_incomplete",
                f"More rows of {self.spec.schema}.{self.spec.table} were updated without their"
                " unchanged large values than can be read again.",
                remedy="Pause for less time, or ALTER TABLE … REPLICA IDENTITY FULL; then start"
                " another backfill.",
            )
        self.owed = tuple(incomplete)[:most]
        return min((incomplete.pop(key) for key in self.owed), default=NONE)

    def told(self, chunk: int, cursor: Cursor) -> Cursor:
        """Note that a chunk is delivered; return the cursor behind all that are whole, if it is new.

        The capture's lock is held.
        """
        self.untold.append((chunk, cursor))
        waiting = [*self.watch.incomplete.values()]
        waiting += [f.owed for f in self.under_way if f.owed < f.chunk]
        whole, new = min(waiting, default=NONE), None
        while self.untold and self.untold[0][0] < whole:
            new = self.untold.popleft()[1]
        return new
