"""The status of a relay group: what `/status`, health and the group's lease report of it."""

from __future__ import annotations

import math
import time
from typing import Any

import structlog

from penstock.core.health import Failure, HealthProblem, Level, Part, worker_part
from penstock.outbox.inbox.inboxes import Inboxes
from penstock.outbox.relay.handover import Handover
from penstock.outbox.relay.lease import GroupLease
from penstock.outbox.relay.lock import GroupLock
from penstock.runtime.state import RunState

log = structlog.get_logger("penstock")


class GroupStatus:
    """The state of a group. The group's threads write it, and any thread reads it.

    Attributes:
        state: `connecting`, `standby`, `waiting`, `starting`, `running` or `error`.
        failure: What keeps the group from running.
        warm: Whether Spark's session and workers are ready.
    """

    def __init__(self, group: str, lock: GroupLock, inboxes: Inboxes, handover: Handover) -> None:
        self.state = "connecting"
        self.failure: Failure | None = None
        self.warm = False
        self._group = group
        self._lock = lock
        self._inboxes = inboxes
        self._handover = handover
        self._deadline = math.inf
        self._hangs = False

    def expect_step(self, seconds: float = math.inf) -> None:
        """Set the deadline of the step under way; past it the group counts as hanging."""
        self._deadline = time.monotonic() + seconds

    @property
    def ready(self) -> bool:
        """Whether the group delivers, stands by, or has nothing to run."""
        run = self._handover.run
        return self.state in ("standby", "waiting") or (run is not None and run.ready)

    @property
    def run_state(self) -> RunState | None:
        """The state of the current run."""
        run = self._handover.run
        return None if run is None else run.state

    def parts(self, now: float) -> list[Part]:
        """Return the health of the group, and of its pipelines that have no sink in its run."""
        starting = self.state in ("connecting", "starting")
        desired = self._handover.desired
        failures = dict(self._inboxes.failures())
        if desired is not None:
            failures |= {
                name: failure
                for name, failure in desired.left_out.items()
                if desired.pipelines[name].enabled
            }
        return [
            worker_part(f"relay group {self._group}", self.failure, now, starting=starting),
            *(
                Part.failing(f"pipeline {name}", Level.DEGRADED, failure)
                for name, failure in failures.items()
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the group's part of `/status`."""
        desired = self._handover.desired
        pipelines = {} if desired is None else desired.pipelines
        failures = {} if desired is None else {**desired.paused, **desired.left_out}
        return {
            "state": self.state,
            "warm": self.warm,
            "error": None if self.failure is None else self.failure.text,
            "inboxes": self._inboxes.as_json(),
            "pipelines": {
                name: {
                    "enabled": pipeline.enabled,
                    "error": failures[name].cause
                    if name in failures and pipeline.enabled
                    else None,
                }
                for name, pipeline in pipelines.items()
            },
        }

    def lease(self) -> GroupLease | None:
        """Return the process's lease on the group, None while the group hangs."""
        if time.monotonic() > self._deadline:
            if not self._hangs:
                self._hangs = True
                log.error(
                    "the group's loop hangs: no heartbeat until it goes on", group=self._group
                )
            return None
        self._hangs = False
        if not self._lock.held:
            return GroupLease(self._group, "standby", self.warm)
        code = error = remedy = None
        if (failure := self.failure) is not None:
            code, error, remedy = failure.code, failure.cause, failure.remedy or None
        elif (problem := self._problem()) is not None:
            code, error, remedy = problem.code, problem.cause, problem.remedy
        return GroupLease(self._group, "running", True, self._lock.pid, code, error, remedy)

    def _problem(self) -> HealthProblem | None:
        """Return why nothing moves in the run; a problem of one sink is its pipeline's."""
        state = self.run_state
        for part in () if state is None else state.parts():
            if part.subject.startswith(("store", "source ")):
                for problem in part.problems:
                    if problem.level is Level.FAILED and problem.code != "sinks_held_up":
                        return problem
        return None
