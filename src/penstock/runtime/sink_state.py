"""The state of one sink: its counts, its failure, and its backlog."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from penstock.core.counting import Counts
from penstock.core.health import Failure
from penstock.runtime.has_failure import HasFailure

_RATE_SECONDS: Final = 5.0


class Rate:
    """The recent rate of a count, a second."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._marks = ((now, 0), (now, 0))

    def note(self, count: int) -> None:
        """Note the count so far."""
        now = time.monotonic()
        if now - self._marks[1][0] > _RATE_SECONDS:
            self._marks = self._marks[1], (now, count)

    def per_second(self, count: int) -> float:
        """Return the rate, `count` being the count so far."""
        now, (at, then) = time.monotonic(), self._marks[0]
        if now - self._marks[1][0] > 2 * _RATE_SECONDS:
            at, then = self._marks[1]
        return (count - then) / max(now - at, 1.0)


@dataclass
class SinkState(HasFailure):
    """A sink's, or NATS consumer's, counts since the run started, its failure, and its backlog.

    `reason` is the failure that put it behind. `refused` is the failure of its expressions on the
    columns that its tables have now.
    """

    type: str
    source: str
    stream: str | None = None
    """Of a consumer of type nats, the stream that it publishes."""
    delivered: int = 0
    duplicates: int = 0
    bytes: int = 0
    dead_lettered: int = 0
    filtered: int = 0
    retries: int = 0
    failure: Failure | None = None
    reason: Failure | None = None
    refused: Failure | None = None
    delivered_at: float = 0.0
    state: str = "attached"
    since: float | None = None
    backlog: int = 0
    backlog_bytes: int = 0
    oldest: float | None = None
    """When the oldest message of the backlog was committed, None where that is not known."""
    rate: Rate = field(default_factory=Rate)

    def fail(self, code: str, text: str, remedy: str | None) -> None:
        """Note a failure; it keeps the time of the first one since the last success."""
        now = time.time()
        self.failure = Failure.of(code, text, remedy, now).lasting(self.failure, now)

    def take_reason(self, code: str | None, text: str | None) -> None:
        """Note why it is behind; one that is paused fails no more, as nothing is tried."""
        if not self.behind:
            self.failure = self.reason = None
        elif text and (self.reason is None or self.reason.code != code):
            self.reason = Failure.of(code, text, None, time.time())
            if self.state == "paused":
                self.failure = None

    def count(self, counts: Counts) -> None:
        """Add the counts of new messages; each message is counted once."""
        self.delivered += counts.delivered
        self.bytes += counts.bytes
        self.dead_lettered += counts.dead_lettered
        self.filtered += counts.filtered
        self.rate.note(self.delivered)

    @property
    def identity(self) -> tuple[str, str, str | None]:
        """What stays the same as long as it is the same sink."""
        return self.type, self.source, self.stream

    @property
    def behind(self) -> bool:
        """Whether its messages go to its backlog."""
        return self.state != "attached"

    def lag(self, waited: float, now: float) -> float:
        """Return how long the oldest message has waited that it lacks.

        `waited` is that of its source. A backlog of which no message was read yet is as old as the sink
        has been behind.
        """
        if not self.behind:
            return waited
        begun = self.oldest or self.since
        return max(now - begun, 0.0) if self.backlog and begun is not None else 0.0

    @property
    def detached(self) -> bool:
        """Whether it has been behind for `detach_after`."""
        return self.state == "detached"
