"""One relay group: a thread that takes the group's lock, and runs its pipelines while it has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

import psycopg
import structlog
from pyspark.sql import SparkSession

from penstock.core.backoff import Backoff
from penstock.core.errors import CaptureError, StoreError
from penstock.core.health import Failure
from penstock.outbox.inbox.inboxes import Inboxes
from penstock.outbox.pipelines import InboxPipeline
from penstock.outbox.relay.desired_state import DesiredPipelines
from penstock.outbox.relay.group_status import GroupStatus
from penstock.outbox.relay.handover import Handover
from penstock.outbox.relay.lease import GroupLease
from penstock.outbox.relay.lock import GroupLock
from penstock.outbox.relay.runner import LONG_STEP_SECONDS, STEP_SECONDS, Runner
from penstock.outbox.sessions import postgres_error
from penstock.spark.session import jvm_exit_code
from penstock.spark.warm import warm

_TICK_SECONDS: Final = 1.0
_BACKOFF_SECONDS: Final = (1.0, 30.0)

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
        self._spark = spark
        self._lock = GroupLock(url, name)
        self._inboxes = Inboxes(url, database)
        self._handover = Handover(name, spark)
        self.status = GroupStatus(name, self._lock, self._inboxes, self._handover)
        self._runner = Runner(
            name, store, spark, self._lock, self._inboxes, self._handover, self.status
        )
        self._logged: set[str] = set()  # codes of failures
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"relay group {name}", daemon=True)

    def lease(self) -> GroupLease | None:
        """Return its lease, None while its loop hangs or has not begun."""
        return None if self._thread.ident is None else self.status.lease()

    def set_desired(
        self, desired: DesiredPipelines | None, inboxes: Sequence[InboxPipeline] = ()
    ) -> None:
        """Set what runs from now on; `desired` is None where the group has no outbox any more."""
        self._inboxes.set_desired(inboxes)
        self._handover.set_desired(desired)
        self._wake.set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Begin an orderly end, from any thread."""
        self._handover.stop()
        self._inboxes.activate(False)
        self._wake.set()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:
            self._thread.join()

    def _main(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS)
        while not self._handover.stopping and jvm_exit_code() is None:
            self.status.expect_step(STEP_SECONDS)
            try:
                held = self._lock.acquire()
                self._inboxes.activate(held)
                if not held:
                    self._enter("standby")
                elif not self._runner.turn():
                    self._handover.discard_next()
                    self._enter("waiting")
                else:
                    self._logged.clear()
                    backoff.reset()
                    continue
                self._pause(_TICK_SECONDS)
                continue
            except (CaptureError, StoreError) as error:  # a bastion's trouble is a `CaptureError`
                self._inboxes.activate(self._lock.check())
                failure = Failure.by(error)
            except psycopg.Error as error:
                self._inboxes.activate(self._lock.check())
                known = postgres_error(error, self._url)
                failure = Failure.by(known)
            except Exception as error:
                log.exception("the group could not be run", group=self.name)
                failure = Failure("internal", f"{type(error).__name__}: {error}", "")
            delay = backoff.after_failure(self._runner.confirmed)
            self._fail(failure, delay)
            self._handover.discard_next()
            self._pause(delay)
        self._handover.discard_next()
        self.status.expect_step()
        self._inboxes.activate(False)
        self._inboxes.join()
        self._lock.close()

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()
        if self._lock.held:
            self._inboxes.activate(self._lock.check())

    def _enter(self, state: str) -> None:
        status = self.status
        if state == status.state:
            return
        status.state, status.failure = state, None
        if state == "standby":
            log.info("standing by: another relay runs the group", group=self.name)
            try:
                status.expect_step(LONG_STEP_SECONDS)
                warm(self._spark)
                status.warm = True
                log.info("warm", group=self.name)
            except Exception:  # it only saves time later
                log.exception("Spark could not be warmed up", group=self.name)

    def _fail(self, failure: Failure, delay: float) -> None:
        """Report what keeps the group from running: once in the log, and in the checkpoints."""
        status = self.status
        status.state, status.failure = "error", failure.lasting(status.failure, time.time())
        status.expect_step(delay + STEP_SECONDS)
        if failure.code not in self._logged:
            self._logged.add(failure.code)
            log.error("the group does not run; trying again", group=self.name, code=failure.code,
                      error=failure.text, retry_in=delay)  # fmt: skip
        desired = self._handover.desired
        if desired is not None and self._lock.held:
            names = desired.pipelines.keys() - desired.left_out.keys()
            self._runner.report(desired, sorted(names), failure)
