"""How many more jobs the lanes take. Pure, no I/O."""

from __future__ import annotations

from typing import Final

_SPARED: Final = 4
"""One of so many places is kept from backfills and sweeps, and one at least."""


class LaneRoom:
    """The lanes, and how many jobs each of them has; `slots` is how many one takes."""

    def __init__(self, slots: int) -> None:
        self._slots: Final = slots
        self._jobs: Final[dict[int, int]] = {}
        self.laters = 0
        """How many of the jobs are of backfills and sweeps."""

    def join(self, lane: int) -> None:
        """Note a lane that takes jobs."""
        self._jobs[lane] = 0

    def lose(self, lane: int) -> None:
        """Note that a lane is gone."""
        self._jobs.pop(lane, None)

    def take(self) -> int:
        """Return the lane that has the fewest jobs, with one more."""
        lane = min(self._jobs, key=self._jobs.__getitem__)
        self._jobs[lane] += 1
        return lane

    def leave(self, lane: int) -> None:
        """Note that a lane has one job less, if it is still there."""
        if lane in self._jobs:
            self._jobs[lane] -= 1

    @property
    def has_any(self) -> bool:
        """Whether there is room for a job that comes first."""
        return sum(self._jobs.values()) < self._places

    @property
    def has_any_for_later(self) -> bool:
        """Whether there is room for a backfill's job, or a sweep's."""
        spared = max(1, self._places // _SPARED) if self._places > 1 else 0
        return self.has_any and self.laters < self._places - spared

    @property
    def _places(self) -> int:
        return len(self._jobs) * self._slots
