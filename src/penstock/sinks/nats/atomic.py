"""The atomic batches in flight: rows of one group that a stream takes together. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_BATCHES: Final = 16
"""Atomic batches in flight. A stream takes 50 from all its publishers."""


class AtomicBatches:
    """Which rows in flight are parts of atomic batches, and which rows go alone."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        """Of each row in a batch, all rows of the batch, in order."""
        self.alone: set[int] = set()
        """The rows of batches that were refused."""
        self._count = 0

    def may_send(self, row: int) -> bool:
        """Return whether a batch that begins with `row` may be sent."""
        return row not in self.alone and self._count < MAX_BATCHES

    def add(self, chain: list[int]) -> None:
        """Note that a batch of these rows is sent."""
        self.rows.update(dict.fromkeys(chain, chain))
        self._count += 1

    def remove(self, chain: Sequence[int]) -> None:
        """Forget a batch."""
        for row in chain:
            del self.rows[row]
        self._count -= 1
