"""Keeps an inbox in the stream's order where messages are redelivered.

The server redelivers what an earlier session has not acked once the ack is overdue, and delivers new
messages meanwhile. A session that finds unacked messages buffers all that it receives until it has
them, and then releases all in the stream's order.
"""

from __future__ import annotations

import time

from nats.aio.msg import Msg


class Redelivery:
    """Buffers messages until the unacked ones are redelivered.

    Args:
        upto: The highest number in the stream that an earlier session received.
        pending: How many messages up to it have no ack.
        seconds: How long to wait for them.
    """

    def __init__(self, upto: int, pending: int, seconds: float) -> None:
        self._upto = upto
        self._pending = pending
        self._until = time.monotonic() + seconds
        self._messages: dict[int, Msg] = {}

    @property
    def late(self) -> bool:
        """Whether the wait is over: some may never be redelivered."""
        return time.monotonic() > self._until

    @property
    def complete(self) -> bool:
        """Whether all of them are here."""
        return sum(number <= self._upto for number in self._messages) >= self._pending

    def add(self, message: Msg) -> None:
        """Buffer a message; of several deliveries of it, the last."""
        self._messages[message.metadata.sequence.stream] = message

    def is_all(self, pending: int) -> bool:
        """Return whether the buffer has all `pending` messages, which the server counts as unacked."""
        return pending <= len(self._messages)

    def messages(self) -> list[Msg]:
        """Return the buffered messages in the stream's order."""
        return [self._messages[number] for number in sorted(self._messages)]
