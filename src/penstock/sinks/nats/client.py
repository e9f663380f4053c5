"""A small synchronous NATS client that does one thing fast: publish, and read the acks in bulk.

`Parser` is the protocol without I/O: bytes in, events out. `Connection` puts a non-blocking socket
under it. Frames are handed over ready-made (`HPUB …`), thousands in one buffer; acks come back as
plain numbers, the last token of each message's reply subject, with no object a message beyond that.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import orjson

from penstock.config.nats import NatsSinkConfig, Server, hello, tls_context
from penstock.core.errors import SinkError
from penstock.sinks.nats.errors import none_of, not_nats, problem_error, tls_error, unresponsive

READ_SIZE: Final = 256 * 1024
WRITE_SIZE: Final = 256 * 1024
MAX_LINE: Final = 1024 * 1024
CONNECT_TIMEOUT: Final = 5.0
ANSWER: Final = b"q"
"""Stands before the number of a question in its reply subject, which acks have the same numbers in."""

_ACK: Final = (
    rb'\{"stream": ?"[^"\r\n]*", ?(?:"domain": ?"[^"\r\n]*", ?)?'
    rb'"seq": ?[1-9][0-9]*(?:, ?"duplicate": ?(?:true|false))?\}'
)
_COPY: Final = rb'"duplicate": ?true\}'
_DUPLICATE: Final = re.compile(_COPY + rb"\r\n")
_CERTIFICATE_REFUSED: Final = re.compile(r"_ALERT_\w*(?:CERTIFICATE|UNKNOWN_CA)")
"""With TLS 1.3 the server judges a client's certificate when the handshake is over for the client."""
_PUBLISH_DENIED: Final = re.compile(r'permissions violation for publish to "(.*)"', re.I | re.S)


class Reply(NamedTuple):
    """A message to the inbox that is not a plain positive ack; `status` is 0 without a header."""

    number: int
    status: int
    body: bytes


class Answer(NamedTuple):
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


Event = Reply | Answer | ServerError | Info | Ping | Pong


class Parser:
    """Reads what a server sends, whatever way it is cut into pieces.

    Acks, by far the most frequent, are matched as a run by one regular expression that leaves no
    room for anything but a positive JetStream ack; all else is parsed message by message. `copies` has
    the acks, by their numbers, of messages that the stream had before; who takes them takes them out.
    """

    def __init__(self, inbox: bytes, where: str = "there"):
        self.copies: dict[bytes, bytes] = {}
        self._tail = b""
        self._inbox = inbox
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
            if len(data) - at > MAX_LINE:
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
        number = fields[0].removeprefix(self._inbox)
        if number.isdigit():
            events.append(Reply(int(number), status, data[body:end]))
        elif number[:1] == ANSWER and number[1:].isdigit():
            events.append(Answer(int(number[1:]), status, data[body:end]))
        return end + 2


