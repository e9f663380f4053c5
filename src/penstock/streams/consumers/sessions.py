"""Connections to the store for an event loop, and the store's clock."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.types.string import ByteaBinaryLoader

from penstock.core import queries
from penstock.core.connect import AsyncConnection, is_lost
from penstock.streams.connect import connect_async
from penstock.streams.connection import Also
from penstock.streams.consumers.line import Call, Line
from penstock.streams.consumers.types import StoreUnavailable
from penstock.streams.errors import store_error

SQL: Final = queries.load("penstock.streams.consumers", "consumer.sql")

Connection = AsyncConnection
Params = Sequence[Any] | Mapping[str, Any] | None

L = TypeVar("L", Connection, Line)

_APPLICATION: Final = "penstock consumers"
_SEARCHES: Final = 2


async def messages(connection: Connection, query: Any, params: Params) -> list[Any]:
    """Run a query and return its rows; what is text in them comes as bytes, not decoded."""
    async with connection.cursor(binary=True) as cursor:
        cursor.adapters.register_loader("text", ByteaBinaryLoader)
        await cursor.execute(query, params)
        return await cursor.fetchall()


async def execute_all(connection: Connection, statements: Also) -> None:
    """Run statements in the transaction that `connection` is in."""
    for statement in statements:
        await connection.execute(*statement)


def composed(name: str, **parts: sql.Composable) -> sql.Composed:
    """Return a query of consumer.sql with its identifiers and conditions filled in."""
    return sql.SQL(SQL[name]).format(**parts)


async def stopped(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and return when it is over; a cancellation may be lost in a failing connection."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1.0)


class Clock:
    """The store's time in µs, from this machine's clock and the difference that was measured."""

    def __init__(self) -> None:
        self._offset: int | None = None

    def now(self) -> int:
        """Return the store's time."""
        return time.monotonic_ns() // 1_000 + (self._offset or 0)

    async def measure(self, connection: Connection) -> None:
        """Read the time."""
        await self.read(connection, SQL["clock"])

    async def read(self, connection: Connection, query: Any) -> tuple[Any, ...]:
        """Run a query whose first column is the time, and return its row."""
        before = time.monotonic_ns()
        row = await (await connection.execute(query)).fetchone()
        assert row is not None  # noqa: S101 - it always has one
        self._offset = row[0] - (before + time.monotonic_ns()) // 2_000
        return row

    @property
    def measured(self) -> bool:
        """Whether the time was ever read."""
        return self._offset is not None


class Sessions:
    """At most `size` connections in autocommit mode, made when they are needed.

    Not psycopg_pool: that waits longer after each failure, up to minutes, and a store that is back
    should be used at once.
    """

    def __init__(self, url: str, size: int) -> None:
        self.url = url
        self.clock = Clock()
        self._size = size
        self._open = 0
        self._idle: list[Connection] = []
        # Not for psycopg too, which drops all that is prepared at each rollback.
        self._lines: list[Line] = []
        self._free = asyncio.Semaphore(size)
        self._closed = False
        self.searches = asyncio.Semaphore(_SEARCHES)
        """Searches that evaluate a condition take turns: workers' requests need connections, too."""

    async def connect(self, application: str = _APPLICATION) -> Connection:
        """Return a connection that is not one of the pool's; raises `StoreUnavailable`."""
        try:
            connection = await connect_async(self.url, application)
            if not self.clock.measured:
                await self.clock.measure(connection)
        except psycopg.Error as error:
            raise self.unavailable(error) from None
        return connection

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Connection]:
        """Lend a connection; errors become `StoreUnavailable`, but for those that callers expect."""
        async with self._free:
            connection = await self._unused(self._idle) or await self._one_more(self._lines)
            async with self._lent(connection, self._idle):
                yield connection

    async def run(self, *calls: Call) -> list[PGresult]:
        """Run statements in one transaction, by the short way; return a result of each.

        Errors are those of `session`.
        """
        async with self._free:
            line = await self._unused(self._lines) or Line(await self._one_more(self._idle))
            async with self._lent(line, self._lines):
                return await line.run(*calls)

    @contextlib.asynccontextmanager
    async def _lent(self, lent: L, idle: list[L]) -> AsyncIterator[None]:
        connection = _connection(lent)
        try:
            yield
        except (psycopg.errors.UndefinedTable, psycopg.errors.UniqueViolation):
            raise
        except psycopg.Error as error:
            if connection.closed:
                await self._drop_idle()
            raise self.unavailable(error) from None
        finally:
            is_idle = connection.pgconn.transaction_status == TransactionStatus.IDLE
            if is_idle and not connection.closed and not self._closed:
                idle.append(lent)
            else:
                await self._close(lent)

    async def _unused(self, idle: list[L]) -> L | None:
        """Return one of those that are idle, None where there is none; what was lost meanwhile goes."""
        while idle:
            found = idle.pop()
            if not is_lost(_connection(found)):
                return found
            await self._close(found)
        return None

    async def _one_more(self, others: list[L]) -> Connection:
        """Return a new connection, in the place of an idle one of the other kind if there are many."""
        if others and self._open >= self._size:
            await self._close(others.pop(0))
        self._open += 1
        try:
            return await self.connect()
        except BaseException:
            self._open -= 1
            raise

    async def _close(self, one: Connection | Line) -> None:
        self._open -= 1
        await _connection(one).close()

    async def rows(self, query: Any, params: Params = None) -> list[tuple[Any, ...]]:
        """Run one query and return its rows."""
        async with self.session() as connection:
            return await (await connection.execute(query, params)).fetchall()

    async def messages(self, query: Any, params: Params) -> list[Any]:
        """Run a query and return its rows; what is text in them comes as bytes, not decoded."""
        async with self.session() as connection:
            return await messages(connection, query, params)

    async def execute(self, query: Any, params: Params = None) -> int:
        """Run a statement and return how many rows it touched."""
        async with self.session() as connection:
            return (await connection.execute(query, params)).rowcount

    def unavailable(self, error: psycopg.Error) -> StoreUnavailable:
        """Return what a request is answered with where the store fails it."""
        return StoreUnavailable(str(store_error(error, self.url)))

    async def _drop_idle(self) -> None:
        # The server has gone down, so none of them is any good.
        idle: list[Connection | Line] = [*self._idle, *self._lines]
        self._idle.clear()
        self._lines.clear()
        for one in idle:
            await self._close(one)

    async def close(self) -> None:
        """Close what is not in use; what is in use closes after it."""
        self._closed = True
        await self._drop_idle()


def _connection(one: Connection | Line) -> Connection:
    return one.connection if isinstance(one, Line) else one
