"""Runs one source for as long as its configuration wants it: stands by, runs, hands over to itself.

A runner holds the source's lease over all of its runs. A changed configuration is looked at beside the
current run; what does not plan is refused, and the run goes on. What does is started beside it, too,
and takes the slot over between two rounds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
from pyspark.sql import SparkSession

from penstock.config.settings import Config
from penstock.core.errors import CaptureError, PenstockError, SetupError, StoreError
from penstock.core.health import Failure, Level, Part
from penstock.postgres import setup
from penstock.runtime import recovery
from penstock.runtime.guard import shared_stream
from penstock.runtime.handover import NextQuery
from penstock.runtime.lease import Lease
from penstock.runtime.nats_consumers import refuse_filters, state_of
from penstock.runtime.reconcile import reads_alike, runs_alike
from penstock.runtime.run import Run
from penstock.runtime.run_log import RunLog
from penstock.runtime.state import RunState
from penstock.runtime.store_session import register_streams, uuids_of
from penstock.spark import planning
from penstock.spark.reasons import query_failure
from penstock.spark.store_writer import StoreTarget
from penstock.spark.warm import warm
from penstock.streams.claim import HOLDER, PATIENCE, claimed_by_another
from penstock.streams.store import Store

_LEASE_SECONDS: Final = 0.5
"""How often a standby asks for the lease."""
_HANDOVER_SECONDS: Final = 30.0
"""How long a change may wait for the next query; then the run ends without it."""
_RETRY_SECONDS: Final = 1.0

log = structlog.get_logger("penstock")


class SparkSoon:
    """The session, which starts while sources are prepared."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self._warming = threading.Lock()
        self._is_warm = False
        self._session: SparkSession | None = None

    def set(self, session: SparkSession | None) -> None:
        """Give the session to all that wait for it; None: there will be none."""
        self._session = session
        self._there.set()

    def warm(self) -> None:
        """Run a first query, once, so that the next one starts fast; raises Spark's errors."""
        with self._warming:
            if not self._is_warm and (session := self.get()) is not None:
                warm(session)
            self._is_warm = True

    @property
    def is_set(self) -> bool:
        """Whether it is there, or none comes."""
        return self._there.is_set()

    def get(self) -> SparkSession | None:
        """Wait for the session and return it; None where none comes."""
        self._there.wait()
        return self._session


@dataclass(frozen=True)
class RunnerContext:
    """What the runners of a process share.

    `noticed` is called when a runner's state has changed. `refused(source, config, failure)` is called
    where a changed configuration can't be run, and `accepted(source)` where the newest one runs.
    `remove(source, config)` drops what is left of removed entities, before a run of that, or returns why
    the run must wait; `is_left` returns whether there is something of an entity that is there again.
    """

    store_url: str
    once: bool
    spark: SparkSoon
    log: RunLog
    noticed: Callable[[], object]
    refused: Callable[[str, Config, PenstockError], object]
    accepted: Callable[[str], object]
    remove: Callable[[str, Config], StoreError | None]
    is_left: Callable[[str, Config], bool]


