"""Pulls the messages of an inbox's consumer from JetStream.

A request stays open at the server until it is used up or has expired, so that messages arrive as they
are stored and nothing polls. Errors are `SinkError`s, with the codes of a NATS sink.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.config.nats import NatsServer, NatsSinkConfig
from penstock.core.errors import SinkError
from penstock.outbox.inbox.consumer import API_SECONDS, DurableConsumer
from penstock.outbox.inbox.redelivery import Redelivery
from penstock.outbox.inbox.settings import InboxSettings
from penstock.sinks.nats.client import connect_first
from penstock.sinks.nats.login import tls_context

log = structlog.get_logger("penstock")

_EXPIRES_SECONDS: Final = 30.0
_HEARTBEAT_SECONDS: Final = 5.0
_REQUEST_BATCHES: Final = 4
"""How many batches one request is for, so that messages arrive while a batch is written."""
_REQUEST_BYTES: Final = 80 << 20
"""The largest answer to a request: more than the largest message, less than the client drops."""
_REDELIVERY_POLL_SECONDS: Final = 0.5
_USED_UP: Final = ("batch completed", "message size exceeds maxbytes")


class Puller:
    """Pulls the messages of one consumer; made by `open_puller`, used in one event loop."""

    def __init__(self, client: Client, server: NatsServer, settings: InboxSettings) -> None:
        self.over = asyncio.Event()
        self._client = client
        self._consumer = DurableConsumer(client, server, settings)
        self._settings = settings
        self._inbox = f"_INBOX.{secrets.token_hex(12)}"
        self._subscription: Subscription | None = None
        self._redelivery: Redelivery | None = None
        self._ready: deque[Msg] = deque()
        self._due = 0
        self._request = 0
        self._expires = 0.0

    @property
    def stream(self) -> str:
        """The stream that it reads."""
        return self._consumer.stream

    async def note(self, error: Exception) -> None:
        """Take an error that the client reports beside its calls' results."""
        await self._consumer.note(error)

    async def ended(self) -> None:
        """Take the end of the connection."""
        self.over.set()

    async def open(self) -> None:
        """Prepare the consumer and subscribe; raises `SinkError`."""
        self._redelivery = await self._consumer.open()
        self._subscription = await self._client.subscribe(f"{self._inbox}.*")

    async def pull(self, timeout: float) -> list[Msg]:
        """Return the messages that have arrived, at most a batch; none after `timeout` seconds.

        They are in the stream's order, except those that were redelivered too late.
        Raises `SinkError` where the connection or the consumer is gone.
        """
        if self._redelivery is not None:
            await self._check_redelivery(self._redelivery)
        if self._redelivery is not None:
            timeout = min(timeout, _REDELIVERY_POLL_SECONDS)
        until = time.monotonic() + timeout
        found: list[Msg] = []
        while len(found) < self._settings.batch_size:
            if self._ready:
                found.append(self._ready.popleft())
                continue
            await self._request_more()
            message = await self._next(0 if found else until - time.monotonic())
            if message is None:
                break
            if message.subject.startswith(self._inbox):
                self._status(message)
                continue
            self._due -= 1
            if self._redelivery is None:
                found.append(message)
                continue
            self._redelivery.add(message)
            if self._redelivery.complete:
                self._release(self._redelivery)
        return found

    async def _check_redelivery(self, redelivery: Redelivery) -> None:
        """Release the buffer where no other message will be redelivered."""
        if redelivery.is_all(await self._consumer.unacked()):
            self._release(redelivery)
        elif redelivery.late:
            log.warning(
                "unacked messages are not redelivered; reading goes on without them",
                stream=self.stream, durable=self._settings.durable,
            )  # fmt: skip
            self._release(redelivery)

    def _release(self, redelivery: Redelivery) -> None:
        self._ready.extend(redelivery.messages())
        self._redelivery = None

    async def ack(self, messages: list[Msg]) -> None:
        """Ack messages; one whose ack is lost is redelivered."""
        try:
            for message in messages:
                await message.ack()
            await self._client.flush(int(API_SECONDS))
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise self._consumer.lost(str(error)) from None

    async def close(self, unwritten: Sequence[Msg] = ()) -> None:
        """Close the connection; have `unwritten` and unread messages redelivered at once."""
        back = [*unwritten, *self._ready]
        if self._redelivery is not None:
            back += self._redelivery.messages()
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            if self._subscription is not None:
                while self._subscription.pending_msgs:
                    message = await self._subscription.next_msg(0.1)
                    if not message.subject.startswith(self._inbox):
                        back.append(message)
                # First: the request that is still open here would get them.
                await self._subscription.unsubscribe()
            for message in back:
                await message.nak()
            if back:
                await self._client.flush(1)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._client.close(), API_SECONDS)

    async def _request_more(self) -> None:
        if self._due > 0 and time.monotonic() < self._expires:
            return
        self._due, self._request = self._settings.batch_size * _REQUEST_BATCHES, self._request + 1
        # The server's message about the end may arrive late, or never.
        self._expires = time.monotonic() + _EXPIRES_SECONDS + _HEARTBEAT_SECONDS
        request = {
            "batch": self._due, "max_bytes": _REQUEST_BYTES,
            "expires": int(_EXPIRES_SECONDS * 1e9), "idle_heartbeat": int(_HEARTBEAT_SECONDS * 1e9),
        }  # fmt: skip
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self._settings.durable}"
        try:
            await self._client.publish(
                subject, json.dumps(request).encode(), reply=f"{self._inbox}.{self._request}"
            )
        except (nats.errors.Error, OSError) as error:
            raise self._consumer.lost(str(error)) from None

    async def _next(self, timeout: float) -> Msg | None:
        subscription = self._subscription
        assert subscription is not None  # noqa: S101 - `open` comes first
        try:
            if subscription.pending_msgs:
                return await subscription.next_msg(API_SECONDS)
            if timeout <= 0:
                return None
            limit = min(timeout, 3 * _HEARTBEAT_SECONDS)
            coming = asyncio.ensure_future(subscription.next_msg(limit))
            over = asyncio.ensure_future(self.over.wait())
            await asyncio.wait({coming, over}, return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming})
                if coming.cancelled() or coming.exception() is not None:
                    return None
            return coming.result()
        except TimeoutError:
            if self._consumer.denied:
                raise self._consumer.not_permitted() from None
            if timeout > 3 * _HEARTBEAT_SECONDS:
                raise self._consumer.lost("no heartbeat") from None
            return None
        except (nats.errors.Error, OSError) as error:
            raise self._consumer.lost(str(error)) from None

    def _status(self, message: Msg) -> None:
        """Handle the server's status of a request, of an earlier one too."""
        headers = message.headers or {}
        status, text = headers.get("Status", ""), headers.get("Description", "")
        if status in ("404", "408") or text.lower().startswith(_USED_UP):
            if message.subject == f"{self._inbox}.{self._request}":
                self._due = 0
        elif status == "503" or (status == "409" and "deleted" in text.lower()):
            raise SinkError(
                "consumer_gone",
                f"The consumer {self._settings.durable!r} of stream {self.stream!r} is gone.",
                remedy="It is made again; messages that the inbox still has are not added again.",
            )
        elif status == "409" and "exceeded" in text.lower():
            # A limit of a consumer that the user has made.
            raise self._consumer.refused(409, text)
        elif status == "409":
            raise self._consumer.lost(text)


