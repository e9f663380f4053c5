"""The receives that wait for messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.streams.consumers.types import Delivery, Received


@dataclass(slots=True, eq=False)
class Waiter:
    """A receive; it waits until `deadline` of the event loop's time."""

    limit: int
    deadline: float
    done: asyncio.Future[Received]
    waits: bool = False  # a step had nothing for it


class Waiters:
    """The receives of a consumer, the first one first."""

    def __init__(self) -> None:
        self._waiters: deque[Waiter] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiters)

    @property
    def some_new(self) -> bool:
        """Whether there is one that no step has served yet."""
        return any(not waiter.waits for waiter in self._waiters)

    def add(self, limit: int, wait: float) -> Waiter:
        """Add a receive of up to `limit` messages that waits `wait` seconds."""
        loop = asyncio.get_running_loop()
        waiter = Waiter(limit, loop.time() + wait, loop.create_future())
        self._waiters.append(waiter)
        return waiter

    def open(self) -> list[Waiter]:
        """Return those that are not answered."""
        return [waiter for waiter in self._waiters if not waiter.done.done()]

    def answer(
        self,
        waiting: Sequence[Waiter],
        deliveries: Sequence[Delivery],
        numbers: tuple[int, int],
        now: float,
    ) -> list[Delivery]:
        """Give deliveries to the receives in `waiting`, and end those whose time is up.

        Args:
            waiting: The receives that the step was taken for.
            deliveries: What it hands out, up to the sum of their limits.
            numbers: How many messages were never handed out, and how many are not acked.
            now: The event loop's time.

        Returns:
            The deliveries whose clients went away meanwhile.
        """
        at = 0
        unclaimed: list[Delivery] = []
        for waiter in waiting:
            mine = list(deliveries[at : at + waiter.limit])
            if not mine and waiter.deadline > now and not waiter.done.done():
                waiter.waits = True
                continue
            at += len(mine)
            if waiter.done.done():
                unclaimed += mine
            else:
                waiter.done.set_result(Received(mine, *numbers))
        self._waiters = deque(self.open())
        return unclaimed

    def end(self) -> list[Waiter]:
        """Forget all; return them."""
        waiters, self._waiters = list(self._waiters), deque()
        return waiters
