"""Hands a relay group over from one run to the next.

A change stops delivery for tenths of a second: the query of the next run is started beside the current
run, and takes over the slot between two batches.
"""

from __future__ import annotations

import threading
import time
from typing import Final

import structlog
from pyspark.sql import SparkSession

from penstock.outbox.relay.desired_state import DesiredPipelines
from penstock.runtime.handover import NextQuery
from penstock.runtime.run import Run
from penstock.spark.reasons import query_failure

_HANDOVER_SECONDS: Final = 30.0
"""How long a change may wait for the next query; then the run ends without it."""

log = structlog.get_logger("penstock")


class Handover:
    """The desired state of a group, its current run and its next query.

    Any thread may set the desired state and stop; the group's thread registers its runs.
    """

    def __init__(self, group: str, spark: SparkSession) -> None:
        self._group = group
        self._spark = spark
        self._changing = threading.Lock()
        self._desired: DesiredPipelines | None = None
        self._is_known = False
        self._run: Run | None = None
        self._running: DesiredPipelines | None = None
        self._next: NextQuery | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def desired(self) -> DesiredPipelines | None:
        """The desired state, None where the group has no outbox."""
        return self._desired

    @property
    def is_known(self) -> bool:
        """Whether the desired state was ever set."""
        return self._is_known

    @property
    def run(self) -> Run | None:
        """The current run."""
        return self._run

    @property
    def running(self) -> DesiredPipelines | None:
        """The desired state that the current run was made of."""
        return self._running

    @property
    def stopping(self) -> bool:
        """Whether the group shall end."""
        return self._stopping.is_set()

    def set_desired(self, desired: DesiredPipelines | None) -> None:
        """Set the desired state; a run that differs from it is replaced."""
        with self._changing:
            self._desired, self._is_known = desired, True
            if self._run is not None and not (desired and desired.runs_as(self._running)):
                self._replace(self._run)

    def stop(self) -> None:
        """End the current run in an orderly way, and start no other."""
        with self._changing:
            self._stopping.set()
            if self._run is not None:
                log.info("stopping: finishing the batch under way", group=self._group)
                self._run.stop()

    def register(self, run: Run, desired: DesiredPipelines) -> bool:
        """Make `run` the current run; return False where the desired state is another one by now."""
        with self._changing:
            if self.stopping or not (self._desired and self._desired.runs_as(desired)):
                return False
            self._run, self._running = run, desired
            return True

    def unregister(self) -> None:
        """Forget the current run, which has ended."""
        with self._changing:
            self._run = self._running = None

    def take_next(self) -> NextQuery | None:
        """Return the query that is prepared for this run; the caller owns it."""
        with self._changing:
            query, self._next = self._next, None
        return query

    def discard_next(self) -> None:
        """Close a prepared query that no run has taken."""
        if (query := self.take_next()) is not None:
            query.close()

    def _replace(self, run: Run) -> None:
        """Begin to replace `run`; the lock is held."""
        if self._thread is None or not self._thread.is_alive():
            log.info("settings changed: the group's run is replaced", group=self._group)
            self._thread = threading.Thread(
                target=self._end, args=(run,), name=f"handover {self._group}", daemon=True
            )
            self._thread.start()

    def _end(self, run: Run) -> None:
        """End `run` once the query of the next one waits for the slot, or can't be started."""
        deadline = time.monotonic() + _HANDOVER_SECONDS
        while True:
            with self._changing:
                desired = self._desired
            query = None if desired is None else self._prepare(run, desired)
            if query is not None and not query.wait(max(deadline - time.monotonic(), 0.0)):
                query.close()
                query = None
            # Before the stop: a drainer may wait for its server. The backlog keeps the messages.
            run.store.end_drainers()
            with self._changing:
                latest = self._desired
                ended = self._run is not run or self.stopping
                same = latest is None or desired is None or latest.config == desired.config
                if not ended and (same or query is None or time.monotonic() > deadline):
                    self._next, query = query, self._next  # the old one is closed below
                    run.stop()
                    ended = True
            if query is not None:
                query.close()
            if ended:
                return

    def _prepare(self, run: Run, desired: DesiredPipelines) -> NextQuery | None:
        """Start the query of the next run; None where that fails: the run then reports it."""
        if not desired.sinks:
            return None
        query = None
        try:
            query = NextQuery(
                self._spark,
                desired.config,
                run.store.target(desired.source),
                run.store.uuids(desired.config, desired.source),
            )
            query.start()
        except Exception as error:
            log.info("the next query could not be started beside this one", group=self._group,
                     error=query_failure(error).cause)  # fmt: skip
            if query is not None:
                query.close()
            return None
        return query
