"""The scheduler of syncs, case by case: what is due, what asks, and what an error stops."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.syncs import deletes
from penstock.syncs.connectors.contract import Deletes, Kind
from penstock.syncs.jobs import Ended, Facts, Job, JobFailure, PageDone, Planned, Swept
from penstock.syncs.progress import CollectionProgress
from penstock.syncs.schedule import Scheduler
from penstock.syncs.sync import SyncSettings

REFUSED = JobFailure("unauthorized", "refused", "Rotate it.")


def scheduler(*, frequency: float = 60.0, collections: int = 1, slots: int = 8) -> Scheduler:
    made = Scheduler(slots, lambda _: 4)
    names = tuple(f"p:{n}" for n in range(collections))
    made.configure([SyncSettings("s", "s", "p", "c", "1", names, frequency=frequency)], {}, 0.0)
    made.join(0)
    return made


def run(made: Scheduler, job: Job, now: float, *pages: PageDone, cursor: bool = True) -> None:
    facts = Facts(Deletes.NONE, has_cursor=cursor)
    if job.slice is None:
        made.report(Planned(job.number, [{}], facts, not job.only_plans), now)
    if not job.only_plans or job.slice is not None:
        for page in pages:
            made.report(msgspec.structs.replace(page, job=job.number), now)
    made.report(Ended(job.number), now)
    store(made, now)


def store(made: Scheduler, now: float) -> None:
    made.stored([(of.sync, of.collection) for of in made.take_dirty()], now)


def backfilled(made: Scheduler, cursor: Any = None) -> None:
    for _ in range(2):
        ((_, job),) = made.hand_out(0.0)
        assert job.kind is Kind.BACKFILL
        run(made, job, 0.0, PageDone(0, 1, 1, cursor=cursor or {"at": 1}, newest=1.0, is_last=True))


def progress(made: Scheduler) -> CollectionProgress:
    ((_, found),) = made.progresses
    return found


@pytest.mark.parametrize(
    ("page", "is_stuck"),
    [
        (PageDone(0, 2, 1, newest=5.0, cursor={"at": 1}), True),
        (PageDone(0, 2, 1, undated=1), True),
        (PageDone(0, 2, 0, 1, newest=5.0, cursor={"at": 2}), False),
        (PageDone(0, 2, 1, newest=1.0, cursor={"at": 1}), False),  # late, or of the same time
        (PageDone(0, 2), False),  # the overlap, unchanged
    ],
)
def test_records_without_a_moving_cursor_are_an_error(page: PageDone, is_stuck: bool) -> None:
    made = scheduler()
    backfilled(made)
    ((_, job),) = made.hand_out(100.0)
    run(made, job, 100.0, page)
    assert (progress(made).stuck is not None) == is_stuck


def test_a_cursor_waits_for_the_slices_before_it() -> None:
    made = scheduler()
    backfilled(made)
    ((_, plan),) = made.hand_out(100.0)
    made.report(Planned(plan.number, [{"n": 0}, {"n": 1}], Facts(), goes_on=True), 100.0)
    ((_, second),) = made.hand_out(100.0)
    made.report(PageDone(second.number, cursor={"at": 9}, is_last=True), 100.0)
    made.report(Ended(second.number), 100.0)
    assert progress(made).cursor == {"at": 1}
    made.report(PageDone(plan.number, cursor={"at": 5}, is_last=True), 100.0)
    assert progress(made).cursor == {"at": 9}


def test_a_poll_takes_the_place_of_a_backfill_which_then_goes_on() -> None:
    made = scheduler(frequency=10.0)
    backfilled(made)
    made.backfill("s", None, 0.0)
    ((_, plan),) = made.hand_out(0.0)
    assert plan.kind is Kind.POLL  # the first one after the backfill
    run(made, plan, 0.5)
    ((_, plan),) = made.hand_out(0.6)
    made.report(Planned(plan.number, [{}], Facts()), 0.6)
    made.report(Ended(plan.number), 0.6)
    store(made, 0.6)
    ((_, read),) = made.hand_out(0.6)
    assert read.kind is Kind.BACKFILL
    made.report(PageDone(read.number, resume={"page": 7}), 1.0)
    assert not made.hand_out(9.0)
    assert made.yields() == []
    assert made.wake_at() == 10.0
    assert not made.hand_out(10.0)
    assert made.yields() == [(0, read.number)]
    made.report(Ended(read.number, yielded=True), 10.1)
    ((_, poll),) = made.hand_out(10.1)
    assert poll.kind is Kind.POLL
    run(made, poll, 10.2)
    ((_, read),) = made.hand_out(10.2)
    assert (read.kind, read.resume) == (Kind.BACKFILL, {"page": 7})


def test_a_feed_begins_before_its_backfill_whatever_is_asked_for() -> None:
    made = scheduler()
    ((_, plan),) = made.hand_out(0.0)
    facts = Facts(Deletes.EVENTS, has_cursor=True)
    made.report(Planned(plan.number, [{}], facts, goes_on=False), 0.0)
    made.report(Ended(plan.number), 0.0)
    store(made, 0.0)
    made.run_now("s", None, 0.0)
    ((_, first),) = made.hand_out(0.0)
    assert first.kind is Kind.EVENTS


def test_a_refused_credential_stops_its_sync_until_it_is_another_one() -> None:
    made = Scheduler(8, lambda _: 4)
    syncs = [SyncSettings(n, n, "p", n, "1", ("p:a", "p:b")) for n in ("bad", "good")]
    made.configure(syncs, {}, 0.0)
    made.join(0)
    jobs = [job for _, job in made.hand_out(0.0)]
    assert len(jobs) == 4
    bad = next(job for job in jobs if job.sync == "bad")
    made.report(Ended(bad.number, problem=REFUSED), 0.0)
    assert not made.hand_out(0.0)
    assert [n for _, n in made.stops()] == [
        job.number for job in jobs if job.sync == "bad" and job is not bad
    ]
    for job in jobs:
        made.report(Ended(job.number, yielded=True), 0.0)
    assert {job.sync for _, job in made.hand_out(1e9)} == {"good"}
    rotated = SyncSettings("bad", "bad", "p", "bad", "2", ("p:a", "p:b"))
    made.configure([rotated, syncs[1]], {}, 1e9)
    assert [job.sync for _, job in made.hand_out(1e9)] == ["bad", "bad"]


def test_a_sweep_that_would_delete_too_much_asks() -> None:
    made = scheduler()
    backfilled(made)
    entry = progress(made)
    entry.facts = Facts(Deletes.SWEEP)
    entry.due[Kind.SWEEP] = 50.0

    def sweep(now: float, missing: int, deleted: int) -> Job:
        jobs = []
        for _ in range(2):
            ((_, job),) = made.hand_out(now)
            jobs.append(job)
            if not job.finish:
                facts = Facts(Deletes.SWEEP)
                made.report(Planned(job.number, [{}], facts, goes_on=True, sweep="w"), now)
            else:
                assert job.sweep == "w"
                made.report(Swept(job.number, 100, missing, deleted), now)
            made.report(Ended(job.number), now)
        return jobs[1]

    ((_, poll),) = made.hand_out(0.0)
    made.report(Planned(poll.number, [{}], Facts(Deletes.SWEEP), goes_on=True), 0.0)
    made.report(Ended(poll.number), 0.0)
    assert sweep(55.0, 40, 0).confirmed == 0
    assert entry.asks is not None
    assert entry.counts.deleted == 0
    made.resume("s", None, 56.0)
    assert sweep(56.0, 41, 41).confirmed == 40
    assert entry.asks is None
    assert entry.counts.deleted == 41


def test_a_shorter_frequency_counts_at_once() -> None:
    made = scheduler(frequency=3600.0)
    backfilled(made)
    ((_, poll),) = made.hand_out(0.0)
    run(made, poll, 1.0)
    assert not made.hand_out(100.0)
    made.configure([SyncSettings("s", "s", "p", "c", "1", ("p:0",), frequency=60.0)], {}, 30.0)
    assert not made.hand_out(30.0)
    assert made.wake_at() == 61.0
    assert made.hand_out(61.0)


def test_a_second_look_follows_at_once_and_a_third_one_does_not() -> None:
    made = scheduler()
    backfilled(made)
    ((_, poll),) = made.hand_out(0.0)
    made.report(Planned(poll.number, [{}], Facts(Deletes.SWEEP), goes_on=True), 0.0)
    made.report(Ended(poll.number), 0.0)

    def swept_at(now: float, *found: int) -> float:
        while True:
            for _, job in made.hand_out(now):
                if job.finish:
                    made.report(Swept(job.number, 100, *found), now)
                elif job.slice is None:
                    goes_on = job.kind is Kind.POLL or job.kind is Kind.SWEEP
                    facts = Facts(Deletes.SWEEP)
                    made.report(Planned(job.number, [{}], facts, goes_on, "w"), now)
                made.report(Ended(job.number), now)
                if job.finish:
                    return now
            wake = made.wake_at()
            assert wake is not None
            now = max(now, wake)

    first = swept_at(0.0, 2, 0, 2)
    assert first >= 3600.0
    assert progress(made).looks_again
    second = swept_at(first, 3, 2, 1)
    assert second - first < 60.0
    third = swept_at(second, 1, 1, 0)
    assert third - second >= 3600.0
    assert not progress(made).looks_again


@pytest.mark.parametrize(
    ("known", "missing", "share", "confirmed", "asks"),
    [(100, 30, 0.3, 0, False), (100, 31, 0.3, 0, True), (1, 1, 0.3, 0, False), (2, 2, 0.3, 0, True),
     (100, 60, 0.3, 40, False), (100, 90, 0.3, 40, True), (0, 0, 0.3, 0, False)],
)  # fmt: skip
def test_the_guard(known: int, missing: int, share: float, confirmed: int, asks: bool) -> None:
    assert deletes.asks(known, missing, share, confirmed) == asks
    assert f"{missing} of {known}" in deletes.question(known, missing, share)


def test_thousands_of_idle_syncs_are_entries_of_a_heap() -> None:
    made = scheduler(collections=5000, slots=64)
    now = 0.0
    while jobs := made.hand_out(now):
        for _, job in jobs:
            run(made, job, now)
    for _ in range(3):
        now += 61.0
        while jobs := made.hand_out(now):
            for _, job in jobs:
                run(made, job, now)
    assert len(made._heap) < 3 * 5000
    assert not made._queues
