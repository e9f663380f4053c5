"""The JetStream side of an inbox: its settings, its durable pull consumer, and its messages.

A request stays open at the server until it is used up or over, so that messages come as they are
stored and nothing polls. What can be wrong is a `SinkError`, in the words of the outbox's sink.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from penstock.config.nats import NatsSinkConfig, Server, tls_context
from penstock.core.errors import PipelineError, SinkError
from penstock.core.subject import overlaps
from penstock.core.text import dotted
from penstock.outbox.inbox.order import Unsettled
from penstock.outbox.secrets import UnresolvedError, resolve
from penstock.outbox.settings import read, without_nulls
from penstock.sinks.nats.check import jetstream_not_enabled
from penstock.sinks.nats.client import connect_first
from penstock.sinks.nats.leader import NOT_ENABLED, UNAVAILABLE, no_quorum

log = structlog.get_logger("penstock")

T = TypeVar("T")
_API_SECONDS: Final = 5.0
_EXPIRES_SECONDS: Final = 30.0
_HEARTBEAT_SECONDS: Final = 5.0
_REQUEST_BATCHES: Final = 4
"""How many batches a request asks for, so that they come while one is written."""
_REQUEST_BYTES: Final = 80 << 20
"""What a request is given at most: more than the largest message, less than the client would drop."""
_ACK_SECONDS: Final = 5.0
"""How long a consumer that is made here waits for acks, and a session for those of one that is gone."""
_UNSETTLED_SECONDS: Final = 120.0
_SETTLE_SECONDS: Final = 0.5
_USED_UP: Final = ("batch completed", "message size exceeds maxbytes")
_DENIED: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.I)


@dataclass(frozen=True)
class InboxSettings:
    """What a pipeline of direction `in` reads, with its references resolved."""

    nats: NatsSinkConfig
    stream: str | None
    subject: str | None
    durable: str
    batch_size: int
    from_end: bool


def read_settings(
    config: Mapping[str, Any], durable: str, environ: Mapping[str, str]
) -> InboxSettings:
    """Return the settings of a config as `tide.relay_set_inbox` took it; raises `PipelineError`.

    `durable` is the consumer's name where the config has none; `environ` gives `${env:NAME}`.
    """
    own = ("source_type", "subject", "durable")
    config = without_nulls(config)
    given = {key: value for key, value in config.items() if key not in own}
    try:
        shared = read({"sink_type": config.get("source_type"), **given}, environ)
        texts = resolve({key: config[key] for key in own[1:] if key in config}, environ)
    except UnresolvedError as error:
        raise PipelineError(
            "unresolved_reference", [f"{dotted(error.place)}: {error}"],
            "Mend it where the relay runs, or set the pipeline's config anew.",
        ) from None  # fmt: skip
    except PipelineError as error:
        problems = [problem.replace("sink_type", "source_type") for problem in error.problems]
        remedy = error.remedy.replace("relay_set_outbox", "relay_set_inbox")
        raise PipelineError(error.code, problems, remedy) from None
    return InboxSettings(
        shared.sink(source="tide", outbox="inbox"), shared.stream, texts.get("subject"),
        texts.get("durable", durable), shared.batch_size, shared.start == "end",
    )  # fmt: skip


def durable_name(system: int, database: str, pipeline: str) -> str:
    """Return what a pipeline's consumer is called: two databases that read a stream have their own.

    `system` is what Postgres calls the cluster: databases of two clusters often have the same name.
    """
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", f"tide_{database}_{pipeline}")
    name = f"{system}\0{database}\0{pipeline}".encode()
    return f"{plain}_{hashlib.blake2b(name, digest_size=4).hexdigest()}"


class Puller:
    """Pulls the messages of one consumer; made by `open_puller`, used in one event loop."""

    def __init__(self, client: Client, server: Server, settings: InboxSettings) -> None:
        self.stream = ""
        self.over = asyncio.Event()
        self._client = client
        self._server = server
        self._settings = settings
        self._inbox = f"_INBOX.{secrets.token_hex(12)}"
        self._subscription: Subscription | None = None
        self._denied: str | None = None
        self._unsettled: Unsettled | None = None
        self._ready: deque[Msg] = deque()
        self._due = 0
        self._request = 0
        self._expires = 0.0

    async def note(self, error: Exception) -> None:
        """Take what the client says beside its calls' results."""
        if _DENIED.search(str(error)):
            self._denied = str(error)

    async def ended(self) -> None:
        """Take that the connection is gone."""
        self.over.set()

    async def open(self) -> None:
        """Find the stream, see to the consumer, and listen; raises `SinkError`."""
        manager = self._client.jsm(timeout=_API_SECONDS)
        self.stream = await self._find_stream()
        durable, subject = self._settings.durable, self._settings.subject
        try:
            info = await self._ask(manager.consumer_info(self.stream, durable))
            config = info.config
            if info.num_ack_pending and info.delivered:
                seconds = min(2 * (config.ack_wait or 30) + _ACK_SECONDS, _UNSETTLED_SECONDS)
                self._unsettled = Unsettled(
                    info.delivered.stream_seq, info.num_ack_pending, seconds
                )
        except NotFoundError:
            new = DeliverPolicy.NEW if self._settings.from_end else DeliverPolicy.ALL
            config = ConsumerConfig(
                durable_name=durable, deliver_policy=new, ack_policy=AckPolicy.EXPLICIT,
                filter_subject=subject, ack_wait=_ACK_SECONDS,
            )  # fmt: skip
            await self._ask(manager.add_consumer(self.stream, config))
        if config.deliver_subject or config.ack_policy != AckPolicy.EXPLICIT:
            raise SinkError(
                "wrong_consumer",
                f"The consumer {durable!r} of stream {self.stream!r} is no pull consumer with"
                " explicit acks.",
                remedy="Set `durable` to another name, and the consumer is made.",
            )
        if (config.filter_subject or None) != subject:
            config.filter_subject = subject
            await self._ask(manager.add_consumer(self.stream, config))
        self._subscription = await self._client.subscribe(f"{self._inbox}.*")

    async def pull(self, timeout: float) -> list[Msg]:
        """Return the messages that are there, at most a batch; none after `timeout` seconds.

        They come in the stream's order, but for those whose ack was waited for too long.
        Raises `SinkError` where the connection or the consumer is gone.
        """
        if self._unsettled is not None:
            await self._settle(self._unsettled)
        if self._unsettled is not None:
            timeout = min(timeout, _SETTLE_SECONDS)
        until = time.monotonic() + timeout
        found: list[Msg] = []
        while len(found) < self._settings.batch_size:
            if self._ready:
                found.append(self._ready.popleft())
                continue
            await self._ask_for_more()
            message = await self._next(0 if found else until - time.monotonic())
            if message is None:
                break
            if message.subject.startswith(self._inbox):
                self._status(message)
                continue
            self._due -= 1
            if self._unsettled is None:
                found.append(message)
                continue
            self._unsettled.hold(message)
            if self._unsettled.complete:
                self._release(self._unsettled)
        return found

    async def _settle(self, unsettled: Unsettled) -> None:
        """Release what is held where nothing else is to come again."""
        manager = self._client.jsm(timeout=_API_SECONDS)
        info = await self._ask(manager.consumer_info(self.stream, self._settings.durable))
        if unsettled.is_all(info.num_ack_pending or 0):
            self._release(unsettled)
        elif unsettled.late:
            log.warning(
                "messages that have no ack do not come again; those behind them go on",
                stream=self.stream, durable=self._settings.durable,
            )  # fmt: skip
            self._release(unsettled)

    def _release(self, unsettled: Unsettled) -> None:
        self._ready.extend(unsettled.messages())
        self._unsettled = None

    async def ack(self, messages: list[Msg]) -> None:
        """Ack messages; one whose ack is lost comes again."""
        try:
            for message in messages:
                await message.ack()
            await self._client.flush(int(_API_SECONDS))
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise self._lost(str(error)) from None

    async def close(self, unwritten: Sequence[Msg] = ()) -> None:
        """Close the connection; have `unwritten` and what was not read sent again at once."""
        back = [*unwritten, *self._ready]
        if self._unsettled is not None:
            back += self._unsettled.messages()
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            if self._subscription is not None:
                while self._subscription.pending_msgs:
                    message = await self._subscription.next_msg(0.1)
                    if not message.subject.startswith(self._inbox):
                        back.append(message)
                # First, or they are sent again to the request that is still open here.
                await self._subscription.unsubscribe()
            for message in back:
                await message.nak()
            if back:
                await self._client.flush(1)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._client.close(), _API_SECONDS)

    async def _ask_for_more(self) -> None:
        if self._due > 0 and time.monotonic() < self._expires:
            return
        self._due, self._request = self._settings.batch_size * _REQUEST_BATCHES, self._request + 1
        # What the server says of the end may come late, or never.
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
            raise self._lost(str(error)) from None

    async def _next(self, timeout: float) -> Msg | None:
        subscription = self._subscription
        assert subscription is not None  # noqa: S101 - `open` comes first
        try:
            if subscription.pending_msgs:
                return await subscription.next_msg(_API_SECONDS)
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
            if self._denied:
                raise self._not_permitted() from None
            if timeout > 3 * _HEARTBEAT_SECONDS:
                raise self._lost("no heartbeat") from None
            return None
        except (nats.errors.Error, OSError) as error:
            raise self._lost(str(error)) from None

    def _status(self, message: Msg) -> None:
        """Take what the server says of a request, one that is over already included."""
        headers = message.headers or {}
        status, text = headers.get("Status", ""), headers.get("Description", "")
        if status in ("404", "408") or text.lower().startswith(_USED_UP):
            if message.subject == f"{self._inbox}.{self._request}":
                self._due = 0
        elif status == "503" or (status == "409" and "deleted" in text.lower()):
            raise SinkError(
                "consumer_gone",
                f"The consumer {self._settings.durable!r} of stream {self.stream!r} is gone.",
                remedy="It is made anew; messages that the inbox still has are not added again.",
            )
        elif status == "409" and "exceeded" in text.lower():
            # A limit of a consumer that somebody else has made.
            raise self._refused(409, text)
        elif status == "409":
            raise self._lost(text)

    async def _find_stream(self) -> str:
        subject, stream = self._settings.subject, self._settings.stream
        manager = self._client.jsm(timeout=_API_SECONDS)
        if stream is None:
            return await self._stream_of(subject or "")
        try:
            info = await self._ask(manager.stream_info(stream))
        except NotFoundError:
            raise SinkError(
                "no_stream",
                f"There is no stream {stream!r} at {self._server}.",
                remedy=f'Run: nats stream add {stream} --subjects "{subject or stream.lower()}"'
                " --storage file --defaults",
            ) from None
        subjects = info.config.subjects or []
        # A mirror's and a source's subjects are told elsewhere.
        if subject and subjects and not info.config.sources:
            if any(overlaps(subject, taken) for taken in subjects):
                return stream
            raise SinkError(
                "no_subject",
                f"Stream {stream!r} has no messages of the subject {subject!r}; it takes "
                f"{', '.join(subjects)}.",
                remedy="Set `subject` to one of them, or to none, or `stream` to another.",
            )
        return stream

    async def _stream_of(self, subject: str) -> str:
        asked = self._client.request(
            "$JS.API.STREAM.NAMES", json.dumps({"subject": subject}).encode(), timeout=_API_SECONDS
        )
        answer = json.loads((await self._ask(asked)).data)
        if "error" in answer and answer["error"].get("err_code") in UNAVAILABLE:
            raise no_quorum(self._server)
        if "error" in answer:
            raise self._refused(answer["error"].get("err_code"), answer["error"].get("description"))
        names = answer.get("streams") or []
        if not names:
            raise SinkError(
                "no_stream",
                f"No JetStream stream captures the subject {subject!r}.",
                remedy=f'Run: nats stream add NAME --subjects "{subject}" --storage file --defaults',
            )
        if len(names) > 1:
            raise SinkError(
                "several_streams",
                f"The subject {subject!r} is captured by several streams: {', '.join(names)}.",
                remedy="Set `stream` to the one that is to be read.",
            )
        return str(names[0])

    async def _ask(self, asking: Awaitable[T]) -> T:
        """Return what JetStream answers; raises `SinkError`, and `NotFoundError` as it comes."""
        try:
            return await asking
        except NotFoundError:
            raise
        except nats.errors.NoRespondersError:
            raise jetstream_not_enabled(self._server) from None
        except APIError as error:
            if error.err_code in UNAVAILABLE:
                raise no_quorum(self._server) from None
            no_code = isinstance(error, ServiceUnavailableError) and error.err_code is None
            if no_code or error.err_code in NOT_ENABLED:
                raise jetstream_not_enabled(self._server) from None
            raise self._refused(error.err_code, error.description) from None
        except TimeoutError:
            if self._denied:
                raise self._not_permitted() from None
            raise SinkError("timeout", f"JetStream at {self._server} does not answer.") from None
        except (nats.errors.Error, OSError) as error:
            raise self._lost(str(error)) from None

    def _refused(self, code: int | None, text: str | None) -> SinkError:
        of = self.stream or self._settings.stream or "the stream"
        return SinkError(
            "jetstream_refused",
            f"JetStream at {self._server} refuses the consumer {self._settings.durable!r} of "
            f"{of}: {text} ({code}).",
            remedy="See: nats consumer ls, and the pipeline's `stream`, `subject` and `durable`.",
        )

    def _not_permitted(self) -> SinkError:
        found = _DENIED.search(self._denied or "")
        assert found is not None  # noqa: S101 - else it was not kept
        verb = "publish" if found[1].lower() == "publish" else "subscribe"
        # The client gives the subject in small letters.
        subject = found[2].lower()
        names = ("STREAM.INFO", "STREAM.NAMES", "CONSUMER.INFO", "CONSUMER.CREATE",
                 "CONSUMER.DURABLE.CREATE", "CONSUMER.MSG.NEXT")  # fmt: skip
        for name in (*(f"$JS.API.{name}" for name in names), "$JS.ACK", "_INBOX"):
            if subject.startswith(name.lower()):
                subject = name if subject == name.lower() else f"{name}.>"
        return SinkError(
            "permission_denied",
            f"This user may not {verb} to {subject!r} at {self._server}.",
            remedy='Permit it to publish to "$JS.API.>" and "$JS.ACK.>", and to subscribe to '
            '"_INBOX.>".',
        )

    def _lost(self, text: str) -> SinkError:
        return SinkError("connection_lost", f"The connection to {self._server} is lost: {text}.")


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


def _choose(config: NatsSinkConfig, name: str) -> tuple[Server, bool]:
    """Return a server that takes the login, and whether by TLS: who fails here is told why."""
    connection = connect_first(config, f"_INBOX.{secrets.token_hex(8)}.".encode(), name)
    connection.close()
    server = connection.server
    return server, server.tls or config.wants_tls or bool(connection.info.get("tls_required"))
