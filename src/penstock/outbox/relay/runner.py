"""Runs the pipelines of a relay group, while the group has its lock."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from typing import Final

import psycopg
import structlog
from pyspark.sql import SparkSession

from penstock.core import queries
from penstock.core.errors import CaptureError, SinkError, StoreError
from penstock.core.health import Failure
from penstock.outbox.inbox.inboxes import Inboxes
from penstock.outbox.relay.begin import begin, forget, give_up_slot, leave
from penstock.outbox.relay.checkpoints import Checkpoints
from penstock.outbox.relay.desired_state import DesiredPipelines
from penstock.outbox.relay.group_status import GroupStatus
from penstock.outbox.relay.guard import RelayGuard
from penstock.outbox.relay.handover import Handover
from penstock.outbox.relay.lock import GroupLock
from penstock.runtime.paused_sinks import PausedSinks
from penstock.runtime.recovery import GAP_CODES
from penstock.runtime.run import Run
from penstock.runtime.state import RunState
from penstock.streams.store import Store

STEP_SECONDS: Final = 30.0
"""How long a step of the group's loop may take before the group counts as hanging."""
LONG_STEP_SECONDS: Final = 240.0

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")
_TICK_SECONDS: Final = 1.0
_PIPELINE_SECONDS: Final = 2.0  # more for each pipeline, as each may wait for a lock
_STARTING: Final = "The messages that the outbox kept go before those that come in now."

log = structlog.get_logger("penstock")


