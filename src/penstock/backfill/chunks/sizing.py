"""How many rows the next chunk has. No I/O."""

from __future__ import annotations

from collections import deque
from typing import Final

FEWEST: Final = 20
MOST: Final = 20_000
RANGE_BYTES: Final = 4 << 20
"""The bytes of a chunk, as COPY prints it: all of it is kept in memory."""
TOO_HEAVY: Final = 32 << 20
"""A range with more bytes is read again as several: its rows are larger than the first of them."""
LIVE_SECONDS: Final = 0.006
"""How long the rows of a chunk may take while live changes come, which wait for it."""
LIVE_MOST: Final = 300
"""Rows of a chunk while live changes come: until it is done, none knows how long it takes."""
LAST: Final = 3_000
"""Rows that a backfill's last chunk may have even so."""
IDLE_SECONDS: Final = 0.2
_SMALL: Final = 1_000
_RECENT: Final = 3


class Sizing:
    """Starts with few rows, and at most doubles, or has four times as many while they are few.

    Each attempt starts anew, so that one among large rows progresses whatever the rows before were.
    A busy machine makes chunks slow whatever rows they have: fewer rows would not help the live changes,
    and the backfill would hardly progress. So rows may take as long as a chunk takes without them.
    """

    def __init__(self) -> None:
        self._rows = FEWEST
        self._light_enough = MOST
        self._least: float | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)

    @property
    def rows(self) -> int:
        """How many rows the next chunk has."""
        return min(self._rows, self._light_enough)

    @property
    def last(self) -> int:
        """How many rows the last chunk may have."""
        return min(LAST, MOST, self._light_enough)

    def weighed(self, row_bytes: float | None) -> None:
        """Take the bytes of one of the next rows, if there is one."""
        if row_bytes is not None:
            self._light_enough = max(int(RANGE_BYTES / max(row_bytes, 1.0)), 1)

    def took(self, rows: int, seconds: float, *, live: bool) -> None:
        """Take that a chunk of `rows` took `seconds` from its hand-out to its end."""
        # Any chunk takes a while; the quickest one shows how long without its rows.
        self._least = least = seconds if self._least is None else min(self._least, seconds)
        self._recent.append((seconds, max(rows, 1)))
        # What makes one chunk slow, and not those about it, are not its rows.
        spent = rows * min(max(of - least, 0.0) / count for of, count in self._recent)
        target = max(LIVE_SECONDS if live else IDLE_SECONDS, least)
        growth = 4.0 if self._rows < _SMALL else 2.0
        factor = growth if spent * growth <= target else target / spent
        most = min(MOST, LIVE_MOST) if live else MOST
        target_rows = round(rows * max(factor, 0.25))
        self._rows = max(FEWEST, min(most, target_rows, round(self._rows * growth)))
