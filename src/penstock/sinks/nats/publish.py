"""Publishes single messages to JetStream, each with its ack: for the rare ones sent by hand."""

from __future__ import annotations

import time
from typing import Self

import orjson

from penstock.config.nats import NatsSinkConfig
from penstock.core.errors import SinkError
from penstock.core.subject import MAX_SUBJECT_BYTES
from penstock.sinks.nats.client import connect_first
from penstock.sinks.nats.duplicates import CODE, stored, verdict
from penstock.sinks.nats.errors import ack_overdue, no_stream, publish_denied, refused_by_stream
from penstock.sinks.nats.jetstream import why_unanswered
from penstock.sinks.nats.parser import Event, Reply, ServerError


class Publisher:
    """One connection to the first server of `config` that answers; a context manager.

    Nothing is tried twice: what is wrong is raised as a `SinkError`.
    """

    def __init__(self, config: NatsSinkConfig, *, name: str, source: str) -> None:
        self._config = config
        self._name = name
        self._source = source
        self._connection = connect_first(config, f"penstock {name}")
        self._number = 0

    def publish(self, subject: str, key: str, body: bytes, *, headers: str = "") -> None:
        """Publish with `key` as `Nats-Msg-Id`, and return when the stream has it, or had it before.

        Raises `SinkError` too where the stream has another publisher's message of that key. `headers`
        are more of them, each with the line end behind it.
        """
        self._number += 1
        expected = self._config.stream
        header = f"NATS/1.0\r\nNats-Msg-Id: {key}\r\n{headers}"
        header += f"Nats-Expected-Stream: {expected}\r\n\r\n" if expected else "\r\n"
        self._check(subject, key, len(header.encode()) + len(body))
        sizes = f"{len(header.encode())} {len(header.encode()) + len(body)}"
        reply = self._connection.inbox.decode() + str(self._number)
        self._connection.send(
            f"HPUB {subject} {reply} {sizes}\r\n{header}".encode() + body + b"\r\n"
        )
        deadline = time.monotonic() + self._config.ack_timeout
        while (left := deadline - time.monotonic()) > 0:
            acks, events = self._connection.step(left)
            number = str(self._number).encode()
            if number in acks:
                copy = self._connection.parser.copies.pop(number, None)
                self._check_owner(key, body, copy)
                return
            if any(self._is_ack(subject, key, body, event) for event in events):
                return
        raise ack_overdue(subject, self._config.ack_timeout)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, subject: str, key: str, size: int) -> None:
        most = self._connection.max_payload
        if size > most:
            code, reason = "message_too_large", f"It has {size} bytes, the server takes {most}."
        elif len(subject.encode()) > MAX_SUBJECT_BYTES:
            code = "subject_too_long"
            reason = (
                f"Its subject has {len(subject.encode())} bytes, {MAX_SUBJECT_BYTES} can be sent."
            )
        elif any(c.isspace() for c in subject) or "\r" in key or "\n" in key:
            code, reason = "invalid_subject", "Its subject or its key holds a blank or a line end."
        else:
            return
        raise SinkError(code, reason, transient=False)

    def _is_ack(self, subject: str, key: str, message: bytes, event: Event) -> bool:
        """Return whether the stream has the message; raises for a refusal."""
        if isinstance(event, ServerError) and event.denied_subject is not None:
            raise publish_denied(subject, self._connection.server)
        if not isinstance(event, Reply) or event.number != self._number:
            return False
        if event.status == 503 and self._connection.info.get("cluster"):
            raise why_unanswered(self._config, self._source, subject)
        if event.status == 503:
            raise no_stream(self._config, self._source, subject)
        try:
            body = orjson.loads(event.body)
        except orjson.JSONDecodeError:
            return False  # of another subscriber to the subject; the stream's ack may follow
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            raise refused_by_stream(body, self._config, subject)
        if not isinstance(body, dict) or not (body.get("stream") and body.get("seq")):
            return False
        self._check_owner(key, message, event.body if body.get("duplicate") else None)
        return True

    def _check_owner(self, key: str, message: bytes, copy: bytes | None) -> None:
        """Raise `SinkError` where the stream dropped a message as a copy of another publisher's."""
        form = self._config.form
        if copy is None or (form is not None and form.shares(key)):
            return
        where = stored(copy)
        try:
            answer = self._connection.request(where.call, where.question, self._config.ack_timeout)
            why = verdict(self._name, key, where, orjson.loads(answer.body), message)
        except (SinkError, LookupError, ValueError):
            return  # it can't be asked
        if why is not None:
            raise SinkError(
                CODE, f"{why[0].upper()}{why[1:]}.",
                remedy=f"Give each its own stream, or try again when {where.stream} has forgotten the"
                " key: after its duplicate_window.",
                transient=False,
            )  # fmt: skip
