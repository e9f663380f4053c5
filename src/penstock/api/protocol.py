"""HTTP/1.1 within limits: what a connection may send, and how long it may take.

uvicorn's protocol bounds neither a request's head nor its body nor their time, and parses all
pipelined requests at once. What this one promises:

* An endpoint is called once the whole head is valid and within its limits, and never for two requests
  of a connection at a time. What comes behind a request stays unparsed until that is answered.
* What breaks a limit is answered with a `Problem`, unless its answer has begun; then the connection is
  closed, and what the client still sends is dropped.
* `Protocol.check`, which the server calls each second, ends the connections whose time is over.

So the parser is fed one piece at a time: a head ends at its empty line, a body by its length or at its
last chunk. uvicorn's part is the parser's callbacks, the scope, and the cycle that runs the
endpoint; its own timer and its queue of pipelined requests are not used.
"""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final

import httptools
from fastapi.responses import Response
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from penstock.api.client import Client
from penstock.api.framing import MAX_HEAD, Framing
from penstock.api.problems import Problem

MAX_CONNECTIONS: Final = 4096

_VERSIONS: Final = ("1.1", "1.0")
_CLOSE: Final = (b"connection", b"close")

# What a connection is doing: the first three in turn, and from each of them the last.
_HEAD: Final = 0  # it waits for a request, or for the rest of its head
_BODY: Final = 1  # it reads a body
_ANSWER: Final = 2  # it has read a request, which is being answered
_REFUSED: Final = 3  # it has refused one, and drops what else comes until it is closed


