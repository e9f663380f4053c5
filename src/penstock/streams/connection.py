"""The store's connection that a process shares between its threads."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, LiteralString, Protocol

import psycopg
from psycopg import sql

from penstock.core.connect import is_lost
from penstock.streams.connect import connect
from penstock.streams.errors import store_error

_CLOSE_SECONDS: Final = 1.0

Also = Sequence[tuple[LiteralString, Sequence[Any] | Mapping[str, Any]]]
"""Statements, each with its values, that join the transaction of something else."""


class Lends(Protocol):
    """What lends connections to the store: one, or a pool of them."""

    def lend(self) -> contextlib.AbstractContextManager[psycopg.Connection[Any]]:
        """Lend a connection, in autocommit mode; what psycopg raises becomes a `StoreError`."""

    def rows(self, query: LiteralString | sql.Composed, values: Any = None) -> list[Any]:
        """Run a query and return its rows."""


class StoreConnection:
    """One connection to the store at `url`. Calls from several threads take turns.

    A connection that was lost is made again by the next call. All methods raise `StoreError`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.RLock()
        self._depth = 0  # how often it is lent to the thread that has it
        self._connection: psycopg.Connection[Any] | None = None

    def close(self) -> None:
        """Close the connection; a call of another thread has a second, and is then ended."""
        mine = self._lock.acquire(timeout=_CLOSE_SECONDS)
        if not mine and (connection := self._connection) is not None:
            _end(connection)
            mine = self._lock.acquire(timeout=_CLOSE_SECONDS)
        if mine:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._lock.release()

    @contextlib.contextmanager
    def lend(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend the connection, in autocommit mode; what psycopg raises becomes a `StoreError`.

        A thread that has it may be lent it again, and is in the same transaction then.
        """
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1 and self._connection is not None and is_lost(self._connection):
                    self._connection.close()
                    self._connection = None
                if self._connection is None:
                    self._connection = connect(self.url)
                yield self._connection
            except psycopg.Error as error:
                raise store_error(error, self.url) from None
            finally:
                self._depth -= 1

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Have all that this thread does in the store meanwhile be one transaction."""
        with self.lend() as connection, connection.transaction():
            yield

    def rows(self, query: LiteralString | sql.Composed, values: Any = None) -> list[Any]:
        """Run a query and return its rows."""
        with self.lend() as connection:
            return connection.execute(query, values).fetchall()


@contextlib.contextmanager
def own_connection(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Give a connection that nothing else waits for, as `lend` does; it is closed afterwards."""
    with contextlib.closing(StoreConnection(url)) as own, own.lend() as connection:
        yield connection


def _end(connection: psycopg.Connection[Any]) -> None:
    """End a connection that another thread waits at, also where the server hangs."""
    with contextlib.suppress(psycopg.Error):
        connection.cancel_safe(timeout=_CLOSE_SECONDS)
    with (
        contextlib.suppress(psycopg.Error, OSError),
        socket.socket(fileno=os.dup(connection.fileno())) as shared,
    ):
        shared.shutdown(socket.SHUT_RDWR)