class Runner:
    """Runs a group's desired state; the group's thread calls it.

    Args:
        group: The group's name.
        store: The store's URL.
        spark: The session.
        lock: The group's lock.
        inboxes: The group's inboxes, which end where the lock is lost.
        handover: The desired state and the current run.
        status: What the group reports.
    """

    def __init__(
        self,
        group: str,
        store: str,
        spark: SparkSession,
        lock: GroupLock,
        inboxes: Inboxes,
        handover: Handover,
        status: GroupStatus,
    ) -> None:
        self.confirmed = 0
        """How many messages all runs have confirmed."""
        self._group = group
        self._store_url = store
        self._spark = spark
        self._lock = lock
        self._inboxes = inboxes
        self._handover = handover
        self._status = status
        self._last: DesiredPipelines | None = None
        self._last_state: RunState | None = None  # of the newest run, which may have ended
        self._left_out: dict[str, Failure] = {}

    def turn(self) -> bool:
        """Run until the desired state changes; return False where there is nothing to run.

        Raises `CaptureError`, `StoreError` and `psycopg.Error` where the run fails.
        """
        if not self._handover.is_known:
            return False
        desired = self._handover.desired
        if desired is None:
            self._retire()
            return False
        self._report_left_out(desired)
        if not desired.sinks and desired.begun:
            with contextlib.closing(Store.open(self._store_url)) as store:
                leave(self._lock.connection, store, desired)
        any_runs = any(name not in desired.paused for name in desired.sinks)
        if not desired.sinks or not (desired.begun or any_runs):
            return False
        with contextlib.closing(Store.open(self._store_url)) as store:
            self._work(desired, store)
        return True

    def report(self, desired: DesiredPipelines, pipelines: Iterable[str], failure: Failure) -> None:
        """Write a failure to the checkpoints of pipelines."""
        names = list(pipelines)
        values = {
            "group": self._group, "pipelines": names,
            "created_at": [desired.pipelines[name].created_at for name in names],
            "code": failure.code, "error": failure.cause, "remedy": failure.remedy or None,
        }  # fmt: skip
        with contextlib.suppress(psycopg.Error):  # the log has it too
            self._lock.connection.execute(_SQL["put_failure"], values)

    def _retire(self) -> None:
        """Drop the backlogs and backfills of a group that has no pipelines any more."""
        if self._last is not None:
            with contextlib.closing(Store.open(self._store_url)) as store:
                forget(store, self._last.source, frozenset())
            self._last = None

    def _report_left_out(self, desired: DesiredPipelines) -> None:
        for name, failure in desired.left_out.items():
            if desired.pipelines[name].enabled and self._left_out.get(name) != failure:
                log.error("pipeline can't be run", pipeline=name, group=self._group,
                          code=failure.code, error=failure.cause, remedy=failure.remedy)  # fmt: skip
                self.report(desired, [name], failure)
        self._left_out = dict(desired.left_out)

    def _work(self, desired: DesiredPipelines, store: Store) -> None:
        """Run until the desired state changes; raises the error that ends the run."""
        # A failure stays reported until the next run delivers: a new attempt alone does not end it.
        self._status.state, self._last = "starting", desired
        self._status.expect_step(LONG_STEP_SECONDS)
        starting = begin(self._lock.connection, store, desired)
        paused = {
            name: SinkError(failure.code, failure.cause, remedy=failure.remedy)
            for name, failure in desired.paused.items()
        }
        paused |= {name: SinkError("starting", _STARTING) for name in starting}
        try:
            sinks = PausedSinks(paused, starting)
            with Run(desired.config, self._store_url, paused=sinks, guard=RelayGuard()) as run:
                if self._last_state is not None:
                    run.state.continue_from(self._last_state)
                self._last_state = run.state
                if self._handover.register(run, desired):
                    try:
                        self._stream(run, desired, store, starting)
                    finally:
                        self._handover.unregister()
                        self.confirmed += sum(s.confirmed for s in run.state.sources.values())
                        self._status.expect_step(LONG_STEP_SECONDS)
            if (failure := run.failure) is not None and not self._handover.stopping:
                raise CaptureError(failure.code, failure.cause, remedy=failure.remedy)
        except CaptureError as error:
            if error.code in GAP_CODES:
                give_up_slot(self._lock.connection, desired)
            raise

    def _stream(
        self, run: Run, desired: DesiredPipelines, store: Store, starting: frozenset[str]
    ) -> None:
        for name, failure in desired.paused.items():
            if desired.pipelines[name].enabled:
                log.error("pipeline stopped", pipeline=name, group=self._group, code=failure.code,
                          error=failure.cause, remedy=failure.remedy)  # fmt: skip
        # Before anything is delivered: until then the run's counts are those of the run before it.
        checkpoints = Checkpoints(self._lock.connection, store, desired, run, starting)
        run.prepare()
        ended, ending = socket.socketpair()
        writer = threading.Thread(
            target=self._write_checkpoints, args=(run, checkpoints, ended),
            name=f"checkpoints {self._group}", daemon=True,
        )  # fmt: skip
        writer.start()
        try:
            if not run.stopping:
                run.stream(self._spark, self._set_running, prepared=self._handover.take_next())
        finally:
            ending.close()
            writer.join()
            ended.close()

    def _set_running(self) -> None:
        status, running = self._status, self._handover.running
        status.state, status.warm, status.failure = "running", True, None
        sinks = [] if running is None else list(running.sinks)
        log.info("relaying", group=self._group, pipelines=sinks)

    def _write_checkpoints(self, run: Run, checkpoints: Checkpoints, ended: socket.socket) -> None:
        """Write checkpoints every second, and once more at the end; without the lock end the run."""
        last = False
        while not last:
            last = self._lock.wait(ended, _TICK_SECONDS)
            self._status.expect_step(STEP_SECONDS + _PIPELINE_SECONDS * len(run.state.sinks))
            if not self._lock.check():
                if not last:
                    log.warning("the group's lock is lost: its session ended", group=self._group)
                    self._status.state = "connecting"
                self._inboxes.activate(False)
                run.stop()
                return
            latest = self._handover.desired
            if latest is not None and latest.runs_as(self._handover.running):
                self._report_left_out(latest)
            try:
                checkpoints.tick()
            except (psycopg.Error, StoreError) as error:
                log.warning("checkpoints could not be written", group=self._group, error=str(error))
            except Exception:
                log.exception("checkpoints could not be written", group=self._group)
