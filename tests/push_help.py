"""An HTTP endpoint for webhooks that behaves as a test wants, and consumers in memory."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import orjson

from penstock.config.consumers import WebhookSettings
from penstock.core.message import Position
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.types import (
    ConsumerInfo,
    Delivery,
    Outcome,
    Received,
    StoreUnavailable,
    UnknownConsumer,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HANG = b""
"""The endpoint reads the request and says nothing."""


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

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait until something that the requests or connections change is so."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(condition)

    async def got(self, count: int, seconds: float = 20.0) -> list[Request]:
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
                    said = self.behaviour(request)
                    await self._tell()
                    if self.pause:
                        await asyncio.sleep(self.pause)
                finally:
                    self._at_once -= 1
                if said is None:
                    return
                writer.write(said)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            del self._writers[writer]
            writer.close()
            await self._tell()

    async def _tell(self) -> None:
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
class _Message:
    position: Position
    group: Any
    body: bytes
    deliver_count: int = 0
    token: str | None = None
    ready_at: float = 0.0
    acked: bool = False


class MemoryConsumer:
    """A consumer in memory: order by group, leases, nack with delay; `away` makes the store fail."""

    def __init__(self, name: str, of: WebhookSettings, number: int = 7) -> None:
        self.info = ConsumerInfo(number, name, "s", "webhook", False, of, None, datetime.now(UTC))
        self.log: list[_Message] = []
        self.away = False
        self.gone = False
        self.disabled: str | None = None
        self.nacks: list[tuple[Any, float]] = []
        self.failures: list[tuple[int | None, str | None]] = []
        self.extended = 0
        self.received: list[int] = []
        self._tokens = itertools.count(1)
        self._changed = asyncio.Condition()
        self._ack_wait = of.ack_wait_ms / 1000

    @property
    def whole(self) -> Consumer:
        """Itself, for those who need but what it has."""
        return cast(Consumer, self)

    async def publish(
        self,
        keys: Iterable[Any],
        group: Callable[[Any], Any] = lambda k: k,
        route: Callable[[Any], str | None] = lambda _: None,
    ) -> None:
        for key in keys:
            metadata = {} if route(key) is None else {"route": route(key)}
            body = orjson.dumps({"record": {"id": key}, "metadata": metadata})
            place = Position(1000, len(self.log))
            self.log.append(_Message(place, group(key), body))
        await self._tell()

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(condition)

    async def all_acked(self, seconds: float = 20.0) -> None:
        await self.until(lambda: all(message.acked for message in self.log), seconds)

    def held(self) -> list[_Message]:
        now = time.monotonic()
        return [m for m in self.log if m.token and not m.acked and m.ready_at > now]

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _check(self) -> None:
        if self.gone:
            raise UnknownConsumer("gone")
        if self.away:
            raise StoreUnavailable("away")

    async def receive(self, limit: int, wait: float) -> Received:
        self._check()
        deadline = time.monotonic() + wait
        while not (taken := self._take(limit)):
            now = time.monotonic()
            due = [m.ready_at for m in self.log if not m.acked and m.ready_at > now]
            left = min([deadline, *due]) - now
            if deadline <= now:
                break
            try:
                async with asyncio.timeout(left), self._changed:
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._check()
        self.received.append(len(taken))
        return Received(taken, 0, 0)

    def _take(self, limit: int) -> list[Delivery]:
        busy: set[Any] = set()
        taken: list[Delivery] = []
        now = time.monotonic()
        for message in self.log:
            if len(taken) == limit:
                break
            if message.acked or message.group in busy:
                continue
            busy.add(message.group)
            if message.ready_at <= now:
                message.token = str(next(self._tokens))
                message.deliver_count += 1
                message.ready_at = now + self._ack_wait
                count, body = message.deliver_count, message.body
                taken.append(Delivery(message.token, count, body, message.position))
        return taken

    def _held(self, tokens: Sequence[str]) -> list[_Message]:
        self._check()
        return [m for m in self.log if m.token in tokens and not m.acked]

    def _outcome(self, tokens: Sequence[str], done: list[_Message]) -> Outcome:
        known = {m.token for m in self.log}
        return Outcome(len(done), [(token, "expired") for token in tokens if token not in known])

    async def ack(self, tokens: Sequence[str]) -> Outcome:
        found = self._held(tokens)
        for message in found:
            message.acked = True
        await self._tell()
        return self._outcome(tokens, found)

    async def nack(
        self, tokens: Sequence[str], delay: float, *, reason: str, status: int | None
    ) -> Outcome:
        found = self._held(tokens)
        self.failures.append((status, reason))
        for message in found:
            message.ready_at = time.monotonic() + delay
            self.nacks.append((orjson.loads(message.body)["record"]["id"], delay))
        await self._tell()
        return self._outcome(tokens, found)

    async def extend(self, tokens: Sequence[str], seconds: float | None = None) -> Outcome:
        found = self._held(tokens)
        for message in found:
            message.ready_at = time.monotonic() + (seconds or self._ack_wait)
        self.extended += len(found)
        return self._outcome(tokens, found)

    async def release(self, tokens: Sequence[str]) -> Outcome:
        found = self._held(tokens)
        for message in found:
            message.ready_at = 0.0
            message.deliver_count -= 1
        await self._tell()
        return self._outcome(tokens, found)

    async def disable(self, reason: str) -> None:
        self._check()
        self.disabled = reason
        await self._tell()


class MemoryConsumers:
    """Consumers in memory, for `Pusher`."""

    def __init__(self, *consumers: MemoryConsumer) -> None:
        self.consumers = {consumer.info.name: consumer for consumer in consumers}
        self.away = False
        self.changed: Callable[[], None] = lambda: None

    async def get(self, name: str) -> Consumer:
        if name not in self.consumers:
            raise UnknownConsumer(name)
        return self.consumers[name].whole

    async def list(self) -> list[ConsumerInfo]:
        if self.away:
            raise StoreUnavailable("away")
        return [
            ConsumerInfo(
                **{name: getattr(c.info, name) for name in ConsumerInfo.__slots__}
                | {"disabled": c.disabled}
            )
            for c in self.consumers.values()
        ]

    def on_change(self, callback: Callable[[], None]) -> None:
        self.changed = callback
