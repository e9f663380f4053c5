"""A few connections to the store that many threads of a process take turns at."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from penstock.core.errors import StoreError
from penstock.streams.connection import StoreConnection
from penstock.streams.letters import DeadLetters


class StorePool:
    """At most `size` connections to the store at `url`, each made when it is needed first.

    A thread that has one and asks again, as inside a transaction, gets the same. All methods raise
    `StoreError`.
    """

    def __init__(self, url: str, size: int) -> None:
        self.letters = DeadLetters(self)
        self._free = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._all = [StoreConnection(url) for _ in range(size)]
        self._idle = list(reversed(self._all))
        self._mine = threading.local()
        self._closed = False

    @contextlib.contextmanager
    def lend(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend a connection to this thread, in autocommit mode; wait for one where all are lent."""
        if self._closed:  # what goes on in a thread that did not end in time is another's to do
            raise StoreError("closed", "The connections to the store are closed.")
        mine: StoreConnection | None = getattr(self._mine, "connection", None)
        if mine is not None:
            with mine.lend() as connection:
                yield connection
            return
        with self._free:
            with self._lock:
                mine = self._mine.connection = self._idle.pop()
            try:
                with mine.lend() as connection:
                    yield connection
            finally:
                self._mine.connection = None
                with self._lock:
                    self._idle.append(mine)

    def rows(self, query: LiteralString | sql.Composed, values: Any = None) -> list[Any]:
        """Run a query and return its rows."""
        with self.lend() as connection:
            return connection.execute(query, values).fetchall()

    def shrink(self) -> None:
        """Close the connections that are not lent, but for one."""
        with self._lock:
            for connection in self._idle[:-1]:
                connection.close()

    def close(self) -> None:
        """Close them all, for good; what a thread waits for at one has a second, and is then ended."""
        self._closed = True
        for connection in self._all:
            connection.close()