class Connection:
    """A logged-in connection that listens on its inbox; made by `connect`."""

    def __init__(
        self,
        config: NatsSinkConfig,
        sock: socket.socket,
        server: Server,
        info: dict[str, Any],
        parser: Parser,
    ):
        sock.setblocking(False)
        self._config = config
        self.server = server
        self.info = info
        self.parser = parser
        self.unsent = 0
        self._sock = sock
        self._out: deque[memoryview] = deque()
        self._last_problem = self._broken = ""
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._events = selectors.EVENT_READ

    @property
    def max_payload(self) -> int:
        """The largest message, headers included, that the server takes."""
        return int(self.info.get("max_payload", 1024 * 1024))

    def send(self, data: bytes | memoryview) -> None:
        """Queue whole frames; `step` sends them."""
        if data:
            self._out.append(memoryview(data))
            self.unsent += len(data)

    def step(self, timeout: float) -> tuple[list[bytes], list[Event]]:
        """Send what the socket takes and read what it has; wait only if there is neither.

        Reading and writing in one step is what keeps the two sides' buffers from filling up
        against each other. Raises `SinkError` when the connection is gone.
        """
        sent = self._flush()
        data = self._read()
        if not data and not sent and timeout > 0:
            self._wait(timeout)
            self._flush()
            data = self._read()
        if not data:
            if self._broken:
                raise self._lost(self._broken)
            return [], []
        acks, events = self.parser.feed(data)
        for event in events:
            if isinstance(event, Ping):
                self.send(b"PONG\r\n")
            elif isinstance(event, Info):
                self.info = event.fields
            elif isinstance(event, ServerError):
                self._note(event)
        return acks, events

    def ping(self, timeout: float) -> None:
        """Ask the server for a sign of life; raises `SinkError` where none comes in time."""
        self.send(b"PING\r\n")
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if any(isinstance(event, Pong) for event in self.step(left)[1]):
                return
        raise unresponsive(self.server, timeout)

    def request(self, subject: str, payload: bytes, inbox: bytes, timeout: float) -> Reply:
        """Send a request and wait for its reply; for the rare calls, never for publishing."""
        size = str(len(payload)).encode()
        self.send(
            b"PUB " + subject.encode() + b" " + inbox + b"0 " + size + b"\r\n" + payload + b"\r\n"
        )
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            for event in self.step(left)[1]:
                if isinstance(event, Reply) and event.number == 0:
                    return event
                if isinstance(event, ServerError):
                    raise problem_error(event.text, self._config, self.server)
        raise SinkError("timeout", f"{self.server} did not answer {subject} within {timeout:g} s.")

    def close(self) -> None:
        """Close the socket; what is queued is dropped."""
        self._selector.close()
        with contextlib.suppress(OSError):
            self._sock.close()

    def _flush(self) -> int:
        sent = 0
        try:
            while self._out:
                view = self._out[0]
                count = self._sock.send(view[:WRITE_SIZE])
                sent += count
                if count == len(view):
                    self._out.popleft()
                else:
                    self._out[0] = view[count:]
                if sent >= WRITE_SIZE:
                    break
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            # Acks, and why it hangs up, may have come before: they are read first.
            self._broken = str(error)
            self._out.clear()
            self.unsent = 0
            return 0
        self.unsent -= sent
        return sent

    def _read(self) -> bytes:
        pieces: list[bytes] = []
        size = 0
        try:
            while size < READ_SIZE:
                piece = self._sock.recv(READ_SIZE)
                if not piece:
                    if pieces:
                        break
                    raise self._lost("the server closed it")
                pieces.append(piece)
                size += len(piece)
                if not isinstance(self._sock, ssl.SSLSocket):
                    break
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            if not pieces:
                raise self._lost(str(error)) from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _wait(self, timeout: float) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if events != self._events:
            self._selector.modify(self._sock, events)
            self._events = events
        self._selector.select(timeout)

    def _note(self, problem: ServerError) -> None:
        # Permission violations leave the connection open, so they are not why it closes.
        if "permissions violation" not in problem.text.lower():
            self._last_problem = problem.text

    def _lost(self, reason: str) -> SinkError:
        if self._last_problem:
            return problem_error(self._last_problem, self._config, self.server)
        if _CERTIFICATE_REFUSED.search(reason):
            return tls_error(self._config, self.server, reason)
        return SinkError("connection_lost", f"The connection to {self.server} is lost: {reason}.")


