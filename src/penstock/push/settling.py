"""What became of deliveries, told to the consumer: many at once, and again while the store is away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import structlog

from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.types import ConsumerError, Outcome, StoreUnavailable

_SHORTEST_EXTENSION: Final = 0.02
_BACKOFF_SECONDS: Final = (0.1, 5.0)

log = structlog.get_logger("penstock")


class Settling:
    """Deliveries of `consumer` that are held, for `ack_wait` seconds each time, until settled."""

    def __init__(self, consumer: Consumer, ack_wait: float) -> None:
        self._consumer = consumer
        self._period = max(ack_wait / 3, _SHORTEST_EXTENSION)
        self._held: dict[str, float] = {}
        self._acks: list[str] = []
        self._nacks: list[tuple[Sequence[str], float, str, int | None]] = []
        self._releases: list[str] = []
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    def hold(self, tokens: Sequence[str]) -> None:
        """Extend deliveries from now on, until they are settled."""
        self._held.update(dict.fromkeys(tokens, time.monotonic()))

    def ack(self, tokens: Sequence[str]) -> None:
        """Settle deliveries as done."""
        self._acks += tokens
        self._wake.set()

    def nack(
        self, tokens: Sequence[str], delay: float, reason: str, status: int | None = None
    ) -> None:
        """Settle deliveries as failed, to be made again in `delay` seconds."""
        self._nacks.append((tokens, delay, reason, status))
        self._wake.set()

    def release(self, tokens: Sequence[str]) -> None:
        """Settle deliveries as not made."""
        self._releases += tokens
        self._wake.set()

    async def run(self) -> None:
        """Settle and extend until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._extend())
            while True:
                await self._wake.wait()
                await self._settle()

    async def finish(self, seconds: float) -> None:
        """Settle what is left; what the store does not take in time comes back by itself."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._settle()

    async def _settle(self) -> None:
        wait, longest = _BACKOFF_SECONDS
        async with self._writing:
            while self._acks or self._nacks or self._releases:
                if await self._settle_once():
                    wait = _BACKOFF_SECONDS[0]
                else:
                    await asyncio.sleep(wait)
                    wait = min(wait * 2, longest)
            self._wake.clear()

    async def _settle_once(self) -> bool:
        """Tell the consumer all there is; return whether the store was there."""
        acks, nacks, releases = self._acks, self._nacks, self._releases
        self._acks, self._nacks, self._releases = [], [], []
        told: list[tuple[Sequence[str], Coroutine[Any, Any, Outcome], Callable[[], None]]] = [
            (
                tokens,
                self._consumer.nack(tokens, delay, reason=reason, status=status),
                partial(self.nack, tokens, delay, reason, status),
            )
            for tokens, delay, reason, status in nacks
        ]
        if acks:
            told.append((acks, self._consumer.ack(acks), partial(self.ack, acks)))
        if releases:
            told.append(
                (releases, self._consumer.release(releases), partial(self.release, releases))
            )
        outcomes = await asyncio.gather(*(call for _, call, _ in told), return_exceptions=True)
        there, refused = True, 0
        for (tokens, _, again), outcome in zip(told, outcomes, strict=True):
            if isinstance(outcome, StoreUnavailable):
                there = False
                again()
                continue
            for token in tokens:
                self._held.pop(token, None)
            if isinstance(outcome, Outcome):
                refused += len(outcome.refused)
            elif not isinstance(outcome, ConsumerError):
                raise outcome
        if refused:
            log.warning(
                "deliveries had expired, other workers have their messages",
                consumer=self._consumer.info.name, messages=refused,
            )  # fmt: skip
        return there

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            now = time.monotonic()
            old = [token for token, since in self._held.items() if now - since >= self._period]
            if old:
                # A store that is away is waited for by those who settle.
                with contextlib.suppress(ConsumerError):
                    await self._consumer.extend(old)