class Protocol(HttpToolsProtocol):
    """A connection; a request finds its `Client` in `state["client"]`."""

    head_s: ClassVar[float] = 10.0  # for a whole head, and for a new connection's first byte
    body_s: ClassVar[float] = 60.0  # for a whole body
    idle_s: ClassVar[float] = 75.0  # between requests, while a worker handles its messages
    unread_s: ClassVar[float] = 60.0  # for a client that reads nothing of its answer
    linger_s: ClassVar[float] = 2.0  # for a refused client to read why

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stage = _HEAD
        self._due = math.inf  # when the stage must have ended
        self._ready: tuple[RequestResponseCycle, ASGI3Application] | None = None
        self._framing = Framing()
        self._rest, self._at = b"", 0  # what came after the request that is being answered
        self._unsent, self._unsent_since = 0, 0.0
        self.hang_up: Callable[[], None] | None = None
        """Called when the client goes before its answer."""

    # What the transport calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's type is wider
        """Begin a connection, in another's place if there are too many."""
        super().connection_made(transport)
        self._due = time.monotonic() + self.head_s
        if len(self.connections) > _max_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        super().connection_lost(exc)
        self._rest = b""
        self._lose_client()

    def data_received(self, data: bytes) -> None:
        """Parse what came; while a request is being answered it waits."""
        if self._stage == _REFUSED:
            return
        if self._stage == _ANSWER or self._rest:
            self._hold(self._rest[self._at :] + data, 0)
        else:
            self._parse(data, 0)

    def shutdown(self) -> None:
        """Close the connection as soon as its request is answered."""
        if self._stage == _REFUSED:
            self.transport.abort()
        else:
            super().shutdown()

    def check(self, now: float) -> None:
        """End the connection if its time is over, or if its client reads nothing."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        if unsent and now - self._unsent_since > self.unread_s:
            self.transport.abort()
        elif now < self._due:
            return
        elif self._stage == _REFUSED:
            self.transport.abort()
        elif self._stage == _BODY and not self.cycle.response_complete:
            self._refuse(Problem(408, f"The body did not come within {self.body_s:.0f} s."))
        elif self._stage == _HEAD and self._framing.head:
            self._refuse(Problem(408, f"The head did not come within {self.head_s:.0f} s."))
        else:
            self.transport.close()

    # Feeding the parser.

    def _parse(self, data: bytes, at: int) -> None:
        try:
            while at < len(data):
                if self._stage == _ANSWER:
                    self._hold(data, at)
                    return
                end = self._end_of_piece(data, at)
                whole = at == 0 and end == len(data)
                self._feed(data if whole else memoryview(data)[at:end])
                at = end
        except Problem as problem:
            self._refuse(problem)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, Problem) else _invalid("its URL"))
        except httptools.HttpParserError as error:
            self._refuse(_invalid(str(error)))

    def _feed(self, piece: bytes | memoryview) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            # The parser takes a body for the other protocol's: it looks like a request.
            if self._framing.has_body:
                raise Problem(400, "A request with a body can't ask for an upgrade.") from None
            self.cycle.keep_alive = False
        if self._ready is not None:
            ready, self._ready = self._ready, None
            super()._start_asgi_task(*ready)

    def _end_of_piece(self, data: bytes, at: int) -> int:
        """Return how far `data` may be parsed: no further than the end of a head, or of a body."""
        if self._stage != _HEAD:
            return self._framing.body_end(data, at)
        if not self._framing.head:
            self._due = time.monotonic() + self.head_s
        return self._framing.head_end(data, at)

    def _hold(self, data: bytes, at: int) -> None:
        """Buffer what came after a request; while that is little, a client's hang-up is still seen."""
        self._rest, self._at = data, at
        if len(data) - at > MAX_HEAD:
            self.flow.pause_reading()

    def _resume(self) -> None:
        """Parse what has waited."""
        if self._stage == _REFUSED or self.transport.is_closing():
            return
        rest, at = self._rest, self._at
        self._rest, self._at = b"", 0
        self._parse(rest, at)
        if len(self._rest) - self._at <= MAX_HEAD and not self.transport.is_closing():
            self.flow.resume_reading()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self._stage != _HEAD:
            raise Problem(400, "A request follows another one that has not ended.")
        super().on_message_begin()
        self.scope["state"]["client"] = _Connected(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, not those after a chunked body."""
        if self._stage != _HEAD:
            return
        super().on_header(name, value)
        self._framing.note_header(name, value)

    def on_headers_complete(self) -> None:
        """Have the request answered, as soon as the parser has taken its head."""
        self._framing.end_head()
        super().on_headers_complete()
        if self.scope["http_version"] not in _VERSIONS:
            raise Problem(505, "The version of HTTP is not 1.1 or 1.0.")
        if self.expect_100_continue:
            # Answered without a 100, the client may leave the body out: what comes next is unknown.
            self.cycle.keep_alive = False
        self._stage, self._due = _BODY, time.monotonic() + self.body_s

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        # The parser may still find the head invalid, such as its Transfer-Encoding.
        self._ready = cycle, app

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._framing.note_body(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        super().on_message_complete()
        if self.cycle.response_complete:
            self._begin()
        else:
            self._stage, self._due = _ANSWER, math.inf

    # Answers.

    def on_response_complete(self) -> None:
        """Go on with what the client has sent since; a body that no endpoint read is dropped."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self._stage == _ANSWER:
            self._begin()
        if not self._rest:
            self.flow.resume_reading()

    def _begin(self) -> None:
        """Wait for a request."""
        self._stage = _HEAD
        self._framing.next_request()
        if self._rest:
            self._due = time.monotonic() + self.head_s
            self.loop.call_soon(self._resume)
        else:
            self._due = time.monotonic() + self.idle_s

    def _refuse(self, problem: Problem) -> None:
        """Answer with `problem`, unless the request has an answer, and close the connection."""
        cycle = self.cycle
        # Before the end of its head, a request has no cycle, and this is the one of the last request.
        answered = self._stage != _HEAD and cycle is not None and cycle.response_started
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self._lose_client()
        self._stage, self._due = _REFUSED, time.monotonic() + self.linger_s
        self._rest, self._ready = b"", None
        if self.transport.is_closing():
            return
        if answered and not cycle.response_complete:
            self.transport.close()
            return
        if not answered:
            self._write(problem.response(), close=True)
        # Closed now, with bytes to read, the client's kernel would drop the answer.
        self.transport.write_eof()
        self.flow.resume_reading()

    def answer(self, response: Response) -> bool:
        """Answer the request that is under way, in one write; return False where ASGI has to."""
        cycle = self.cycle
        if self._stage != _ANSWER or cycle.response_started or self.flow.write_paused:
            return False
        if not cycle.disconnected:
            self._write(response, close=not cycle.keep_alive)
            cycle.response_started = cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                self.transport.close()
            self.on_response_complete()
        return True

    def _write(self, response: Response, *, close: bool) -> None:
        headers = [*self.server_state.default_headers, *response.raw_headers]
        if close:
            headers.append(_CLOSE)
        head = b"".join([b"%b: %b\r\n" % header for header in headers])
        self.transport.write(
            b"%b%b\r\n%b" % (STATUS_LINE[response.status_code], head, bytes(response.body))
        )

    @property
    def is_gone(self) -> bool:
        """Whether what is written now is lost."""
        return self._stage == _REFUSED or self.transport.is_closing()

    def _lose_client(self) -> None:
        hang_up, self.hang_up = self.hang_up, None
        if hang_up is not None:
            hang_up()

    def _make_room(self) -> None:
        """End the connections that have waited longest for a request, or this one."""
        idle = [
            other
            for other in self.connections
            if isinstance(other, Protocol) and other is not self and other.is_idle
        ]
        if not idle:
            self._refuse(
                Problem(503, "There are too many connections.", headers={"Retry-After": "1"})
            )
        # Several at once, as looking for them takes long where there are many.
        idle.sort(key=lambda other: other.rank)
        for other in idle[: 1 + len(idle) // 32]:
            self.connections.discard(other)
            other.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self._stage in (_HEAD, _REFUSED) and not self._rest

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """What sorts idle connections: first those that were refused, then those never used."""
        return self._stage == _HEAD, self.cycle is not None, self._due


class _Connected(Client):
    """The client at the other end of a connection, for one request."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol

    @property
    def gone(self) -> bool:
        return self._protocol.is_gone

    def watch(self, hang_up: Callable[[], None] | None) -> None:
        self._protocol.hang_up = hang_up

    def answer(self, response: Response) -> bool:
        return self._protocol.answer(response)


def _invalid(reason: str) -> Problem:
    return Problem(400, f"The request is not valid HTTP/1.1: {reason}.")


def _max_connections() -> int:
    """Return how many there may be: half of the files, the rest is for the store and for logs."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if files < 0 else min(max(files // 2, 1), MAX_CONNECTIONS)
