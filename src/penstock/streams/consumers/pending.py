"""How many messages wait for a consumer: counted once, then followed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from penstock.streams.consumers.entry import StreamPosition
from penstock.streams.consumers.reader import ConsumerReader
from penstock.streams.consumers.state import State
from penstock.streams.consumers.types import StoreUnavailable

_FEW: Final = 1_000
_AT_ONCE: Final = 20_000
_CHUNK: Final = 200_000
_SECONDS: Final = 1.0


class Pending:
    """The number of messages that were never handed out.

    It is exact near the head. Farther behind, new messages are counted once a second, and a long
    stretch (of a new consumer of an old stream) beside the work, so that the number grows at first.
    """

    def __init__(self, reader: ConsumerReader) -> None:
        self._reader = reader
        self._counted = 0  # between the cursor, when `passed` was so much, and `to`
        self._passed = 0
        self._to: StreamPosition = (-1, -1)
        self._epoch = 0
        self._at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def number(self, state: State) -> int:
        """Return how many wait."""
        waiting = state.pending + len(state.replays)
        rows = self._reader.ahead.rows
        if self._reader.ahead.at_head and len(rows) <= _FEW:
            return waiting + sum(row[4] is not None for row in rows)
        if self._epoch != state.epoch or self._to < state.cursor:
            self._epoch, self._to = state.epoch, state.cursor
            self._counted, self._passed = 0, state.passed
        busy = self._task is not None and not self._task.done()
        if (
            not busy
            and self._to < self._reader.view.head
            and time.monotonic() - self._at >= _SECONDS
        ):
            self._at = time.monotonic()
            with contextlib.suppress(StoreUnavailable):  # another look a second later
                if await self._count(_AT_ONCE):
                    self._task = asyncio.create_task(self._count_on())
        return waiting + max(self._counted - (state.passed - self._passed), 0)

    async def _count(self, limit: int) -> bool:
        """Count on; return whether there is more."""
        to, epoch = self._to, self._epoch
        counted, end = await self._reader.count(to, limit)
        if (to, epoch) != (self._to, self._epoch):
            return False
        self._counted += counted
        self._to = end
        return end < self._reader.view.head

    async def _count_on(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            while await self._count(_CHUNK):
                pass

    def close(self) -> None:
        """Stop counting."""
        if self._task is not None:
            self._task.cancel()
