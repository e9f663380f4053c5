"""The HTTP server: where it listens, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Final

import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from penstock.api.app import Api
from penstock.api.protocol import Protocol
from penstock.core.errors import ListenError

_GRACE: Final = 5  # seconds for requests that are under way when the server ends
_TICK_SECONDS: Final = 1.0
_TICKS: Final = 10  # uvicorn's own in a second; at each tenth it renews the date in answers


class Connections(ServerState):
    """The connections of a server."""

    is_ending = False
    """Whether the server has asked all of them to end."""


class Connection(Protocol):
    """A connection of a server that may be ending."""

    server_state: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's type is wider
        """Begin; end at once where the server has asked the others to end before this one was made."""
        super().connection_made(transport)
        if self.server_state.is_ending:
            transport.close()


class Uvicorn(uvicorn.Server):
    """Serves `app` until `should_exit`, or a signal where it runs in the main thread."""

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on" if isinstance(app, Api) else "off",
            timeout_graceful_shutdown=_GRACE,
            ws="none",
        )
        self._exits = False
        self._woken: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(config)
        self.server_state: Connections = Connections()
        self._app = app

    @property
    def should_exit(self) -> bool:
        """Whether the server is to end; any thread, and a signal's handler, may set it."""
        return self._exits

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._exits = value
        if self._loop is not None and self._woken is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._woken.set)

    async def main_loop(self) -> None:
        """Tick once a second until the end: uvicorn's own ten ticks cost an idle process more."""
        self._woken = woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        counter = 0
        while not await self.on_tick(counter):
            counter += _TICKS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await woken.wait()

    async def on_tick(self, counter: int) -> bool:
        """End the connections whose time is over."""
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            if isinstance(connection, Protocol):
                connection.check(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what waits, then end as uvicorn does; late connections end, too."""
        self.server_state.is_ending = True
        if isinstance(self._app, Api):
            self._app.end()
        await super().shutdown(sockets)


def bind(listen: str) -> socket.socket:
    """Return a listening socket for `host:port`; raises `ListenError`."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ListenError(f"--listen {listen!r} is not host:port (as in 127.0.0.1:7380).")
    host = host.strip("[]") or "0.0.0.0"  # noqa: S104 - `:7380` is every address
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, int(port)))
        bound.listen(128)
    except OSError as error:
        raise ListenError(
            f"Can't listen on {listen}: {error.strerror or error}. Is another penstock running?"
            " Choose another address with --listen."
        ) from None
    return bound


def address(bound: socket.socket) -> str:
    """Return the address that a socket listens on, `host:port`."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
