"""One run of a configuration: its pipelines in a Spark session, and an orderly end.

A session may see many runs, one after the other or beside each other: what ends a run leaves the
session alone. `penstock.cli.service` has the process around it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Self

import structlog
from pyspark.sql import SparkSession

from penstock.config.settings import Config
from penstock.core.errors import StoreError
from penstock.core.health import Failure, Part, run_part
from penstock.core.monitor import Monitor, Report
from penstock.core.startup import Step
from penstock.runtime.backfills import RunBackfills
from penstock.runtime.drain import DRAIN_SECONDS, Mark, await_captures
from penstock.runtime.guard import Guard, SlotGuard
from penstock.runtime.handover import NextQuery, monitor_for
from penstock.runtime.jvm import jvm_failure, stop_queries
from penstock.runtime.nats_consumers import state_of
from penstock.runtime.paused_sinks import NONE_PAUSED, PausedSinks
from penstock.runtime.preparation import Preparation
from penstock.runtime.run_log import RunLog
from penstock.runtime.source_query import RunContext, SourceQuery
from penstock.runtime.store_session import StoreSession
from penstock.sinks import reports
from penstock.spark.settings import warn_of_few_slots
from penstock.streams.claim import Claim
from penstock.streams.errors import EMBEDDED_DOWN

log = structlog.get_logger("penstock")


class Run:
    """One run of a configuration, whose streams and backlogs are in the store at `store_url`.

    A context manager, as it has its part in the store: then `prepare`, then `stream`, which is `begin`,
    `work`, `attend`, `drain` and `end` in turn. A run that follows another one on the same slot has its
    `register_beside` instead, while that one streams, and `follow` once that one has ended.

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
        self._sources = config.running_sources
        self.state = state_of(config, self._sources)
        for name, reason in paused.reasons.items():
            self.state.pause(name, reason.code, paused.error(name), reason.remedy)
        self._stopping = threading.Event()
        self._expired = threading.Event()
        self._wake = threading.Event()
        self.failure: Failure | None = None
        """What ended the run, None where nothing did."""
        self._closed = False
        self.lost_claim = False
        """Whether it ended as another process has its source."""
        self._streams_due = False  # to ask for shared streams again
        self.store = StoreSession(config, store_url, self._handle, paused, claim)
        self._guard: Guard = SlotGuard(config, self.store) if guard is None else guard
        self.preparation = Preparation(
            config, self.store, self._guard, self._stopping, claim, follows=follows
        )
        self._log = RunLog(paused.starting) if run_log is None else run_log
        self._backfills = RunBackfills(config, store_url, self._sources, self.state, paused)
        self._monitor: Monitor | None = None
        self._spark: SparkSession | None = None
        self._prepared: NextQuery | None = None
        self._starting: dict[str, Step] = {}
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
        self._log.report(report, self._config.nats_consumers)
        self.state.update(report)
        if "sink" in report and report.get("state") == "attached":
            self._streams_due = True
        if "confirmed_lsn" in report:
            self._guard.confirmed(
                report["capture"], report["confirmed_lsn"], report.get("confirmed_time", 0)
            )
        self._backfills.handle(report)
        self._wake.set()
        return None

    @property
    def ready(self) -> bool:
        """Whether every source streams through a query that has run a batch."""
        return all(query.streams for query in self._queries.values())

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
        self.close()

    def close(self) -> None:
        """End all that it has begun, and its part in the store; may be called again."""
        self.end()
        if not self._closed:
            self._closed = True
            self._guard.close()
            self.store.end_drainers()
            self.store.__exit__()

    def stop(self) -> None:
        """Ask for an orderly end, from any thread."""
        self._stopping.set()
        self._wake.set()
        for query in self._queries.values():
            query.wake()

    @property
    def stopping(self) -> bool:
        """Whether the end was asked for."""
        return self._stopping.is_set()

    def prepare(self, *, quietly: bool = False) -> None:
        """Make and claim what the sources need; returns early where the end is asked for.

        With `quietly` it is logged as no step of the start. Raises `CaptureError` and `StoreError`.
        """
        self.preparation.prepare(quietly=quietly)
        self._refuse_shared_streams()
        if not self._stopping.is_set():
            self.store.start()

    def _refuse_shared_streams(self) -> None:
        """End the run where two sinks' messages would be each other's duplicates."""
        self._streams_due = False
        if (failure := self._guard.shared_stream()) is not None:
            self._fail(failure)

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
        prepared: NextQuery | None = None,
    ) -> None:
        """Run a query for each source until the end, and take down all but the session.

        Args:
            spark: The session.
            on_ready: Called once, when every query has run a batch.
            prepared: The query of the one source, started already; used if it fits this run.
        """
        if prepared is not None and not prepared.fits(self._config, self.store):
            prepared.close()
            prepared = None
        self.begin(spark, prepared)
        if prepared is not None:
            prepared.pipeline.forget_others()
        self.work()
        self.attend(on_ready)
        self.drain()
        self.end()

    def begin(
        self,
        spark: SparkSession,
        prepared: NextQuery | None = None,
        after: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Start a query for each source, or have the `prepared` one of the one source go on.

        `after` is up to where the run before has delivered, by source.
        """
        self._spark, self._prepared = spark, prepared
        if prepared is not None:
            self._queries[prepared.source].adopt(prepared, after.get(prepared.source))
            self._monitor = prepared.monitor
        else:
            self._monitor = monitor_for(spark, self._config, self._handle)
        warn_of_few_slots(spark, self._config.sharing)
        # The first batch of a query connects to its sinks.
        self._starting = {
            name: Step("sinks", source=name, sinks=[*self._config.sinks_of(name)])
            for name in self._sources
        }
        for query in self._queries.values():
            query.start(spark, self._monitor.address)

    def work(self) -> None:
        """Begin what goes on beside the queries; raises `StoreError`."""
        if self._monitor is None or self._stopping.is_set():
            return
        if self._once:
            self._backfills.leave_out()
        else:
            self._backfills.start(self._monitor)

    def follow(self) -> None:
        """Begin that, and the part in the store, once the run before has ended; waits for the store."""
        failed = False
        while not self._stopping.is_set():
            try:
                self.store.start()
                self.work()
                break
            except StoreError as error:
                failed = True
                self._handle(reports.store_failure(error))
                self._stopping.wait(1.0)
        if failed:
            self._handle(reports.STORE_WORKS)

    def drain(self, *, leave: bool = False) -> bool:
        """Let the queries deliver what they have begun with, once the end is asked for.

        With `leave` it returns when they have left their slots: their batches end later. Returns whether
        they have.
        """
        if not self._stopping.is_set() or self._monitor is None:
            return False
        self._backfills.drain()
        if self.lost_claim:
            return False
        alive = [name for name, query in self._queries.items() if query.alive]
        mark: Mark = "released" if leave else "drained"
        done = await_captures(self._monitor, self.state, alive, mark, self._wake)
        if self.failure is None and not done:
            log.warning("stopped before the last batch was delivered; it stays in the slot",
                        store=self.state.store_error)  # fmt: skip
        return done

    def end(self) -> None:
        """End all queries and what goes on beside them, at once: `drain` comes first."""
        self.stop()
        monitor, self._monitor = self._monitor, None
        if monitor is None or self._spark is None:
            return
        self._expired.set()
        for query in self._queries.values():
            query.join(DRAIN_SECONDS)
        names = {name for query in self._queries.values() for name in query.names}
        stop_queries(self._spark, names)
        if self._prepared is not None and self._prepared.pipeline.name not in names:
            self._prepared.close()  # the end was asked for before it was used
        self._backfills.close()
        monitor.flush()
        monitor.close()

    def attend(self, on_ready: Callable[[], None]) -> None:
        """Log and check what the reports bring, until the end is asked for or all queries ended."""
        ready, starting = False, self._starting
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
        if self._once:
            self._await_backlogs()

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
