"""One relay group: its run, begun anew whenever what it should be has changed, while it has its lock.

What a change concerns stands still for tenths of a second: the query of the next run is started first,
beside the one that runs, and takes over the slot between two batches.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import psycopg
import structlog
from pyspark.sql import SparkSession

from penstock.core import queries
from penstock.core.backoff import Backoff
from penstock.core.errors import CaptureError, SinkError, StoreError
from penstock.core.health import Failure, Level, Part, Problem, pipeline_part, worker_part
from penstock.outbox.inbox.inbox import InboxPipeline
from penstock.outbox.inbox.inboxes import Inboxes
from penstock.outbox.relay.begin import begin, forget, give_up_slot, leave
from penstock.outbox.relay.guard import RelayGuard
from penstock.outbox.relay.lease import Lease
from penstock.outbox.relay.lock import GroupLock
from penstock.outbox.relay.places import Places
from penstock.outbox.relay.wanted import Wanted
from penstock.outbox.sessions import postgres_error
from penstock.runtime.handover import NextQuery
from penstock.runtime.paused_sinks import PausedSinks
from penstock.runtime.recovery import GAP_CODES
from penstock.runtime.run import Run
from penstock.runtime.state import RunState
from penstock.spark.reasons import query_failure
from penstock.spark.session import jvm_exit_code
from penstock.spark.warm import warm
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")
_TICK_SECONDS: Final = 1.0
_BACKOFF_SECONDS: Final = (1.0, 30.0)
_HAND_OVER_SECONDS: Final = 30.0
"""How long a change may wait for the next query; then the run ends without it."""
# Within how many seconds a step of the group's loop is over; where it is not, the loop hangs.
_STEP_SECONDS: Final = 30.0
_LONG_STEP_SECONDS: Final = 240.0
_PIPELINE_SECONDS: Final = 2.0  # more for each, as each may wait for a lock

log = structlog.get_logger("penstock")


class Group:
    """Runs one group's pipelines, in a thread, from `start` to `stop`, while it has the lock.

    Args:
        name: The group's.
        url: The outboxes' database.
        database: Its name.
        store: The store's URL.
        spark: The session.
    """

    def __init__(self, name: str, url: str, database: str, store: str, spark: SparkSession) -> None:
        self.name = name
        self._url = url
        self._store_url = store
        self._spark = spark
        self._lock = GroupLock(url, name)
        self._inboxes = Inboxes(url, database)
        self._changing = threading.Lock()  # of what is wanted, and what runs
        self._wanted: Wanted | None = None
        self._running: Wanted | None = None
        self._last: Wanted | None = None
        self._run: Run | None = None
        self._ended: RunState | None = None  # of the newest run, over or not
        self._asked = False
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._state = "connecting"
        self._failure: Failure | None = None
        self._confirmed = 0  # messages, by all of its runs
        self._warm = False
        self._due = math.inf  # when the step under way should be over
        self._hangs = False
        self._handing_over: threading.Thread | None = None
        self._next: NextQuery | None = None
        self._told: set[str] = set()
        self._left_out: dict[str, Failure] = {}
        self._thread = threading.Thread(target=self._main, name=f"relay group {name}", daemon=True)

    # -- what others ask

    @property
    def ready(self) -> bool:
        """Whether it streams, stands by, or has nothing to run."""
        run = self._run
        return self._state in ("standby", "waiting") or (run is not None and run.ready)

    @property
    def run_state(self) -> RunState | None:
        """The state of its run, None while there is none."""
        run = self._run
        return None if run is None else run.state

    def parts(self, now: float) -> list[Part]:
        """Return how the group is, and its pipelines that have no sink in its run."""
        starting = self._state in ("connecting", "starting")
        wanted = self._wanted
        failures = dict(self._inboxes.failures())
        for name, failure in ({} if wanted is None else wanted.left_out).items():
            if wanted is not None and wanted.pipelines[name].enabled:
                failures[name] = failure
        return [
            worker_part(f"relay group {self.name}", self._failure, now, starting=starting),
            *(pipeline_part(name, failure) for name, failure in failures.items()),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return what `/status` says of it."""
        wanted = self._wanted
        failed = {} if wanted is None else {**wanted.held, **wanted.left_out}
        return {
            "state": self._state,
            "warm": self._warm,
            "error": None if self._failure is None else self._failure.text,
            "inboxes": self._inboxes.as_json(),
            "pipelines": {
                name: {"enabled": p.enabled, "error": str(failed[name].cause)}
                if name in failed and p.enabled
                else {"enabled": p.enabled, "error": None}
                for name, p in ({} if wanted is None else wanted.pipelines).items()
            },
        }

    def lease(self) -> Lease | None:
        """Return its lease on the group, None while its loop hangs or has not begun."""
        if self._thread.ident is None:
            return None
        if time.monotonic() > self._due:
            if not self._hangs:
                self._hangs = True
                log.error("the group's loop hangs: no heartbeat until it goes on", group=self.name)
            return None
        self._hangs = False
        if not self._lock.held:
            return Lease(self.name, "standby", self._warm)
        code = error = remedy = None
        if (failure := self._failure) is not None:
            code, error, remedy = failure.code, failure.cause, failure.remedy or None
        elif (problem := self._problem()) is not None:
            code, error, remedy = problem.code, problem.cause, problem.remedy
        return Lease(self.name, "running", True, self._lock.pid, code, error, remedy)

    def _problem(self) -> Problem | None:
        """Return why nothing moves in its run; what one sink suffers from is its pipeline's."""
        state = self.run_state
        for part in () if state is None else state.parts():
            if part.subject.startswith(("store", "source ")):
                for problem in part.problems:
                    if problem.level is Level.FAILED and problem.code != "sinks_held_up":
                        return problem
        return None

    def want(self, wanted: Wanted | None, inboxes: Sequence[InboxPipeline] = ()) -> None:
        """Take what shall run from now on, None where the group has no outbox any more."""
        self._inboxes.set_desired(inboxes)
        with self._changing:
            self._wanted, self._asked = wanted, True
            if self._run is not None and not (wanted and wanted.same(self._running)):
                self._hand_over(self._run)
        self._wake.set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask for an orderly end, from any thread."""
        with self._changing:
            self._stopping.set()
            if self._run is not None:
                log.info("stopping: finishing the batch under way", group=self.name)
                self._run.stop()
        self._inboxes.activate(False)
        self._wake.set()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:
            self._thread.join()

    # -- the thread

    def _main(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS)
        while not self._stopping.is_set() and jvm_exit_code() is None:
            self._within(_STEP_SECONDS)
            try:
                held = self._lock.acquire()
                self._inboxes.activate(held)
                if not held:
                    self._enter("standby")
                elif not self._turn():
                    self._discard_next()
                    self._enter("waiting")
                else:
                    self._told.clear()
                    backoff.reset()
                    continue
                self._pause(_TICK_SECONDS)
                continue
            except (CaptureError, StoreError) as error:
                failure = Failure.by(error)
            except psycopg.Error as error:
                self._inboxes.activate(self._lock.check())
                known = postgres_error(error, self._url)
                failure = Failure.by(known)
            except Exception as error:
                log.exception("the group could not be run", group=self.name)
                failure = Failure("internal", f"{type(error).__name__}: {error}", "")
            delay = backoff.after_failure(self._confirmed)
            self._fail(failure, delay)
            self._discard_next()
            self._pause(delay)
        self._discard_next()
        self._due = math.inf
        self._inboxes.activate(False)
        self._inboxes.join()
        self._lock.close()

    def _within(self, seconds: float) -> None:
        """Expect the loop's next step within so many seconds."""
        self._due = time.monotonic() + seconds

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()
        if self._lock.held:
            self._inboxes.activate(self._lock.check())

    def _enter(self, state: str) -> None:
        if state == self._state:
            return
        self._state, self._failure = state, None
        if state == "standby":
            log.info("standing by: another relay runs the group", group=self.name)
            try:
                self._within(_LONG_STEP_SECONDS)
                warm(self._spark)
                self._warm = True
                log.info("warm", group=self.name)
            except Exception:  # it only saves time later
                log.exception("Spark could not be warmed up", group=self.name)

    def _fail(self, failure: Failure, delay: float) -> None:
        """Report what keeps the group from running: in the log once, and in its pipelines' status."""
        self._state, self._failure = "error", failure.lasting(self._failure, time.time())
        self._within(delay + _STEP_SECONDS)
        if failure.code not in self._told:
            self._told.add(failure.code)
            log.error("the group does not run; trying again", group=self.name, code=failure.code,
                      error=failure.text, retry_in=delay)  # fmt: skip
        wanted = self._wanted
        if wanted is None or not self._lock.held:
            return
        pipelines = [name for name in wanted.pipelines if name not in wanted.left_out]
        self._tell(wanted, pipelines, failure)

    def _tell(self, wanted: Wanted, pipelines: list[str], failure: Failure) -> None:
        values = {
            "group": self.name, "pipelines": pipelines,
            "created_at": [wanted.pipelines[name].created_at for name in pipelines],
            "code": failure.code, "error": failure.cause, "remedy": failure.remedy or None,
        }  # fmt: skip
        with contextlib.suppress(psycopg.Error):  # told in the log, too
            self._lock.connection.execute(_SQL["put_trouble"], values)

    # -- a change of what is to run

    def _hand_over(self, run: Run) -> None:
        """Begin to end `run` for another one; the lock is held."""
        if self._handing_over is None or not self._handing_over.is_alive():
            log.info("settings changed: the group's run begins anew", group=self.name)
            self._handing_over = threading.Thread(
                target=self._replace, args=(run,), name=f"hand over {self.name}", daemon=True
            )
            self._handing_over.start()

    def _replace(self, run: Run) -> None:
        """End `run` once the query of the next one waits for the slot, or can't be had."""
        deadline = time.monotonic() + _HAND_OVER_SECONDS
        while True:
            with self._changing:
                wanted = self._wanted
            query = None if wanted is None else self._prepare(run, wanted)
            if query is not None and not query.wait(max(deadline - time.monotonic(), 0.0)):
                query.close()
                query = None
            # Now, as one may wait for its server for a while; what it has not delivered is kept.
            run.store.end_drainers()
            with self._changing:
                latest = self._wanted
                ended = self._run is not run or self._stopping.is_set()
                same = latest is None or wanted is None or latest.config == wanted.config
                if not ended and (same or query is None or time.monotonic() > deadline):
                    self._next, query = query, self._next  # one that nobody took is closed
                    run.stop()
                    ended = True
            if query is not None:
                query.close()
            if ended:
                return

    def _prepare(self, run: Run, wanted: Wanted) -> NextQuery | None:
        """Start the query of the next run; None where it can't be, which that run then reports."""
        if not wanted.sinks:
            return None
        query = None
        try:
            query = NextQuery(self._spark, wanted.config, run.store.target(wanted.source))
            query.start()
        except Exception as error:
            log.info("the next query could not be started beside this one", group=self.name,
                     error=query_failure(error).cause)  # fmt: skip
            if query is not None:
                query.close()
            return None
        return query

    # -- a turn with the lock

    def _turn(self) -> bool:
        """Run what is wanted until that changes; return False where there is nothing to run."""
        with self._changing:
            wanted, asked = self._wanted, self._asked
        if not asked:
            return False
        if wanted is None:
            self._retire()
            return False
        self._tell_left_out(wanted)
        if not wanted.sinks and wanted.begun:
            with contextlib.closing(Store.open(self._store_url)) as store:
                leave(self._lock.connection, store, wanted)
        if not wanted.sinks or not (wanted.begun or self._any_enabled(wanted)):
            return False
        with contextlib.closing(Store.open(self._store_url)) as store:
            self._work(wanted, store)
        return True

    def _discard_next(self) -> None:
        """Close a query that was prepared, and that no run has taken."""
        with self._changing:
            query, self._next = self._next, None
        if query is not None:
            query.close()

    def _work(self, wanted: Wanted, store: Store) -> None:
        """Run `wanted` until it is that no longer; raises what ends it otherwise."""
        # A failure stands until the next run has begun, and is not over because it is tried.
        self._state, self._last = "starting", wanted
        self._within(_LONG_STEP_SECONDS)
        starting = begin(self._lock.connection, store, wanted)
        held = {
            name: SinkError(t.code, t.cause, remedy=t.remedy) for name, t in wanted.held.items()
        }
        held |= {name: SinkError("starting", _STARTING) for name in starting}
        try:
            paused = PausedSinks(held, starting)
            with Run(wanted.config, self._store_url, paused=paused, guard=RelayGuard()) as run:
                if self._ended is not None:
                    run.state.continue_from(self._ended)
                self._ended = run.state
                if self._enlist(run, wanted):
                    try:
                        self._stream(run, wanted, store, starting)
                    finally:
                        with self._changing:
                            self._run = self._running = None
                        self._confirmed += sum(s.confirmed for s in run.state.sources.values())
                        self._within(_LONG_STEP_SECONDS)
            if run.failure is not None and not self._stopping.is_set():
                raise CaptureError(run.failure.code, run.failure.text)
        except CaptureError as error:
            if error.code in GAP_CODES:
                give_up_slot(self._lock.connection, wanted)
            raise

    def _retire(self) -> None:
        """Forget what the pipelines had waiting, now that the group has none any more."""
        if self._last is not None:
            with contextlib.closing(Store.open(self._store_url)) as store:
                forget(store, self._last.source, frozenset())
            self._last = None

    @staticmethod
    def _any_enabled(wanted: Wanted) -> bool:
        return any(name not in wanted.held for name in wanted.sinks)

    def _enlist(self, run: Run, wanted: Wanted) -> bool:
        """Make `run` known to who may end it; return False where it is not wanted any more."""
        with self._changing:
            if self._stopping.is_set() or not (self._wanted and self._wanted.same(wanted)):
                return False
            self._run, self._running = run, wanted
            return True

    def _tell_left_out(self, wanted: Wanted) -> None:
        for name, failure in wanted.left_out.items():
            if wanted.pipelines[name].enabled and self._left_out.get(name) != failure:
                log.error("pipeline can't be run", pipeline=name, group=self.name,
                          code=failure.code, error=failure.cause, remedy=failure.remedy)  # fmt: skip
                self._tell(wanted, [name], failure)
        self._left_out = dict(wanted.left_out)

    def _stream(self, run: Run, wanted: Wanted, store: Store, starting: frozenset[str]) -> None:
        for name, failure in wanted.held.items():
            if wanted.pipelines[name].enabled:
                log.error("pipeline stopped", pipeline=name, group=self.name, code=failure.code,
                          error=failure.cause, remedy=failure.remedy)  # fmt: skip
        # Before anything is delivered: what the run counts by then is of the one before.
        places = Places(self._lock.connection, store, wanted, run, starting)
        run.prepare()
        ended = threading.Event()
        keeper = threading.Thread(
            target=self._keep, args=(run, places, ended), name=f"places {self.name}", daemon=True
        )
        keeper.start()
        try:
            if not run.stopping:
                with self._changing:
                    prepared, self._next = self._next, None
                run.stream(self._spark, self._say_ready, prepared=prepared)
        finally:
            ended.set()
            keeper.join()

    def _say_ready(self) -> None:
        self._state, self._warm, self._failure = "running", True, None
        running = self._running
        sinks = [] if running is None else list(running.sinks)
        log.info("relaying", group=self.name, pipelines=sinks)

    def _keep(self, run: Run, places: Places, ended: threading.Event) -> None:
        """Write the places every second, and once more at the end; without the lock the run ends."""
        last = False
        while not last:
            last = ended.wait(_TICK_SECONDS)
            self._within(_STEP_SECONDS + _PIPELINE_SECONDS * len(run.state.sinks))
            if not self._lock.check():
                if not last:
                    log.warning("the group's lock is lost: its session ended", group=self.name)
                self._inboxes.activate(False)
                run.stop()
                return
            if (latest := self._wanted) is not None and latest.same(self._running):
                self._tell_left_out(latest)
            try:
                places.tick()
            except (psycopg.Error, StoreError) as error:
                log.warning("places could not be written", group=self.name, error=str(error))
            except Exception:
                log.exception("places could not be written", group=self.name)


_STARTING: Final = "The messages that the outbox kept go before those that come in now."
