"""A small synchronous NATS client that does one thing fast: publish, and read the acks in bulk.

`NatsConnection` puts a non-blocking socket under `Parser`. Frames are handed over ready-made (`HPUB …`),
thousands in one buffer.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from penstock.bastion import tunnel_to
from penstock.config.nats import NatsServer, NatsSinkConfig
from penstock.core.errors import BastionError, SinkError
from penstock.sinks.nats import announced
from penstock.sinks.nats.errors import none_of, problem_error, tls_error, unresponsive
from penstock.sinks.nats.login import connect_options, secure
from penstock.sinks.nats.parser import Event, Info, Parser, Ping, Pong, Reply, ServerError

_READ_SIZE: Final = 256 * 1024
_WRITE_SIZE: Final = 256 * 1024
CONNECT_TIMEOUT: Final = 5.0
_CERTIFICATE_REFUSED: Final = re.compile(r"_ALERT_\w*(?:CERTIFICATE|UNKNOWN_CA)")
"""With TLS 1.3 the server judges a client's certificate when the handshake is over for the client."""


def new_inbox() -> bytes:
    """Return what the subjects begin with that acks and replies come to."""
    return f"_INBOX.{secrets.token_hex(8)}.".encode()


class NatsConnection:
    """A logged-in connection that listens on its inbox; made by `connect`."""

    def __init__(
        self,
        config: NatsSinkConfig,
        sock: socket.socket,
        server: NatsServer,
        info: dict[str, Any],
        parser: Parser,
    ):
        sock.setblocking(False)
        self._config = config
        self.server = server
        self.info = info
        self.parser = parser
        self.inbox = parser.inbox
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

    def publish(self, subject: bytes, payload: bytes = b"", *, reply: bytes = b"") -> None:
        """Queue one message without headers; for the rare ones."""
        to = b"%b %b" % (subject, reply) if reply else subject
        self.send(b"PUB %b %d\r\n%b\r\n" % (to, len(payload), payload))

    def step(self, timeout: float, *, last: bool = False) -> tuple[list[bytes], list[Event]]:
        """Send what the socket takes and read what it has; wait only if there is neither.

        Reading and writing in one step is what keeps the two sides' buffers from filling up
        against each other. With `last` there is nothing more to send, and it waits for something to
        read. Raises `SinkError` when the connection is gone.
        """
        sent = self._flush()
        # TLS may have data that the socket has no more.
        awaits = last and not self._out and not isinstance(self._sock, ssl.SSLSocket)
        data = b"" if awaits and sent and timeout > 0 else self._read()
        if not data and (awaits or not sent) and timeout > 0:
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
                announced.note(self._config, self.server, event.fields)
            elif isinstance(event, ServerError):
                self._note(event)
        return acks, events

    def events(self, timeout: float) -> Iterator[Event]:
        """Yield what the server sends, acks aside, for `timeout` seconds; raises as `step` does."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            yield from self.step(left)[1]

    def ping(self, timeout: float) -> None:
        """Ask the server for a sign of life; raises `SinkError` where none comes in time."""
        self.send(b"PING\r\n")
        if not any(isinstance(event, Pong) for event in self.events(timeout)):
            raise unresponsive(self.server, timeout)

    def request(self, subject: str, payload: bytes, timeout: float) -> Reply:
        """Send a request and wait for its reply; for the rare calls, never for publishing."""
        self.publish(subject.encode(), payload, reply=self.inbox + b"0")
        for event in self.events(timeout):
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
                count = self._sock.send(view[:_WRITE_SIZE])
                sent += count
                if count == len(view):
                    self._out.popleft()
                else:
                    self._out[0] = view[count:]
                if sent >= _WRITE_SIZE:
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
            while size < _READ_SIZE:
                piece = self._sock.recv(_READ_SIZE)
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
    server: NatsServer,
    inbox: bytes,
    name: str,
    timeout: float = CONNECT_TIMEOUT,
) -> NatsConnection:
    """Open, secure and log in one connection that listens on `inbox`; raises `SinkError`.

    Each step of it may take `timeout` seconds.
    """
    where = f"{server.host}:{server.port}"
    try:
        sock = _open(config, server, timeout)
    except BastionError as error:
        raise SinkError(
            error.code, error.message, remedy=error.remedy, transient=error.transient
        ) from None
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
    connection: NatsConnection | None = None
    try:
        sock.settimeout(timeout)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        parser = Parser(inbox, f"at {where}")
        info = _read_info(sock, parser, where)
        announced.note(config, server, info)
        sock = secure(sock, config, server, info)
        connection = NatsConnection(config, sock, server, info, parser)
        options = orjson.dumps(connect_options(config, server, info, name))
        connection.send(b"CONNECT " + options + b"\r\nSUB " + inbox + b"* 1\r\nPING\r\n")
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
    name: str,
    *,
    inbox: bytes | None = None,
    start: int = 0,
    timeout: Callable[[], float] = lambda: CONNECT_TIMEOUT,
) -> NatsConnection:
    """Connect as `connect` does to the first server that takes it, beginning with number `start`.

    The servers are those of `announced.servers_of`. Without an `inbox` it has a new one. Where none
    does, the `SinkError` has each one's reason.
    """
    inbox = inbox or new_inbox()
    servers = announced.servers_of(config)
    errors: list[SinkError] = []
    for number in range(start, start + len(servers)):
        try:
            return connect(config, servers[number % len(servers)], inbox, name, timeout())
        except SinkError as error:
            errors.append(error)
    raise none_of(errors)


def _open(config: NatsSinkConfig, server: NatsServer, timeout: float) -> socket.socket:
    """Return a socket that leads to a server, through the bastion if there is one."""
    if config.reached is None:
        return socket.create_connection((server.host, server.port), timeout)
    return tunnel_to(config.reached).open(server.host, server.port, timeout)


def _read_info(sock: socket.socket, parser: Parser, where: str) -> dict[str, Any]:
    while True:
        data = sock.recv(_READ_SIZE)
        if not data:
            raise SinkError("connection_lost", f"{where} closed the connection before its INFO.")
        for event in parser.feed(data)[1]:
            if isinstance(event, ServerError):
                raise SinkError("server_error", f"{where} refuses to connect: {event.text}.")
            if isinstance(event, Info):
                return event.fields


def _await_pong(connection: NatsConnection, config: NatsSinkConfig, timeout: float) -> None:
    for event in connection.events(timeout):
        if isinstance(event, ServerError):
            raise problem_error(event.text, config, connection.server)
        if isinstance(event, Pong):
            return
    raise SinkError(
        "timeout",
        f"{connection.server} did not answer the login within {timeout:g} s.",
    )
