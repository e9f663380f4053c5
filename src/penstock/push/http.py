"""An HTTP/1.1 client for one endpoint: POST, keep-alive, and only to addresses that were checked.

Redirects are not followed, nor are proxies used: either would let the answer of a stranger choose where
a request goes. Of an answer the status and Retry-After matter; its body is read for the connection's
sake, up to a limit. The start of a failure's body is reported, for people to read.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

import httptools
from pydantic import SecretStr

from penstock import __version__
from penstock.bastion import tunnel_to
from penstock.config.bastion import Bastion
from penstock.core.errors import BastionError
from penstock.core.tls import client_context
from penstock.push.addresses import resolve
from penstock.push.errors import EndpointError
from penstock.push.quoting import KEPT_BYTES

_LONGEST_ANSWER: Final = 256 * 1024
_IDLE_SECONDS: Final = 30.0  # a connection unused for longer may be dead without a word
_NEXT_ADDRESS_SECONDS: Final = 3.0
_PORTS: Final = {"http": 80, "https": 443}


class EndpointAnswer(NamedTuple):
    """An endpoint's answer: `retry_after` is that header's value, `start` that of a failure's body."""

    status: int
    retry_after: str | None
    start: bytes = b""


class Endpoint:
    """A URL that is posted to, and its connections.

    Args:
        url: http or https; credentials in it become basic authentication.
        headers: Sent with each request.
        allow_private: Whether its host may be at an address that is not public.
        ca: The PEM text of the CA that signed its certificate; None: those that the system knows.
        identity: The PEM text of the certificate that it is shown, with its key; None: it is shown none.
        bastion: Gives the bastion that it lies behind, asked at each new connection; None: there is
            none. Its name then stands for an address there, which may be private.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        allow_private: bool,
        ca: str | None = None,
        identity: SecretStr | None = None,
        bastion: Callable[[], Awaitable[Bastion]] | None = None,
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._tls = parts.scheme == "https"
        self._allow_private = allow_private
        self._trust = ca, identity
        self._bastion = bastion
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        netloc = parts.netloc.rpartition("@")[2]
        self.address = f"{parts.scheme}://{netloc}"
        """Scheme, host and port: what may stand in a log."""
        named = {"content-type": "application/json", "user-agent": f"penstock/{__version__}"}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            named["authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        named |= {name.lower(): value for name, value in headers.items()}
        self._path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
        self._query = "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?") if parts.query else ""
        lines = [f"host: {_ascii(netloc)}"]
        lines += [f"{name}: {value}" for name, value in named.items()]
        self._head = "\r\n".join(lines).encode("ascii") + b"\r\n"

    async def post(
        self, body: bytes, headers: bytes, seconds: float, path: str = ""
    ) -> EndpointAnswer:
        """Post `body` and return the answer, whatever its status.

        Args:
            body: JSON.
            headers: More header lines, each with its end.
            seconds: After so long without the whole answer the connection is cut.
            path: What comes behind the URL's own path, escaped, with its slash.

        Raises:
            EndpointError: There was no answer.
        """
        target = f"{self._path.rstrip('/') if path else self._path}{path}{self._query}"
        request = b"POST %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n%b" % (
            target.encode("ascii"), self._head, headers, len(body), body,
        )  # fmt: skip
        try:
            async with asyncio.timeout(seconds):
                return await self._post(request)
        except TimeoutError:
            raise EndpointError(
                "timeout", f"{self.address} gave no answer within {seconds * 1000:.0f} ms"
            ) from None

    async def _post(self, request: bytes) -> EndpointAnswer:
        if (connection := self._take_idle()) is not None:
            answer = await self._send(connection, request)
            if answer is not None:
                return answer
            # It was closed as unused, at the moment it was used: no failure of the endpoint's.
        connection = await self._connect()
        answer = await self._send(connection, request)
        if answer is None:
            raise EndpointError(
                "connection_lost", f"{self.address} closed the connection without an answer"
            )
        return answer

    async def _send(self, connection: _Connection, request: bytes) -> EndpointAnswer | None:
        """Return the answer, None if the connection ended before a byte of one."""
        try:
            answer = await connection.send(request)
        except EndpointError as error:
            raise EndpointError(error.code, f"{self.address} {error}") from None
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
                self._open.discard(connection)
        return answer

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and time.monotonic() - connection.used < _IDLE_SECONDS:
                return connection
            connection.close()
            self._open.discard(connection)
        return None

    async def _connect(self) -> _Connection:
        if self._bastion is not None:
            return await self._connect_through(await self._bastion())
        addresses = await resolve(self._host, self._port, allow_private=self._allow_private)
        loop, last = asyncio.get_running_loop(), addresses[-1]
        for address in addresses:
            try:
                async with asyncio.timeout(None if address == last else _NEXT_ADDRESS_SECONDS):
                    _, connection = await loop.create_connection(
                        _Connection,
                        address,
                        self._port,
                        ssl=_tls(*self._trust) if self._tls else None,
                        server_hostname=self._host if self._tls else None,
                    )
            except (OSError, TimeoutError) as error:
                if address == last:
                    raise self._unreachable(error, address) from None
                continue
            self._open.add(connection)
            return connection
        raise AssertionError("a name without addresses does not resolve")

    async def _connect_through(self, bastion: Bastion) -> _Connection:
        opening = tunnel_to(bastion).opening(self._host, self._port)
        try:
            sock = await asyncio.wrap_future(opening)
        except BastionError as error:
            raise EndpointError(error.code, str(error)) from None
        try:
            sock.setblocking(False)
            _, connection = await asyncio.get_running_loop().create_unix_connection(
                _Connection, sock=sock, ssl=_tls(*self._trust) if self._tls else None,
                server_hostname=self._host if self._tls else None,
            )  # fmt: skip
        except OSError as error:
            raise self._unreachable(error, self._host) from None
        self._open.add(connection)
        return connection

    def _unreachable(self, error: OSError, address: str) -> EndpointError:
        where = self.address if address in self.address else f"{self.address} ({address})"
        if isinstance(error, ssl.SSLError):
            why = getattr(error, "verify_message", "") or error.reason or "the connection ended"
            return EndpointError("tls", f"{where}: TLS failed: {why}")
        if isinstance(error, ConnectionRefusedError):
            return EndpointError("connection_refused", f"{where} refused the connection")
        why = error.strerror or type(error).__name__
        return EndpointError("unreachable", f"{where} cannot be reached: {why}")

    def close(self) -> None:
        """Close all connections."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time; its methods are called by asyncio and httptools."""

    def __init__(self) -> None:
        self.used = time.monotonic()
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[EndpointAnswer | None] | None = None

    async def send(self, request: bytes) -> EndpointAnswer | None:
        """Send a request and return the answer, None if the connection ended before a byte of one."""
        if self._transport is None or self._transport.is_closing():
            self.reusable = False
            return None
        self._waiter = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._received = self._status = 0
        self._start = b""
        self._retry_after: str | None = None
        self.reusable = False  # until the answer is whole
        self._transport.write(request)
        try:
            return await self._waiter
        finally:
            self._waiter = None
            self.used = time.monotonic()

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.close()  # an answer to no request: it can't be assigned to one
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._answer()
        except httptools.HttpParserError:
            self._fail("bad_answer", "answered, but not in HTTP")
        if self._received > _LONGEST_ANSWER and not self._waiter.done():
            self._answer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._status >= 300 and (room := KEPT_BYTES - len(self._start)) > 0:
            self._start += data[:room]

    def on_message_complete(self) -> None:
        if self._waiter is None or self._waiter.done():
            self.reusable = False  # more than one answer
        elif self._status >= 200:  # 100 and 103 come before the answer
            self.reusable = self._parser.should_keep_alive()
            self._answer()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self.reusable = False
        if self._waiter is None or self._waiter.done():
            return
        if self._received == 0:
            self._waiter.set_result(None)
        else:
            self._answer()  # where no length was given, the end of the connection is the answer's

    def _answer(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if self._status:
            self._waiter.set_result(EndpointAnswer(self._status, self._retry_after, self._start))
        else:
            self._fail("bad_answer", "ended in the middle of an answer's headers")

    def _fail(self, code: str, message: str) -> None:
        self.reusable = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(EndpointError(code, message))


@functools.cache
def _tls(ca: str | None, identity: SecretStr | None) -> ssl.SSLContext:
    return client_context(ca, identity)


def _ascii(netloc: str) -> str:
    try:
        return netloc if netloc.isascii() else netloc.encode("idna").decode("ascii")
    except UnicodeError:
        return ""  # nor will it resolve
