"""The rows of one batch: what each is at, and how many are left and in flight. No I/O and no clock."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

WAITING: Final = 0
SENT: Final = 1
BACKOFF: Final = 2
DONE: Final = 3
DOUBTED: Final = 4
"""The states of a row. The stream has dropped one in doubt as a copy of another message."""


class RowTable:
    """The state of each of `count` rows, all of which wait at first.

    Loops over rows read and write `state` directly; one that writes it keeps the counts right.
    """

    def __init__(self, count: int) -> None:
        self.count: Final = count
        self.state = bytearray(count)
        self.left = count
        """Rows that are not done."""
        self.flying = 0
        """Rows that are sent, and whose ack is awaited."""

    def send_range(self, rows: range) -> None:
        """Note that neighbouring rows are sent."""
        self.state[rows.start : rows.stop] = bytes([SENT]) * len(rows)
        self.flying += len(rows)

    def put(self, row: int, state: int) -> None:
        """Give a row that is not done another state."""
        self.flying -= self.state[row] == SENT
        self.left -= state == DONE
        self.state[row] = state

    def sent(self) -> list[int]:
        """Return the rows in flight, in order."""
        return [row for row in range(self.count) if self.state[row] == SENT]

    def all_done(self, first: int, end: int) -> bool:
        """Return whether the rows from `first` up to `end`, exclusive, are done."""
        return self.state.count(DONE, first, end) == end - first

    def rest_mask(self) -> pa.Array:
        """Return of each row whether it is left."""
        return pa.array([state != DONE for state in self.state], pa.bool_())
