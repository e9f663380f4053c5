"""The durable consumer of an inbox: its stream, its configuration, and the errors of JetStream's API."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Final, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from penstock.config.nats import NatsServer
from penstock.core.errors import SinkError
from penstock.core.subject import overlaps
from penstock.outbox.inbox.redelivery import Redelivery
from penstock.outbox.inbox.settings import InboxSettings
from penstock.sinks.nats.errors import (
    DENIED,
    NOT_ENABLED,
    UNAVAILABLE,
    jetstream_not_enabled,
    no_quorum,
)

T = TypeVar("T")
API_SECONDS: Final = 5.0
"""How long a request to JetStream's API may take."""
_ACK_SECONDS: Final = 5.0
"""How long a consumer that is made here waits for acks."""
_REDELIVERY_SECONDS: Final = 120.0
"""The longest wait for messages that an earlier session has not acked."""


class DurableConsumer:
    """The durable pull consumer that a pipeline reads with.

    Its methods raise `SinkError`, with the codes of a NATS sink.
    """

    def __init__(self, client: Client, server: NatsServer, settings: InboxSettings) -> None:
        self.stream = ""
        self.denied: str | None = None
        """The server's last error about a right of the user."""
        self._client = client
        self._manager = client.jsm(timeout=API_SECONDS)
        self._server = server
        self._settings = settings

    async def note(self, error: Exception) -> None:
        """Take an error that the client reports beside its calls' results."""
        if DENIED.search(str(error)):
            self.denied = str(error)

    async def open(self) -> Redelivery | None:
        """Find the stream, and make or update the consumer.

        Returns a buffer for the messages that an earlier session has not acked, None without any.
        """
        self.stream = await self._find_stream()
        durable, subject = self._settings.durable, self._settings.subject
        redelivery = None
        try:
            info = await self.ask(self._manager.consumer_info(self.stream, durable))
            config = info.config
            if info.num_ack_pending and info.delivered:
                seconds = min(2 * (config.ack_wait or 30) + _ACK_SECONDS, _REDELIVERY_SECONDS)
                redelivery = Redelivery(info.delivered.stream_seq, info.num_ack_pending, seconds)
        except NotFoundError:
            new = DeliverPolicy.NEW if self._settings.from_end else DeliverPolicy.ALL
            config = ConsumerConfig(
                durable_name=durable, deliver_policy=new, ack_policy=AckPolicy.EXPLICIT,
                filter_subject=subject, ack_wait=_ACK_SECONDS,
            )  # fmt: skip
            await self.ask(self._manager.add_consumer(self.stream, config))
        if config.deliver_subject or config.ack_policy != AckPolicy.EXPLICIT:
            raise SinkError(
                "wrong_consumer",
                f"The consumer {durable!r} of stream {self.stream!r} is no pull consumer with"
                " explicit acks.",
                remedy="Set `durable` to another name, and the consumer is made.",
            )
        if (config.filter_subject or None) != subject:
            config.filter_subject = subject
            await self.ask(self._manager.add_consumer(self.stream, config))
        return redelivery

    async def unacked(self) -> int:
        """Return how many delivered messages have no ack."""
        info = await self.ask(self._manager.consumer_info(self.stream, self._settings.durable))
        return info.num_ack_pending or 0

    async def _find_stream(self) -> str:
        subject, stream = self._settings.subject, self._settings.stream
        if stream is None:
            return await self._stream_of(subject or "")
        try:
            info = await self.ask(self._manager.stream_info(stream))
        except NotFoundError:
            raise SinkError(
                "no_stream",
                f"There is no stream {stream!r} at {self._server}.",
                remedy=f'Run: nats stream add {stream} --subjects "{subject or stream.lower()}"'
                " --storage file --defaults",
            ) from None
        subjects = info.config.subjects or []
        # A mirror, or a stream with sources, does not list all its subjects.
        if subject and subjects and not info.config.sources:
            if any(overlaps(subject, taken) for taken in subjects):
                return stream
            raise SinkError(
                "no_subject",
                f"Stream {stream!r} has no messages of the subject {subject!r}; it captures "
                f"{', '.join(subjects)}.",
                remedy="Set `subject` to one of them, leave it out, or set `stream` to another.",
            )
        return stream

    async def _stream_of(self, subject: str) -> str:
        asked = self._client.request(
            "$JS.API.STREAM.NAMES", json.dumps({"subject": subject}).encode(), timeout=API_SECONDS
        )
        answer = json.loads((await self.ask(asked)).data)
        if "error" in answer and answer["error"].get("err_code") in UNAVAILABLE:
            raise no_quorum(self._server)
        if "error" in answer:
            raise self.refused(answer["error"].get("err_code"), answer["error"].get("description"))
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

    async def ask(self, request: Awaitable[T]) -> T:
        """Return JetStream's answer; raises `SinkError` and `NotFoundError`."""
        try:
            return await request
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
            raise self.refused(error.err_code, error.description) from None
        except TimeoutError:
            if self.denied:
                raise self.not_permitted() from None
            raise SinkError("timeout", f"JetStream at {self._server} does not answer.") from None
        except (nats.errors.Error, OSError) as error:
            raise self.lost(str(error)) from None

    def refused(self, code: int | None, text: str | None) -> SinkError:
        """Return the error for a request that JetStream refuses."""
        of = self.stream or self._settings.stream or "the stream"
        return SinkError(
            "jetstream_refused",
            f"JetStream at {self._server} refuses the consumer {self._settings.durable!r} of "
            f"{of}: {text} ({code}).",
            remedy="See: nats consumer ls, and the pipeline's `stream`, `subject` and `durable`.",
        )

    def not_permitted(self) -> SinkError:
        """Return the error for the right that the server denied."""
        found = DENIED.search(self.denied or "")
        assert found is not None  # noqa: S101 - `note` keeps no other
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

    def lost(self, text: str) -> SinkError:
        """Return the error for a connection that is gone."""
        return SinkError("connection_lost", f"The connection to {self._server} is lost: {text}.")
