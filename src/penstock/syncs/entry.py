"""One collection of one sync: what is done with it next. Pure, no I/O.

One run of a collection goes on at a time, so that no page that was fetched before a delete or a change
is written after it. Polls and the feed of events come first: a backfill or a sweep makes room behind the
next page from which it can go on. What can't go on anywhere is read to its end before.
"""

from __future__ import annotations

from typing import Final, Literal

from penstock.core.backoff import wait_after
from penstock.syncs.connectors.contract import Deletes, Kind
from penstock.syncs.errors import PAUSING
from penstock.syncs.flight import Flight
from penstock.syncs.jobs import FINISH, Job, JobFailure, PageDone, Planned, Swept
from penstock.syncs.progress import CollectionFailure, CollectionProgress, CollectionRun
from penstock.syncs.sync import Key, SyncSettings

FIRST: Final = (Kind.POLL, Kind.EVENTS)
"""What a backfill and a sweep make room for."""
_CONTINUOUS_SECONDS: Final = 0.25
_LEAST_SHARE_SECONDS: Final = 1.0
"""So long a backfill or a sweep goes on at least before it makes room again."""
_TRANSIENT: Final = (1.0, 300.0)
_LASTING: Final = (60.0, 3600.0)
_JITTER: Final = 0.25


class Entry:
    """A collection of a sync; `progress` is what is stored of it."""

    def __init__(self, sync: SyncSettings, progress: CollectionProgress) -> None:
        self.sync = sync
        self.progress = progress
        self.flights: dict[int, Flight] = {}
        self.runs: dict[Kind, CollectionRun] = {}
        self.queued: Literal["first", "later"] | None = None
        """In which of its credential's queues it waits."""
        self.queued_in = ""
        """The credential of that queue."""
        self.was_cut = False
        """Whether its newest job was ended, and all that it had done was lost."""
        self.removed = False
        self.blocked = False
        """Whether the sync waits for another credential."""
        self.must_store = False
        """Whether its progress must be stored before anything else is done."""
        self.storing = False
        self.version = 0
        """Of its entry in the scheduler's heap: others are stale."""
        self._holds_until = 0.0
        if progress.backfill is not None:
            self.runs[Kind.BACKFILL] = progress.backfill

    @property
    def key(self) -> Key:
        """The ids of sync and collection."""
        return self.progress.sync, self.progress.collection

    @property
    def runs_now(self) -> bool:
        """Whether anything is done with it."""
        waits = self.blocked or self.removed or self.must_store
        return self.sync.active and not waits

    # -- what comes next

    def choose(self, now: float) -> CollectionRun | None:
        """Return the run that is to go on now, which may begin with that; None: nothing is due."""
        if not self.runs_now:
            return None
        self._begin_backfill(now)
        if not self.flights:
            for run in [run for run in self.runs.values() if run.is_over]:
                self._complete(run, now)
        for kind in self._order:
            if self._at(kind) <= now:
                return self._run(kind, now)
        return None

    def look_at(self) -> float | None:
        """Return when to choose again, None: not before a job has ended or something was changed."""
        if not self.runs_now or any(f.yields for f in self.flights.values()):
            return None
        running = self.running
        if running is None and self.queued is None:
            if self.progress.backfilled_at is None and Kind.BACKFILL not in self.runs:
                return 0.0
            return min((self._at(kind) for kind in self._order), default=None)
        if self.queued == "first" or (running is not None and running.kind in FIRST):
            return None
        return min((self._at(kind) for kind in self._order if kind in FIRST), default=None)

    def makes_room(self, chosen: CollectionRun | None) -> bool:
        """Return whether what lanes have can wait: it is to end where it can go on."""
        running = self.running
        if running is None or chosen is None or running is chosen:
            return False
        return chosen.kind in FIRST and running.kind not in FIRST

    @property
    def is_unwanted(self) -> bool:
        """Whether what lanes have is not to go on: it is to end behind any page."""
        running = self.running
        if running is None:
            return False
        return not self.runs_now or self.runs.get(running.kind) is not running

    @property
    def running(self) -> CollectionRun | None:
        """The run that lanes have jobs of."""
        return next((flight.run for flight in self.flights.values()), None)

    @property
    def _order(self) -> list[Kind]:
        """What may be done with it by now, the first one first."""
        progress, facts = self.progress, self.progress.facts
        if progress.backfilled_at is None:
            # What is deleted while the backfill lasts is in the feed behind where that is begun.
            feeds = facts is not None and facts.deletes is Deletes.EVENTS
            first = feeds and Kind.EVENTS not in progress.due
            return [Kind.EVENTS, Kind.BACKFILL] if first else [Kind.BACKFILL]
        kinds: list[Kind] = [kind for kind in self.runs if kind in FIRST]
        kinds += [kind for kind in progress.kinds if kind in FIRST and kind not in kinds]
        if Kind.BACKFILL in self.runs:
            return [*kinds, Kind.BACKFILL]
        if Kind.SWEEP in progress.kinds and progress.asks is None:
            kinds.append(Kind.SWEEP)
        return kinds

    def _at(self, kind: Kind) -> float:
        """Return when a kind may go on, or begin."""
        progress = self.progress
        if kind in self.runs:
            at = 0.0
        elif kind is Kind.SWEEP:
            at = (progress.swept_at or progress.backfilled_at or 0.0) + self.sync.sweep_interval
            at = min(at, progress.due.get(kind, at))
        else:
            every = max(self.sync.frequency, _CONTINUOUS_SECONDS)  # it may be shorter by now
            at = min(progress.due.get(kind, 0.0), (progress.polled_at or 0.0) + every)
        if (failed := progress.failed.get(kind)) is not None and failed.retry_at is not None:
            at = max(at, failed.retry_at)
        waits = kind in FIRST and any(of not in FIRST for of in self.runs)
        return max(at, self._holds_until) if waits else at

    def _begin_backfill(self, now: float) -> None:
        if self.progress.backfilled_at is None and Kind.BACKFILL not in self.runs:
            self.start_backfill(now)

    def _run(self, kind: Kind, now: float) -> CollectionRun:
        if kind not in self.runs:
            progress = self.progress
            self.runs[kind] = CollectionRun(
                kind, now, begun=progress.cursor_of(kind), newest=progress.newest,
                confirmed=progress.confirmed if kind is Kind.SWEEP else 0,
            )  # fmt: skip
        return self.runs[kind]

    def next_slice(self, run: CollectionRun) -> tuple[bool, int | None]:
        """Return whether there is a job of a run to hand out, and of which slice; None: of the plan."""
        taken = {flight.slice for flight in self.flights.values()}
        if run.slices is None:
            return not self.flights, None
        number = run.pending({n for n in taken if n is not None})
        if number is not None:
            return None not in taken, number
        ends = run.kind is Kind.SWEEP and run.is_read and not self.flights
        return (ends, FINISH) if ends else (False, None)

    def take(
        self, number: int, lane: int, run: CollectionRun, slice_: int | None, now: float
    ) -> Job:
        """Return a job, numbered `number`, which a lane has from now on."""
        progress, sync = self.progress, self.sync
        part = None if slice_ in (None, FINISH) or run.slices is None else run.slices[slice_ or 0]
        job = Job(
            number, *self.key, run.kind,
            slice=None if part is None else part.of,
            resume=None if part is None else part.resume,
            cursor=progress.cursor_of(run.kind) if slice_ is None else None,
            only_plans=run.kind is Kind.BACKFILL,
            sweep=progress.sweep if run.kind is Kind.SWEEP else None,
            finish=slice_ == FINISH, max_share=sync.max_deleted_share, confirmed=run.confirmed,
            max_age=sync.max_age if run.kind is Kind.BACKFILL else None,
        )  # fmt: skip
        self.was_cut = False
        self.flights[number] = Flight(job, lane, run, slice_, sync.credential, now)
        return job

    # -- what lanes report

    def planned(self, flight: Flight, report: Planned, now: float) -> None:
        """Take a plan."""
        flight.since = now
        self.progress.facts = report.facts
        self._recover(flight)
        if self.runs.get(flight.run.kind) is flight.run:
            flight.run.plan(report.slices)
            # What a plan says of where polls begin must not be forgotten once a page is written.
            self.must_store = self.must_store or flight.run.kind is Kind.BACKFILL
            self.progress.sweep = report.sweep or self.progress.sweep
            flight.slice = 0 if report.goes_on and report.slices else None

    def page(self, flight: Flight, report: PageDone, now: float) -> None:
        """Take a page that is written."""
        self.progress.counts.add(report)
        self._recover(flight)
        if self.runs.get(flight.run.kind) is flight.run and flight.slice is not None:
            flight.note(report, now)
            self.progress.move(flight.run)

    def _recover(self, flight: Flight) -> None:
        failed = self.progress.failed.get(flight.run.kind)
        if failed is not None and failed.slice == flight.slice:
            del self.progress.failed[flight.run.kind]

    def swept(self, flight: Flight, report: Swept, now: float) -> None:
        """Take what a complete sweep has found."""
        self.progress.swept(flight.run, report, self.sync.max_deleted_share, now)

    def ended(self, flight: Flight, now: float) -> None:
        """Note that a job has ended well: its slice is done, or the whole run."""
        run = flight.run
        if self.runs.get(run.kind) is not run:
            return
        if flight.slice is not None and flight.slice != FINISH:
            run.end_slice(flight.slice)
            self.progress.move(run)
        if not self.flights and run.is_over:
            self._complete(run, now)

    def _complete(self, run: CollectionRun, now: float) -> None:
        progress, sync, kind = self.progress, self.sync, run.kind
        del self.runs[kind]
        progress.failed.pop(kind, None)
        progress.succeeded_at = now
        progress.move(run)
        if run.latest is not None:
            progress.newest = max(run.latest, progress.newest or run.latest)
        self._check_cursor(run, now)
        if kind is Kind.BACKFILL:
            progress.backfill = None
            progress.backfilled_at = progress.backfilled_at or now
        elif kind is Kind.SWEEP:
            progress.swept_at = now
            progress.due[kind] = now if progress.looks_again else now + sync.sweep_interval
        else:
            # Where the feed begins must not be forgotten once the backfill has written something.
            self.must_store = progress.backfilled_at is None
            progress.polled_at = now
            progress.due[kind] = max(run.started_at + sync.frequency, now + _CONTINUOUS_SECONDS)
            self._holds_until = now + max(_LEAST_SHARE_SECONDS, now - run.started_at)

    def _check_cursor(self, run: CollectionRun, now: float) -> None:
        progress = self.progress
        if progress.facts is None or not progress.facts.has_cursor:
            progress.stuck = None
        elif run.is_stuck:
            since = now if progress.stuck is None else progress.stuck.since
            progress.stuck = CollectionFailure(
                "cursor_stuck",
                f"Records of {progress.collection} came while the cursor did not move: each poll reads"
                " them again, and may miss others.",
                "See whether the connector's cursor field is in the API's objects, and is parsed.",
                since,
            )
        elif run.has_moved:
            progress.stuck = None

    def failed(self, flight: Flight, problem: JobFailure, now: float) -> None:
        """Note that a job failed; a failure of the credential holds until that changes."""
        progress, run = self.progress, flight.run
        if self.runs.get(run.kind) is not run:
            return
        if not run.goes_on(flight.slice, transient=problem.transient):
            del self.runs[run.kind]
        before = progress.failed.get(run.kind)
        failures = 1 if before is None else before.failures + 1
        is_credential = problem.code in PAUSING
        first, most = _TRANSIENT if problem.transient else _LASTING
        wait = max(wait_after(failures, first, most, _JITTER), problem.retry_after or 0.0)
        progress.failed[run.kind] = CollectionFailure(
            problem.code, problem.cause, problem.remedy, now if before is None else before.since,
            failures, None if is_credential else now + wait,
            self.sync.credential_version if is_credential else None, flight.slice,
        )  # fmt: skip

    def stored(self) -> bool:
        """Note that what was taken for the store is there; return whether that was waited for."""
        waited = self.must_store and self.storing
        self.must_store = self.must_store and not self.storing
        return waited

    # -- commands

    def start_backfill(self, now: float) -> None:
        """Begin a backfill from the beginning, but for a first one that goes on; a sweep is dropped."""
        if self.progress.backfilled_at is None and self.progress.backfill is not None:
            return  # the cursor that it began with covers what was deleted since
        self.runs.pop(Kind.SWEEP, None)
        run = CollectionRun(Kind.BACKFILL, now, newest=self.progress.newest)
        self.runs[Kind.BACKFILL] = self.progress.backfill = run
        self.progress.failed.pop(Kind.BACKFILL, None)

    def run_now(self, now: float) -> None:
        """Have all that is done from time to time be due; a sweep that asks begins anew."""
        progress = self.progress
        progress.asks = None
        self.try_again(now)
        for kind in progress.kinds:
            # A feed that has no time has not begun: that comes before the backfill, see `_order`.
            if kind is not Kind.EVENTS or kind in progress.due:
                progress.due[kind] = min(progress.due.get(kind, now), now)

    def try_again(self, now: float) -> None:
        """Try at once what waits after a failure."""
        for failed in self.progress.failed.values():
            if failed.credential is None:
                failed.retry_at = now

    def resume(self, now: float) -> None:
        """Go on after a question or with the credential as it is."""
        progress = self.progress
        if progress.asks is not None:
            progress.confirmed, progress.asks = progress.asks.missing, None
            progress.due[Kind.SWEEP] = now
        for failed in progress.failed.values():
            failed.credential, failed.retry_at = None, now

    def forget_credential(self) -> None:
        """Drop what was wrong with an earlier credential."""
        kept = {
            kind: failed
            for kind, failed in self.progress.failed.items()
            if failed.credential in (None, self.sync.credential_version)
        }
        self.progress.failed = kept

    @property
    def waits_for_credential(self) -> bool:
        """Whether the credential stopped it."""
        version = self.sync.credential_version
        return any(f.credential == version for f in self.progress.failed.values())
