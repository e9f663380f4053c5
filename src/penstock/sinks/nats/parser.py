"""The protocol of a nats-server without I/O: bytes in, acks and events out.

Acks come as plain numbers, the last token of each message's reply subject, with no object a message
beyond that.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import orjson

from penstock.sinks.nats.errors import not_nats

_MAX_LINE: Final = 1024 * 1024
ANSWER: Final = b"q"
"""Stands before the number of a question in its reply subject, which acks have the same numbers in."""

_ACK: Final = (
    rb'\{"stream": ?"[^"\r\n]*", ?(?:"domain": ?"[^"\r\n]*", ?)?'
    rb'"seq": ?[1-9][0-9]*(?:, ?"duplicate": ?(?:true|false))?\}'
)
_COPY: Final = rb'"duplicate": ?true\}'
_DUPLICATE: Final = re.compile(_COPY + rb"\r\n")
_PUBLISH_DENIED: Final = re.compile(r'permissions violation for publish to "(.*)"', re.I | re.S)


class Reply(NamedTuple):
    """A message to the inbox that is not a plain positive ack; `status` is 0 without a header."""

    number: int
    status: int
    body: bytes


class StoredAnswer(NamedTuple):
    """A stream's answer to the question for a message that it has."""

    number: int
    status: int
    body: bytes


class ServerError(NamedTuple):
    """What the server reports by `-ERR`."""

    text: str

    @property
    def denied_subject(self) -> str | None:
        """The subject, if the problem is that publishing to it is not permitted."""
        found = _PUBLISH_DENIED.search(self.text)
        return found.group(1) if found else None


class Info(NamedTuple):
    """The server's description of itself; comes first, and again when the cluster changes."""

    fields: dict[str, Any]


class Ping(NamedTuple):
    """The server asks for a PONG."""


class Pong(NamedTuple):
    """The server has handled all that was sent before our PING."""


Event = Reply | StoredAnswer | ServerError | Info | Ping | Pong


class Parser:
    """Reads what a server sends, whatever way it is cut into pieces.

    Acks, by far the most frequent, are matched as a run by one regular expression that leaves no
    room for anything but a positive JetStream ack; all else is parsed message by message. `copies` has
    the acks, by their numbers, of messages that the stream had before; who takes them takes them out.
    `newest` is the ack that came last.
    """

    def __init__(self, inbox: bytes, where: str = "there"):
        self.copies: dict[bytes, bytes] = {}
        self.newest = b""
        self._tail = b""
        self.inbox = inbox
        self._where = where
        head = rb"MSG " + re.escape(inbox)
        self._run = re.compile(rb"(?:" + head + rb"[0-9]+ 1 [0-9]+\r\n" + _ACK + rb"\r\n)++")
        self._number = re.compile(head + rb"([0-9]+) ")
        self._copy = re.compile(head + rb"([0-9]+) 1 [0-9]+\r\n(\{[^{}\r\n]*" + _COPY + rb")")

    def feed(self, data: bytes) -> tuple[list[bytes], list[Event]]:
        """Take bytes; return the numbers of positive acks and the other events, in order each."""
        data = self._tail + data if self._tail else data
        acks: list[bytes] = []
        events: list[Event] = []
        at, size = 0, len(data)
        while at < size:
            if run := self._run.match(data, at):
                acks += self._number.findall(data, at, run.end())
                if _DUPLICATE.search(data, at, run.end()):
                    self.copies.update(self._copy.findall(data, at, run.end()))
                at = run.end()
                self.newest = data[data.rfind(b"{", 0, at) : at]
                continue
            end = self._next(data, at, events)
            if end < 0:
                break
            at = end
        self._tail = data[at:]
        return acks, events

    def _next(self, data: bytes, at: int, events: list[Event]) -> int:
        """Parse one operation at `at`; return where it ends, or -1 if it is not all here yet."""
        eol = data.find(b"\r\n", at)
        if eol < 0:
            if len(data) - at > _MAX_LINE:
                raise not_nats(self._where, data[at : at + 40])
            return -1
        line = data[at:eol]
        word, _, rest = line.partition(b" ")
        word = word.upper()
        if word in (b"MSG", b"HMSG"):
            return self._message(data, eol + 2, word, rest.split(), events)
        if word == b"PING":
            events.append(Ping())
        elif word == b"PONG":
            events.append(Pong())
        elif word == b"INFO":
            events.append(Info(orjson.loads(rest)))
        elif word == b"-ERR":
            events.append(ServerError(rest.decode(errors="replace").strip().strip("'")))
        elif word != b"+OK":
            raise not_nats(self._where, line)
        return eol + 2

    def _message(
        self, data: bytes, at: int, word: bytes, fields: list[bytes], events: list[Event]
    ) -> int:
        end = at + int(fields[-1])
        if len(data) < end + 2:
            return -1
        status, body = 0, at
        if word == b"HMSG":
            body = at + int(fields[-2])
            # `NATS/1.0 503` and perhaps a text after it; a plain header has no status.
            first = data[at:body].split(b"\r\n", 1)[0].split()
            status = int(first[1]) if len(first) > 1 and first[1].isdigit() else 0
        number = fields[0].removeprefix(self.inbox)
        if number.isdigit():
            events.append(Reply(int(number), status, data[body:end]))
        elif number[:1] == ANSWER and number[1:].isdigit():
            events.append(StoredAnswer(int(number[1:]), status, data[body:end]))
        return end + 2
