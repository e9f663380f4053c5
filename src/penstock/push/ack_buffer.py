"""Acks, nacks and releases of deliveries: many in one call, and again while the store is away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import structlog

from penstock.core.backoff import Backoff
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.types import ConsumerError, Outcome, StoreUnavailable

_SHORTEST_EXTENSION: Final = 0.02
_BACKOFF_SECONDS: Final = (0.1, 5.0)

log = structlog.get_logger("penstock")


class AckBuffer:
    """Acks of a consumer's deliveries; extends the deliveries that wait for theirs.

    `ack_wait` is how long an extension lasts, in seconds.
    """

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
        """Extend deliveries from now on, until they are acked, nacked or released."""
        self._held.update(dict.fromkeys(tokens, time.monotonic()))

    def ack(self, tokens: Sequence[str]) -> None:
        """Ack deliveries."""
        self._acks += tokens
        self._wake.set()

    def nack(
        self, tokens: Sequence[str], delay: float, reason: str, status: int | None = None
    ) -> None:
        """Nack deliveries: they come again in `delay` seconds."""
        self._nacks.append((tokens, delay, reason, status))
        self._wake.set()

    def release(self, tokens: Sequence[str]) -> None:
        """Release deliveries, which were not made."""
        self._releases += tokens
        self._wake.set()

    async def run(self) -> None:
        """Flush and extend until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._extend())
            while True:
                await self._wake.wait()
                await self._flush()

    async def finish(self, seconds: float) -> None:
        """Flush within `seconds`; what the store does not take by then is delivered again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._flush()

    async def _flush(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS)
        async with self._writing:
            while self._acks or self._nacks or self._releases:
                if await self._flush_once():
                    backoff.reset()
                else:
                    await asyncio.sleep(backoff.after_failure())
            self._wake.clear()

    async def _flush_once(self) -> bool:
        """Flush all that waits; return whether the store was there."""
        acks, nacks, releases = self._acks, self._nacks, self._releases
        self._acks, self._nacks, self._releases = [], [], []
        calls: list[tuple[Sequence[str], Coroutine[Any, Any, Outcome], Callable[[], None]]] = [
            (
                tokens,
                self._consumer.nack(tokens, delay, reason=reason, status=status),
                partial(self.nack, tokens, delay, reason, status),
            )
            for tokens, delay, reason, status in nacks
        ]
        if acks:
            calls.append((acks, self._consumer.ack(acks), partial(self.ack, acks)))
        if releases:
            calls.append(
                (releases, self._consumer.release(releases), partial(self.release, releases))
            )
        outcomes = await asyncio.gather(*(call for _, call, _ in calls), return_exceptions=True)
        there, refused = True, 0
        for (tokens, _, again), outcome in zip(calls, outcomes, strict=True):
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
                # `_flush` waits for a store that is away.
                with contextlib.suppress(ConsumerError):
                    await self._consumer.extend(old)
