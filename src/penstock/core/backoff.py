"""How long to wait before the next try: twice as long after each failure, up to a limit."""

from __future__ import annotations

import random
from typing import Final

_MOST_DOUBLINGS: Final = 60


def wait_after(failures: int, first: float, most: float, jitter: float = 0.0) -> float:
    """Return the seconds to wait after `failures` failures in a row, at least one.

    The first wait has `first` seconds, each one after it twice as many, and none more than `most`.
    `jitter` shortens each by a random part, up to that one: 0.25 gives three quarters or more.
    """
    seconds = min(first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), most)
    return seconds * random.uniform(1.0 - jitter, 1.0) if jitter else seconds  # noqa: S311 - no secret


class Backoff:
    """Counts the failures of one loop, and returns its waits: see `wait_after`.

    A loop that makes progress and fails later starts with the first wait again. How long it ran shows
    no progress: a failure may be slow.
    """

    def __init__(self, first: float, most: float, *, jitter: float = 0.0) -> None:
        self._first: Final = first
        self._most: Final = most
        self._jitter: Final = jitter
        self._failures = 0
        self._mark: object = None

    def after_failure(self, mark: object = None) -> float:
        """Count a failure and return how many seconds to wait now.

        `mark` is how far the loop has come, a count or a position: another one than at the failure
        before is progress.
        """
        if mark != self._mark:
            self.reset()
            self._mark = mark
        self._failures += 1
        return wait_after(self._failures, self._first, self._most, self._jitter)

    def reset(self) -> None:
        """Note progress: the next wait is the first one."""
        self._failures = 0
