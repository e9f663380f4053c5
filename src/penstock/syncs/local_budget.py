"""The budget of a session that shares it with no other process: trials, and users' tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from penstock.syncs.rate_headers import rate_limit
from penstock.syncs.session import PATIENCE


class LocalBudget:
    """A budget of this process alone: so many requests an interval, so many at once.

    It spreads the requests over the interval, and waits where the API's headers say that none is left.
    """

    def __init__(
        self,
        allowed_requests: int = 10,
        interval: timedelta = timedelta(seconds=1),
        max_concurrent_requests: int = 4,
        *,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gap: Final = interval.total_seconds() / allowed_requests
        self._places: Final = threading.BoundedSemaphore(max_concurrent_requests)
        self._lock: Final = threading.Lock()
        self._sleep: Final = sleep
        self._clock: Final = clock
        self._next = 0.0
        self.requests = 0

    def acquire(self) -> None:
        """Wait until a request may be made."""
        self._places.acquire()
        with self._lock:
            now = self._clock()
            wait = max(self._next - now, 0.0)
            self._next = max(self._next, now) + self._gap
            self.requests += 1
        if wait:
            self._sleep(wait)

    def release(self, headers: Mapping[str, str], status: int) -> None:  # noqa: ARG002 - Budget
        """Note that the request has ended."""
        left = rate_limit(headers, datetime.now(UTC))
        if left.remaining == 0 and left.reset:
            with self._lock:
                self._next = max(self._next, self._clock() + min(left.reset, PATIENCE))
        self._places.release()
