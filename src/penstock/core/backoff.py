"""How long to wait before something is tried again: longer each time, until it has progressed."""

from __future__ import annotations

import random
from typing import Final


class Backoff:
    """Waits that double from `first` to `most` seconds, each shortened by up to its share `jitter`.

    What runs for a while and fails again has its waits start anew only if it has progressed meanwhile:
    by how long it ran one can't tell work from a slow failure.
    """

    def __init__(self, first: float, most: float, *, jitter: float = 0.0) -> None:
        self._first: Final = first
        self._most: Final = most
        self._jitter: Final = jitter
        self._next = first
        self._mark: object = None

    def after_failure(self, mark: object = None) -> float:
        """Return how many seconds to wait now.

        `mark` tells how far the thing is, a count or a position: where it differs from the one before,
        there was progress.
        """
        if mark != self._mark:
            self.reset()
            self._mark = mark
        seconds, self._next = self._next, min(2 * self._next, self._most)
        return seconds * random.uniform(1 - self._jitter, 1)  # noqa: S311 - no secret

    def reset(self) -> None:
        """Begin with the first wait again, as it has succeeded."""
        self._next = self._first