class SourceRunner:
    """Runs the source `name` of `config`, which has no other, in a thread."""

    def __init__(self, name: str, config: Config, context: RunnerContext) -> None:
        self.name = name
        self._context = context
        self._changing = threading.RLock()
        self._desired: Config | None = config
        self._refused: tuple[Config, Failure] | None = None
        self._good: Config | None = None
        self._run: Run | None = None
        self._next: NextQuery | None = None
        self._replacing: threading.Thread | None = None
        self._warmed = False
        self._delayed: Failure | None = None
        self._stopping = threading.Event()
        self._lease = Lease(context.store_url, name, self._lost)
        self.state = _idle_state(name, config)
        """The state of the newest run."""
        self.error: PenstockError | None = None
        """What it could not be prepared for, as it was raised."""
        self.failure: Failure | None = None
        """Why it has ended for good."""
        self.prepared = False
        self._thread = threading.Thread(target=self._main, name=f"source {name}", daemon=True)

    # -- what others see of it

    @property
    def standing_by(self) -> str | None:
        """Who runs the source while this one stands by."""
        return self.state.standing_by

    @property
    def settled(self) -> bool:
        """Whether it is prepared, stands by or has ended."""
        return self.prepared or self.standing_by is not None or not self._thread.is_alive()

    @property
    def waits_for_slot(self) -> bool:
        """Whether another reader has its slot."""
        return self._run is not None and self._run.waits_for_slot

    @property
    def alive(self) -> bool:
        """Whether it may still run something."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether it streams."""
        return self._run is not None and self._run.ready

    @property
    def stuck(self) -> bool:
        """Whether it can't go on before a repair."""
        return self.failure is not None or (self._run is not None and self._run.has_gap)

    @property
    def running(self) -> Config | None:
        """The configuration of the current run."""
        return self._good if self._run is not None else None

    @property
    def refuses(self) -> bool:
        """Whether it has refused the newest configuration."""
        return self._refused is not None

    @property
    def holds_lease(self) -> bool:
        """Whether the source is this process's."""
        return self._lease.claim is not None

    def parts(self) -> list[Part]:
        """Return what is wrong with it beside the state of its run."""
        subject, found = f"source {self.name}", []
        if self.failure is not None:
            found.append(Part.failing(subject, Level.FAILED, self.failure))
        elif self._delayed is not None:
            found.append(Part.failing(subject, Level.FAILED, self._delayed))
        elif self._refused is not None:
            found.append(Part.failing(subject, Level.DEGRADED, self._refused[1]))
        return found

    def store_outage(self, error: str | None) -> None:
        """Take in why the embedded store is away, or with None that it is back."""
        if (run := self._run) is not None:
            run.store_outage(error)

    # -- what it is told to do

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Ask for an orderly end, from any thread."""
        with self._changing:
            self._stopping.set()
            if self._run is not None:
                self._run.stop()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:
            self._thread.join()

    def set_desired(self, config: Config | None) -> None:
        """Run another configuration of the source; None: it is wanted no longer."""
        with self._changing:
            self._desired = config
            if config is None:
                self.stop()
            elif self._run is not None and self._good is not None:
                if runs_alike(self._good, config, self.name):
                    if self._refused is not None:
                        self._refused = None
                        self._context.accepted(self.name)
                elif self._replacing is None or not self._replacing.is_alive():
                    self._replacing = threading.Thread(
                        target=self._replace, args=(self._run, self._good),
                        name=f"handover {self.name}", daemon=True,
                    )  # fmt: skip
                    self._replacing.start()

    def renew(self) -> None:
        """Begin the run anew: something that it uses is to be removed, and made again."""
        with self._changing:
            if self._run is not None:
                self._run.stop()

    # -- its thread

    def _main(self) -> None:
        try:
            while not self._stopping.is_set() and self.failure is None:
                if (desired := self._next_config()) is None:
                    break
                self._turn(desired)
                if self._context.once:
                    break
        except PenstockError as error:
            self.error, self.failure = error, self._failed(Failure.by(error))
        except Exception as error:
            log.exception("a source's runner ended", source=self.name)
            self.failure = self._failed(query_failure(error))
        finally:
            self._discard_next()
            self._lease.close()
            self._context.noticed()

    def _failed(self, failure: Failure) -> Failure:
        return failure.lasting(None, time.time())

    def _next_config(self) -> Config | None:
        """Return what the next run is of: the desired configuration, or the last good one."""
        with self._changing:
            if self._refused is not None and self._refused[0] is self._desired:
                return self._good
            return self._desired

    def _turn(self, config: Config) -> None:
        """Run until the end, a change or a failure; raises `PenstockError` where it can't begin."""
        earlier = self.state if self._good is not None else None
        self._warmed = False
        try:
            if not self._acquire(config):
                return
            config = self._next_config() or config  # its consumers may be newer
            if (left := self._context.remove(self.name, config)) is not None:
                self._note_delay(left)
                self._stopping.wait(_RETRY_SECONDS)
                return
            with Run(
                config, self._context.store_url, once=self._context.once, claim=self._lease.claim,
                run_log=self._context.log, follows=earlier is not None,
            ) as run:  # fmt: skip
                if earlier is not None:
                    run.state.continue_from(earlier)
                run.state.holder = HOLDER
                self.state = run.state
                if self._begin(run, config):
                    try:
                        self._stream(run)
                    finally:
                        with self._changing:
                            self._run = None
        except (CaptureError, StoreError) as error:
            if error.transient and self._context.spark.is_set and not self._context.once:
                self._note_delay(error)
                self._stopping.wait(_RETRY_SECONDS)
                return
            good = self._good
            if good is None or good is config or self._stopping.is_set():
                raise
            self._refuse(config, error)
            return
        if run.lost_claim:
            log.warning("another penstock run has taken the source over", source=self.name)
            self._lease.close()
            self.state = _idle_state(self.name, config)
            self.state.continue_from(run.state)
        elif run.failure is not None and self._good not in (None, config):
            found = run.failure
            self._refuse(config, SetupError(found.code, found.cause, remedy=found.remedy))
        elif run.failure is not None:
            self.failure = self._failed(run.failure)

    def _note_delay(self, error: CaptureError | StoreError) -> None:
        """Note why the source can't begin now; it is tried again."""
        failure = Failure.by(error)
        if self._delayed is None or self._delayed.cause != failure.cause:
            log.warning("the source can't be run now; trying again", source=self.name,
                        code=error.code, error=str(error))  # fmt: skip
        self._delayed = failure.lasting(self._delayed, time.time())

    def _begin(self, run: Run, config: Config) -> bool:
        """Prepare the run, and make it the current one; return False where it is to end."""
        with self._changing:
            if self._stopping.is_set():
                return False
            self._run = run
        self._context.noticed()
        try:
            run.prepare(quietly=self._good is not None)
        except BaseException:
            with self._changing:
                self._run = None
            raise
        if run.failure is not None:
            with self._changing:
                self._run = None
            return False
        with self._changing:
            self._good = config
            desired = self._desired
        self.prepared, self._delayed = True, None
        self._context.noticed()
        if desired is not None and desired is not config:
            self.set_desired(desired)  # it came meanwhile
        return not run.stopping

    def _stream(self, run: Run) -> None:
        spark = self._context.spark.get()
        if spark is None or run.stopping:
            return
        with self._changing:
            prepared, self._next = self._next, None
        run.stream(spark, self._note_ready, prepared=prepared)

    def _note_ready(self) -> None:
        if self._refused is None:
            self._context.accepted(self.name)
        self._context.noticed()

    def _acquire(self, config: Config) -> bool:
        """Wait for the lease; return False where the end or a change came first."""
        deadline = time.monotonic() + PATIENCE
        began = None
        while not self._stopping.is_set() and self._is_wanted(config):
            try:
                if self._lease.acquire(config.sources[self.name]):
                    if began is not None:
                        self.state.standing_by = None
                        seconds = round(time.monotonic() - began, 1)
                        log.info("taking the source over", source=self.name, stood_by=seconds)
                    return True
            except StoreError as error:
                if not error.transient or began is None:
                    raise
            else:
                holder = self._lease.holder or "another process"
                if self._context.once:
                    if began is None:
                        log.warning("waiting for another run to end", source=self.name)
                    if time.monotonic() > deadline:
                        raise claimed_by_another(self.name, holder)
                elif holder != self.state.standing_by:
                    log.info(f"standing by: {holder} runs source {self.name}", source=self.name,
                             holder=holder)  # fmt: skip
                    self.state.standing_by = holder
                    self._context.noticed()
                began = began or time.monotonic()
                if not self._warmed and not self._context.once and self._context.spark.is_set:
                    self._warmed = True
                    threading.Thread(
                        target=self._warm, args=(config,), name=f"warm {self.name}", daemon=True
                    ).start()
            self._stopping.wait(_LEASE_SECONDS)
        self._discard_next()
        return False

    def _is_wanted(self, config: Config) -> bool:
        """Return whether the next run is still of `config`, whatever its consumers."""
        wanted = self._next_config()
        return wanted is not None and runs_alike(wanted, config, self.name)

    def _warm(self, config: Config) -> None:
        """Start the query that is to take the source over: it waits for the slot, however long."""
        spark, query = self._context.spark.get(), None
        try:
            self._context.spark.warm()
            with Store(self._context.store_url) as store:
                known, ids = store.source(self.name), {s.name: s.id for s in store.streams()}
                uuids = uuids_of(store, config, self.name)
            epoch = self._lease.next_epoch
            if spark is None or known is None or not ids.keys() >= config.streams.keys():
                return
            target = StoreTarget(self._context.store_url, known.id, known.base, epoch)
            streams = {name: ids[name] for name in config.streams}
            query = NextQuery(spark, config, target, uuids, streams, ())
            query.start()
            if query.wait(_HANDOVER_SECONDS):
                log.info("ready to take the source over", source=self.name)
        except Exception as error:  # it is made once the source is this process's
            log.info("no query is prepared for a take-over", source=self.name,
                     error=query_failure(error).cause)  # fmt: skip
            if query is not None:
                query.close()
            return
        with self._changing:
            if self.standing_by is not None and self._is_wanted(config) and self.alive:
                self._next, query = query, self._next
        if query is not None:
            query.close()

    def _lost(self) -> None:
        with self._changing:
            if self._run is not None:
                self._run.lose_claim()

    # -- a changed configuration

    def _replace(self, run: Run, running: Config) -> None:
        """End `run` once the query of the next one waits for the slot; runs in a thread."""
        began = time.monotonic()
        while True:
            with self._changing:
                desired = self._desired
                if desired is None or self._run is not run or self._stopping.is_set():
                    return
                if runs_alike(running, desired, self.name):
                    self._replacing = None
                    return
            try:
                query = self._prepare(run, running, desired)
            except PenstockError as error:
                if getattr(error, "transient", False):
                    self._stopping.wait(_RETRY_SECONDS)
                    continue
                self._refuse(desired, error)
                with self._changing:
                    if self._desired is desired:
                        self._replacing = None
                        return
                continue
            except Exception as error:
                log.exception("a changed configuration can't be prepared", source=self.name)
                found = query_failure(error)
                self._refuse(desired, SetupError(found.code, found.cause, remedy=found.remedy))
                with self._changing:
                    if self._desired is desired:
                        self._replacing = None
                        return
                continue
            with self._changing:
                if self._desired is not desired or self._run is not run:
                    if query is not None:
                        query.close()
                    continue
            # Before the stop: a drainer may wait for its server. The backlog keeps the messages.
            run.store.end_drainers()
            with self._changing:
                self._refused, self._next, self._replacing = None, query, None
                run.stop()
            log.info("the configuration changed: the source's run is replaced", source=self.name,
                     prepared=round(time.monotonic() - began, 1))  # fmt: skip
            return

    def _prepare(self, run: Run, running: Config, desired: Config) -> NextQuery | None:
        """Start the next query beside the run; raises what refuses the desired configuration.

        Returns None where the next run must begin by itself: it reads another slot, for one.
        """
        source, sinks = desired.sources[self.name], desired.sinks_of(self.name)
        planning.refuse(source, sinks)
        if (shared := shared_stream(desired)) is not None:
            raise SetupError("shared_stream", shared)
        if not reads_alike(running, desired, self.name):
            return None
        if self._context.is_left(self.name, desired):
            return None  # it goes before it is made anew
        with Store(self._context.store_url) as store:
            recovery.refuse_gap(desired, self.name, store)
            setup.ensure(source, is_read=True)
            streams = register_streams(store, desired, run.store.source(self.name))
            refuse_filters(store, desired, streams)
        spark = self._context.spark.get()
        if spark is None:
            return None
        query = None
        try:
            uuids = run.store.uuids(desired, self.name)
            query = NextQuery(spark, desired, run.store.target(self.name), uuids, streams, ())
            query.start()
            if query.wait(_HANDOVER_SECONDS):
                return query
        except CaptureError:
            if query is not None:
                query.close()
            raise
        except Exception as error:
            log.info("the next query could not be started beside this one", source=self.name,
                     error=query_failure(error).cause)  # fmt: skip
        if query is not None:
            query.close()
        return None

    def _refuse(self, config: Config, error: PenstockError) -> None:
        failure = Failure(
            "change_refused",
            f"The changed configuration of source {self.name} is refused, and the one before goes on"
            f" ({error.code}): {error.message}",
            error.remedy or "Correct it.",
            time.time(),
        )
        with self._changing:
            self._refused = config, failure
        self._context.refused(self.name, config, error)

    def _discard_next(self) -> None:
        with self._changing:
            query, self._next = self._next, None
        if query is not None:
            with contextlib.suppress(Exception):  # the JVM may be gone
                query.close()


def _idle_state(name: str, config: Config) -> RunState:
    return state_of(config, [name])
