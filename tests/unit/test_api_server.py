"""The end of the HTTP server, as its connections see it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest
import uvloop
from fastapi import FastAPI
from tests.waits import Later

from penstock.api import server as api_server
from penstock.api.server import Connection, Uvicorn, bind


async def end_of_a_late_connection() -> None:
    """Make a connection once a server has asked all others to end; return when both have ended.

    A server may have accepted such a connection before the event loop makes it.
    """
    server = Uvicorn(FastAPI())
    serving = asyncio.create_task(server.serve([bind("127.0.0.1:0")]))
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
        server.should_exit = True
        while not server.server_state.is_ending:
            await asyncio.sleep(0)
    client, accepted = socket.socketpair()
    loop = asyncio.get_running_loop()
    with client:
        client.setblocking(False)
        await loop.connect_accepted_socket(
            lambda: Connection(server.config, server.server_state, {}), accepted
        )
        async with asyncio.timeout(2):  # less than the grace of requests that are under way
            assert await loop.sock_recv(client, 1) == b""
            await serving


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_comes_late_is_ended_too(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(end_of_a_late_connection())


def test_it_ends_at_once_however_seldom_it_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_server, "_TICK_SECONDS", 3600.0)
    ticked, ticks = threading.Event(), list[int]()

    class Ticking(Uvicorn):
        async def on_tick(self, counter: int) -> bool:
            ticks.append(counter)
            ticked.set()
            return await super().on_tick(counter)

    made = Ticking(FastAPI())
    running = Later(lambda: made.run([bind("127.0.0.1:0")]))
    assert ticked.wait(60)
    made.should_exit = True
    running.result(60)
    assert ticks == [0, 10]
