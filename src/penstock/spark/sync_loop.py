"""The thread that schedules all syncs: it hands jobs to lanes of long batches, and grants requests.

What decides is pure (`penstock.syncs.schedule`, `budget`); the sockets, the clock and the store are
here.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
import structlog

from penstock.core.errors import CaptureError
from penstock.spark.lane_server import Event, Joined, LaneServer, Lost, await_open
from penstock.spark.sync_lanes import CLIENT, GRANT, JOB, OPEN, STOP, YIELD
from penstock.syncs.budget import ApiLimits, CredentialBudget
from penstock.syncs.controls import SyncCommand
from penstock.syncs.jobs import encode, report_of
from penstock.syncs.lane import JobClient
from penstock.syncs.schedule import Scheduler
from penstock.syncs.setup import Setup
from penstock.syncs.shown import Shown, shown
from penstock.syncs.states import States, load
from penstock.syncs.sync import Key, Limit

SLOTS: Final = 16
"""How many jobs a lane runs at a time: they wait for answers most of the time."""
_SAVE_SECONDS: Final = 0.1
_IDLE_SECONDS: Final = 1.0
_END_SECONDS: Final = 15.0
"""How long the end of a batch waits for jobs to end between two pages; what is left is lost."""
_CLOSE_SECONDS: Final = 5.0

log = structlog.get_logger("penstock.syncs")


class SyncLoop:
    """Runs from `start` until `close`.

    Args:
        host: Where executors reach this process.
        store_url: The store's URL.
        records_url: That of the records table's Postgres.
        seconds: How long a batch lasts, about.
        on_shown: Called from the thread with what is shown of collections that have changed.
    """

    def __init__(
        self,
        *,
        host: str,
        store_url: str,
        records_url: str,
        seconds: float,
        on_shown: Callable[[Mapping[Key, Shown]], None],
    ) -> None:
        self._server = LaneServer(host, reports=False)
        self._opening = msgspec.msgpack.encode([store_url, records_url, SLOTS])
        self._seconds = seconds
        self._on_shown = on_shown
        self._setup = Setup()
        self._paused: set[str] = set()
        self._asked: list[SyncCommand] = []  # of syncs that are not configured here yet
        self._obeyed: list[int] = []
        self._budgets: dict[str, CredentialBudget] = {}
        self._scheduler = Scheduler(SLOTS, self._concurrency, time.time_ns())
        self._known: dict[int, set[int]] = {}  # by lane: the clients that it was sent
        self._numbers: dict[str, int] = {}  # of the clients, by sync: syncs share one that is equal
        self._next_client = 0
        self._states = States(store_url, self._note_stored, self._note_asked)
        self._calls: list[Callable[[float], None]] = []
        self._calling = threading.Lock()
        self._save_at = 0.0
        self._opened: tuple[int, float] | None = None  # the batch, and when its first lane came
        self._due = math.inf
        """When the batch had lasted, or was to be renewed."""
        self._ending: float | None = None
        self._closed = False
        self.draining = False
        self.drained = False
        self.configured = False
        self.failure: CaptureError | None = None
        """What ended the loop."""
        self._thread = threading.Thread(target=self._run, name="syncs", daemon=True)

    @property
    def address(self) -> str:
        """Where lanes connect."""
        return self._server.address

    @property
    def budgets(self) -> dict[str, list[float]]:
        """Of each credential how many requests of its interval are used, may be, and were refused."""
        return {
            name: [budget.used, budget.limit.requests, budget.limit.interval, budget.limited]
            for name, budget in list(self._budgets.items())
        }

    def start(self) -> None:
        """Start the threads."""
        self._states.start()
        self._thread.start()

    def configure(self, setup: Setup) -> None:
        """Run these syncs from now on; waits for the store. Raises `StoreError`."""
        known = load(self._states.store, [sync.id for sync in setup.syncs])
        self._call(lambda now: self._configure(setup, known, now))

    def open(self, batch: int) -> None:
        """Begin a batch; its lanes come by themselves, once this returns."""
        opened = threading.Event()

        def open_(_: float) -> None:
            self._open(batch)
            opened.set()

        self._call(open_)
        await_open(opened, self._thread)

    def renew(self) -> None:
        """End the batch as soon as no job loses what it has read: the next one has more lanes."""
        self._call(lambda _: self._shorten())

    def drain(self) -> None:
        """Hand nothing more out, and end the batch once all jobs have ended a page."""
        self.draining = True
        self._server.wake()

    def close(self) -> None:
        """End the threads, store what is not stored, and hang up on the lanes."""
        self._closed = True
        self._server.wake()
        self._thread.join(_CLOSE_SECONDS)
        self._server.close()
        self._states.close(_CLOSE_SECONDS)

    # -- from other threads

    def _call(self, do: Callable[[float], None]) -> None:
        with self._calling:
            self._calls.append(do)
        self._server.wake()

    def _note_stored(self, keys: list[Key]) -> None:
        self._call(lambda now: self._scheduler.stored(keys, now))

    def _note_asked(self, asked: list[SyncCommand], paused: set[str]) -> None:
        if asked or paused != self._paused:
            self._call(lambda now: self._obey(asked, paused, now))

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._closed:
                now = time.time()
                with self._calling:
                    calls, self._calls = self._calls, []
                for do in calls:
                    do(now)
                self._hand_out(now)
                self._grant(now)
                self._save(now)
                self._end(now)
                for event in self._server.poll(self._pause(time.time())):
                    self._handle(event, time.time())
            self._save(time.time(), at_once=True)
        except Exception as error:
            log.exception("the scheduler of the syncs failed")
            self.failure = CaptureError(
                "internal",
                f"The scheduler of the syncs failed: {type(error).__name__}: {error}.",
                remedy="This is a defect of penstock; the log has its trace. No cursor moved wrongly.",
            )
            self._server.close()  # so that the tasks end, and the query with them

    def _configure(self, setup: Setup, known: Mapping[Key, Any], now: float) -> None:
        shared: dict[tuple[str, str], tuple[int, JobClient]] = {}
        for sync, client in setup.clients.items():
            of = client.credential, client.provider
            if of not in shared or shared[of][1] != client:
                if self._setup.clients.get(sync) != client:
                    self._numbers[sync], self._next_client = (
                        self._next_client,
                        self._next_client + 1,
                    )
                shared[of] = self._numbers[sync], client
            self._numbers[sync] = shared[of][0]
        self._setup = setup
        for name, limit in setup.limits.items():
            self._budgets.setdefault(name, CredentialBudget(limit)).limit = limit
        self.configured = True
        self._schedule(known, now)
        self._obey([], self._paused, now)

    def _schedule(self, known: Mapping[Key, Any], now: float) -> None:
        syncs = [
            replace(sync, active=sync.active and sync.id not in self._paused)
            for sync in self._setup.syncs
        ]
        self._scheduler.configure(syncs, known, now)

    def _obey(self, asked: list[SyncCommand], paused: set[str], now: float) -> None:
        if paused != self._paused:
            self._paused = paused
            self._schedule({}, now)
        commands = {
            "run": self._scheduler.run_now, "backfill": self._scheduler.backfill,
            "resume": self._scheduler.resume,
        }  # fmt: skip
        waiting, self._asked = [*self._asked, *asked], []
        known = {sync.id for sync in self._setup.syncs}
        for one in waiting:
            if str(one.sync) in known:
                commands[one.command](str(one.sync), one.collection, now)
                self._obeyed.append(one.id)
            else:  # it was asked of a sync that this process is about to have; it may be gone, too
                self._asked.append(one)

    def _concurrency(self, credential: str) -> int:
        return self._budgets.get(credential, CredentialBudget(Limit())).limit.concurrency

    def _open(self, batch: int) -> None:
        self._opened, self._due, self._ending = (batch, math.inf), math.inf, None
        self._server.open(batch)
        if not self.draining:
            self._scheduler.go()

    def _shorten(self) -> None:
        if self._opened is not None:
            self._opened = self._opened[0], -math.inf

    def _pause(self, now: float) -> float:
        wakes = [now + _IDLE_SECONDS, self._scheduler.wake_at()]
        if self._scheduler.is_dirty or self._obeyed:
            wakes.append(self._save_at)
        wakes += [budget.wake_at(now) for budget in self._budgets.values() if not budget.is_idle]
        return max(0.0, min(at for at in wakes if at is not None) - now)

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, Joined):
            if self._opened is not None and self._opened[1] == math.inf:
                # Its tasks may have waited for slots longer than a batch lasts.
                self._opened = self._opened[0], now
            self._known[event.lane] = set()
            self._server.send(event.lane, OPEN, self._opening)
            self._scheduler.join(event.lane)
        elif isinstance(event, Lost):
            self._lose(event.lane, now)
        else:
            self._report(event.lane, event.report, now)

    def _lose(self, lane: int, now: float) -> None:
        self._known.pop(lane, None)
        self._scheduler.lose(lane, now)
        for budget in self._budgets.values():
            budget.lose(lane)

    def _report(self, lane: int, report: list[Any], now: float) -> None:
        if report[0] not in ("ask", "answered", "cancel"):
            self._scheduler.report(report_of(report), now)
            return
        kind, credential, number, *of = report
        budget = self._budgets.setdefault(credential, CredentialBudget(Limit()))
        ticket = lane, number
        if kind == "ask":
            budget.ask(ticket, first=of[0])
        elif kind == "answered":
            budget.answered(ticket, ApiLimits(*of), now)
        else:
            budget.cancel(ticket)

    def _hand_out(self, now: float) -> None:
        for lane, job in self._scheduler.hand_out(now):
            number = self._numbers[job.sync]
            known = self._known[lane]
            if number not in known:
                known.add(number)
                data = pickle.dumps((number, self._setup.clients[job.sync]))
                self._server.send(lane, CLIENT, data)
            self._server.send(lane, JOB, msgspec.msgpack.encode([number, encode(job)]))
        for lane, of in self._scheduler.yields():
            self._server.send(lane, YIELD, msgspec.msgpack.encode(of))
        for lane, of in self._scheduler.stops():
            self._server.send(lane, STOP, msgspec.msgpack.encode(of))

    def _grant(self, now: float) -> None:
        for budget in self._budgets.values():
            for lane, number in budget.grant(now):
                self._server.send(lane, GRANT, msgspec.msgpack.encode(number))

    def _save(self, now: float, *, at_once: bool = False) -> None:
        """Have what has changed be stored, and shown."""
        if now < self._save_at and not at_once:
            return
        changed: dict[Key, tuple[bytes, Shown]] = {}
        for progress in self._scheduler.take_dirty():
            key = progress.sync, progress.collection
            entry = self._scheduler.entry(key)
            if entry is not None:
                changed[key] = msgspec.json.encode(progress), shown(entry, now)
        if changed or self._obeyed:
            self._save_at = now + _SAVE_SECONDS
            obeyed, self._obeyed = self._obeyed, []
            self._states.save(changed, obeyed)
        if changed:
            self._on_shown({key: of for key, (_, of) in changed.items()})

    def _end(self, now: float) -> None:
        """End the batch once it has lasted, or the run drains, and no lane has a job.

        What a lane reads is lost with it, back to the last page behind which it can go on. So the batch
        lasts until each job that it had when it was due has come to such a page, or to its end: at once
        where it is there and waits for its budget. Those that begin meanwhile are not waited for.
        """
        if self._opened is None:
            self.drained = self.draining
            return
        _, since = self._opened
        if self._ending is None:
            if not self.draining:
                if now - since < self._seconds:
                    return
                if self._due == math.inf:
                    self._due = now
                    self._scheduler.make_room()
                    self._hand_out(now)
                if self._scheduler.would_lose(self._due):
                    return
            self._ending = now + _END_SECONDS
            self._scheduler.pause()
            self._hand_out(now)
        if self._scheduler.idle or now >= self._ending:
            for lane in list(self._known):
                self._lose(lane, now)
            self._opened = None
            self._server.end()
            self.drained = self.draining
