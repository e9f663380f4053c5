"""Messages that are handed out with an ack, for the receive that follows it. No I/O.

Most workers ack what they have and receive at once what comes next. Where they do, the step of the ack
hands out the next messages too, and the receive finds them here: one commit for both. What no receive
takes soon is given back, and then acks have nothing handed out with them for a while.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from penstock.streams.consumers.state import Held, State
from penstock.streams.consumers.types import Delivery, Received

SECONDS: Final = 0.05
"""How soon a receive follows an ack, and how long messages wait for it."""

_SURE: Final = 4  # receives that followed, after which the next one is expected
_DOUBTFUL: Final = -16  # the same, after messages waited for nothing


class ReceiveClaims:
    """The messages that wait for the receive that they are meant for.

    Args:
        give_back: Called with those that no receive has taken.
    """

    def __init__(self, give_back: Callable[[Sequence[Delivery]], object]) -> None:
        self._give_back = give_back
        self._ready: deque[tuple[int, Delivery]] = deque()  # with the delivery's number
        self._numbers = (0, 0)
        self._since = 0.0  # when the newest were added
        self._timer: asyncio.TimerHandle | None = None
        self._followed = 0  # how many receives have followed an ack, in a row
        self._acked = 0  # acks that no receive has followed yet
        self._acked_at = 0.0
        self._limit = 0  # of the last receive that followed one

    def __len__(self) -> int:
        return len(self._ready)

    def expected(self, acks: int) -> int:
        """Return how many messages a step with so many acks should hand out for the next receives."""
        if self._followed < _SURE:
            return 0
        return max(self._limit * acks - len(self._ready), 0)

    def acked(self, acks: int) -> None:
        """Note that so many acks are answered now."""
        now = asyncio.get_running_loop().time()
        if self._acked and now - self._acked_at > SECONDS:
            self._acked = 0
            self._followed = min(self._followed, 0)
        self._acked += acks
        self._acked_at = now

    def received(self, limit: int) -> None:
        """Note that a receive of up to `limit` messages has come."""
        if self._acked and asyncio.get_running_loop().time() - self._acked_at <= SECONDS:
            self._acked -= 1
            self._followed = min(self._followed + 1, _SURE)
            self._limit = limit

    def add(self, first: int, deliveries: Sequence[Delivery], numbers: tuple[int, int]) -> None:
        """Keep deliveries numbered from `first` on; `numbers` are those of `Received`."""
        loop = asyncio.get_running_loop()
        self._ready.extend(enumerate(deliveries, first))
        self._numbers = numbers
        self._since = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(SECONDS, self._expire)

    def check(self, state: State) -> None:
        """Drop what is no longer out: the consumer was rewound, or another worker has it."""
        if self._ready and asyncio.get_running_loop().time() > self._since + SECONDS:
            self._give_back(self.end())  # the event loop was late
        held = state.held
        if any(not _is_out(held.get(number), delivery) for number, delivery in self._ready):
            self._ready = deque(
                (number, delivery)
                for number, delivery in self._ready
                if _is_out(held.get(number), delivery)
            )

    def take(self, limit: int) -> list[Delivery]:
        """Return up to `limit` of the messages."""
        return [self._ready.popleft()[1] for _ in range(min(limit, len(self._ready)))]

    def receive(self, limit: int, state: State) -> Received | None:
        """Return `limit` messages if there are as many."""
        if len(self._ready) < limit:
            return None
        self.check(state)
        if len(self._ready) < limit:
            return None
        return Received(self.take(limit), *self._numbers)

    def end(self) -> list[Delivery]:
        """Return all, and expect no more receives."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._followed = _DOUBTFUL
        return self.take(len(self._ready))

    def _expire(self) -> None:
        self._timer = None
        if not self._ready:
            return
        loop = asyncio.get_running_loop()
        due = self._since + SECONDS
        if loop.time() < due:
            self._timer = loop.call_at(due, self._expire)
        else:
            self._give_back(self.end())


def _is_out(held: Held | None, delivery: Delivery) -> bool:
    return held is not None and (held[0], held[1]) == delivery.position
