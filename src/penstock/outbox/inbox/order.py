"""The order of an inbox where messages come again.

What a session before this one was given and has not acked, the server sends once more when its ack
is overdue, and meanwhile what is new. So a session that finds such messages holds all that it is given
until it has them, and then takes all in the stream's order.
"""

from __future__ import annotations

import time

from nats.aio.msg import Msg


class Unsettled:
    """Holds messages until those that are to come again are there.

    Args:
        upto: The highest number in the stream that was given to a session before.
        pending: How many of those have no ack.
        seconds: How long to wait for them.
    """

    def __init__(self, upto: int, pending: int, seconds: float) -> None:
        self._upto = upto
        self._pending = pending
        self._until = time.monotonic() + seconds
        self._held: dict[int, Msg] = {}

    @property
    def late(self) -> bool:
        """Whether it was waited for long enough: some may never come."""
        return time.monotonic() > self._until

    @property
    def complete(self) -> bool:
        """Whether all of them are there."""
        return sum(number <= self._upto for number in self._held) >= self._pending

    def hold(self, message: Msg) -> None:
        """Keep a message; of one that comes several times, the last."""
        self._held[message.metadata.sequence.stream] = message

    def is_all(self, pending: int) -> bool:
        """Tell whether these are all that have no ack, of `pending` that the server counts."""
        return pending <= len(self._held)

    def messages(self) -> list[Msg]:
        """Return what is held, in the stream's order."""
        return [self._held[number] for number in sorted(self._held)]
