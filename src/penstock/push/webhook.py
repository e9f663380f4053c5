"""One webhook consumer, as one process delivers it.

Messages are received a little ahead of the requests that carry them, acked together, and given back
where they could not be sent. What is held longer than a third of `ack_wait_ms` is extended, so that
a slow endpoint's messages do not go out twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import structlog

from penstock.config.bastion import Bastion
from penstock.config.consumers import WebhookSettings
from penstock.push import retry
from penstock.push.ack_buffer import AckBuffer
from penstock.push.errors import EndpointError
from penstock.push.http import Endpoint, EndpointAnswer
from penstock.push.paths import path_of
from penstock.push.quoting import Quoting
from penstock.push.signing import Signer, request_id
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.types import Delivery, StoreUnavailable, TooManyWaiting

_WAIT_SECONDS: Final = 30.0
_AHEAD_SECONDS: Final = 0.1  # messages are received at most so long before they are sent
_LOOK_SECONDS: Final = 0.5  # whether the endpoint has become slower
_MOST_RECEIVED: Final = 1_000
_MOST_TOGETHER: Final = 10_000
_PATIENCE: Final = 5  # failures in a row, before the endpoint is asked with one request at a time
_LONGEST_PAUSE: Final = 10.0
_PROBED: Final = 100  # among so many messages the one is chosen that such a request carries
_BATCH_ATTEMPTS: Final = 3  # from then on its messages go one by one
_STOP_SECONDS: Final = 3.0
_LOG_SECONDS: Final = 10.0
_STORE_SECONDS: Final = 1.0

log = structlog.get_logger("penstock")

Chunk = list[Delivery]
"""The messages of one request."""


class Webhook:
    """Delivers a consumer's messages until `stop`, or until the endpoint is gone for good.

    `bastion` gives the one that the endpoint lies behind, if it does.
    """

    def __init__(
        self,
        consumer: Consumer,
        settings: WebhookSettings,
        bastion: Callable[[], Awaitable[Bastion]] | None = None,
    ) -> None:
        self._consumer = consumer
        self._settings = settings
        self._size = settings.batch_size if settings.batch else 1
        via = settings.via
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        self._endpoint = Endpoint(
            settings.url.get_secret_value(), headers, allow_private=settings.allow_private,
            ca=None if via is None else via.ca,
            identity=None if via is None else via.identity, bastion=bastion,
        )  # fmt: skip
        self._quoting = Quoting(settings)
        self._signer = Signer([secret.get_secret_value() for secret in settings.secrets])
        self._acks = AckBuffer(consumer, settings.ack_wait_ms / 1000)
        self._waiting: deque[Chunk] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._free = asyncio.Event()
        self._over = asyncio.Event()
        self._gone: str | None = None
        self._together: dict[tuple[int, int], str] = {}  # batches that failed, by position
        self._sent, self._sent_since, self._pace = 0, time.monotonic(), 0
        self._failures = self._probes = 0
        self._resume_at = 0.0
        self._logged_failing, self._logged_at = False, {False: -_LOG_SECONDS, True: -_LOG_SECONDS}
        self._unlogged = 0

    def stop(self) -> None:
        """Take no more messages, and let `run` end."""
        self._over.set()

    async def run(self) -> None:
        """Deliver; raises `UnknownConsumer` where the consumer was deleted."""
        over = asyncio.create_task(self._over.wait())
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._acks.run())]
        try:
            await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks[0].cancel()
            over.cancel()
            await self._end()
            tasks[1].cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._endpoint.close()
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _end(self) -> None:
        self._give_back(self._waiting)
        self._waiting.clear()
        if self._workers:
            await asyncio.wait(self._workers, timeout=_STOP_SECONDS)
            for worker in self._workers:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)
        if self._gone is not None:
            await self._disable(self._gone)
        await self._acks.finish(_STOP_SECONDS)

    async def _disable(self, reason: str) -> None:
        # Where the store is away for longer, the endpoint answers so again.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                while True:
                    try:
                        await self._consumer.disable(reason)
                    except StoreUnavailable:
                        await asyncio.sleep(_STORE_SECONDS)
                        continue
                    log.error("webhook disabled", consumer=self._consumer.info.name, error=reason)
                    return

    # Receiving

    async def _receive(self) -> None:
        """Keep as much at hand as the endpoint takes, and no more."""
        while True:
            if self._failures >= _PATIENCE:
                await self._probe()
                continue
            ahead = self._ahead()
            while len(self._waiting) > 2 * ahead + self._settings.concurrency:
                self._give_back([self._waiting.pop()])  # the endpoint has become slower
            room = self._settings.concurrency - len(self._workers) + ahead - len(self._waiting)
            if room <= 0 or len(self._waiting) > ahead // 2:
                await self._one_less()
                continue
            chunks = await self._take(room * self._size)
            if self._failures >= _PATIENCE:
                self._give_back(chunks)
                continue
            self._waiting.extend(chunks)
            while self._waiting and len(self._workers) < self._settings.concurrency:
                worker = asyncio.create_task(self._work(self._waiting.popleft()))
                self._workers.add(worker)

    def _ahead(self) -> int:
        """Return how many requests are made in `_AHEAD_SECONDS` at the present pace."""
        elapsed = time.monotonic() - self._sent_since
        if elapsed >= _AHEAD_SECONDS:
            self._pace = int(self._sent * _AHEAD_SECONDS / elapsed)
            self._sent, self._sent_since = 0, time.monotonic()
        return self._pace

    async def _one_less(self) -> None:
        self._free.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS if self._waiting else None):
                await self._free.wait()

    async def _take(self, limit: int) -> list[Chunk]:
        try:
            received = await self._consumer.receive(min(limit, _MOST_RECEIVED), _WAIT_SECONDS)
        except (StoreUnavailable, TooManyWaiting):
            await asyncio.sleep(_STORE_SECONDS)
            return []
        self._acks.hold([delivery.token for delivery in received.deliveries])
        return self._chunks(received.deliveries)

    def _chunks(self, deliveries: Sequence[Delivery]) -> list[Chunk]:
        """Return what goes into a request each: a batch that failed stays as it was at first.

        A request has one path. The messages are of different groups, so any may go before others.
        """
        if self._size == 1:
            return [[delivery] for delivery in deliveries]
        together: dict[str, Chunk] = {}
        others: dict[str, Chunk] = {}
        alone: list[Chunk] = []
        for delivery in sorted(deliveries, key=_position):
            batch = self._together.get(delivery.position)
            if delivery.deliver_count > _BATCH_ATTEMPTS:
                alone.append([delivery])
            elif batch is not None:
                together.setdefault(batch, []).append(delivery)
            else:
                others.setdefault(path_of(delivery.message), []).append(delivery)
        size = self._size
        fresh = [
            chunk[at : at + size] for chunk in others.values() for at in range(0, len(chunk), size)
        ]
        return [*together.values(), *fresh, *alone]

    def _give_back(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._acks.release([delivery.token for delivery in chunk])

    # Sending

    async def _work(self, chunk: Chunk) -> None:
        try:
            await self._deliver(chunk)
            while self._waiting and not self._over.is_set() and self._failures < _PATIENCE:
                await self._deliver(self._waiting.popleft())
        finally:
            self._workers.discard(asyncio.current_task())
            self._free.set()

    async def _probe(self) -> None:
        """Ask an endpoint that keeps failing with one request at a time."""
        self._give_back(self._waiting)
        self._waiting.clear()
        while self._workers:
            await self._one_less()
        if self._failures < _PATIENCE:
            return
        await asyncio.sleep(self._resume_at - time.monotonic())
        chunks = await self._take(max(self._size, _PROBED))
        if not chunks:
            return
        # Any of those that failed least often: else a few messages that the endpoint cannot take,
        # and which come back again and again, would make it look dead to all the others.
        self._probes += 1
        chunk = min(chunks, key=lambda chunk: (_attempt(chunk), random.random()))  # noqa: S311 - no secret
        self._give_back(other for other in chunks if other is not chunk)
        self._workers.add(worker := asyncio.create_task(self._work(chunk)))
        await asyncio.wait([worker])

    def _id(self, chunk: Chunk) -> str:
        positions = [delivery.position for delivery in chunk]
        return request_id(self._consumer.info.id, positions)

    async def _deliver(self, chunk: Chunk) -> None:
        tokens = [delivery.token for delivery in chunk]
        body = chunk[0].message
        path = path_of(body)
        if self._settings.batch:
            body = b'{"data":[%b]}' % b",".join([delivery.message for delivery in chunk])
        try:
            headers = self._signer.headers(self._id(chunk), body)
            timeout = self._settings.timeout_ms / 1000
            answer = await self._endpoint.post(body, headers, timeout, path)
        except EndpointError as error:
            self._failed(chunk, error.code, str(error))
        except asyncio.CancelledError:
            self._acks.release(tokens)
            raise
        except Exception:
            log.exception("webhook request broke off", consumer=self._consumer.info.name)
            self._failed(chunk, "internal", "an error of Penstock's own")
        else:
            if 200 <= answer.status < 300:
                self._acks.ack(tokens)
                self._succeeded(chunk)
            elif answer.status == 410 and not path:
                self._gone = f"{self._endpoint.address} answered 410 Gone"
                self._acks.release(tokens)
                self._over.set()
            else:
                self._answered(chunk, answer)
        self._sent += 1
        if len(self._waiting) <= self._pace // 2:
            self._free.set()

    def _answered(self, chunk: Chunk, answer: EndpointAnswer) -> None:
        what = f"{self._endpoint.address} answered {answer.status}"
        if 300 <= answer.status < 400:
            what += ": redirects are not followed, give the address it leads to"
        elif start := self._quoting.quote(answer.start):
            what += f": {start}"
        retry_after = retry.seconds_of(answer.retry_after)
        self._failed(chunk, f"http_{answer.status}", what, retry_after, status=answer.status)

    def _succeeded(self, chunk: Chunk) -> None:
        if self._together:
            for delivery in chunk:
                self._together.pop(delivery.position, None)
        self._failures = 0
        if self._logged_failing:
            self._logged_failing = False
            log.info("webhook delivers again", consumer=self._consumer.info.name)

    def _failed(
        self,
        chunk: Chunk,
        code: str,
        error: str,
        retry_after: float | None = None,
        *,
        status: int | None = None,
    ) -> None:
        wait = retry.delay(_attempt(chunk), retry_after)
        self._acks.nack([delivery.token for delivery in chunk], wait, error, status)
        if len(chunk) > 1:
            if len(self._together) > _MOST_TOGETHER:
                self._together.clear()  # other processes got what was to come back here
            self._together.update(dict.fromkeys(map(_position, chunk), self._id(chunk)))
        self._failures += 1
        if self._failures == _PATIENCE:
            self._probes = 0
        pause = min(retry.delay(self._probes + 1), _LONGEST_PAUSE)
        asked = min(retry_after or 0.0, retry.MOST)
        self._resume_at = time.monotonic() + max(pause, asked)
        self._log(code, error)

    def _log(self, code: str, error: str) -> None:
        self._unlogged += 1
        failing = self._failures >= _PATIENCE
        now = time.monotonic()
        if now - self._logged_at[failing] < _LOG_SECONDS:
            return
        self._logged_failing |= failing
        log.warning(
            "webhook keeps failing" if failing else "webhook failed",
            consumer=self._consumer.info.name, code=code, error=error, failures=self._unlogged,
        )  # fmt: skip
        self._unlogged, self._logged_at[failing] = 0, now


def _attempt(chunk: Chunk) -> int:
    return max(delivery.deliver_count for delivery in chunk)


def _position(delivery: Delivery) -> tuple[int, int]:
    return delivery.position
