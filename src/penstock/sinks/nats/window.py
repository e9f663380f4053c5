"""How much may be in flight, and for how long it may go on without an ack."""

from __future__ import annotations

import time
from typing import Final

from penstock.sinks.nats.duplicates import ASKING_SECONDS

WINDOW: Final = 4096
"""Messages in flight. A stream takes up to 10,000 (`max_buffered_msgs`) from all its publishers."""
STEADY_RATE: Final = 5_000
"""Messages a second that a sink may take its time for before patience runs out."""
_CONNECT_TRIES: Final = 3
"""Tries to connect after which patience is over."""


class Window:
    """How many messages may be in flight: `size`."""

    def __init__(self) -> None:
        self.size = WINDOW

    def grow(self) -> None:
        """Note that acks came; what a busy stream took away comes back slowly, as in TCP."""
        self.size = min(WINDOW, self.size + 1)

    def shrink(self) -> None:
        """Note that the stream is busy."""
        self.size = max(8, self.size // 2)


class Patience:
    """How long a write of `rows` messages may last: `until` moves on with every ack, up to a bound."""

    def __init__(self, seconds: float | None, rows: int) -> None:
        self._seconds = float("inf") if seconds is None else seconds
        self._started = time.monotonic()
        self._last = self._started + self._seconds + rows / STEADY_RATE
        self.until = self._started + self._seconds
        self._spare = ASKING_SECONDS
        # A server that is gone is not waited for: others wait for this batch meanwhile.
        self.tries = float("inf") if seconds is None else _CONNECT_TRIES

    def progress(self, now: float) -> None:
        """Note that acks came."""
        self.until = min(now + self._seconds, self._last)

    def extend(self, seconds: float) -> None:
        """Add time in which a stream is asked about its messages, which is over by itself."""
        seconds = min(seconds, self._spare)
        self._spare -= seconds
        self._last += seconds
        self.until += seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds that have passed."""
        return time.monotonic() - self._started
