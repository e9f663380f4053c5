"""Whether a sink is attached, behind or detached, as its drainer reports and logs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import structlog

from penstock.core.monitor import Report
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.sink import SinkBacklog
from penstock.sinks.backlog.store import Behind
from penstock.streams.nats_consumers import FOLLOWING, PAUSED
from penstock.streams.pool import StorePool

_REPORT_SECONDS: Final = 1.0
_CATCHES_UP: Final = frozenset({FOLLOWING[0], backlog.RESUMED.code})

log = structlog.get_logger("penstock")


class ReportedState:
    """Reports changes at once, and a backlog's size while there is one.

    Args:
        store: Where the backlog is.
        of: The backlog of the sink.
        detach_after: How long the sink may be behind before it counts as detached.
        send: Takes the reports.
    """

    def __init__(
        self,
        store: StorePool,
        of: SinkBacklog,
        detach_after: timedelta,
        send: Callable[[Report], object],
    ) -> None:
        self._store = store
        self._of = of
        self._sink = of.name
        self._detach_after = detach_after
        self._send = send
        self._state = "attached"
        self._reported_at = 0.0
        self.since = 0.0
        """When the sink fell behind, by the monotonic clock."""
        self.oldest: float | None = None
        """When the oldest message that waits was committed, or one before it; None: not known."""

    @property
    def is_attached(self) -> bool:
        """Whether the sink was not behind when this was last updated."""
        return self._state == "attached"

    def update(self, behind: Behind | None) -> bool:
        """Report what has changed; return whether the sink fell behind since the last update."""
        now, before = time.monotonic(), self._state
        state = "attached"
        if behind is not None:
            late = behind.seconds >= self._detach_after.total_seconds()
            state = "detached" if late else "behind"
            if behind.code == PAUSED:
                state = "paused"
            elif behind.code in _CATCHES_UP:
                state = "behind"  # however long that takes
        if state == before and (behind is None or now < self._reported_at + _REPORT_SECONDS):
            return False
        messages = bytes_ = 0
        if behind is not None:
            with self._store.lend() as connection:
                messages, bytes_ = self._of.size(connection)
        self._reported_at, self._state = now, state
        if state != before:
            self._log(state, behind, now)
        fell_behind = before == "attached"
        if behind is None:
            self.oldest = None
        if fell_behind and behind is not None:
            self.since = now - behind.seconds
        self._send(
            {
                "sink": self._sink, "state": state, "backlog": messages, "backlog_bytes": bytes_,
                "since": time.time() - behind.seconds if behind else None,
                "why": behind.error if behind else None,
                "why_code": behind.code if behind else None, "oldest": self.oldest,
            }
        )  # fmt: skip
        return fell_behind

    def _log(self, state: str, behind: Behind | None, now: float) -> None:
        kind, what = self._of.kind, {self._of.kind: self._sink}
        if behind is None:
            log.info(f"{kind} attached again, its backlog is delivered",
                     seconds=round(now - self.since, 1), **what)  # fmt: skip
        elif state == "paused":
            log.info(f"{kind} paused", why=behind.error, **what)
        elif state == "detached":
            log.warning(
                f"{kind} detached", code=behind.code, error=behind.error,
                after=str(self._detach_after), **what,
            )  # fmt: skip
        elif behind.code == FOLLOWING[0]:
            log.info(f"{kind} publishes what its stream holds", **what)
        elif behind.code == backlog.STARTED:
            log.info(f"{kind} takes what came in while it started", **what)
        elif behind.code == backlog.RESUMED.code:
            log.info(f"{kind} resumed, it takes what waits", **what)
        else:
            log.warning(
                f"{kind} is behind, its messages wait in the store", code=behind.code,
                error=behind.error, **what,
            )  # fmt: skip
