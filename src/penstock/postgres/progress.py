"""How far a slot may be confirmed: invariant 1 in one place. No I/O, no lock.

A slot can only be confirmed at the end of a transaction, while messages become durable one after the
other, so this remembers where each transaction that has messages ends. WAL without messages of ours
may go as soon as nothing before it is under way.
"""

from __future__ import annotations

from collections import deque

from penstock.core.message import Position


class SlotProgress:
    """What was read and what is durable, and the LSN that follows from it.

    Args:
        start: Messages up to and with this position are durable already.
    """

    def __init__(self, start: Position) -> None:
        self.confirmed = start
        """Messages up to and with this position are durable."""
        self.received_lsn = 0
        """All that was committed before this LSN has been read."""
        self.flush_lsn = 0
        """The server may forget the WAL before this LSN."""
        self.flush_time = 0
        """When the newest transaction before that was committed, 0 where none is known."""
        # The last message of each transaction, and what may be confirmed when it is durable: a tuple of
        # numbers alone, which the garbage collector passes by.
        self._ends: deque[tuple[int, int, int, int]] = deque()
        self._ended: tuple[int, int] = start
        """The last of these messages, or what is confirmed if that is more."""
        self._time = 0
        self._open: int | None = None

    def begin(self, lsn: int) -> None:
        """Note that the transaction with this commit LSN starts."""
        self._open = lsn

    def commit(self, lsn: int, idx: int, end_lsn: int, time: int = 0) -> None:
        """Note the transaction's end, and when it was committed.

        `lsn` and `idx` are the position of the newest message read, the transaction's own or an earlier.
        """
        self._time = max(self._time, time)
        # After a reconnect the server sends again what it does not know to be durable.
        if lsn == self._open and (lsn, idx) > self._ended:
            self._ended = lsn, idx
            self._ends.append((lsn, idx, end_lsn, self._time))
        self._open = None
        if self._ends and end_lsn > self.received_lsn:
            self.received_lsn = end_lsn
        else:
            self.received(end_lsn)

    def received(self, lsn: int) -> None:
        """Note that the server has sent all before `lsn`; inside a transaction that is no end."""
        if self._open is None:
            self.received_lsn = max(self.received_lsn, lsn)
            self._advance()

    def interrupted(self) -> None:
        """Note that the connection was lost; what was read of a transaction will come again."""
        self._open = None

    def confirm(self, position: Position) -> tuple[int, int]:
        """Note that all messages up to and with `position` are durable.

        Returns how many transactions with messages are durable by that, and the sum of the times at
        which they were committed.
        """
        count = times = 0
        if position <= self.confirmed:
            return count, times
        self.confirmed = position
        self._ended = max(self._ended, position)
        while self._ends and self._ends[0][:2] <= position:
            _, _, end_lsn, self.flush_time = self._ends.popleft()
            self.flush_lsn = max(self.flush_lsn, end_lsn)
            count, times = count + 1, times + self.flush_time
        self._advance()
        return count, times

    def _advance(self) -> None:
        # What was read of a transaction without its end commits behind `received_lsn`.
        if self._open is None and not self._ends:
            self.flush_lsn = max(self.flush_lsn, self.received_lsn)
            self.flush_time = self._time