def connect(
    config: NatsSinkConfig,
    server: Server,
    inbox: bytes,
    name: str,
    timeout: float = CONNECT_TIMEOUT,
) -> Connection:
    """Open, secure and log in one connection that listens on `inbox`; raises `SinkError`.

    Each step of it may take `timeout` seconds.
    """
    where = f"{server.host}:{server.port}"
    try:
        sock = socket.create_connection((server.host, server.port), timeout)
    except ConnectionRefusedError:
        raise SinkError(
            "connection_refused",
            f"Nothing listens at {where} (connection refused).",
            remedy=f"Start nats-server there, or set {config.setting('url')} to where it is.",
        ) from None
    except OSError as error:
        raise SinkError(
            "unreachable",
            f"Cannot reach {where}: {error}.",
            remedy=f"Mend {config.setting('url')}, the name or the network.",
        ) from None
    connection: Connection | None = None
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        parser = Parser(inbox, f"at {where}")
        info = _read_info(sock, parser, where)
        sock = _secure(sock, config, server, info)
        connection = Connection(config, sock, server, info, parser)
        greeting = orjson.dumps(hello(config, server, info, name))
        connection.send(b"CONNECT " + greeting + b"\r\nSUB " + inbox + b"* 1\r\nPING\r\n")
        _await_pong(connection, config, timeout)
        return connection
    except BaseException as error:
        if connection is not None:
            connection.close()
        sock.close()
        if isinstance(error, TimeoutError):
            raise SinkError(
                "timeout",
                f"{where} sends no INFO of a NATS server within {timeout:g} s.",
                remedy=f"Mend {config.setting('url')}; a server with tls handshake_first is not "
                "supported.",
            ) from None
        if isinstance(error, ssl.SSLError):
            raise tls_error(config, server, str(error)) from None
        if isinstance(error, OSError):
            raise SinkError(
                "connection_lost", f"The connection to {where} is lost: {error}."
            ) from None
        raise


def connect_first(
    config: NatsSinkConfig,
    inbox: bytes,
    name: str,
    *,
    start: int = 0,
    timeout: Callable[[], float] = lambda: CONNECT_TIMEOUT,
) -> Connection:
    """Connect as `connect` does to the first server that takes it, beginning with number `start`.

    Where none does, the `SinkError` has each one's reason.
    """
    servers = config.servers
    errors: list[SinkError] = []
    for number in range(start, start + len(servers)):
        try:
            return connect(config, servers[number % len(servers)], inbox, name, timeout())
        except SinkError as error:
            errors.append(error)
    raise none_of(errors)


def _read_info(sock: socket.socket, parser: Parser, where: str) -> dict[str, Any]:
    while True:
        data = sock.recv(READ_SIZE)
        if not data:
            raise SinkError("connection_lost", f"{where} hung up before its greeting.")
        for event in parser.feed(data)[1]:
            if isinstance(event, ServerError):
                raise SinkError("server_error", f"{where} refuses to connect: {event.text}.")
            if isinstance(event, Info):
                return event.fields


def _secure(
    sock: socket.socket, config: NatsSinkConfig, server: Server, info: dict[str, Any]
) -> socket.socket:
    required = bool(info.get("tls_required"))
    asked = server.tls or config.wants_tls
    tls = config.setting("tls")
    if config.tls is False and required:
        reason = f"the server requires TLS, and {tls} is false"
        raise tls_error(config, server, reason, f"Leave {tls} out.")
    if asked and not (required or info.get("tls_available")):
        raise tls_error(
            config, server, "the configuration asks for TLS, and the server offers none",
            f"Leave {tls} and the certificates out, and write nats:// in {config.setting('url')}; or "
            "give the server a `tls {}` block.",
        )  # fmt: skip
    if not (asked or required):
        return sock
    if info.get("tls_verify") and not config.tls_cert:
        cert, key = config.setting("tls_cert"), config.setting("tls_key")
        raise tls_error(
            config, server, f"the server asks for a client's certificate, and {cert} is none",
            f"Set {cert} and {key} to one that the server's CA has signed, and its key.",
        )  # fmt: skip
    return tls_context(config).wrap_socket(sock, server_hostname=server.host)


def _await_pong(connection: Connection, config: NatsSinkConfig, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        for event in connection.step(left)[1]:
            if isinstance(event, ServerError):
                raise problem_error(event.text, config, connection.server)
            if isinstance(event, Pong):
                return
    raise SinkError(
        "timeout",
        f"{connection.server} did not answer the login within {timeout:g} s.",
    )
