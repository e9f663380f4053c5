"""The query of one source, in a thread: started again after each failure until the run ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import structlog
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.config.settings import Config
from penstock.core.backoff import Backoff
from penstock.core.errors import CaptureError
from penstock.core.health import Failure
from penstock.core.message import Position
from penstock.core.monitor import Handler, Report
from penstock.runtime.guard import Guard
from penstock.runtime.handover import NextQuery
from penstock.runtime.run_log import RunLog
from penstock.runtime.state import RunState
from penstock.runtime.store_session import StoreSession
from penstock.spark.pipeline import Pipeline
from penstock.spark.planning import Planner
from penstock.spark.reasons import query_failure
from penstock.spark.session import jvm_exit_code, last_errors

_BACKOFF_SECONDS: Final = (0.5, 30.0)
_LOOK_SECONDS: Final = 5.0
"""How often it looks whether its query is to end, though nothing has woken it."""

log = structlog.get_logger("penstock")


@dataclass(frozen=True)
class RunContext:
    """What a run shares with its queries.

    `handle` takes the reports of a query's processes. `fail(source, failure)` ends the run.
    """

    config: Config
    once: bool
    store: StoreSession
    state: RunState
    guard: Guard
    log: RunLog
    handle: Handler
    fail: Callable[[str, Failure], None]
    stopping: threading.Event
    """Set when the run is to end."""
    expired: threading.Event
    """Set when the run waits no longer for batches to end."""


class SourceQuery:
    """Keeps the query of the source `name` running while its run lasts."""

    def __init__(self, name: str, run: RunContext) -> None:
        self._name = name
        self._run = run
        self._state = run.state.sources[name]
        self._planner = Planner(run.config.sources[name], run.config.sinks_of(name))
        self._prepared: NextQuery | None = None
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self.names: set[str] = set()
        """The names of all queries that it had in the session."""

    def adopt(self, prepared: NextQuery, after: Sequence[int] | None) -> None:
        """Continue a query that is started already, instead of starting the first one.

        `after` is the position up to which all is delivered, where that is known.
        """
        self._prepared, self._planner = prepared, prepared.pipeline.planner
        self._note_done(after)

    def note_altered(self, report: Report) -> None:
        """Note the table that was altered: the query is planned anew, from behind `after`."""
        self._planner.after = Position(*report["after"])
        self._planner.altered = tuple(report["altered"])
        self.wake()

    def wake(self) -> None:
        """Have its thread look whether the query is to end."""
        self._woken.set()

    def _note_done(self, done: Sequence[int] | None) -> None:
        """Have the next query go on behind what is delivered, where the slot stands before that.

        A server that crashed has of a slot what it saved last. What a filter has left out must not come
        late, behind newer messages, because the filter of now lets it through.
        """
        if done is not None:
            self._planner.after = max(self._planner.after, Position(*done))

    @property
    def streams(self) -> bool:
        """Whether the source streams through a query that has run a batch."""
        return self._state.warm and self._state.state == "streaming"

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, spark: SparkSession, monitor: str) -> None:
        """Start the thread; `monitor` is the address to which the query's processes report."""
        self._thread = threading.Thread(
            target=self.keep, args=(spark, monitor), name=self._name, daemon=True
        )
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, for so long at the most."""
        if self._thread is not None:
            self._thread.join(seconds)

    def keep(self, spark: SparkSession, monitor: str) -> None:
        """Keep the query running until the end of the run."""
        run, backoff = self._run, Backoff(*_BACKOFF_SECONDS)
        while not run.stopping.is_set():
            self._note_done(self._state.done)
            pipeline = Pipeline(
                spark, run.config, self._name, run.store.routes(self._name),
                run.store.target(self._name), monitor, self._planner,
                run.store.consumer_routes(self._name),
            ) if self._prepared is None else self._prepared.pipeline  # fmt: skip
            self.names.add(pipeline.name)
            self._state.capture_failure = None
            try:
                run.guard.refuse_noted_gap(self._name)
                self._await(self._begin(pipeline))
                pipeline.stop()
                if self._planner.altered is None or run.stopping.is_set():
                    return
                self._state.state, self._state.warm = "connecting", False
                log.info("a table of the sinks' expressions was altered; planning the query anew",
                         source=self._name, table=".".join(self._planner.altered))  # fmt: skip
            except Exception as error:
                if run.stopping.is_set() or jvm_exit_code() is not None:
                    with contextlib.suppress(Exception):
                        pipeline.stop()
                    return
                failure = self._failure(error)
                fatal = run.guard.query_failed(self._name, failure) or run.once
                self._state.restarts += not fatal
                run.state.query_failed(self._name, failure)
                if fatal:
                    run.fail(self._name, failure)
                    return
                with contextlib.suppress(Exception):
                    pipeline.stop()
                delay = backoff.after_failure(self._state.confirmed)
                run.log.query_ended(self._name, failure, delay)
                run.stopping.wait(delay)

    def _begin(self, pipeline: Pipeline) -> StreamingQuery:
        if self._prepared is not None:
            query = self._prepared.go(self._run.handle, self._planner.after)
            self._prepared = None
            return query
        query = pipeline.start(once=self._run.once)
        for name in self._run.config.sinks_of(self._name):
            self._run.state.sinks[name].refused = self._planner.refused.get(name)
        return query

    def _failure(self, error: Exception) -> Failure:
        """Return why a query ended: what its capture has reported, or else what Spark raised."""
        if isinstance(error, CaptureError):  # raised before there was a query
            return Failure.by(error)
        return self._state.capture_failure or query_failure(
            error, last_errors(), retried=not self._run.once
        )

    def _await(self, query: StreamingQuery) -> None:
        """Return when the query has ended or is to be planned anew, or the run's end is reached."""
        stopping = self._run.stopping
        # Not `isActive`: a failure under asynchronous progress tracking can leave that true for ever.
        # And not with a timeout again and again: ten calls a second cost 0.5 % of a core.
        end = Future[None]()
        end.add_done_callback(lambda _: self.wake())
        threading.Thread(target=_note_end, args=(query, end), daemon=True).start()
        while not end.done():
            if self._planner.altered is not None and not stopping.is_set():
                return
            if stopping.is_set() and (self._state.drained or self._run.expired.is_set()):
                return
            self._woken.wait(0.05 if stopping.is_set() else _LOOK_SECONDS)
            self._woken.clear()
        end.result()


def _note_end(query: StreamingQuery, end: Future[None]) -> None:
    try:
        query.awaitTermination()
    except Exception as error:
        end.set_exception(error)
    else:
        end.set_result(None)
