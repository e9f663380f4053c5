"""The protocol takes one request at a time, wherever the network cuts what a client sends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from penstock.api.framing import MAX_BODY, MAX_HEAD, MAX_HEADERS
from penstock.api.protocol import Protocol


class Pipe(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.paused = self.closing = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def write_eof(self) -> None:
        self.closing = True

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return 0


class App:
    """Answers with method, path and the whole body; notes what is under way at a time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bytes]] = []
        self.now = self.most = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.now -= 1
                return
            body, more = body + message["body"], message["more_body"]
        self.calls.append((scope["method"], scope["path"], body))
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.now -= 1
        await send({"type": "http.response.body", "body": b""})


async def _serve(pieces: Sequence[bytes]) -> tuple[App, Pipe]:
    app, pipe = App(), Pipe()
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    config.load()
    protocol = Protocol(config, ServerState(), {})
    protocol.connection_made(pipe)
    for piece in pieces:
        for _ in range(1000):
            if not pipe.paused:
                break
            await asyncio.sleep(0)
        if not pipe.closing:
            protocol.data_received(piece)
        await asyncio.sleep(0)
    idle = 0
    while idle < 20:  # turns of the loop in which nothing was answered
        before = len(pipe.written)
        await asyncio.sleep(0)
        idle = 0 if len(pipe.written) != before else idle + 1
    return app, pipe


def serve(*pieces: bytes) -> tuple[App, Pipe]:
    """Send the pieces, one after the other, and wait for what is answered."""
    return asyncio.run(_serve(pieces))


def cut(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    """Yield `data` in pieces."""
    start = 0
    for end in [*sorted({at % (len(data) + 1) for at in cuts}), len(data)]:
        if end > start:
            yield data[start:end]
        start = end


BODIES = st.sampled_from(
    [
        b"",
        b"x",
        b"\r\n\r\n",
        b"0\r\n\r\n",
        b"GET /smuggled HTTP/1.1\r\n\r\n",
        b"\r\n\r\n" * 50,
        b"y" * 70_000,
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, tuple[str, str, bytes]]:
    """Return a request as it is sent, and as it should come to the app."""
    start = draw(st.sampled_from([b"", b"\r\n", b"\r\n\r\n"]))
    path = draw(st.sampled_from(["/", "/a", "/b"]))
    kind = draw(st.sampled_from(["GET", "length", "chunked"]))
    if kind == "GET":
        return start + f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), ("GET", path, b"")
    body = draw(BODIES)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n".encode()
    if kind == "length":
        sent = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        return start + head + sent, ("POST", path, body)
    middle = draw(st.integers(0, len(body)))
    extension = draw(st.sampled_from([b"", b";name=value"]))
    chunks = b"".join(
        b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk)
        for chunk in (body[:middle], body[middle:])
        if chunk
    )
    end = b"0%b\r\n%b\r\n" % (extension, draw(st.sampled_from([b"", b"Trailer: x\r\nB: y\r\n"])))
    sent = b"Transfer-Encoding: chunked\r\n\r\n" + chunks + end
    return start + head + sent, ("POST", path, body)


@settings(max_examples=150)
@given(st.lists(requests(), min_size=1, max_size=6), st.lists(st.integers(0, 1 << 20), max_size=12))
def test_requests_come_whole_in_order_and_one_at_a_time(
    sent: list[tuple[bytes, tuple[str, str, bytes]]], cuts: list[int]
) -> None:
    data = b"".join(wire for wire, _ in sent)
    app, pipe = serve(*cut(data, cuts))
    assert app.calls == [call for _, call in sent]
    assert pipe.written.count(b"HTTP/1.1 200 OK") == len(sent)
    assert app.most == 1
    assert not pipe.closing


def test_byte_by_byte() -> None:
    data = (
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n0\r\nT: x\r\n\r\n"
        b"POST /b HTTP/1.1\r\nContent-Length: 4\r\n\r\n\r\n\r\nGET /c HTTP/1.1\r\n\r\n"
    )
    app, _ = serve(*[data[at : at + 1] for at in range(len(data))])
    assert app.calls == [
        ("POST", "/a", b"\r\n\r\n"),
        ("POST", "/b", b"\r\n\r\n"),
        ("GET", "/c", b""),
    ]


