"""The state of one source: its capture, as it last reported, and its query."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from penstock.core.health import Failure
from penstock.runtime.has_failure import HasFailure

_WELL_SECONDS: Final = 5.0
"""How long a query that had failed must be idle and well for its failure to be over."""

_MOMENT_SECONDS: Final = 5.0
"""How long ago an earlier run of the source may have reported, for this one to go on from it."""


@dataclass
class SourceState(HasFailure):
    """A source's capture, as it last reported, and its query.

    `failure` is why it does not stream, or why its query ended. A query's failure stays until the
    next query has confirmed messages or was idle for a while.
    """

    state: str = "connecting"
    failure: Failure | None = None
    capture_failure: Failure | None = None
    query_failed: bool = False
    started: bool = False
    captured: int = 0
    confirmed: int = 0
    deliveries: int = 0
    """Transactions that are in every sink, or in the backlog of one that is behind."""
    delivery_us: int = 0
    """The sum of the times from their commit until then, in µs."""
    waiting: int = 0
    waiting_since: float | None = None
    reported_at: float | None = None
    progress_at: float | None = None
    well_since: float | None = None
    truncates_skipped: int = 0
    reconnects: int = 0
    received_lsn: int = 0
    confirmed_lsn: int = 0
    unread_bytes: int = 0
    warm: bool = False
    drained: bool = False
    released: bool = False
    restarts: int = 0
    done: list[int] | None = None

    @property
    def waited(self) -> float:
        """The age of the oldest message that is captured and not confirmed, in seconds."""
        since = self.waiting_since
        return 0.0 if since is None else max(time.time() - since, 0.0)

    def take_over(self, earlier: SourceState, now: float) -> None:
        """Go on from a state that streamed a moment ago: a change does not start the source anew.

        Where this one does not stream soon, what is taken over shows it: it has reported nothing
        since, or messages wait.
        """
        at = earlier.reported_at
        if not earlier.started or earlier.failure is not None or at is None:
            return
        if now - at < _MOMENT_SECONDS:
            self.started, self.reported_at, self.progress_at = True, at, earlier.progress_at
            self.waiting, self.waiting_since = earlier.waiting, earlier.waiting_since
            self.confirmed_lsn = earlier.confirmed_lsn

    def note_done(self, done: list[int] | None) -> None:
        """Note up to where all is delivered; two threads report it, and what comes late may be older."""
        if done is not None and (self.done is None or done > self.done):
            self.done = done

    def fail(self, failure: Failure) -> None:
        """Note a failure; it keeps the time of the first one since the last success."""
        self.failure = failure.lasting(self.failure, time.time())

    def recover(self) -> None:
        """Note progress: the failure is over."""
        self.failure, self.query_failed = None, False

    def check_recovered(self, now: float) -> None:
        """End the failure if the capture's report at `now` (Unix time) shows that it is over."""
        streams = self.state == "streaming"
        if not (streams and self.warm and not self.waiting):
            self.well_since = None
        elif self.well_since is None:
            self.well_since = now
        if self.query_failed:
            if self.well_since is not None and now - self.well_since >= _WELL_SECONDS:
                self.recover()
        elif streams:
            self.recover()
