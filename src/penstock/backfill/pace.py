"""How fast something is read, from how far it was when one looked."""

from __future__ import annotations

from collections import deque
from typing import Final

_RATE_SECONDS: Final = 10.0


class Pace:
    """How fast a backfill goes, from how far it was at some times."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, now: float, rows: int) -> None:
        """Add how many rows were done at a time, in seconds."""
        self._marks.append((now, rows))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RATE_SECONDS:
            self._marks.popleft()

    @property
    def rate(self) -> float:
        """Rows a second of the last seconds, 0 where that is not known."""
        if len(self._marks) < 2:
            return 0.0
        (then, before), (now, rows) = self._marks[0], self._marks[-1]
        return max(rows - before, 0) / max(now - then, 0.001)

    def left(self, rows: int, total: int | None) -> float | None:
        """Return the seconds that are left at this rate, None where that is not known."""
        rate = self.rate
        if total is None or rate <= 0:
            return None
        return max(total - rows, 0) / rate
