"""What the processes of one store notify each other of: new messages, deliveries and changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import psycopg
from psycopg import sql

from penstock.core import queries
from penstock.streams.consumers.sessions import SQL, Connection, Sessions, stopped
from penstock.streams.consumers.types import StoreUnavailable
from penstock.streams.names import CHANNEL

_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")
_APPLICATION: Final = "penstock api"
_PRESENCE: Final = 3.0
_RETRY: Final = 0.5


class Notices:
    """Listens, over a connection of its own, from `open` to `close`; a lost one is made again.

    Args:
        sessions: The store.
        connected: Called whenever it listens, as notices may have been missed before.
        received: Called with each notice.
        lost: Called when it listens no more.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        connected: Callable[[], Awaitable[None]],
        received: Callable[[str], None],
        lost: Callable[[], None],
    ) -> None:
        self._sessions = sessions
        self._connected = connected
        self._received = received
        self._lost = lost
        self._alone = False  # no other process serves this store
        self._listener: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_used(self) -> bool:
        """Whether `open` was called: only then changes are noticed."""
        return self._listener is not None

    async def open(self) -> None:
        """Return when it listens, or when the store does not answer."""
        ready = asyncio.Event()
        self._listener = asyncio.create_task(self._listen(ready))
        await ready.wait()

    async def close(self) -> None:
        """End all that runs."""
        await stopped(self._listener)
        for task in list(self._tasks):
            await stopped(task)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside everything else, until `close`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def send(self, payload: str) -> None:
        """Notify the other processes, if there are any."""
        if not self._alone:
            self.run(self._send(payload))

    async def _send(self, payload: str) -> None:
        with contextlib.suppress(StoreUnavailable):  # the others look every second
            await self._sessions.execute(_STORE_SQL["notify"], (payload,))

    async def _listen(self, ready: asyncio.Event) -> None:
        while True:
            try:
                connection = await self._sessions.connect(_APPLICATION)
                async with connection:
                    await self._receive(connection, ready)
            except (StoreUnavailable, psycopg.Error):
                self._alone = False
                self._lost()
                ready.set()
                await asyncio.sleep(_RETRY)

    async def _receive(self, connection: Connection, ready: asyncio.Event) -> None:
        await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(CHANNEL)))
        await self._connected()
        while True:
            row = await self._sessions.clock.read(connection, SQL["presence"])
            self._alone = not row[1]
            ready.set()
            async for notice in connection.notifies(timeout=_PRESENCE):
                self._received(notice.payload)
