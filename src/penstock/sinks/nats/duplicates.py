"""Duplicates: whose message a stream has in the place of one that it dropped as a copy.

A stream drops a message whose `Nats-Msg-Id` it knows, and its ack then names the message that it has.
After a restart that is the sink's own. Where it is another publisher's, ours is nowhere: it becomes a
dead letter. So the stream is asked for the message, which names who published it: in `metadata.consumer`
of its body, or, of an outbox's message, in a header.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from penstock.core.delivery import OnRetry
from penstock.core.errors import SinkError
from penstock.sinks.nats.client import NatsConnection
from penstock.sinks.nats.errors import UNAVAILABLE
from penstock.sinks.nats.outbox_formats import OWNER
from penstock.sinks.nats.parser import ANSWER, StoredAnswer

if TYPE_CHECKING:
    from penstock.sinks.nats.task import Task

LOOKUP: Final = "STREAM.MSG.GET"
ASKED_AT_ONCE: Final = 256
TRIES: Final = 2
"""Questions without an answer after which a message counts as the sink's own."""
ANSWER_SECONDS: Final = 1.0
"""How long an answer may take."""
ASKING_SECONDS: Final = TRIES * ANSWER_SECONDS + 1.0
"""By how much the patience with a write is more where its messages are in doubt, at most."""
SILENCE: Final = 1.5
"""A server that is silent for so many times `ANSWER_SECONDS` counts as gone."""
_DENIED: Final = "not permitted"
_NO_MESSAGE: Final = 10037
_ASK_AGAIN: Final = UNAVAILABLE | {_NO_MESSAGE}
_ID: Final = b"Nats-Msg-Id:"
_OWNER: Final = f"{OWNER}:".encode()
CODE: Final = "duplicate_key"


class Stored(NamedTuple):
    """Which message a stream has with the id of one that it dropped."""

    stream: str
    number: int
    domain: str = ""

    @property
    def call(self) -> str:
        """The subject by which the stream is asked for it."""
        prefix = f"$JS.{self.domain}.API" if self.domain else "$JS.API"
        return f"{prefix}.{LOOKUP}.{self.stream}"

    @property
    def question(self) -> bytes:
        """What the stream is asked."""
        return b'{"seq":%d}' % self.number


def stored(ack: bytes) -> Stored:
    """Return which message an ack names as the one that was there before."""
    fields = orjson.loads(ack)
    return Stored(str(fields["stream"]), int(fields["seq"]), str(fields.get("domain") or ""))


def refusal(answer: dict[str, Any]) -> str | None:
    """Return why a stream can't be asked at all, None where it has answered, or may do so later."""
    error = answer.get("error")
    if not isinstance(error, dict):
        return None
    if error.get("code") == 404 or error.get("err_code") in _ASK_AGAIN:
        return None
    return str(error.get("description") or error)


def verdict(
    name: str, key: str, where: Stored, answer: dict[str, Any], body: bytes | None = None
) -> str | None:
    """Return why a stream's message is not the sink's own, None where it is, or is gone since.

    `key` is the id that the sink's was sent with; where the stream's has another, nothing is known.
    One that names no publisher is the sink's own if it has the same `body`, where that is given. Raises
    `LookupError` where the answer names no message: ask again.
    """
    error = answer.get("error")
    if isinstance(error, dict):
        if error.get("err_code") == _NO_MESSAGE or error.get("code") == 404:
            return None
        raise LookupError(error.get("description"))
    message = answer.get("message")
    if not isinstance(message, dict):
        raise LookupError
    headers = base64.b64decode(message.get("hdrs") or "")
    data = base64.b64decode(message.get("data") or "")
    owner = owner_of(headers, data)
    if owner == name or _value(headers, _ID) != key or (owner is None and data == body):
        return None
    by = "another publisher" if owner is None else f"{owner!r}"
    return (
        f"stream {where.stream} dropped this message of {name!r} as a copy: its message"
        f" {where.number}, which {by} published to {message.get('subject')}, has the same"
        f" Nats-Msg-Id {key!r}"
    )


