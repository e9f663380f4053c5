"""A small HTTP/1.1 client over one connection: the workers share the cores with what they measure."""

from __future__ import annotations

import re
import socket
from typing import Self
from urllib.parse import urlsplit

_RECEIVE = 1 << 20
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class HttpError(Exception):
    """The server answered with something else than 200, or not at all."""


class Client:
    """A connection to the server of `url`; a context manager. Every call raises `HttpError`."""

    def __init__(self, url: str, token: str, timeout: float = 60) -> None:
        parts = urlsplit(url)
        try:
            self._socket = socket.create_connection((parts.hostname or "", parts.port or 80), 10)
        except OSError as error:
            raise HttpError(f"{url}: {error}") from None
        self._socket.settimeout(timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = f"Host: {parts.netloc}\r\nAuthorization: Bearer {token}\r\n".encode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def get(self, path: bytes) -> bytes:
        """Return the body of the answer to a GET."""
        return self._request(b"GET %b HTTP/1.1\r\n%b\r\n" % (path, self._headers))

    def post(self, path: bytes, body: bytes) -> bytes:
        """Return the body of the answer to a POST of JSON."""
        return self._request(
            b"POST %b HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (path, self._headers, len(body), body)
        )

    def _request(self, request: bytes) -> bytes:
        try:
            self._socket.sendall(request)
            data = self._more()
            while (end := data.find(b"\r\n\r\n")) < 0:
                data += self._more()
            length = _LENGTH.search(data, 0, end)
            if length is None:
                raise HttpError(f"an answer without Content-Length: {data[:end]!r}")
            missing = int(length[1]) - (len(data) - end - 4)
            parts = [data[end + 4 :]]
            while missing > 0:
                parts.append(self._more())
                missing -= len(parts[-1])
        except OSError as error:
            raise HttpError(f"no answer: {error}") from None
        body = b"".join(parts)
        if data[9:12] != b"200":
            raise HttpError(f"status {data[9:12].decode()}: {body[:500].decode(errors='replace')}")
        return body

    def _more(self) -> bytes:
        data = self._socket.recv(_RECEIVE)
        if not data:
            raise HttpError("the server closed the connection")
        return data
