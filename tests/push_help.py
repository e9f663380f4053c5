"""An HTTP endpoint for webhooks that behaves as a test wants, and consumers in memory."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, cast

import orjson

from penstock.config.consumers import WebhookSettings
from penstock.streams.consumers.ack_tokens import read_tokens
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.decide import Step
from penstock.streams.consumers.state import START
from penstock.streams.consumers.types import (
    ConsumerInfo,
    ConsumerMessage,
    Outcome,
    Received,
    StoreUnavailable,
    UnknownConsumer,
)
from penstock.testing import Clock, InMemoryConsumer, InMemoryStream, StreamRow

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HANG = b""
"""The endpoint reads the request and never answers."""


def answer(status: int, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"HTTP/1.1 {status} Some Reason", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@dataclass
class Request:
    """What the endpoint got, on which of its connections, and when."""

    target: str
    headers: dict[str, str]
    body: bytes
    connection: int
    at: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def records(self) -> list[Any]:
        """The records of the messages, of a batch or alone."""
        content = orjson.loads(self.body)
        messages = content.get("data", [content])
        return [message["record"]["id"] for message in messages]


Behaviour = Callable[[Request], bytes | None]
"""Returns the answer's bytes, `HANG`, or None to close the connection without a word."""


class Receiver:
    """A webhook's endpoint on loopback."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[Request] = []
        self.most_at_once = 0
        self.open = 0
        self.port = 0
        self.pause = 0.0
        self._at_once = 0
        self._connections = itertools.count()
        self._writers: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._changed = asyncio.Condition()
        self._released = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until something that the requests or connections change is so."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(condition)

    async def got(self, count: int, seconds: float = 60.0) -> list[Request]:
        await self.until(lambda: len(self.requests) >= count, seconds)
        return self.requests

    def delivered(self) -> list[Any]:
        """The records of all requests, repeats included."""
        return [record for request in self.requests for record in request.records]

    def drop_connections(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def end(self) -> None:
        self.drop_connections()
        await asyncio.gather(*(task for task in self._writers.values() if task))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(self._connections)
        self._writers[writer] = asyncio.current_task()
        self.open += 1
        try:
            while (request := await _read(reader, number)) is not None:
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                try:
                    self.requests.append(request)
                    reply = self.behaviour(request)
                    await self._notify_changed()
                    if self.pause:
                        await asyncio.sleep(self.pause)
                finally:
                    self._at_once -= 1
                if reply is None:
                    return
                writer.write(reply)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            del self._writers[writer]
            writer.close()
            await self._notify_changed()

    async def _notify_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _read(reader: asyncio.StreamReader, number: int) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return Request(first.split(" ")[1], headers, body, number)


@asynccontextmanager
async def receiver(
    behaviour: Behaviour = lambda _: OK, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    endpoint = Receiver(behaviour)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0, ssl=tls)
    endpoint.port = server.sockets[0].getsockname()[1]
    try:
        yield endpoint
    finally:
        server.close()
        await endpoint.end()


def settings(url: str, **others: Any) -> WebhookSettings:
    return WebhookSettings.model_validate({"url": url, "allow_private": True, **others})


@dataclass
class Published:
    """A message of the stream, and how far the consumer is with it."""

    body: bytes
    deliver_count: int = 0
    acked: bool = False


class MemoryConsumer(InMemoryConsumer):
    """A consumer in memory that counts what is asked of it; `away` makes the store fail."""

    def __init__(self, name: str, of: WebhookSettings, number: int = 7) -> None:
        clock = Clock(datetime.now(UTC), running=True)
        info = ConsumerInfo(
            number, name, "s", "webhook", False, of, None, clock.now, uuid=f"uuid-{number}"
        )  # fmt: skip
        super().__init__(info, InMemoryStream(1, "s", "changes", "shop", clock.now), clock, START)
        self.clock = clock
        self.away = False
        self.gone = False
        self._published: dict[tuple[int, int], Published] = {}
        self.nacks: list[tuple[Any, float]] = []
        self.failures: list[tuple[int | None, str | None]] = []
        self.extended = 0
        self.asked: set[str] = set()  # tokens of acks, also of those that the store did not take
        self.received: list[int] = []

    @property
    def whole(self) -> Consumer:
        """Itself, where the type of the real one is expected."""
        return cast(Consumer, self)

    async def publish(
        self,
        keys: Iterable[Any],
        group: Callable[[Any], Any] = lambda k: k,
        route: Callable[[Any], str | None] = lambda _: None,
    ) -> None:
        lsn, idx = max(self.stream.head, (1000, 0))
        for number, key in enumerate(keys, 1):
            metadata = {"table_name": "items"}
            if (to := route(key)) is not None:
                metadata["route"] = to
            body = orjson.dumps({"record": {"id": key}, "metadata": metadata})
            row = (lsn, idx + number, hash(group(key)), None, None, "public", "items", "insert")
            self.stream.add([StreamRow(*row, body)])
            self._published[row[:2]] = Published(self._with_consumer(body))
        self.clock.notify()

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await self.clock.wait()

    async def all_acked(self, seconds: float = 60.0) -> None:
        await self.until(lambda: all(message.acked for message in self.log), seconds)

    @property
    def log(self) -> list[Published]:
        """All messages, in their order."""
        return list(self._published.values())

    @property
    def disabled(self) -> str | None:
        return self.info.disabled

    @disabled.setter
    def disabled(self, reason: str | None) -> None:
        self.change(replace(self.info, disabled=reason))

    def held(self) -> list[ConsumerMessage]:
        return [each for each in self.left() if each.until is not None]

    def _begin(self) -> Step:
        self._check()
        return super()._begin()

    def _check(self) -> None:
        if self.gone:
            raise UnknownConsumer("gone")
        if self.away:
            raise StoreUnavailable("away")

    async def receive(self, limit: int, wait: float = 0.0) -> Received:
        received = await super().receive(limit, wait)
        self.received.append(len(received.deliveries))
        for delivery in received.deliveries:
            self._published[delivery.position].deliver_count = delivery.deliver_count
        return received

    def _taken(self, tokens: Sequence[str], outcome: Outcome) -> list[Published]:
        refused = {token for token, _ in outcome.refused}
        refs = read_tokens(self.info.id, [token for token in tokens if token not in refused])
        return [self._published[ref[:2]] for ref in refs if ref is not None]

    async def ack(self, tokens: Sequence[str], *, followed: bool = False) -> Outcome:
        self.asked.update(tokens)
        outcome = await super().ack(tokens, followed=followed)
        for message in self._taken(tokens, outcome):
            message.acked = True
        return outcome

    async def nack(
        self,
        tokens: Sequence[str],
        delay: float = 0.0,
        *,
        reason: str | None = None,
        status: int | None = None,
    ) -> Outcome:
        outcome = await super().nack(tokens, delay, reason=reason, status=status)
        self.failures.append((status, reason))
        for message in self._taken(tokens, outcome):
            self.nacks.append((orjson.loads(message.body)["record"]["id"], delay))
        return outcome

    async def extend(self, tokens: Sequence[str], seconds: float | None = None) -> Outcome:
        outcome = await super().extend(tokens, seconds)
        self.extended += outcome.done
        return outcome

    async def release(self, tokens: Sequence[str]) -> Outcome:
        outcome = await super().release(tokens)
        for message in self._taken(tokens, outcome):
            message.deliver_count -= 1
        return outcome

    async def disable(self, reason: str) -> None:
        self._check()
        await super().disable(reason)


class MemoryConsumers:
    """Consumers in memory, for `Pusher`."""

    def __init__(self, *consumers: MemoryConsumer) -> None:
        self.consumers = {consumer.info.name: consumer for consumer in consumers}
        self.away = False
        self.changed: Callable[[], None] = lambda: None
        self._read = asyncio.Event()

    async def announce(self) -> None:
        """Announce a change, and wait until the list has been read."""
        self._read.clear()
        self.changed()
        await asyncio.wait_for(self._read.wait(), 60)

    async def get(self, name: str) -> Consumer:
        if name not in self.consumers:
            raise UnknownConsumer(name)
        return self.consumers[name].whole

    async def list(self) -> list[ConsumerInfo]:
        if self.away:
            raise StoreUnavailable("away")
        self._read.set()
        return [consumer.info for consumer in self.consumers.values()]

    def on_change(self, callback: Callable[[], None]) -> None:
        self.changed = callback