def owner_of(headers: bytes, body: bytes) -> str | None:
    """Return the name of the sink or pipeline that published a message, None where it names none."""
    if (named := _value(headers, _OWNER)) is not None:
        return named
    try:
        name = orjson.loads(body)["metadata"]["consumer"]["name"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        # Such as half of a surrogate pair in a record: the consumer stands at the envelope's end.
        return _at_end(body)
    return name if isinstance(name, str) else None


def _at_end(body: bytes) -> str | None:
    _, found, tail = body.rpartition(b',"consumer":')
    if not found or not tail.endswith(b"}}"):
        return None
    try:
        name = orjson.loads(tail[:-2])["name"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) else None


def unchecked(where: Stored, why: str) -> SinkError:
    """Return what is reported where a stream can't be asked."""
    see = f"See whether it answers: nats stream get {where.stream} {where.number}"
    return SinkError(
        "duplicates_unchecked",
        f"Messages that stream {where.stream} has already can't be looked at ({why}): they count as"
        " delivered.",
        remedy=f"Allow the user to publish to {where.call}." if why == _DENIED else see,
    )


def _value(headers: bytes, name: bytes) -> str | None:
    _, found, rest = headers.partition(b"\r\n" + name)
    return rest.partition(b"\r\n")[0].strip().decode(errors="replace") if found else None


@dataclass(slots=True)
class _Asked:
    where: Stored
    at: float = 0.0
    tries: int = 0


class Doubts:
    """The rows of a batch that a stream has dropped as copies, until it is known of what."""

    def __init__(self) -> None:
        self._rows: dict[int, _Asked] = {}
        self._waiting: deque[int] = deque()
        self._asked: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, where: Stored) -> None:
        """Add a row that a stream has dropped."""
        self._rows[row] = _Asked(where)
        self._waiting.append(row)

    def where(self, row: int) -> Stored | None:
        """Return what a row was dropped for, None where it is in no doubt any more."""
        found = self._rows.get(row)
        return None if found is None else found.where

    def drop(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)
        self._asked.discard(row)

    def all(self) -> list[tuple[int, Stored]]:
        """Return all rows, and what they were dropped for."""
        return [(row, asked.where) for row, asked in self._rows.items()]

    def due(self, now: float, timeout: float) -> Iterator[tuple[int, Stored]]:
        """Yield the rows to ask for now: new ones, and those whose answer is overdue."""
        for row in [r for r in self._asked if now - self._rows[r].at > timeout]:
            self._asked.discard(row)
            self._waiting.append(row)
        while self._waiting and len(self._asked) < ASKED_AT_ONCE:
            row = self._waiting.popleft()
            if (asked := self._rows.get(row)) is None:
                continue
            asked.at, asked.tries = now, asked.tries + 1
            self._asked.add(row)
            yield row, asked.where

    def tried(self, row: int) -> int:
        """Return how often a row was asked for."""
        return self._rows[row].tries

    def disconnected(self) -> None:
        """Ask again: answers that are still to come won't."""
        self._waiting = deque(self._rows)
        self._asked.clear()
        for asked in self._rows.values():
            asked.tries = 0


class Duplicates:
    """Asks streams for the messages that they have in the place of a sink's, and judges by them."""

    def __init__(self, name: str, timeout: float, on_retry: OnRetry) -> None:
        self._name = name
        self._timeout = min(timeout, ANSWER_SECONDS)
        self._on_retry = on_retry
        self._may_ask = True

    def connected(self) -> None:
        """Ask on a new connection, whatever came of it on the last one."""
        self._may_ask = True

    def silent(self, now: float, heard: float) -> bool:
        """Return whether the server itself is silent, last heard then: streams can't answer either."""
        return now - heard > SILENCE * self._timeout

    def ask(self, connection: NatsConnection, task: Task, now: float, heard: float) -> None:
        """Ask for what is in doubt, and the server, last heard at `heard`, for a sign of life."""
        due = list(task.doubts.due(now, self._timeout))
        if due and self._may_ask:
            connection.send(b"PING\r\n")
        for row, where in due:
            if not self._may_ask:
                task.believe(row)
            elif task.doubts.tried(row) > TRIES and not self.silent(now, heard):
                self._give_up(task, "it does not answer")
                return
            else:
                reply = b"%b%b%d" % (connection.inbox, ANSWER, row + task.base)
                connection.publish(where.call.encode(), where.question, reply=reply)

    def judge(self, task: Task, answer: StoredAnswer) -> None:
        """Judge by a stream's answer: its message is the sink's own, or the sink's is nowhere."""
        row = answer.number - task.base
        where = task.doubts.where(row)
        if where is None:
            return  # of an earlier batch, or asked for twice
        if answer.status == 503:
            self._give_up(task, "JetStream's API does not answer")
            return
        try:
            body = orjson.loads(answer.body)
            if (refused := refusal(body)) is not None:
                self._give_up(task, refused)
                return
            why = verdict(self._name, task.key(row), where, body)
        except (AttributeError, LookupError, ValueError):
            return  # it is asked again
        if why is None:
            task.believe(row)
        else:
            task.bury(row, CODE, why)

    def denied(self, task: Task, subject: str) -> bool:
        """Return whether the denied `subject` is that of a question; if so, ask no more."""
        if f".API.{LOOKUP}." not in subject:
            return False
        self._give_up(task, _DENIED)
        return True

    def _give_up(self, task: Task, why: str) -> None:
        """Count all that is in doubt as delivered."""
        for row, where in task.doubts.all():
            if self._may_ask:
                self._may_ask = False
                self._on_retry(unchecked(where, why), 0.0)
            task.believe(row)
