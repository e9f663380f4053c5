"""What the replies of a server mean for the rows of a task, and what is asked to know more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import orjson

from penstock.config.nats import NatsSinkConfig
from penstock.core.delivery import OnRetry
from penstock.core.errors import SinkError
from penstock.sinks.nats.chains import Chaining
from penstock.sinks.nats.client import NatsConnection
from penstock.sinks.nats.duplicates import Duplicates
from penstock.sinks.nats.errors import (
    jetstream_not_enabled,
    no_stream,
    publish_denied,
    refused_by_stream,
)
from penstock.sinks.nats.leader import Silence, unanswered
from penstock.sinks.nats.parser import Event, Reply, ServerError, StoredAnswer
from penstock.sinks.nats.task import Task
from penstock.sinks.nats.window import Window

_STREAM_NAMES: Final = "$JS.API.STREAM.NAMES"
_ATOMIC_DISABLED: Final = 10174
"""The error of a stream without `allow_atomic` to which an atomic batch is sent."""


_OUT_OF_LINE: Final = frozenset({"out_of_line", "wrong_stream"})
"""The errors of a stream that another message came to, or that is not the one of the row before."""


class Replies:
    """Handles what a server sends to a sink, but for its plain acks."""

    def __init__(
        self,
        config: NatsSinkConfig,
        source: str,
        duplicates: Duplicates,
        chaining: Chaining,
        window: Window,
        on_retry: OnRetry,
    ) -> None:
        self._config = config
        self._source = source
        self._duplicates = duplicates
        self._chaining = chaining
        self._window = window
        self._on_retry = on_retry
        self._jetstream: bool | None = None  # whether it is enabled, where the API has answered
        self._asked = False
        self._silence = Silence()

    def connected(self) -> None:
        """Forget what the server of the last connection has answered."""
        self._jetstream, self._asked = None, False
        self._silence = Silence()

    def handle(
        self, connection: NatsConnection, task: Task, events: Sequence[Event], now: float
    ) -> None:
        """Handle events; rows whose publishing has failed back off, are sent again or dead letters."""
        denied: list[str] = []
        failed: dict[str, tuple[SinkError, list[int]]] = {}
        for event in events:
            if isinstance(event, ServerError) and (subject := event.denied_subject) is not None:
                if subject == _STREAM_NAMES:
                    self._silence.forbidden()
                elif not self._duplicates.denied(task, subject):
                    denied.append(subject)
            elif isinstance(event, StoredAnswer):
                self._duplicates.judge(task, event)
            elif isinstance(event, Reply) and event.number == 0 and connection.info.get("cluster"):
                self._silence.answered(event.status, event.body, now)
            elif isinstance(event, Reply) and event.number == 0:
                self._jetstream = event.status != 503 and b'"error"' not in event.body
            elif isinstance(event, Reply) and (row := task.flies(event.number)) is not None:
                if row in task.chains.batches:
                    self._handle_batch(task, event, row, now)
                    continue
                error = self._error(connection, task, event, row)
                if error is None:
                    continue
                unlinked = error.code in _OUT_OF_LINE and row in task.chains.linked
                if unlinked or task.is_early(row):
                    if not task.is_early(row) and row not in task.chains.asking:
                        self._chaining.pause_links(now)
                    task.take_back(row)
                elif error.code == "message_too_large":
                    task.bury(row, error.code, error.message)
                else:
                    failed.setdefault(error.code, (error, []))[1].append(row)
        for error, rows in failed.values():
            if error.code == "too_many_requests" and not task.retries.pending(error.code):
                self._window.shrink()
            task.fail(rows, error, now, self._on_retry)
        if denied:
            error = publish_denied(denied[0], connection.server)
            task.fail(task.flying_to(set(denied)), error, now, self._on_retry)

    def _handle_batch(self, task: Task, reply: Reply, row: int, now: float) -> None:
        """Handle a reply to the first or the last message of an atomic batch."""
        if not reply.status:
            try:
                body = orjson.loads(reply.body)
            except orjson.JSONDecodeError:
                return  # empty, as the batch has begun; or of another subscriber
            if not isinstance(body, dict):
                return
            error = body.get("error")
            if error is None and task.committed(row, body.get("count")):
                return
            if isinstance(error, dict) and error.get("err_code") == _ATOMIC_DISABLED:
                self._chaining.pause_batches(now)
        task.dissolve(row)

    def _error(
        self, connection: NatsConnection, task: Task, reply: Reply, row: int
    ) -> SinkError | None:
        """Return what is wrong by a reply that is no plain ack, or None if nothing is."""
        if reply.status == 503 and connection.info.get("cluster"):
            return self._silence_of(connection, task.subject(row))
        if reply.status == 503:
            if not self._asked:
                # The account may lack JetStream though the server has it: only the API knows.
                self._asked = True
                connection.publish(b"$JS.API.INFO", reply=connection.inbox + b"0")
            enabled = self._jetstream
            if enabled is None:
                enabled = bool(connection.info.get("jetstream"))
            if not enabled:
                return jetstream_not_enabled(connection.server)
            return no_stream(self._config, self._source, task.subject(row))
        try:
            body = orjson.loads(reply.body)
        except orjson.JSONDecodeError:
            return None  # of another subscriber to the subject; the stream's ack may follow
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            return refused_by_stream(body, self._config, task.subject(row))
        if isinstance(body, dict) and body.get("stream") and body.get("seq"):
            number = str(reply.number).encode()
            task.acked([number], {number: reply.body} if body.get("duplicate") else {})
            if self._chaining.may_link:
                task.note_newest(number, reply.body)
        return None

    def _silence_of(self, connection: NatsConnection, subject: str) -> SinkError:
        """Return why a cluster does not answer for a subject, as far as that is known."""
        verdict, question = self._silence.seen(subject, time.monotonic())
        if question is not None:
            connection.publish(_STREAM_NAMES.encode(), question, reply=connection.inbox + b"0")
        return unanswered(verdict, self._config, self._source, subject, connection.server)