LENGTH = b"POST / HTTP/1.1\r\nContent-Length: "
CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD, 431),
        (b"GET /" + b"a" * MAX_HEAD, 431),
        (b"G" * (MAX_HEAD + 1), 431),
        (b"\r\n" * MAX_HEAD, 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
        (LENGTH + b"%d\r\n\r\n" % (MAX_BODY + 1), 413),
        (LENGTH + b"%d\r\nExpect: 100-continue\r\n\r\n" % (MAX_BODY + 1), 413),
        (CHUNKED + b"\r\n%x\r\n" % (MAX_BODY + 1) + b"a" * (MAX_BODY + 1), 413),
        (CHUNKED + b"\r\n" + b"1\r\na\r\n" * MAX_BODY, 413),
        (CHUNKED + b"\r\n1;" + b"a" * 2 * MAX_BODY, 413),
        (CHUNKED + b"\r\n0\r\nX: " + b"a" * 2 * MAX_BODY, 413),
        (LENGTH + b"1\r\nContent-Length: 1\r\n\r\na", 400),
        (LENGTH + b"1\r\nContent-Length: 2\r\n\r\na", 400),
        (LENGTH + b"1, 1\r\n\r\na", 400),
        (LENGTH + b"+1\r\n\r\na", 400),
        (LENGTH + b"-1\r\n\r\na", 400),
        (LENGTH + b"1\r\n 2\r\n\r\na", 400),
        (LENGTH + b"99999999999999999999\r\n\r\na", 400),
        (LENGTH + b"3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (CHUNKED + b"Content-Length: 3\r\n\r\n0\r\n\r\n", 400),
        (CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX : y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nX: a\0b\r\n\r\n", 400),
        (b"GET http:// HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT x:443 HTTP/1.1\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 505),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (LENGTH + b"3\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nabc", 400),
    ],
)
def test_what_is_refused(request_: bytes, status: int) -> None:
    app, pipe = serve(request_ + b"GET /smuggled HTTP/1.1\r\n\r\n")
    assert app.calls == []
    head, _, body = pipe.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/problem+json" in head
    assert b"connection: close" in head
    assert b'"status":%d' % status in body
    assert pipe.written.count(b"HTTP/1.1 ") == 1 + body.count(b"HTTP/1.1 ")
    assert pipe.closing


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD - 100) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * MAX_HEADERS + b"\r\n",
        LENGTH + b"%d\r\n\r\n" % MAX_BODY + b"a" * MAX_BODY,
        CHUNKED + b"\r\n%x\r\n" % MAX_BODY + b"a" * MAX_BODY + b"\r\n0\r\n\r\n",
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    ],
)
def test_what_is_within_the_limits(request_: bytes) -> None:
    app, pipe = serve(request_)
    assert len(app.calls) == 1
    assert pipe.written.startswith(b"HTTP/1.1 200 ")


def test_an_upgrade_is_not_made_and_the_request_is_answered() -> None:
    request_ = b"GET /a HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    app, pipe = serve(request_ + b"GET /b HTTP/1.1\r\n\r\n")
    assert app.calls == [("GET", "/a", b"")]
    assert b"connection: close" in pipe.written


def test_a_trailer_is_no_header() -> None:
    async def send() -> list[bytes]:
        seen: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["more_body"]:
                pass
            seen.set_result([name for name, _ in scope["headers"]])

        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
        config.load()
        protocol = Protocol(config, ServerState(), {})
        protocol.connection_made(Pipe())
        trailers = b"0\r\nAuthorization: Bearer x\r\nOther: y\r\n\r\n"
        protocol.data_received(CHUNKED + b"\r\n" + trailers)
        return await asyncio.wait_for(seen, 60)

    assert asyncio.run(send()) == [b"transfer-encoding"]
