"""Whether a NATS user may publish what a sink publishes, found out without publishing a message.

The server names a user's permissions at `$SYS.REQ.USER.INFO`. A user who may not ask there is found
out about subject by subject: a message whose reply subject is one of the server's own is never
delivered, and the server looks at the permission for its subject before it refuses the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock.core.errors import SinkError
from penstock.core.finding import Finding
from penstock.core.subject import covers, overlaps
from penstock.sinks.nats.client import NatsConnection
from penstock.sinks.nats.errors import unresponsive
from penstock.sinks.nats.parser import Pong, ServerError

_USER_INFO: Final = "$SYS.REQ.USER.INFO"
_RESERVED: Final = b"_R_.penstock"
"""A reply subject of the server's own service imports: no client may publish with it."""
_TRIES: Final = 200
"""Subjects that are tried, each of which the server's log has."""
_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class Permissions:
    """What a user may publish to: what `allow` takes (None: everything) and `deny` does not."""

    allow: tuple[str, ...] | None
    deny: tuple[str, ...] = ()

    @classmethod
    def read(cls, permissions: dict[str, Any]) -> Permissions:
        """Read what the server names as a user's `permissions`."""
        publish = permissions.get("publish") or {}
        allow = publish.get("allow")
        if allow is None and "responses" in permissions:
            allow = ()  # a user who may answer requests may publish nothing else by itself
        return cls(None if allow is None else tuple(allow), tuple(publish.get("deny") or ()))

    def allows_all(self, subject: str) -> bool:
        """Return whether all that `subject` stands for is certainly allowed."""
        allowed = self.allow is None or any(covers(p, subject) for p in self.allow)
        return allowed and not any(overlaps(p, subject) for p in self.deny)

    def allows_none(self, subject: str) -> bool:
        """Return whether nothing that `subject` stands for is allowed."""
        allowed = self.allow is None or any(overlaps(p, subject) for p in self.allow)
        return not allowed or any(covers(p, subject) for p in self.deny)


def inspect(connection: NatsConnection, wildcard: str, samples: Sequence[str]) -> Finding:
    """Look whether the user may publish to what a template gives.

    `wildcard` stands for all of it, `samples` are the subjects that it gives now, where these are known;
    a token that is not may be `*`.
    Raises `SinkError` where the connection is lost.
    """
    what = f"subject {wildcard}"
    fix = f'allow it in the user\'s `permissions {{ publish {{ allow: ["{wildcard}"] }} }}`'
    permissions = ask(connection)
    if permissions is not None:
        denied = [subject for subject in samples if not permissions.allows_all(subject)]
        if not denied and permissions.allows_none(wildcard):
            denied = [wildcard]
        partly = not samples and not permissions.allows_all(wildcard)
    else:
        tried = [each.replace("*", "penstock") for each in samples or [wildcard]]
        denied = refused(connection, tried[:_TRIES])
        partly = bool(denied) and not samples
    if denied and not (partly and permissions is None):
        more = f" and {len(denied) - 3} more" if len(denied) > 3 else ""
        message = f"this user may not publish to {', '.join(denied[:3])}{more}"
        return Finding("error", what, message, fix)
    if partly:
        return Finding("warning", what, "this user may publish to a part of it at most", fix)
    return Finding("ok", what, "this user may publish to it")


def ask(connection: NatsConnection) -> Permissions | None:
    """Return the user's permissions, None where the server does not name them."""
    try:
        reply = connection.request(_USER_INFO, b"", _TIMEOUT)
    except SinkError as error:
        if error.code in ("permission_denied", "timeout"):
            return None
        raise
    try:
        answer = orjson.loads(reply.body)["data"]
        return Permissions.read(answer.get("permissions") or {})
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None  # a server before 2.10, which does not know the question


def refused(connection: NatsConnection, subjects: Iterable[str]) -> list[str]:
    """Return the subjects that the user may not publish to; no message is delivered."""
    tried = list(subjects)
    for subject in tried:
        connection.publish(subject.encode(), reply=_RESERVED)
    connection.send(b"PING\r\n")
    denied: set[str] = set()
    for event in connection.events(_TIMEOUT):
        if isinstance(event, ServerError) and event.denied_subject is not None:
            denied.add(event.denied_subject)
        if isinstance(event, Pong):
            return [subject for subject in tried if subject in denied]
    raise unresponsive(connection.server, _TIMEOUT)
