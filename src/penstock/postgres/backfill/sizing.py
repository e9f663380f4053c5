"""How many rows the next chunk has, from how long the last ones took. No I/O."""

from __future__ import annotations

from typing import Final

FEWEST: Final = 1_000
MOST: Final = 100_000
LIVE_SECONDS: Final = 0.06
"""What a chunk may add to a batch while changes come, which have to wait for it."""
IDLE_SECONDS: Final = 0.5
REST: Final = 2.0
"""For how many times as long as a chunk's batch took live changes have the batches to themselves."""


class Sizing:
    """Starts with few rows, as it is not known what they weigh, and at most doubles."""

    def __init__(self) -> None:
        self.rows = FEWEST
        self._least: float | None = None

    def took(self, rows: int, seconds: float, *, live: bool) -> None:
        """Note that a chunk planned for `rows` took `seconds` from its batch's plan to its end."""
        # Any batch takes a while; the quickest one shows how long without its rows.
        self._least = seconds if self._least is None else min(self._least, seconds)
        spent = max(seconds - self._least, 0.0)
        target = LIVE_SECONDS if live else IDLE_SECONDS
        factor = 2.0 if spent * 2 <= target else target / spent
        wanted = round(rows * max(factor, 0.25))
        self.rows = max(FEWEST, min(MOST, wanted, self.rows * 2))
