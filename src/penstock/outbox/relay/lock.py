"""The lock of a relay group: of several relays, the one that holds it runs the group."""

from __future__ import annotations

import select
import socket
from typing import Any, Final

import psycopg

from penstock.core import queries
from penstock.outbox.sessions import connect

LOCK_GROUP: Final = 7383
"""The class of the advisory locks that a group's hash identifies."""

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")


class GroupLock:
    """A group's lock, which one session in the outboxes' database holds.

    `pid` is the server's process of that session, while the lock is `held` here.
    """

    def __init__(self, url: str, group: str) -> None:
        self._url = url
        self._group = group
        self._connection: psycopg.Connection[Any] | None = None
        self.held = False
        self.pid: int | None = None

    def acquire(self) -> bool:
        """Take the lock if it is free; return whether it is held. Raises `psycopg.Error`."""
        if self.held:
            return True
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._url)
        values = {"class": LOCK_GROUP, "group": self._group}
        row = self._connection.execute(_SQL["try_lock"], values).fetchone()
        self.held = bool(row and row[0])
        self.pid = self._connection.info.backend_pid if self.held else None
        return self.held

    def check(self) -> bool:
        """Return whether the lock is still held: its session may have ended."""
        if self.held and self._connection is not None:
            try:
                self._connection.execute(_SQL["alive"])
            except psycopg.Error:
                self.close()
        return self.held

    def wait(self, until: socket.socket, seconds: float) -> bool:
        """Wait so long, until the server writes to the session or ends it, or until `until` can be read.

        Returns whether `until` can be; whether the lock is still held is for `check`.
        """
        poll = select.poll()
        poll.register(until, select.POLLIN)
        if self._connection is not None and not self._connection.closed:
            poll.register(self._connection.fileno(), select.POLLIN)
        return until.fileno() in [fd for fd, _ in poll.poll(seconds * 1_000)]

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The session that holds the lock."""
        if self._connection is None:
            raise psycopg.OperationalError("the lock's session is gone")
        return self._connection

    def close(self) -> None:
        """Release the lock."""
        self.held, self.pid = False, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
