"""The scheduler of syncs: whatever happens, the copy becomes what the API holds.

The machine plays the API, the lanes and the store: lanes die before or after they have written or
reported a page, the driver dies with what it has not stored, settings change in the middle.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.syncs.connectors.contract import Deletes, Kind
from penstock.syncs.jobs import Ended, Facts, Job, JobFailure, PageDone, Planned, Swept
from penstock.syncs.progress import CollectionProgress
from penstock.syncs.schedule import Scheduler
from penstock.syncs.sync import SyncSettings

SLOTS = 3
CONCURRENCY = 2
IDS = 9
MODES = {"p:tombs": Deletes.TOMBSTONE, "p:sweep": Deletes.SWEEP, "p:events": Deletes.EVENTS}
SYNCS = {"s1": list(MODES), "s2": ["p:events"]}
KEYS = [(sync, collection) for sync, of in SYNCS.items() for collection in of]
WHOLE = ("s2", "p:events")
"""Its reads go on nowhere."""
CHANGE = st.tuples(st.sampled_from(KEYS), st.integers(0, IDS - 1), st.booleans())
DOWN = JobFailure("unavailable", "down", transient=True)
BROKEN = JobFailure("bad_response", "broken")
REFUSED = JobFailure("unauthorized", "refused", "Rotate it.")


def member(kind: Kind) -> str:
    return "events" if kind is Kind.EVENTS else "seq"


@dataclass
class Api:
    """One collection: objects by id with their version, and the log of (id, is it a delete)."""

    mode: Deletes
    objects: dict[int, int] = field(default_factory=dict)
    log: list[tuple[int, bool]] = field(default_factory=list)

    def plan(self, job: Job) -> list[dict[str, Any]]:
        end = len(self.log)
        if job.kind in (Kind.BACKFILL, Kind.SWEEP):
            return [{"from": a, "to": a + 4, "at": end} for a in range(0, IDS, 4)]
        begin = end if job.kind is Kind.EVENTS else 0
        start = (job.cursor or {}).get(member(job.kind), begin)
        middle = (start + end) // 2
        return [{"n": 0, "from": start, "to": middle}, {"n": 1, "from": middle, "to": end}]

    def page(self, kind: Kind, of: dict[str, Any], at: int) -> tuple[list[Any], int, Any]:
        """Return up to two rows from `at` (id, version, deleted), where it ends, and its cursor."""
        end = min(at + 2, of["to"])
        if kind in (Kind.BACKFILL, Kind.SWEEP):
            there = [(i, self.objects[i], False) for i in range(at, end) if i in self.objects]
            return there, end, {"seq": of["at"]} if end >= of["to"] else None
        changes = self.log[at:end]
        rows: list[Any] = []
        for i, is_delete in changes:
            if kind is Kind.EVENTS:
                rows += [(i, None, True)] if is_delete and i not in self.objects else []
            elif i in self.objects:
                rows.append((i, self.objects[i], False))
            elif self.mode is Deletes.TOMBSTONE:
                rows.append((i, None, True))
        return rows, end, {member(kind): end}


@dataclass
class Task:
    """A job as a lane does it: `fetched` is a page that is not written."""

    job: Job
    of: dict[str, Any] | None = None
    at: int = 0
    fetched: Any = None
    begun: bool = False
    yields: bool = False
    stops: bool = False


class Machine(RuleBasedStateMachine):
    """Two syncs of one credential."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.apis = {key: Api(MODES[key[1]]) for key in KEYS}
        self.table: dict[Any, dict[int, tuple[int | None, bool, int]]] = {k: {} for k in KEYS}
        self.writes = 0
        self.version = 0
        self.sweeps: dict[str, tuple[set[int], int]] = {}
        self.missed: dict[Any, tuple[set[int], int]] = {}
        self.stored: dict[Any, bytes] = {}
        self.tasks: dict[int, dict[int, Task]] = {}
        self.number = 1
        self.collections = {sync: list(of) for sync, of in SYNCS.items()}
        self.active = {"s1": True, "s2": True}
        self.credential = 1
        self.start()

    def start(self) -> None:
        self.scheduler = Scheduler(SLOTS, lambda _: CONCURRENCY, self.number)
        self.tasks.clear()
        self.configure()

    def configure(self) -> None:
        self.store()
        known = {k: msgspec.json.decode(d, type=CollectionProgress) for k, d in self.stored.items()}
        self.scheduler.configure(
            [
                SyncSettings(name, name, "p", "c", str(self.credential), tuple(of), frequency=5.0,
                     sweep_interval=20.0, max_deleted_share=1.0, active=self.active[name])
                for name, of in self.collections.items()
            ],
            known, self.now,
        )  # fmt: skip

    @initialize(is_backfilled=st.sampled_from([True, True, False]))
    def begin(self, is_backfilled: bool) -> None:
        for key in KEYS:
            for id_ in range(0, IDS, 2):
                self.change(key, id_, False)
        if is_backfilled:
            self.join()
            self.settle()

    # -- the API

    @rule(changes=st.lists(CHANGE, min_size=1, max_size=6))
    def change_some(self, changes: list[Any]) -> None:
        for change in changes:
            self.change(*change)

    def change(self, key: Any, id_: int, gone: bool) -> None:
        api = self.apis[key]
        if gone and id_ not in api.objects:
            return
        self.version += 1
        if gone:
            del api.objects[id_]
        else:
            api.objects[id_] = self.version
        api.log.append((id_, gone))

    # -- the driver

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 30.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def hand_out(self) -> None:
        for lane, job in self.scheduler.hand_out(self.now):
            assert lane in self.tasks
            self.number = job.number + 1
            self.tasks[lane][job.number] = Task(job, job.slice, (job.resume or {}).get("at", -1))
        for lane, number in self.scheduler.yields():
            if lane in self.tasks and number in self.tasks[lane]:
                self.tasks[lane][number].yields = True
        for lane, number in self.scheduler.stops():
            if lane in self.tasks and number in self.tasks[lane]:
                self.tasks[lane][number].stops = True
        wake = self.scheduler.wake_at()
        assert wake is None or wake > self.now

    @rule()
    def store(self) -> None:
        taken = self.scheduler.take_dirty()
        for progress in taken:
            self.stored[progress.sync, progress.collection] = msgspec.json.encode(progress)
        self.scheduler.stored([(p.sync, p.collection) for p in taken], self.now)

    @rule(stored=st.booleans())
    def kill(self, stored: bool) -> None:
        if stored:
            self.store()
        self.start()

    @precondition(lambda self: len(self.tasks) < 3)
    @rule()
    def join(self) -> None:
        lane = min({0, 1, 2} - set(self.tasks))
        self.tasks[lane] = {}
        self.scheduler.join(lane)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.tasks)))
        del self.tasks[lane]
        self.scheduler.lose(lane, self.now)

    @rule(goes=st.booleans())
    def pause(self, goes: bool) -> None:
        if goes:
            self.scheduler.go()
        else:
            self.scheduler.pause()

    @rule(steps=st.integers(1, 8), seconds=st.sampled_from([0.0, 0.0, 2.0]))
    def go_on(self, steps: int, seconds: float) -> None:
        self.scheduler.go()
        if not self.tasks:
            self.join()
        for _ in range(steps):
            self.now += seconds
            self.hand_out()
            for lane, task in [(lane, t) for lane, of in self.tasks.items() for t in of.values()]:
                self.step(lane, task)

    # -- the user

    @rule(key=st.sampled_from(KEYS), there=st.booleans())
    def choose_collection(self, key: Any, there: bool) -> None:
        of = self.collections[key[0]]
        if there and key[1] not in of:
            of.append(key[1])
        elif not there and key[1] in of:
            of.remove(key[1])
        self.configure()

    @rule(sync=st.sampled_from(["s1", "s2"]), active=st.booleans())
    def activate(self, sync: str, active: bool) -> None:
        self.active[sync] = active
        self.configure()

    @rule()
    def rotate(self) -> None:
        self.credential += 1
        self.configure()

    @rule(key=st.sampled_from(KEYS), what=st.sampled_from(["run_now", "backfill", "resume"]))
    def command(self, key: Any, what: str) -> None:
        getattr(self.scheduler, what)(*key, self.now)

    # -- the lanes

    def pick(self, data: st.DataObject) -> tuple[int, Task]:
        found = [(lane, task) for lane, of in self.tasks.items() for task in of.values()]
        return data.draw(st.sampled_from(found)) if data is not None else found[0]

    @precondition(lambda self: any(self.tasks.values()))
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        self.step(*self.pick(data))

    @precondition(lambda self: any(self.tasks.values()))
    @rule(data=st.data(), problem=st.sampled_from([DOWN, DOWN, BROKEN, REFUSED]))
    def fail(self, data: st.DataObject, problem: JobFailure) -> None:
        lane, task = self.pick(data)
        self.end(lane, Ended(task.job.number, problem=problem))

    @precondition(lambda self: any(t.fetched for of in self.tasks.values() for t in of.values()))
    @rule(data=st.data())
    def die_before_the_report(self, data: st.DataObject) -> None:
        lane, task = self.pick(data)
        if task.fetched is not None:
            self.write(task)
            del self.tasks[lane]
            self.scheduler.lose(lane, self.now)

    def end(self, lane: int, report: Ended) -> None:
        del self.tasks[lane][report.job]
        self.scheduler.report(report, self.now)

    def step(self, lane: int, task: Task) -> None:
        job, key = task.job, (task.job.sync, task.job.collection)
        if job.finish:
            self.finish(lane, task)
        elif task.of is None:
            slices = self.apis[key].plan(job)
            sweep = None
            if job.kind is Kind.SWEEP:
                sweep = str(job.number)
                self.sweeps[sweep] = set(), self.writes
            goes_on = not job.only_plans
            facts = Facts(self.apis[key].mode, has_cursor=True)
            self.scheduler.report(Planned(job.number, slices, facts, goes_on, sweep), self.now)
            if not goes_on:
                self.end(lane, Ended(job.number))
            else:
                task.of, task.at = slices[0], -1
                if sweep is not None:
                    task.job = msgspec.structs.replace(job, sweep=sweep)
        elif task.fetched is None:
            if task.stops or (task.yields and not task.begun):
                self.end(lane, Ended(job.number, yielded=True))
                return
            task.begun = True
            start = task.of["from"] if task.at < 0 else task.at
            task.fetched = self.apis[key].page(job.kind, task.of, start)
        else:
            self.write(task)
            rows, end, cursor = task.fetched
            task.fetched, task.at = None, end
            is_last = end >= task.of["to"]
            task.begun = key == WHOLE
            resume = None if task.begun else {"at": end}
            self.scheduler.report(
                PageDone(job.number, len(rows), resume=resume, cursor=cursor, is_last=is_last),
                self.now,
            )
            if is_last:
                self.end(lane, Ended(job.number))

    def write(self, task: Task) -> None:
        key = task.job.sync, task.job.collection
        if task.job.kind is Kind.SWEEP:
            assert task.job.sweep is not None
            self.sweeps[task.job.sweep][0].update(i for i, _, _ in task.fetched[0])
            return
        for i, version, deleted in task.fetched[0]:
            there = self.table[key].get(i)
            if there is not None and version is not None and (there[0] or 0) > version:
                continue  # the table knows a newer one
            self.writes += 1
            self.table[key][i] = version or (there[0] if there else None), deleted, self.writes

    def finish(self, lane: int, task: Task) -> None:
        assert task.job.sweep is not None
        seen, began = self.sweeps[task.job.sweep]
        key = task.job.sync, task.job.collection
        rows = self.table[key]
        known = [i for i, (_, gone, at) in rows.items() if not gone and at <= began]
        missing = {i for i in known if i not in seen}
        missed, before = self.missed.get(key, (set(), 0))
        deleted = {i for i in missing & missed if rows[i][2] <= before}
        for i in deleted:
            self.writes += 1
            rows[i] = rows[i][0], True, self.writes
        self.missed[key] = missing - deleted, began
        counts = len(known), len(missing), len(deleted), len(missing - deleted)
        self.scheduler.report(Swept(task.job.number, *counts), self.now)
        self.end(lane, Ended(task.job.number))

    # -- what holds

    @invariant()
    def one_run_at_a_time(self) -> None:
        kinds: dict[Any, set[Kind]] = {}
        for of in self.tasks.values():
            for task in of.values():
                kinds.setdefault((task.job.sync, task.job.collection), set()).add(task.job.kind)
        assert all(len(k) == 1 for k in kinds.values())

    @invariant()
    def one_job_a_slice(self) -> None:
        found = Counter(
            (t.job.sync, t.job.collection, str(t.of))
            for of in self.tasks.values() for t in of.values() if t.of is not None
        )  # fmt: skip
        assert all(n == 1 for n in found.values())

    @invariant()
    def limits_hold(self) -> None:
        jobs = [task.job for of in self.tasks.values() for task in of.values()]
        assert all(len(of) <= SLOTS for of in self.tasks.values())
        later = [j for j in jobs if j.kind in (Kind.BACKFILL, Kind.SWEEP)]
        assert len(later) <= CONCURRENCY
        assert len(jobs) - len(later) <= CONCURRENCY

    def teardown(self) -> None:
        """Let all go well from now on: the copy is what the API holds, and nothing is left to do."""
        self.collections = {sync: list(of) for sync, of in SYNCS.items()}
        self.active = {"s1": True, "s2": True}
        self.credential += 1
        self.configure()
        self.scheduler.go()
        while len(self.tasks) < 2:
            self.join()
        for _ in range(3):  # a poll, a sweep and a retry
            self.now += 5000.0
            self.settle()
        assert not any(self.tasks.values())
        for key, api in self.apis.items():
            rows = {i: v for i, (v, gone, _) in self.table[key].items() if not gone}
            assert rows == api.objects, (key, self.stored.get(key))
        assert self.scheduler.idle
        for _, progress in self.scheduler.progresses:
            assert not progress.failed
            assert progress.backfilled_at is not None

    def settle(self) -> None:
        for _ in range(3000):
            self.now += 0.01
            self.store()
            self.hand_out()
            busy = [(lane, task) for lane, of in self.tasks.items() for task in of.values()]
            if not busy and (self.scheduler.wake_at() or 0) > self.now + 3.0:
                return
            for lane, task in busy:
                self.step(lane, task)
        pytest.fail("the scheduler never comes to rest")


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestSchedule = Machine.TestCase
