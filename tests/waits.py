"""Waits for what has no event, and calls in threads: each has a limit, and reports what did not come."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from .pipeline import PATIENCE, holds

T = TypeVar("T")
_PAUSE: Final = 0.02


def await_true(
    condition: Callable[[], object],
    timeout: float = PATIENCE,
    *,
    what: str = "what this waits for",
) -> None:
    """Poll until `condition` holds; `what` is the sentence of what does not come otherwise."""
    deadline = time.monotonic() + timeout
    while not holds(condition, _PAUSE):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"


async def until(condition: Callable[[], object], timeout: float = PATIENCE) -> None:
    """Poll until `condition` holds, while the event loop goes on."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(_PAUSE)


def await_end(*threads: threading.Thread, timeout: float = PATIENCE) -> None:
    """Wait until threads have ended; one that does not is named."""
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), f"not within {timeout:g} s: the end of {thread.name}"


class Later(threading.Thread, Generic[T]):
    """A call in a thread of its own: one that hangs keeps neither its test nor the process alive."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._returned: list[T] = []
        self._raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._returned.append(self._call())
        except BaseException as error:
            self._raised = error

    @property
    def done(self) -> bool:
        return not self.is_alive()

    def result(self, timeout: float = PATIENCE) -> T:
        """Return what the call returned, or raise what it raised."""
        await_end(self, timeout=timeout)
        if self._raised is not None:
            raise self._raised
        return self._returned[0]


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Run calls at the same time, and return what they returned, once all of them have ended."""
    running = [Later(call) for call in calls]
    await_end(*running)
    return [each.result() for each in running]
