"""A consumer as a process has it: requests that wait are served together, one step after the other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from penstock.message import Position
from penstock.streams.consumer_types import (
    ConsumerInfo,
    ConsumerLetter,
    Looked,
    Outcome,
    Received,
)


class Consumer:
    """A consumer of a stream. Every call raises `StoreUnavailable` where the store does not answer."""

    info: ConsumerInfo

    async def receive(self, limit: int, wait: float) -> Received:
        """Hand out up to `limit` messages, as soon as there is one; none after `wait` seconds.

        Cancelling takes nothing. Raises `TooManyWaiting` where this would be one too many to wait.
        """
        raise NotImplementedError

    async def ack(self, tokens: Sequence[str]) -> Outcome:
        """Take messages as done, for ever; those that are done already count as taken."""
        raise NotImplementedError

    async def nack(self, tokens: Sequence[str], delay: float = 0.0) -> Outcome:
        """Make messages available again after `delay` seconds; at `max_deliver` dead letters."""
        raise NotImplementedError

    async def extend(self, tokens: Sequence[str], seconds: float | None = None) -> Outcome:
        """Give deliveries `seconds` from now, or ack_wait_ms; those that are done are refused."""
        raise NotImplementedError

    async def release(self, tokens: Sequence[str]) -> Outcome:
        """Give back what a client never got: available at once, and not counted as delivered."""
        raise NotImplementedError

    async def rewind(self, to: Position | datetime | Literal["all", "new"]) -> Position:
        """Go on from a message, a commit time, the first or the next one; return the cursor.

        What is out is forgotten, and its tokens are refused as unknown from now on.
        """
        raise NotImplementedError

    async def messages(
        self, state: Literal["pending", "delivered", "dead"], limit: int
    ) -> list[Looked]:
        """Look at messages without taking them, in their order."""
        raise NotImplementedError

    async def dead_letters(self, limit: int, after: int = 0) -> list[ConsumerLetter]:
        """Return dead letters behind number `after`, replayed ones too, the oldest first."""
        raise NotImplementedError

    async def replay(self, number: int) -> None:
        """Put a dead letter back into the consumer; raises `UnknownDeadLetter`."""
        raise NotImplementedError

    async def disable(self, reason: str) -> None:
        """Note why the webhook is delivered to no more; nothing happens to its messages."""
        raise NotImplementedError

    async def enable(self) -> None:
        """Take a `disable` back."""
        raise NotImplementedError
