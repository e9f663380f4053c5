"""Reads that take long: each comes to its end, whatever else is due, and however long a batch lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.waits import Later

from penstock.syncs.connectors.contract import Collection, Deletes, Json, Kind, Page
from penstock.syncs.job import Control, Tools, Yielded, run
from penstock.syncs.jobs import Ended, Facts, Job, PageDone, Planned, Report, Swept
from penstock.syncs.lane import RemoteBudget
from penstock.syncs.progress import CollectionProgress
from penstock.syncs.records.writer import RecordsWritten
from penstock.syncs.schedule import Scheduler
from penstock.syncs.sync import SyncSettings

ID = "902261b0-6b22-48a0-8d6b-2fdb16cf8402"
SECONDS = 30.0
BATCH, PATIENCE = 60.0, 15.0
FACTS = Facts(Deletes.SWEEP, has_cursor=True)


# -- a job


class Pages:
    """The tools of a job, whose connector reads these pages and calls `reads` before each."""

    requests = 0
    session = None

    def __init__(self, resumes: Sequence[Json | None], reads: Callable[[int], object]) -> None:
        self._resumes, self._reads = resumes, reads
        self.connector = self

    def collections(self, _: object = None) -> dict[str, Collection]:
        return {"contacts": Collection("contacts")}

    def read(self, *_: object) -> Iterator[Page]:
        for number, resume in enumerate(self._resumes):
            self._reads(number)
            yield Page([], (), resume, is_last=number == len(self._resumes) - 1)

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[Any, Any]]:
        yield self, None

    def write(self, *_: object, **__: object) -> RecordsWritten:
        return RecordsWritten(0, 0, 0, 0)


def pages_read(
    resumes: Sequence[Json | None], control: Control, reads: Callable[[int], object]
) -> tuple[int, bool]:
    """Return how many pages a job has read, and whether it ended before all were."""
    reports: list[Report] = []
    tools = cast("Tools", Pages(resumes, reads))
    run(Job(1, ID, "crm:contacts", Kind.BACKFILL, slice={}), tools, control, reports.append)
    *pages, end = reports
    assert isinstance(end, Ended)
    assert end.problem is None
    return len(pages), end.yielded


@pytest.mark.parametrize(
    ("resumes", "asked_in", "loses", "read"),
    [
        ([None, None, None, None], 1, False, 4),
        ([None, None, None, None], 1, True, 2),
        ([{"n": 1}, {"n": 2}, {"n": 3}, None], 1, False, 2),
        ([{"n": 1}, {"n": 2}, {"n": 3}, None], 1, True, 2),
        ([{"n": 1}, {"n": 1}, {"n": 1}, {"n": 2}, None], 1, False, 4),  # parts of several pages
        ([None, None, {"n": 1}, {"n": 2}, None], 0, False, 3),
    ],
)
def test_a_job_makes_room_where_it_loses_nothing(
    resumes: list[Json | None], asked_in: int, loses: bool, read: int
) -> None:
    control = Control()

    def reads(number: int) -> None:
        if number == asked_in:
            control.begun = True  # as its request has it
            control.stop(loses=loses)

    assert pages_read(resumes, control, reads) == (read, read < len(resumes))


def test_a_job_that_has_not_begun_makes_room_at_once() -> None:
    control = Control()
    control.stop(loses=False)
    assert pages_read([None, None], control, lambda _: None) == (0, True)


def test_a_page_that_has_begun_waits_for_its_other_requests() -> None:
    reports: list[list[Any]] = []

    def answer(report: list[Any]) -> None:
        reports.append(report)
        if report[0] == "ask":
            granted = budget.requests < 2
            Later(budget.grant if granted else budget.control.stop)

    budget = RemoteBudget("key", answer, 1)
    budget.acquire()
    budget.control.stop(loses=False)
    budget.control.sleep(0.01)  # as between two tries
    budget.acquire()
    assert budget.requests == 2
    with pytest.raises(Yielded):
        budget.acquire()
    with pytest.raises(Yielded):
        budget.control.sleep(SECONDS)
    assert reports[-1] == ["cancel", "key", 1]


def test_a_job_that_waits_for_its_first_request_makes_room() -> None:
    def answer(_: list[Any]) -> None:
        Later(lambda: budget.control.stop(loses=False))

    budget = RemoteBudget("key", answer, 1)
    with pytest.raises(Yielded):
        budget.acquire()


# -- the scheduler


@dataclass(frozen=True)
class Shape:
    """A collection: so many pages of so many seconds; `whole`: a read goes on nowhere."""

    pages: int
    seconds: float
    whole: bool

    @property
    def lasts(self) -> float:
        return self.pages * self.seconds


@dataclass
class Reading:
    """A job in a lane, which has its next page `at` a time."""

    job: Job
    page: int
    at: float
    yields: bool = False
    stops: bool = False


class World:
    """A lane and its batches, as `SyncLoop` ends them, by a clock of their own."""

    def __init__(self, shapes: Sequence[Shape], frequency: float, concurrency: int) -> None:
        self.shapes = {f"p:{number}": shape for number, shape in enumerate(shapes)}
        self.now = 0.0
        self.jobs: dict[int, Reading] = {}
        self.batches = 0
        self.ends: dict[tuple[str, Kind], int] = {}
        self.reads: dict[tuple[str, Kind], int] = {}
        self.scheduler = Scheduler(8, lambda _: concurrency)
        names = tuple(self.shapes)
        sync = SyncSettings("s", "s", "p", "c", "1", names, frequency=frequency, sweep_interval=5.0)
        self.scheduler.configure([sync], {}, 0.0)
        self.open()

    def open(self) -> None:
        self.opened, self.due, self.ending = self.now, float("inf"), float("inf")
        self.batches += 1
        self.scheduler.join(0)
        self.scheduler.go()

    def progress(self, collection: str) -> CollectionProgress:
        entry = self.scheduler.entry(("s", collection))
        assert entry is not None
        return entry.progress

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        while self.now < until and not done():
            self.hand_out()
            self.end()
            wakes = [self.scheduler.wake_at(), self.ending, *(r.at for r in self.jobs.values())]
            if self.due > self.now:
                wakes.append(self.opened + BATCH)
            self.now = max(self.now + 1e-3, min(at for at in wakes if at is not None))
            for number, reading in list(self.jobs.items()):
                if number in self.jobs and reading.at <= self.now:
                    self.read(reading)
        return done()

    def hand_out(self) -> None:
        for _, job in self.scheduler.hand_out(self.now):
            shape = self.shapes[job.collection]
            page = (job.resume or {}).get("page", 0)
            self.jobs[job.number] = Reading(job, page, self.now + shape.seconds)
            if job.slice is None and not job.finish:
                goes_on = not job.only_plans
                self.report(Planned(job.number, [{}], FACTS, goes_on, "w"))
                if not goes_on:
                    self.end_of(job.number, yielded=False)
            elif job.finish:
                self.report(Swept(job.number, 1, 0, 0))
                self.end_of(job.number, yielded=False)
        for _, number in self.scheduler.yields():
            if number in self.jobs:
                self.jobs[number].yields = True
        for _, number in self.scheduler.stops():
            if number in self.jobs:
                self.jobs[number].stops = True
        taken = self.scheduler.take_dirty()
        self.scheduler.stored([(of.sync, of.collection) for of in taken], self.now)

    def read(self, of: Reading) -> None:
        key, shape = (of.job.collection, of.job.kind), self.shapes[of.job.collection]
        of.page += 1
        self.reads[key] = self.reads.get(key, 0) + 1
        is_last = of.page == shape.pages
        resume = None if shape.whole or is_last else {"page": of.page}
        self.report(PageDone(of.job.number, 1, resume=resume, cursor={"n": 1}, is_last=is_last))
        if is_last:
            self.ends[key] = self.ends.get(key, 0) + 1
            self.end_of(of.job.number, yielded=False)
        elif of.stops or (of.yields and not shape.whole):
            self.end_of(of.job.number, yielded=True)
        else:
            of.at = self.now + shape.seconds

    def report(self, report: Report) -> None:
        self.scheduler.report(report, self.now)

    def end_of(self, number: int, *, yielded: bool) -> None:
        del self.jobs[number]
        self.report(Ended(number, yielded))

    def end(self) -> None:
        if self.ending == float("inf"):
            if self.now - self.opened < BATCH:
                return
            if self.due == float("inf"):
                self.due = self.now
                self.scheduler.make_room()
                self.hand_out()
            if self.scheduler.would_lose(self.due):
                return
            self.ending = self.now + PATIENCE
            self.scheduler.pause()
            self.hand_out()
        if self.scheduler.idle or self.now >= self.ending:
            self.jobs.clear()
            self.scheduler.lose(0, self.now)
            self.open()
            self.hand_out()


SHAPES = st.builds(Shape, st.integers(1, 12), st.sampled_from([1.0, 7.0, 30.0]), st.booleans())


@settings(max_examples=60, deadline=None)
@example([Shape(3, 30.0, False), Shape(4, 30.0, False), Shape(3, 30.0, True)], 5.0, 1)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    frequency=st.sampled_from([0.0, 5.0, 60.0]),
    concurrency=st.sampled_from([1, 2]),
)
def test_every_read_comes_to_its_end(
    shapes: list[Shape], frequency: float, concurrency: int
) -> None:
    world = World(shapes, frequency, concurrency)
    keys = [(name, kind) for name in world.shapes for kind in (Kind.POLL, Kind.SWEEP)]
    work = sum(shape.lasts for shape in shapes) + BATCH
    ended = world.run(60 * work, lambda: all(world.ends.get(key, 0) >= 3 for key in keys))
    assert ended, (world.ends, world.reads)


def test_a_read_that_goes_on_nowhere_is_read_once() -> None:
    """One of an hour, beside polls that are due each second and batches of a minute."""
    world = World([Shape(360, 10.0, whole=True), Shape(2, 1.0, whole=False)], 1.0, 4)
    first = "p:0", Kind.BACKFILL
    assert world.run(3700.0, lambda: first in world.ends)
    assert world.reads[first] == 360
    sweep = "p:0", Kind.SWEEP
    assert world.run(20_000.0, lambda: sweep in world.ends)
    # It may have begun at the very end of the batch that waited for the poll.
    assert world.reads[sweep] <= 362
    other = "p:1", Kind.POLL
    assert world.ends[other] > 1000, "it waits for nothing"


def test_batches_end_although_reads_go_on() -> None:
    world = World([Shape(9, 10.0, whole=True) for _ in range(3)], 1.0, 2)
    world.run(3600.0, lambda: False)
    assert world.batches > 3600 / (BATCH + 90.0 + PATIENCE) - 1
