"""What an endpoint finds of its client: an answer in one write, and a call when it hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from tests.unit.test_api_protocol import Pipe
from uvicorn.server import ServerState

from penstock.api.client import Client
from penstock.api.protocol import Protocol
from penstock.api.requests import Json

ANSWER = (
    b"HTTP/1.1 200 OK\r\nserver: test\r\n"
    b"content-type: application/json\r\ncache-control: no-store\r\n"
)
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


class Counting(Pipe):
    """Counts the writes."""

    writes = 0

    def write(self, data: Any) -> None:
        self.writes += 1
        super().write(data)


def connected(app: Callable[[Any, Any, Any], Awaitable[None]]) -> tuple[Protocol, Counting]:
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    config.load()
    state = ServerState()
    state.default_headers = [(b"server", b"test")]
    protocol, pipe = Protocol(config, state, {}), Counting()
    protocol.connection_made(pipe)
    return protocol, pipe


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def answered(*pieces: bytes, pause: bool = False) -> tuple[list[bool], Counting]:
    """Send the pieces to an app that answers `{}`; return what `answer` returned, and what came."""
    returned: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        response = Json(b"{}")
        returned.append(scope["state"]["client"].answer(response))
        if not returned[-1]:
            await response(scope, receive, send)

    async def work() -> Counting:
        protocol, pipe = connected(app)
        if pause:
            protocol.pause_writing()
        for piece in pieces:
            protocol.data_received(piece)
            await settle()
        if pause:
            assert pipe.writes == 0
            protocol.resume_writing()
            await settle()
        return pipe

    return returned, asyncio.run(work())


def test_an_answer_is_one_write_and_the_connection_goes_on() -> None:
    returned, pipe = answered(GET, GET + GET)
    assert returned == [True] * 3
    assert pipe.writes == 3
    assert pipe.written == 3 * (ANSWER + b"content-length: 2\r\n\r\n{}")
    assert not pipe.closing


def test_a_client_that_wants_no_more_has_its_connection_closed() -> None:
    for request in b"GET /a HTTP/1.0\r\n\r\n", GET.replace(b"Host: x", b"Connection: close"):
        returned, pipe = answered(request)
        assert returned == [True]
        assert pipe.written == ANSWER + b"content-length: 2\r\nconnection: close\r\n\r\n{}"
        assert pipe.closing


def test_before_the_body_has_come_asgi_answers() -> None:
    head = b"POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\n"
    returned, pipe = answered(head, b"{}" + GET)
    assert returned == [False, True]
    assert pipe.written.count(b"HTTP/1.1 200 OK") == 2


def test_to_a_client_that_reads_nothing_asgi_answers_when_it_does() -> None:
    returned, pipe = answered(GET, pause=True)
    assert returned == [False]
    assert pipe.written.startswith(ANSWER)


def test_a_hang_up_is_reported_once_and_only_while_it_is_watched() -> None:
    calls: list[str] = []
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client: Client = scope["state"]["client"]
        if scope["path"] == "/a":
            client.watch(lambda: calls.append("watched no more"))
            client.watch(None)
            assert client.answer(Json(b"{}"))
            return
        client.watch(lambda: calls.append("gone"))
        assert not client.gone
        await go_on.wait()
        assert client.gone
        calls.append(f"answered: {client.answer(Json(b'{}'))}")

    async def work() -> None:
        protocol, pipe = connected(app)
        protocol.data_received(GET)
        await settle()
        protocol.data_received(GET.replace(b"/a", b"/b"))
        await settle()
        pipe.close()
        protocol.connection_lost(None)
        protocol.connection_lost(None)
        go_on.set()
        await settle()
        assert pipe.writes == 1

    asyncio.run(work())
    assert calls == ["gone", "answered: True"]
