"""How far a collection of a sync is: what is stored, and what a restart may lose. Pure, no I/O."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.syncs.connectors.contract import Deletes, Json, Kind
from penstock.syncs.deletes import asks
from penstock.syncs.jobs import FINISH, Facts, PageDone, Swept

_MOST_RETRIES: Final = 3
"""So often a run of polls goes on after a failure; then it is planned anew."""


def merged(old: Json | None, new: Json | None) -> Json | None:
    """Return a cursor with the members that another one has."""
    return old if new is None else {**(old or {}), **new}


class RunSlice(msgspec.Struct):
    """A slice of a run: what the connector planned, and how far it is read and written."""

    of: Json
    resume: Json | None = None
    cursor: Json | None = None
    done: bool = False


class CollectionRun(msgspec.Struct):
    """One backfill, poll, sweep, or read of the events of a collection.

    Attributes:
        kind: What it does.
        started_at: When it began, Unix time.
        begun: The cursor that it was planned from.
        newest: The newest time that was known when it began.
        slices: What it reads; None until it is planned.
        cursor: Up to where all slices are written.
        is_swept: Whether what a sweep has missed is dealt with.
        confirmed: How many deletes an operator has agreed to.
        read: How many records it has read.
        newer: New and changed records that are newer than all before, or of an unknown time.
        latest: The newest time that it has seen.
        failures: Its failures in a row.
    """

    kind: Kind
    started_at: float
    begun: Json | None = None
    newest: float | None = None
    slices: list[RunSlice] | None = None
    cursor: Json | None = None
    is_swept: bool = False
    confirmed: int = 0
    read: int = 0
    newer: int = 0
    latest: float | None = None
    failures: int = 0

    def pending(self, taken: set[int]) -> int | None:
        """Return the next slice for a job, None where there is none that is not `taken`."""
        for number, slice_ in enumerate(self.slices or ()):
            if not slice_.done and number not in taken:
                return number
        return None

    @property
    def is_read(self) -> bool:
        """Whether all slices are done."""
        return self.slices is not None and all(s.done for s in self.slices)

    @property
    def is_over(self) -> bool:
        """Whether all of it is done."""
        return self.is_read and (self.kind is not Kind.SWEEP or self.is_swept)

    @property
    def is_stuck(self) -> bool:
        """Whether records came that are newer than all before, and the cursor did not move."""
        if self.kind is Kind.BACKFILL:
            return self.read > 0 and self.cursor is None
        return self.kind is Kind.POLL and self.newer > 0 and not self.has_moved

    @property
    def has_moved(self) -> bool:
        """Whether its cursor is another one than that from which it was planned."""
        return merged(self.begun, self.cursor) != self.begun

    @property
    def share(self) -> float:
        """The share of its slices that is done."""
        slices = self.slices or ()
        return sum(s.done for s in slices) / len(slices) if slices else 0.0

    def plan(self, slices: list[Json]) -> None:
        """Take the slices that a job has planned."""
        self.slices = [RunSlice(of) for of in slices]

    def note(self, number: int, page: PageDone) -> None:
        """Take a page of a slice."""
        slice_ = self._slice(number)
        slice_.resume = page.resume
        slice_.cursor = merged(slice_.cursor, page.cursor)
        slice_.done = slice_.done or page.is_last
        self.read += page.read
        self.newer += page.undated
        if page.newest is not None:
            self.newer += self.newest is None or page.newest > self.newest
            self.latest = max(page.newest, self.latest or page.newest)
        self.failures = 0
        self._move()

    def end_slice(self, number: int) -> None:
        """Note that a slice is read to its end."""
        self._slice(number).done = True
        self._move()

    def goes_on(self, number: int | None, *, transient: bool) -> bool:
        """Note that the job of a slice failed (None: that of the plan); return whether the run goes on.

        Otherwise another one is planned: a sweep that broke off deletes nothing.
        """
        self.failures += 1
        if self.kind is Kind.SWEEP and not transient:
            return False
        if self.kind is not Kind.BACKFILL and self.failures > _MOST_RETRIES:
            return False
        if number is not None and number != FINISH and not transient:
            self._slice(number).resume = None  # it may be what the API refuses
        return True

    def _slice(self, number: int) -> RunSlice:
        assert self.slices is not None  # noqa: S101 - a job of a slice comes from a plan
        return self.slices[number]

    def _move(self) -> None:
        for slice_ in self.slices or ():
            self.cursor = merged(self.cursor, slice_.cursor)
            if not slice_.done:
                return


class CollectionFailure(msgspec.Struct):
    """Why a collection is not read: what is wrong, what to do, and when it is tried again.

    `credential` is the version of the credential that is at fault; then nothing is tried before another.
    `slice` is the number of the slice that failed.
    """

    code: str
    cause: str
    remedy: str
    since: float
    failures: int = 1
    retry_at: float | None = None
    credential: str | None = None
    slice: int | None = None


class AskedSweep(msgspec.Struct):
    """A sweep that would delete too much."""

    known: int
    missing: int
    at: float


class CollectionCounts(msgspec.Struct):
    """What was read and written since the sync began."""

    read: int = 0
    inserted: int = 0
    changed: int = 0
    deleted: int = 0
    unreadable: int = 0
    skipped: int = 0
    requests: int = 0

    def add(self, page: PageDone) -> None:
        """Count a page."""
        for name in ("read", "inserted", "changed", "deleted", "unreadable", "skipped"):
            setattr(self, name, getattr(self, name) + getattr(page, name))


class CollectionProgress(msgspec.Struct, kw_only=True):
    """A collection of a sync, as it is stored; times are Unix time.

    Attributes:
        cursor: Up to where polls and reads of events have read, and all of that is written.
        backfill: The backfill that is not complete, which goes on after a restart.
        backfilled_at: When the first one was complete; None: nothing is polled yet.
        newest: The newest `updated_at` that was seen.
        due: When it is polled next, and so on, by kind.
        sweep: What the ids of the newest sweep are stored under.
        looks_again: Whether the next sweep is the second look that one which has missed something wants.
        asks: A sweep that waits for an answer.
        confirmed: How many deletes of the next sweep an operator has agreed to.
        stuck: Records came and the cursor did not move.
        failed: Why it is not read, by what is done with it.
    """

    sync: str
    collection: str
    cursor: Json | None = None
    backfill: CollectionRun | None = None
    backfilled_at: float | None = None
    newest: float | None = None
    polled_at: float | None = None
    succeeded_at: float | None = None
    swept_at: float | None = None
    due: dict[Kind, float] = {}
    facts: Facts | None = None
    sweep: str | None = None
    looks_again: bool = False
    asks: AskedSweep | None = None
    confirmed: int = 0
    stuck: CollectionFailure | None = None
    failed: dict[Kind, CollectionFailure] = {}
    counts: CollectionCounts = msgspec.field(default_factory=CollectionCounts)

    def cursor_of(self, kind: Kind) -> Json | None:
        """Return the cursor from which a run is planned."""
        return self.cursor if kind in (Kind.POLL, Kind.EVENTS) else None

    def move(self, run: CollectionRun) -> None:
        """Take over how far a run has come.

        A backfill's cursor counts once all of it is there. It moves nothing that polls have moved: these
        may not have read yet what was deleted before it.
        """
        if run.kind in (Kind.POLL, Kind.EVENTS):
            self.cursor = merged(self.cursor, run.cursor)
        elif run.kind is Kind.BACKFILL and run.is_over:
            self.cursor = merged(run.cursor, self.cursor)

    def swept(self, run: CollectionRun, report: Swept, share: float, now: float) -> None:
        """Take what a complete sweep has found; `share` of the records may go without a question."""
        self.counts.deleted += report.deleted
        self.confirmed = 0
        is_held = not (report.deleted or report.waiting)
        if is_held and asks(report.known, report.missing, share, run.confirmed):
            self.asks = AskedSweep(report.known, report.missing, now)
        run.is_swept = True
        # What a second look is the first one to miss can wait: an API that loses objects all the time is
        # not swept all the time.
        self.looks_again = report.waiting > 0 and not self.looks_again

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What is done from time to time, by what is known of the collection."""
        deletes = Deletes.NONE if self.facts is None else self.facts.deletes
        if deletes is Deletes.EVENTS:
            return (Kind.POLL, Kind.EVENTS)
        return (Kind.POLL, Kind.SWEEP) if deletes is Deletes.SWEEP else (Kind.POLL,)
