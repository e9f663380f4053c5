"""A connection's short way: prepared statements, sent together, whose results come without a cursor.

What runs for every ack and every receive runs here; it takes a third of the CPU that `execute` does.
All is libpq's own: the statements go out in one piece, and the event loop watches the socket from
the first one on, so that between two of them nothing is registered anew.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import pq, sql
from psycopg.errors import error_from_result

from penstock.core.connect import AsyncConnection, is_lost

_MOST_PREPARED: Final = 100
_PARAMETER: Final = re.compile(r"%\((\w+)\)s|%%")
_FAILED: Final = (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.PIPELINE_ABORTED)

Value = int | str | None


class Statement:
    """A query with parameters as psycopg has them, each of whose types the server can tell."""

    def __init__(self, query: sql.Composable) -> None:
        self.names: list[str] = []
        self.text = _PARAMETER.sub(self._number, query.as_string(None)).encode()

    def _number(self, found: re.Match[str]) -> str:
        name = found[1]
        if name is None:
            return "%"
        if name not in self.names:
            self.names.append(name)
        return f"${self.names.index(name) + 1}"


class Call(NamedTuple):
    """A statement with its values by name."""

    statement: Statement
    values: Mapping[str, Value]

    def encoded(self) -> list[bytes | None]:
        """Return the values as the server takes them."""
        found = map(self.values.__getitem__, self.statement.names)
        return [None if value is None else str(value).encode() for value in found]


def numbers(result: pq.abc.PGresult) -> list[tuple[Any, ...]]:
    """Return rows of whole numbers and nulls."""
    columns = range(result.nfields)
    return [
        tuple(None if (text := result.get_value(row, at)) is None else int(text) for at in columns)
        for row in range(result.ntuples)
    ]


class Line:
    """A connection in autocommit mode for `run` alone, lent to one task at a time."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self._pgconn = connection.pgconn
        self._socket = connection.pgconn.socket
        self._loop = asyncio.get_running_loop()
        self._watched = False
        self._used = False
        self._ready: asyncio.Future[None] | None = None
        self._names: dict[bytes, bytes] = {}  # of what is prepared, the oldest first
        self._count = 0

    def is_lost(self) -> bool:
        """Return whether the server has ended the connection, which is idle."""
        if lost := is_lost(self.connection):
            self._unwatch()
        return lost

    async def close(self) -> None:
        """Close the connection."""
        self._unwatch()
        await self.connection.close()

    def _unwatch(self) -> None:
        """Watch the socket no more: at once when it is closed, as another one may get its number."""
        if self._watched:
            self._loop.remove_reader(self._socket)
            self._watched = False

    async def run(self, *calls: Call) -> list[pq.abc.PGresult]:
        """Run statements in one transaction; return a result of each.

        Raises what the first one that failed raises.
        """
        self._used = True
        try:
            results, sent = await self._ask(calls)
        except BaseException:
            self._unwatch()
            raise
        self._used = False
        return self._checked(results, sent)

    async def _ask(self, calls: Sequence[Call]) -> tuple[list[pq.abc.PGresult], list[bytes | None]]:
        """Return the results, and of each what it has prepared: None for one that was asked for."""
        pgconn, sent = self._pgconn, list[bytes | None]()
        if not self._watched:
            self._loop.add_reader(self._socket, self._readable)
            self._watched = True
        if together := len(calls) > 1 or calls[0].statement.text not in self._names:
            pgconn.enter_pipeline_mode()
        for call in calls:
            text = call.statement.text
            name = self._names.get(text)
            if name is None:
                name = self._prepare(text, sent)
            pgconn.send_query_prepared(name, call.encoded())
            sent.append(None)
        if together:
            pgconn.pipeline_sync()
        results = await self._results(together)
        if together:
            pgconn.exit_pipeline_mode()
        return results, sent

    def _prepare(self, text: bytes, sent: list[bytes | None]) -> bytes:
        if len(self._names) >= _MOST_PREPARED:
            oldest = next(iter(self._names))
            self._pgconn.send_query_params(b"DEALLOCATE " + self._names.pop(oldest), None)
            sent.append(b"")
        self._count += 1
        name = b"penstock_%d" % self._count
        self._pgconn.send_prepare(name, text)
        self._names[text] = name
        sent.append(text)
        return name

    def _checked(
        self, results: Sequence[pq.abc.PGresult], sent: Sequence[bytes | None]
    ) -> list[pq.abc.PGresult]:
        for result, prepared in zip(results, sent, strict=False):
            if result.status in _FAILED and prepared:
                del self._names[prepared]
        for result in results:
            if result.status in _FAILED:
                raise error_from_result(result, encoding="utf-8")
        return [result for result, prepared in zip(results, sent, strict=True) if prepared is None]

    async def _results(self, together: bool) -> list[pq.abc.PGresult]:
        pgconn = self._pgconn
        while pgconn.flush():
            await self._writable()
            pgconn.consume_input()
        found: list[pq.abc.PGresult] = []
        while True:
            while pgconn.is_busy():
                self._ready = self._loop.create_future()
                try:
                    await self._ready
                finally:
                    self._ready = None
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is not None and result.status != pq.ExecStatus.PIPELINE_SYNC:
                found.append(result)
            elif result is not None or not together:
                return found
            elif pgconn.status == pq.ConnStatus.BAD:
                raise error_from_result(found[-1]) if found else psycopg.OperationalError("lost")

    async def _writable(self) -> None:
        """Wait until more can be sent, or the server has something to say first."""
        ready = self._ready = self._loop.create_future()
        self._loop.add_writer(self._socket, self._readable)
        try:
            await ready
        finally:
            self._ready = None
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        if self._ready is not None:
            if not self._ready.done():
                self._ready.set_result(None)
        elif not self._used:
            self._unwatch()  # the connection has ended, as `is_lost` finds, or there is a notice
