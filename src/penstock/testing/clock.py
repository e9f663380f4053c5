"""The time of a Penstock in memory: it stands still until a test advances it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Final

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""When a clock starts, unless a test chooses another time."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

_skips: ContextVar[bool] = ContextVar("_skips", default=False)


class Clock:
    """Time for commits and consumers.

    Args:
        start: The time at first, with its offset.
        running: Whether the clock runs on with real time, beside what `advance` adds.

    Raises:
        ValueError: `start` has no offset.
    """

    def __init__(self, start: datetime = START, *, running: bool = False) -> None:
        if start.tzinfo is None:
            raise ValueError(f"{start} has no offset: give it a tzinfo, as in tzinfo=UTC")
        self._now = (start - _EPOCH) // _MICROSECOND
        self._running = running
        self._started = time.monotonic()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self.lock: Final = threading.RLock()
        """Held while something changes: the threads of a test may share one Penstock."""

    @property
    def now(self) -> datetime:
        """The time, in UTC."""
        return _EPOCH + self.microseconds * _MICROSECOND

    @property
    def microseconds(self) -> int:
        """The time, in microseconds since 1970."""
        passed = time.monotonic() - self._started if self._running else 0.0
        return self._now + int(passed * 1e6)

    def advance(self, seconds: float | timedelta) -> None:
        """Move the time forward; deliveries whose time is up become available again.

        Raises:
            ValueError: `seconds` is negative.
        """
        by = seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
        if by < timedelta():
            raise ValueError(f"a clock goes forward only, and {seconds} is negative")
        with self.lock:
            self._now += by // _MICROSECOND
        self.notify()

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """Have every `wait` in this block advance the clock in place of waiting.

        A call that blocks its thread needs this: the test can't advance the clock meanwhile.
        """
        token = _skips.set(not self._running)
        try:
            yield
        finally:
            _skips.reset(token)

    async def wait(self, until: int | None = None) -> None:
        """Return at the next `notify`, or at the time `until`, in microseconds since 1970."""
        if _skips.get() and until is not None:
            self.advance(max(until - self.microseconds, 0) * _MICROSECOND)
            return
        waiting = (asyncio.get_running_loop(), asyncio.Event())
        left = None
        if self._running and until is not None:
            left = max(until - self.microseconds, 0) / 1e6
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(left):
                await waiting[1].wait()
        except TimeoutError:
            pass
        finally:
            with self.lock:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)

    def notify(self) -> None:
        """Wake all that waits: there may be something to hand out."""
        with self.lock:
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # a loop that was closed waits for nothing
                loop.call_soon_threadsafe(event.set)
