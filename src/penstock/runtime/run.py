"""One run of a configuration: its pipelines in a Spark session, and an orderly end.

A session may see many runs, one after the other or beside each other: what ends a run leaves the
session alone. `penstock.cli.service` has the process around it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self

import structlog
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.backfill.supervisor import BackfillSupervisor, log_left_out
from penstock.config.file import Config
from penstock.config.settings import PostgresSource
from penstock.core.backoff import Backoff
from penstock.core.errors import CaptureError, SinkError, StoreError
from penstock.core.health import Failure, Part, run_part
from penstock.core.message import Position
from penstock.core.monitor import Monitor, Report
from penstock.core.startup import Step, step
from penstock.postgres import setup
from penstock.runtime import recovery
from penstock.runtime.handover import NextQuery
from penstock.runtime.state import State
from penstock.runtime.store_session import StoreSession
from penstock.sinks.nats.shared import shared_streams
from penstock.spark import planning
from penstock.spark.pipeline import Pipeline
from penstock.spark.reasons import query_failure
from penstock.spark.session import jvm_exit_code, last_errors
from penstock.streams.errors import EMBEDDED_DOWN
from penstock.streams.positions import Positions, Recorder
from penstock.streams.store import Store

_DRAIN_SECONDS: Final = 15.0
_HELD_SECONDS: Final = 3.0  # of these, where the store is down and the batch can't be finished
_BACKOFF_SECONDS: Final = (0.5, 30.0)
# After a kill the server may hold the slot for the last run's connection: `wal_sender_timeout`, 60 s
# by default, if the machine went with it.
_SLOT_PATIENCE: Final = 75.0
# Errors of a capture that end the run. One without its publication goes on reporting that.
_FATAL: Final = recovery.GAP_CODES - {"publication_missing"} | {"unknown_column", "internal"}

log = structlog.get_logger("penstock")


@dataclass(frozen=True)
class Holding:
    """Sinks whose messages only wait, with the reason.

    What is read by a backfill for those that are `starting` is delivered all the same: it goes before
    what waits.
    """

    sinks: Mapping[str, SinkError]
    starting: frozenset[str] = frozenset()


QUIET: Final = frozenset({"disabled", "starting"})
"""Codes of what is held that are no errors."""


class Run:
    """One run of a configuration, whose streams and backlogs are in the store at `store_url`.

    A context manager, as it has its part in the store: then `prepare`, then `stream`. With `once` it
    ends when what is there is delivered, else when `stop` asks for it.

    A relay's run has a `Holding`: its slot may be made anew, as the messages are in a table too.
    """

    def __init__(
        self,
        config: Config,
        store_url: str,
        *,
        once: bool = False,
        holding: Holding | None = None,
    ) -> None:
        self._config = config
        self._once = once
        self._holding = holding
        self._sources = [name for name in config.sources if config.sinks_of(name)]
        sinks = {name: (sink.type, sink.source) for name, sink in config.sinks.items()}
        self.state = State(self._sources, sinks)
        self._stopping = threading.Event()
        self._expired = threading.Event()
        self._wake = threading.Event()
        self._failed: tuple[str, str] | None = None
        self._held: dict[str, set[str]] = {}
        self._ended: dict[str, tuple[float, str]] = {}  # queries: since when, and why last
        self._ask_streams = False
        self._gaps: dict[str, CaptureError] = {}
        self._store = StoreSession(
            config, store_url, self._handle,
            {} if holding is None else holding.sinks, () if holding is None else holding.starting,
        )  # fmt: skip
        for name, why in ({} if holding is None else holding.sinks).items():
            error = None if why.code in QUIET else str(why)
            self.state.hold(name, why.code, error, why.remedy)
        self._backfilling: BackfillSupervisor | None = None
        self._planners = {
            name: planning.Planner(config.sources[name], config.sinks_of(name))
            for name in self._sources
        }
        self._recorder = Recorder(store_url) if holding is None else None
        self._queries: set[str] = set()  # names of all that it had in the session

    # -- reports

    def _handle(self, report: Report) -> Report | None:
        if "claim" in report:
            self._fail(report["error"], source=report["claim"], code=report["code"])
            return None
        if "query" in report and "part" not in report:
            return self.state.begin_query(report)
        if (failed := self._store.handle(report)) is not None:
            return failed
        for letter in report.get("dead") or ():
            log.error(
                "dead letter", sink=report["sink"], code=letter["code"],
                reason=letter["reason"], idempotency_key=letter["idempotency_key"],
            )  # fmt: skip
        if "altered" in report:
            planner = self._planners[report["capture"]]
            planner.after = Position(*report["after"])
            planner.altered = tuple(report["altered"])
        self._narrate(report)
        self.state.update(report)
        if self._recorder is not None and "confirmed_lsn" in report:
            source = report["capture"]
            self._recorder.note(
                source, self._store.source(source).tag, report["confirmed_lsn"],
                report.get("confirmed_time", 0),
            )  # fmt: skip
        if self._backfilling is not None:
            self._backfilling.handle(report)
        self._wake.set()
        return None

    def _narrate(self, report: Report) -> None:
        """Log the store's trouble once, and what else is wrong with a sink that is behind.

        Dead letters that it does not take are told at each try: that may never end by itself.
        """
        if "store" in report:
            error, held = report["store"], self._held.setdefault("", set())
            if error is None and held:
                held.clear()
                log.info("the store answers again")
            elif error is not None and report["code"] not in held - {"dead_letters"}:
                held.add(report["code"])
                log.error("the store is in trouble, everything waits for it",
                          code=report["code"], error=error)  # fmt: skip
        elif (name := report.get("sink")) is None:
            return
        elif report.get("behind"):
            if self._holding is not None and name in self._holding.starting:
                log.warning("sink is behind, its kept messages wait in the store", sink=name,
                            code=report["code"], error=report["error"])  # fmt: skip
            self._held.setdefault(name, set()).add(report["code"])
        elif report.get("state") == "attached":
            self._held.pop(name, None)
            self._ask_streams = True
        elif name in self._held and (code := report.get("code")) not in {None, *self._held[name]}:
            self._held[name].add(str(code))
            log.warning("sink still behind", sink=name, code=code, error=report["error"])

    @property
    def ready(self) -> bool:
        """Whether every source streams through a query that has run a batch."""
        return all(self._streams(name) for name in self._sources)

    def _streams(self, source: str) -> bool:
        state = self.state.sources[source]
        return state.warm and state.state == "streaming"

    @property
    def healthy(self) -> bool:
        """Whether the run goes on by itself."""
        return self._failed is None

    def store_outage(self, error: str | None) -> None:
        """Take in why the store is away, or with None that it is back."""
        self._handle({"store": error, "code": EMBEDDED_DOWN})

    def parts(self) -> list[Part]:
        """Return what failed the run, if something has."""
        return [] if self._failed is None else [run_part(Failure(*self._failed))]

    # -- the run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._recorder is not None:
            self._recorder.close()
        self._store.__exit__(*_)

    def stop(self) -> None:
        """Ask for an orderly end, from any thread."""
        self._stopping.set()
        self._wake.set()

    @property
    def stopping(self) -> bool:
        """Whether the end was asked for."""
        return self._stopping.is_set()

    @property
    def failure(self) -> tuple[str, str] | None:
        """The code and the text of what ended the run, None where nothing did."""
        return self._failed

    @property
    def store(self) -> StoreSession:
        """The run's part in its store."""
        return self._store

    def prepare(self) -> None:
        """Make and claim what the sources need; returns early where the end is asked for.

        Raises `CaptureError` and `StoreError`.
        """
        for name in self._sources:
            with step("source", source=name):
                self._ensure(name, self._config.sources[name])
                planning.refuse(self._config.sources[name], self._config.sinks_of(name))
                self._store.register(name, self._stopping)
        self._refuse_shared_streams()
        if not self._stopping.is_set():
            self._store.start()

    def _ensure(self, name: str, source: PostgresSource) -> None:
        """Make what a source lacks; a slot that a killed run's connection still holds is awaited."""
        deadline, told = time.monotonic() + _SLOT_PATIENCE, False
        while not self._stopping.is_set():
            try:
                self._refuse_gap(name)  # each time: the slot may go while it is waited for
                setup.ensure(source)
                return
            except CaptureError as found:
                error = found.recovered_by(self._config.recover_command(name))
                if error.code != "slot_in_use" or time.monotonic() > deadline:
                    raise error from None
                if not told:
                    told = True
                    log.warning(
                        "waiting for the slot", source=name, code=error.code, error=str(error)
                    )
                self._stopping.wait(1.0)

    def _refuse_shared_streams(self) -> None:
        """End the run where two sinks' messages would be each other's duplicates.

        Sinks that can't be asked now are asked when they deliver again. One pipeline of a relay must
        not end the others, so theirs are left alone.
        """
        self._ask_streams = False
        if self._holding is not None:
            return
        for name in self._sources:
            sinks = self._config.sinks_of(name)
            for finding in shared_streams(name, sinks) if len(sinks) > 1 else ():
                if finding.level != "error":
                    continue
                self._fail(
                    f"{finding.subject}: {finding.message}; {finding.fix}.", code="shared_stream"
                )

    def _refuse_gap(self, name: str) -> None:
        """Raise where a source must be recovered before it runs: a new slot would hide a gap."""
        if self._holding is None:
            with Store(self._store.url) as store:
                recovery.refuse_gap(self._config, name, store)

    def _note_gap(self, name: str, failure: Failure) -> None:
        """Note that a source can't go on by itself, for this run and for later ones."""
        code = failure.code
        if self._holding is None and code in recovery.GAP_CODES and name not in self._gaps:
            self._gaps[name] = CaptureError(code, failure.cause, remedy=failure.remedy, is_gap=True)
            with contextlib.suppress(StoreError), Store(self._store.url) as store:
                Positions(store).note_gap(name, self._store.source(name).tag, code)

    def _fail(self, reason: str, **fields: str) -> None:
        """Note why the run can't go on, and ask for its end."""
        if self._failed is None:
            told = {"code": "spark", **fields}
            self._failed = told["code"], reason
            log.error("run failed", **told, error=reason)
        self.stop()

    def stream(
        self, spark: SparkSession, on_ready: Callable[[], None], prepared: NextQuery | None = None
    ) -> None:
        """Run a query for each source until the end, and take down all but the session.

        `on_ready` is called once, when every query has run a batch. A query that was `prepared` for
        the one source is taken where it is what would be started.
        """
        if prepared is not None and not prepared.fits(self._config, self._store):
            prepared.close()
            prepared = None
        if prepared is not None:
            self._planners[prepared.source] = prepared.pipeline.planner
        local = self._config.spark.master.startswith("local")
        host = spark.sparkContext.getConf().get("spark.driver.host") or "127.0.0.1"
        if prepared is not None:
            monitor = prepared.monitor
        else:
            monitor = Monitor(self._handle, "127.0.0.1" if local else host)
        if self._once:  # a backfill may take longer than what is there now
            with contextlib.suppress(StoreError):  # its trouble is told when something is written
                log_left_out(self._config, self._store.url, self._sources)
        else:
            self._backfilling = BackfillSupervisor(
                self._config, self._store.url, self._sources, monitor.command,
                self._waits, self.state.show_backfills,
            )  # fmt: skip
            self._backfilling.start()
        threads = {
            name: threading.Thread(
                target=self._supervise, args=(spark, name, monitor, prepared), name=name,
                daemon=True,
            )
            for name in self._sources
        }  # fmt: skip
        # The first batch of a query is empty, and connects to its sinks.
        starting = {
            name: Step("sinks", source=name, sinks=[*self._config.sinks_of(name)])
            for name in self._sources
        }
        for thread in threads.values():
            thread.start()
        said = False
        while not self._stopping.is_set() and any(t.is_alive() for t in threads.values()):
            self._wake.wait(1.0)
            self._wake.clear()
            if self._ask_streams:
                self._refuse_shared_streams()
            for name in [name for name in starting if self._streams(name)]:
                starting.pop(name).done()
            self._log_recovered()
            if self.ready and not said:
                said = True
                on_ready()
            if (code := jvm_exit_code()) is not None and not self._stopping.wait(0.5):
                self._fail(
                    f"Spark's JVM ended with exit code {code} (-9: killed, perhaps for want of"
                    " memory). What was not delivered is still in the slot: start penstock again."
                )
        if self._once:
            self._await_backlogs()
        if self._stopping.is_set():
            if self._failed is None and self._holding is None:
                log.info("stopping: finishing the batch under way")
            if self._backfilling is not None:
                self._backfilling.drain()
            self._drain(monitor, threads)
        self._expired.set()
        for thread in threads.values():
            thread.join(_DRAIN_SECONDS)
        self._end_queries(spark)
        if prepared is not None and prepared.pipeline.name not in self._queries:
            prepared.close()  # the end was asked for before it was taken
        if self._backfilling is not None:
            self._backfilling.close()
        monitor.flush()
        monitor.close()

    def _waits(self, sink: str) -> bool:
        """Tell whether a backfill would only add to what a sink has waiting."""
        starting = self._holding is not None and sink in self._holding.starting
        return self.state.sinks[sink].behind and not starting

    def release(self, sink: str) -> None:
        """Deliver from now on what a held sink has waiting; raises `StoreError`."""
        self.state.release(sink)
        self._store.release(sink)

    def _end_queries(self, spark: SparkSession) -> None:
        """See to it that nothing of this run is left in the session, whatever it was at."""
        with contextlib.suppress(Exception):  # the JVM may be gone
            for query in spark.streams.active:
                if query.name in self._queries:
                    query.stop()

    def _await_backlogs(self) -> None:
        """Wait until what sinks did not take at once is delivered too."""
        self._store.look()
        while not self._store.is_drained() and not self._stopping.is_set():
            self._wake.wait(0.1)
            self._wake.clear()

    def _drain(self, monitor: Monitor, threads: dict[str, threading.Thread]) -> None:
        """Let every query finish its batch, which a store that is down may keep it from."""
        started = time.monotonic()
        states = self.state.sources
        while True:
            waits = self.state.store_error is not None
            if time.monotonic() - started > (_HELD_SECONDS if waits else _DRAIN_SECONDS):
                break
            monitor.drain()
            if all(states[n].drained for n, thread in threads.items() if thread.is_alive()):
                break
            self._wake.wait(0.1)
            self._wake.clear()
        if self._failed is None and not all(s.drained for s in states.values()):
            log.warning("stopped before the last batch was delivered; it stays in the slot",
                        store=self.state.store_error)  # fmt: skip

    def _supervise(
        self, spark: SparkSession, source: str, monitor: Monitor, prepared: NextQuery | None = None
    ) -> None:
        """Keep a source's query running until the end is asked for."""
        backoff = Backoff(*_BACKOFF_SECONDS)
        planner = self._planners[source]
        while not self._stopping.is_set():
            pipeline = Pipeline(
                spark, self._config, source, self._store.routes(source),
                self._store.target(source), monitor.address, planner,
            ) if prepared is None else prepared.pipeline  # fmt: skip
            self._queries.add(pipeline.name)
            self.state.sources[source].capture_failure = None
            try:
                if source in self._gaps:  # what is missed does not come back with a publication
                    raise self._gaps[source]
                if prepared is None:
                    query = pipeline.start(once=self._once)
                    for name in self._config.sinks_of(source):
                        self.state.sinks[name].refused = planner.refused.get(name)
                else:
                    query = prepared.go(self._handle)
                    prepared = None
                self._await(query, source)
                pipeline.stop()
                if planner.altered is None or self._stopping.is_set():
                    return
                state = self.state.sources[source]
                state.state, state.warm = "connecting", False
                log.info("a table of the sinks' expressions was altered; planning the query anew",
                         source=source, table=".".join(planner.altered))  # fmt: skip
            except Exception as error:
                if self._stopping.is_set() or jvm_exit_code() is not None:
                    with contextlib.suppress(Exception):
                        pipeline.stop()
                    return
                state = self.state.sources[source]
                failure = self._why(source, error)
                self._note_gap(source, failure)
                # A relay makes the slot anew, and reads the outboxes' tables.
                gap = self._holding is not None and failure.code in recovery.GAP_CODES
                if gap or failure.code in _FATAL or self._once:
                    self.state.query_failed(source, failure)
                    self._fail(failure.text, source=source, code=failure.code)
                    return
                state.restarts += 1
                self.state.query_failed(source, failure)
                with contextlib.suppress(Exception):
                    pipeline.stop()
                delay = backoff.after_failure(state.confirmed)
                self._log_end(source, failure, delay)
                self._stopping.wait(delay)

    def _log_end(self, source: str, failure: Failure, delay: float) -> None:
        """Log why a query ended, once until the source streams again or there is another reason."""
        since, logged = self._ended.get(source, (time.monotonic(), ""))
        self._ended[source] = since, failure.text
        if failure.text != logged:
            log.error("query ended; starting it again", source=source, code=failure.code,
                      error=failure.text, retry_in=delay)  # fmt: skip

    def _log_recovered(self) -> None:
        """Log which sources stream again that have failed."""
        for source, (since, _) in list(self._ended.items()):
            state = self.state.sources[source]
            if state.failure is None and self._streams(source):
                del self._ended[source]
                seconds = round(time.monotonic() - since, 1)
                log.info("the source streams again", source=source, restarts=state.restarts,
                         seconds=seconds)  # fmt: skip

    def _why(self, source: str, error: Exception) -> Failure:
        """Return why a query ended: what its capture has reported, or else what Spark raised."""
        if isinstance(error, CaptureError):  # raised before there was a query
            return Failure.by(error)
        return self.state.sources[source].capture_failure or query_failure(
            error, last_errors(), retried=not self._once
        )

    def _await(self, query: StreamingQuery, source: str) -> None:
        """Return when the query has ended, or the end was asked for and it is drained or overdue."""
        state = self.state.sources[source]
        # Not `isActive`: a failure under asynchronous progress tracking can leave that true for ever.
        while not query.awaitTermination(0.05 if self._stopping.is_set() else 0.1):  # type: ignore[arg-type]
            if self._planners[source].altered is not None and not self._stopping.is_set():
                return
            if self._stopping.is_set() and (state.drained or self._expired.is_set()):
                return
