"""A connection's short way: prepared statements, sent together, whose results come without a cursor.

What runs for every ack and every receive runs here; it takes about half the CPU that `execute` does.

The event loop watches the socket only while a statement waits for it, and never while libpq runs:
libpq closes the socket of a connection that has failed, and the next connection gets its number. Each
wait begins to watch anew, as uvloop reports a socket that has failed once, and from then on nothing,
though there may be an answer to read before the failure.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import pq, sql
from psycopg.errors import error_from_result

from penstock.core.connect import AsyncConnection

_MOST_PREPARED: Final = 100
_PARAMETER: Final = re.compile(r"%\((\w+)\)s|%%")
_FAILED: Final = (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.PIPELINE_ABORTED)

Value = int | str | None


class Statement:
    """A query with parameters as psycopg has them, each of whose types the server can infer.

    Its text is made when it is needed: a process may know thousands of consumers, and serve few.
    """

    def __init__(self, query: sql.Composable) -> None:
        self._query = query

    @cached_property
    def text(self) -> bytes:
        """The query as the server takes it."""
        return _PARAMETER.sub(self._number, self._written).encode()

    @cached_property
    def names(self) -> list[str]:
        """The names of its parameters, by their numbers."""
        return [name for name in dict.fromkeys(_PARAMETER.findall(self._written)) if name]

    @cached_property
    def _written(self) -> str:
        return self._query.as_string(None)

    def _number(self, found: re.Match[str]) -> str:
        return "%" if found[1] is None else f"${self.names.index(found[1]) + 1}"


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
        self._names: dict[bytes, bytes] = {}  # of what is prepared, the oldest first
        self._count = 0

    async def run(self, *calls: Call) -> list[pq.abc.PGresult]:
        """Run statements in one transaction; return a result of each.

        Raises what the first one that failed raises. If an answer is missing, the connection is closed.
        """
        try:
            results, sent = await self._ask(calls)
        except BaseException:
            self._pgconn.finish()
            raise
        return self._checked(results, sent)

    async def _ask(self, calls: Sequence[Call]) -> tuple[list[pq.abc.PGresult], list[bytes | None]]:
        """Return the results, and of each what it has prepared: None for one that was asked for."""
        pgconn, sent = self._pgconn, list[bytes | None]()
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
            await self._ready(to_send=True)
            pgconn.consume_input()
        found: list[pq.abc.PGresult] = []
        while True:
            while pgconn.is_busy():
                await self._ready()
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is not None and result.status != pq.ExecStatus.PIPELINE_SYNC:
                found.append(result)
            elif result is not None or not together:
                return found
            elif pgconn.status == pq.ConnStatus.BAD:
                raise error_from_result(found[-1]) if found else psycopg.OperationalError("lost")

    async def _ready(self, *, to_send: bool = False) -> None:
        """Wait until there is something to read, or, with `to_send`, until more can be sent."""
        loop, socket = asyncio.get_running_loop(), self._pgconn.socket
        ready = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(socket, wake)
        if to_send:
            loop.add_writer(socket, wake)
        try:
            await ready
        finally:
            loop.remove_reader(socket)
            if to_send:
                loop.remove_writer(socket)
