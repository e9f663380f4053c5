"""A row of an inbox, made of a message of a stream."""

from __future__ import annotations

import hashlib
import json
from typing import Final, NamedTuple

import orjson
from nats.aio.msg import Msg

_ID_BYTES: Final = 1000
"""The longest message id that is kept as it is; an index takes no long ones."""


class InboxRow(NamedTuple):
    """A row of an inbox: `payload` is JSON, and `body` has the bytes of what is no JSON."""

    message_id: str
    subject: str
    payload: str | None
    body: bytes | None
    headers: str

    @classmethod
    def of(cls, message: Msg) -> InboxRow:
        """Return a message's row; Postgres may still refuse its JSON."""
        headers = {
            _text(name): _text(value) for name, value in (message.headers or {}).items()
        }  # fmt: skip
        given = headers.get("Nats-Msg-Id")
        meta = message.metadata
        # With the time it was stored: a stream that is deleted and made again counts from 1.
        stored = round(meta.timestamp.timestamp() * 1_000_000)
        message_id = given or f"{meta.stream}:{meta.sequence.stream}:{stored}"
        if len(message_id.encode()) > _ID_BYTES:
            message_id = "sha256:" + hashlib.sha256(message_id.encode()).hexdigest()
        payload = _json(message.data)
        return cls(
            message_id, _text(message.subject), payload,
            message.data if payload is None else None, json.dumps(headers),
        )  # fmt: skip

    @property
    def as_body(self) -> InboxRow:
        """The same row with its payload as a body."""
        body = self.body if self.payload is None else self.payload.encode()
        return self._replace(payload=None, body=body)


def _text(given: object) -> str:
    """Return a text without what Postgres refuses: NUL and lone surrogates."""
    return str(given).replace("\0", "�").encode(errors="replace").decode()


def _json(data: bytes) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        # orjson refuses some that Postgres takes: numbers beyond a double, and deep nesting.
        try:
            json.loads(text, parse_constant=_refuse)
        except RecursionError:
            return text
        except ValueError:
            return None
    return text


def _refuse(constant: str) -> None:
    raise ValueError(constant)
