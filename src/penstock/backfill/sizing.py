"""How many rows the next chunk has, from what they weigh and how long the last ones took. No I/O."""

from __future__ import annotations

from typing import Final

FEWEST: Final = 20
MOST: Final = 100_000
RANGE_BYTES: Final = 16 << 20
"""What one range may weigh, as COPY prints it: whoever writes it keeps all of it in memory."""
TOO_HEAVY: Final = 64 << 20
"""A range that weighs more is read again as several: its rows are heavier than the first of them."""
LIVE_SECONDS: Final = 0.06
"""What a chunk may add to a batch while changes come, which have to wait for it."""
IDLE_SECONDS: Final = 0.5
REST: Final = 2.0
"""For how many times as long as a chunk's batch took live changes have the batches to themselves."""
_SMALL: Final = 1_000


class Sizing:
    """Starts with few rows, and at most doubles, or has four times as many while they are few.

    So a backfill that starts again among heavy rows gets on, whatever it thought of them before.
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
        """Note what the next rows weigh, if there are any, of which `splits` ranges are made."""
        if row_bytes is not None:
            fit = int(RANGE_BYTES / max(row_bytes, 1.0))
            self._light_enough = max(fit, 1) * splits

    def took(self, rows: int, seconds: float, *, live: bool) -> None:
        """Note that a chunk planned for `rows` took `seconds` from its batch's plan to its end."""
        # Any batch takes a while; the quickest one shows how long without its rows.
        self._least = seconds if self._least is None else min(self._least, seconds)
        spent = max(seconds - self._least, 0.0)
        target = LIVE_SECONDS if live else IDLE_SECONDS
        growth = 4.0 if self._rows < _SMALL else 2.0
        factor = growth if spent * growth <= target else target / spent
        wanted = round(rows * max(factor, 0.25))
        self._rows = max(FEWEST, min(MOST, wanted, round(self._rows * growth)))