async def open_puller(settings: InboxSettings, name: str) -> Puller:
    """Connect to the first server that takes the login; `name` is shown there.

    Raises `SinkError`.
    """
    server, tls = await asyncio.to_thread(_choose, settings.nats, name)
    client = Client()
    puller = Puller(client, server, settings)
    config = settings.nats
    options: dict[str, Any] = {}
    if server.user is not None:
        options |= {"user": server.user, "password": server.password}
    elif server.token is not None:
        options["token"] = server.token
    elif config.user is not None and config.password is not None:
        options |= {"user": config.user, "password": config.password.get_secret_value()}
    elif config.token is not None:
        options["token"] = config.token.get_secret_value()
    elif config.credentials_file is not None:
        options["user_credentials"] = str(config.credentials_file.expanduser())
    elif (seed := config.seed()) is not None:
        options["nkeys_seed_str"] = seed.decode()
    if tls:
        options["tls"] = tls_context(config)
    try:
        await client.connect(
            str(server), name=name, allow_reconnect=False, connect_timeout=5,
            ping_interval=5, max_outstanding_pings=2,
            error_cb=puller.note, closed_cb=puller.ended, disconnected_cb=puller.ended, **options,
        )  # fmt: skip
        await puller.open()
    except SinkError:
        await puller.close()
        raise
    except (nats.errors.Error, OSError, TimeoutError) as error:
        await puller.close()
        raise SinkError("connection_lost", f"Cannot connect to {server}: {error}.") from None
    return puller


def _choose(config: NatsSinkConfig, name: str) -> tuple[NatsServer, bool]:
    """Return a server that takes the login, and whether by TLS; raises `SinkError`."""
    connection = connect_first(config, name)
    connection.close()
    server = connection.server
    return server, server.tls or config.wants_tls or bool(connection.info.get("tls_required"))
