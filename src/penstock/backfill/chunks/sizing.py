"""How many rows the next chunk has, and when it gives way to live changes. No I/O."""

from __future__ import annotations

import time
from typing import Final

FEWEST: Final = 20
MOST: Final = 100_000
RANGE_BYTES: Final = 16 << 20
"""The bytes of one range, as COPY prints it: its task keeps all of it in memory."""
TOO_HEAVY: Final = 64 << 20
"""A range with more bytes is read again as several: its rows are larger than the first of them."""
LIVE_SECONDS: Final = 0.06
"""How long a chunk's batch may take while live changes come, which wait for it."""
IDLE_SECONDS: Final = 0.5
_REST: Final = 2.0
"""After a chunk, batches are free for live changes for this many times as long as its batch took."""
_LONGEST_REST: Final = 2.0
_SMALL: Final = 1_000


class Sizing:
    """Starts with few rows, and at most doubles, or has four times as many while they are few.

    Each attempt starts anew, so that one among large rows progresses whatever the rows before were.
    """

    def __init__(self) -> None:
        self._rows = FEWEST
        self._light_enough = MOST
        self._least: float | None = None

    @property
    def rows(self) -> int:
        """How many rows the next chunk has."""
        return min(self._rows, self._light_enough)

    def weighed(self, row_bytes: float | None, splits: int) -> None:
        """Take the bytes of one of the next rows, if there is one; a chunk has `splits` ranges."""
        if row_bytes is not None:
            fit = int(RANGE_BYTES / max(row_bytes, 1.0))
            self._light_enough = max(fit, 1) * splits

    def took(self, rows: int, seconds: float, *, live: bool) -> None:
        """Take that a chunk of about `rows` took `seconds` from its batch's plan to its end."""
        # Any batch takes a while; the quickest one shows how long without its rows.
        self._least = seconds if self._least is None else min(self._least, seconds)
        spent = max(seconds - self._least, 0.0)
        target = LIVE_SECONDS if live else IDLE_SECONDS
        growth = 4.0 if self._rows < _SMALL else 2.0
        factor = growth if spent * growth <= target else target / spent
        target_rows = round(rows * max(factor, 0.25))
        self._rows = max(FEWEST, min(MOST, target_rows, round(self._rows * growth)))


class LivePriority:
    """Lets live changes go first: while they come, they find most of the batches free.

    `captured` counts the live messages so far.
    """

    def __init__(self, captured: int) -> None:
        self._captured = captured
        self._live = True
        self.rest_until = 0.0

    def delivered(self, captured: int, seconds: float) -> bool:
        """Take that a chunk's batch took `seconds`; return whether live changes came since the last."""
        self._live, self._captured = captured > self._captured, captured
        self.rest_until = time.monotonic() + min(_REST * seconds, _LONGEST_REST)
        return self._live

    def may_write(self, *, in_flight: bool) -> bool:
        """Return whether the next chunk may go now; `in_flight`: another one is under way."""
        return not (self._live and (in_flight or time.monotonic() < self.rest_until))
