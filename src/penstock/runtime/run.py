"""One run of a configuration: its pipelines in a Spark session, and an orderly end.

A session may see many runs, one after the other or beside each other: what ends a run leaves the
session alone. `penstock.cli.service` has the process around it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final, Self

import structlog
from pyspark.sql import SparkSession

from penstock.backfill.supervisor import BackfillSupervisor, log_left_out
from penstock.config.settings import Config
from penstock.config.sources import PostgresSource
from penstock.core.errors import CaptureError, StoreError
from penstock.core.health import Failure, Part, run_part
from penstock.core.monitor import Monitor, Report
from penstock.core.startup import Step, step
from penstock.postgres import setup
from penstock.runtime.guard import Guard, SlotGuard
from penstock.runtime.handover import NextQuery, monitor_for
from penstock.runtime.nats_consumers import state_of
from penstock.runtime.paused_sinks import NONE_PAUSED, PausedSinks
from penstock.runtime.run_log import RunLog
from penstock.runtime.source_query import RunContext, SourceQuery
from penstock.runtime.store_session import StoreSession
from penstock.runtime.stream_maker import StreamMaker
from penstock.spark import planning
from penstock.spark.session import jvm_exit_code
from penstock.spark.settings import warn_of_few_slots
from penstock.streams.claim import Claim
from penstock.streams.errors import EMBEDDED_DOWN

_DRAIN_SECONDS: Final = 15.0
_STORE_DOWN_DRAIN_SECONDS: Final = 3.0  # where the store is down and the batch can't be finished
# After a kill the server may hold the slot for the last run's connection: `wal_sender_timeout`, 60 s
# by default, if the machine went with it.
_SLOT_PATIENCE: Final = 75.0
_LEAVING_SECONDS: Final = 5.0  # in which a query of this process leaves the slot

log = structlog.get_logger("penstock")


class Run:
    """One run of a configuration, whose streams and backlogs are in the store at `store_url`.

    A context manager, as it has its part in the store: then `prepare`, then `stream`.

    Args:
        config: What to run.
        store_url: The store's URL.
        once: End when what is there is delivered, and not only when `stop` asks for it.
        paused: The sinks that the run starts paused.
        guard: What to do about gaps and shared streams; a `SlotGuard` by default.
        claim: The claim on its one source, which its owner keeps; by default it makes its own.
        run_log: Where it logs what several runs may report; its own by default.
        follows: Whether it follows a run of this process, which has just left the slot.
    """

    def __init__(
        self,
        config: Config,
        store_url: str,
        *,
        once: bool = False,
        paused: PausedSinks = NONE_PAUSED,
        guard: Guard | None = None,
        claim: Claim | None = None,
        run_log: RunLog | None = None,
        follows: bool = False,
    ) -> None:
        self._config = config
        self._once = once
        self._paused = paused
        self._claim = claim
        self._follows = follows
        self._sources = config.running_sources
        self.state = state_of(config, self._sources)
        for name, reason in paused.reasons.items():
            self.state.pause(name, reason.code, paused.error(name), reason.remedy)
        self._stopping = threading.Event()
        self._expired = threading.Event()
        self._wake = threading.Event()
        self.failure: Failure | None = None
        """What ended the run, None where nothing did."""
        self.lost_claim = False
        """Whether it ended as another process has its source."""
        self.waits_for_slot = False
        self._jetstreams = StreamMaker(self._stopping)
        self._streams_due = False  # to ask for shared streams again
        self.store = StoreSession(config, store_url, self._handle, paused, claim)
        self._guard: Guard = SlotGuard(config, self.store) if guard is None else guard
        self._log = RunLog(paused.starting) if run_log is None else run_log
        self._backfilling: BackfillSupervisor | None = None
        context = RunContext(
            config, once, self.store, self.state, self._guard, self._log, self._handle,
            self._query_fatal, self._stopping, self._expired,
        )  # fmt: skip
        self._queries = {name: SourceQuery(name, context) for name in self._sources}

    # -- reports

    def _handle(self, report: Report) -> Report | None:
        if "claim" in report:
            failure = Failure(report["code"], report["error"], report["remedy"])
            self._fail(failure, source=report["claim"])
            return None
        if "query" in report and "part" not in report:
            return self.state.begin_query(report)
        if (failed := self.store.handle(report)) is not None:
            return failed
        if "altered" in report:
            self._queries[report["capture"]].note_altered(report)
        self._log.report(report)
        self.state.update(report)
        if "sink" in report and report.get("state") == "attached":
            self._streams_due = True
        if "confirmed_lsn" in report:
            self._guard.confirmed(
                report["capture"], report["confirmed_lsn"], report.get("confirmed_time", 0)
            )
        if self._backfilling is not None:
            self._backfilling.handle(report)
        self._wake.set()
        return None

    @property
    def ready(self) -> bool:
        """Whether every source streams through a query that has run a batch."""
        return all(query.streams for query in self._queries.values())

    @property
    def healthy(self) -> bool:
        """Whether the run goes on by itself."""
        return self.failure is None

    @property
    def has_gap(self) -> bool:
        """Whether a source can't go on before it is recovered."""
        return any(self._guard.has_gap(name) for name in self._sources)

    def lose_claim(self) -> None:
        """End at once, as another process has the source: nothing more is delivered from here."""
        self.lost_claim = True
        self._expired.set()
        self.stop()

    def store_outage(self, error: str | None) -> None:
        """Note why the store is away, or with None that it is back."""
        self._handle({"store": error, "code": EMBEDDED_DOWN})

    def parts(self) -> list[Part]:
        """Return what failed the run, if something has."""
        return [] if self.failure is None else [run_part(self.failure)]

    # -- the run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.close()
        self.store.__exit__(*_)

    def stop(self) -> None:
        """Ask for an orderly end, from any thread."""
        self._stopping.set()
        self._wake.set()

    @property
    def stopping(self) -> bool:
        """Whether the end was asked for."""
        return self._stopping.is_set()

    def prepare(self, *, quietly: bool = False) -> None:
        """Make and claim what the sources need; returns early where the end is asked for.

        With `quietly` it is logged as no step of the start. Raises `CaptureError` and `StoreError`.
        """
        for name in self._sources:
            with contextlib.nullcontext() if quietly else step("source", source=name):
                self._ensure(name, self._config.sources[name])
                planning.refuse(self._config.sources[name], self._config.sinks_of(name))
                self.store.register(name, self._stopping)
            for sink, settings in self._config.sinks_of(name).items():
                self._jetstreams.add(sink, settings)
            for consumer, publishes in self._config.nats_consumers_of(name).items():
                self._jetstreams.add(consumer, publishes)
        if not quietly:  # at a change the other sinks go on
            self._jetstreams.wait()
        self._refuse_shared_streams()
        if not self._stopping.is_set():
            self.store.start()

    def _ensure(self, name: str, source: PostgresSource) -> None:
        """Make what a source lacks; wait for a slot that a killed run's connection still holds."""
        began, logged = time.monotonic(), False
        deadline = began + _SLOT_PATIENCE
        while not self._stopping.is_set():
            try:
                self._guard.refuse_gap(name)  # the slot may go while the run waits for it
                setup.ensure(source)
                return
            except CaptureError as found:
                error = found.recovered_by(self._config.recover_command(name))
                if error.code != "slot_in_use" or time.monotonic() > deadline:
                    raise error from None
                if self._follows and time.monotonic() - began < _LEAVING_SECONDS:
                    self._stopping.wait(0.02)
                    continue
                if self._claim is not None and self._claim.took_over:
                    self._end_lost_reader(name, source)
                if not logged:
                    logged = self.waits_for_slot = True
                    log.warning(
                        "waiting for the slot", source=name, code=error.code, error=str(error)
                    )
                self._stopping.wait(1.0)
        self.waits_for_slot = False

    @staticmethod
    def _end_lost_reader(name: str, source: PostgresSource) -> None:
        """End the session at the slot that the lost holder of the source has left behind."""
        with contextlib.suppress(CaptureError):  # the role may not: then the slot is waited for
            if setup.end_reader(source):
                log.warning("the lost run's session at the slot is ended", source=name)

    def _refuse_shared_streams(self) -> None:
        """End the run where two sinks' messages would be each other's duplicates."""
        self._streams_due = False
        if (error := self._guard.shared_stream()) is not None:
            self._fail(Failure("shared_stream", error))

    def _query_fatal(self, source: str, failure: Failure) -> None:
        self._fail(failure, source=source)

    def _fail(self, failure: Failure, source: str | None = None) -> None:
        """Note why the run can't go on, and ask for its end."""
        if self.failure is None and not self.lost_claim:
            self.failure = failure
            self._log.failed(failure, source)
        self.stop()

    def stream(
        self,
        spark: SparkSession,
        on_ready: Callable[[], None],
        on_stopping: Callable[[], None] = lambda: None,
        prepared: NextQuery | None = None,
    ) -> None:
        """Run a query for each source until the end, and take down all but the session.

        Args:
            spark: The session.
            on_ready: Called once, when every query has run a batch.
            on_stopping: Called when an orderly end begins that no failure has caused.
            prepared: The query of the one source, started already; used if it fits this run.
        """
        if prepared is not None and not prepared.fits(self._config, self.store):
            prepared.close()
            prepared = None
        if prepared is not None:
            self._queries[prepared.source].adopt(prepared)
            monitor = prepared.monitor
        else:
            monitor = monitor_for(spark, self._config, self._handle)
        self._start_backfilling(monitor)
        warn_of_few_slots(spark, self._config.sharing)
        # The first batch of a query connects to its sinks.
        starting = {
            name: Step("sinks", source=name, sinks=[*self._config.sinks_of(name)])
            for name in self._sources
        }
        for query in self._queries.values():
            query.start(spark, monitor.address)
        self._attend(starting, on_ready)
        if self._once:
            self._await_backlogs()
        if self._stopping.is_set():
            if self.failure is None:
                on_stopping()
            if self._backfilling is not None:
                self._backfilling.drain()
            if not self.lost_claim:
                self._drain(monitor)
        self._expired.set()
        for query in self._queries.values():
            query.join(_DRAIN_SECONDS)
        names = {name for query in self._queries.values() for name in query.names}
        _stop_queries(spark, names)
        if prepared is not None and prepared.pipeline.name not in names:
            prepared.close()  # the end was asked for before it was used
        if self._backfilling is not None:
            self._backfilling.close()
        monitor.flush()
        monitor.close()

    def _start_backfilling(self, monitor: Monitor) -> None:
        if self._once:  # a backfill may take longer than what is there now
            with contextlib.suppress(StoreError):  # the next write to the store reports it
                log_left_out(self._config, self.store.url, self._sources)
            return
        self._backfilling = BackfillSupervisor(
            self._config, self.store.url, self._sources, monitor.command,
            self._adds_to_backlog, self.state.show_backfills,
        )  # fmt: skip
        self._backfilling.start()

    def _attend(self, starting: dict[str, Step], on_ready: Callable[[], None]) -> None:
        """Log and check what the reports bring, until the end is asked for or all queries ended."""
        ready = False
        while not self._stopping.is_set() and any(q.alive for q in self._queries.values()):
            self._wake.wait(1.0)
            self._wake.clear()
            if self._streams_due:
                self._refuse_shared_streams()
            for name in [name for name in starting if self._queries[name].streams]:
                starting.pop(name).done()
            for name, state in self.state.sources.items():
                if state.failure is None and self._queries[name].streams:
                    self._log.streams(name, state.restarts)
            if self.ready and not ready:
                ready = True
                on_ready()
            if (failure := jvm_failure()) is not None and not self._stopping.wait(0.5):
                self._fail(failure)

    def _adds_to_backlog(self, sink: str) -> bool:
        """Return whether a backfill would only add to what waits for a sink."""
        return self.state.sinks[sink].behind and sink not in self._paused.starting

    def resume(self, sink: str) -> None:
        """Deliver from now on what waits for a paused sink; raises `StoreError`."""
        self.state.resume(sink)
        self.store.resume(sink)

    def _await_backlogs(self) -> None:
        """Wait until the backlogs are delivered too."""
        self.store.look()
        while not self.store.is_drained() and not self._stopping.is_set():
            self._wake.wait(0.1)
            self._wake.clear()

    def _drain(self, monitor: Monitor) -> None:
        """Let every query finish its batch; a store that is down may prevent that."""
        started = time.monotonic()
        states = self.state.sources
        while True:
            down = self.state.store_error is not None
            patience = _STORE_DOWN_DRAIN_SECONDS if down else _DRAIN_SECONDS
            if time.monotonic() - started > patience:
                break
            monitor.drain()
            if all(states[name].drained for name, query in self._queries.items() if query.alive):
                break
            self._wake.wait(0.1)
            self._wake.clear()
        if self.failure is None and not all(s.drained for s in states.values()):
            log.warning("stopped before the last batch was delivered; it stays in the slot",
                        store=self.state.store_error)  # fmt: skip


def jvm_failure() -> Failure | None:
    """Return that Spark's JVM has ended, None while it runs."""
    if (code := jvm_exit_code()) is None:
        return None
    return Failure(
        "spark",
        f"Spark's JVM ended with exit code {code} (-9: killed, perhaps because memory ran out). What"
        " was not delivered is still in the slot.",
        "Start penstock again.",
    )


def _stop_queries(spark: SparkSession, names: set[str]) -> None:
    """Stop the queries of these names that are still in the session."""
    with contextlib.suppress(Exception):  # the JVM may be gone
        for query in spark.streams.active:
            if query.name in names:
                query.stop()
