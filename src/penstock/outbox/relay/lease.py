"""The relay's leases: a row for each of its groups, renewed while this process works on it.

One thread renews them all every two seconds, in one statement on a session of its own. It leaves out a
group whose loop is overdue, so that a heartbeat means that the group works. SQL decides whether a lease
is alive, by the server's clock (`tide._leases`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import psycopg
import structlog

from penstock.core import queries
from penstock.core.errors import CaptureError
from penstock.outbox.sessions import connect

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")
_BEAT_SECONDS: Final = 2.0

log = structlog.get_logger("penstock")


@dataclass(frozen=True)
class GroupLease:
    """A process's lease on a group: `running` with the group's lock, or `standby`.

    `code`, `error` and `remedy` are of the failure that keeps the whole group from moving.
    """

    group: str
    state: Literal["running", "standby"]
    warm: bool
    lock_pid: int | None = None
    code: str | None = None
    error: str | None = None
    remedy: str | None = None


class Leases:
    """Renews the leases that `current` returns, in a thread, from `start` to `stop`."""

    def __init__(self, url: str, current: Callable[[], Iterable[GroupLease]]) -> None:
        self._url = url
        self._current = current
        self._instance = secrets.token_hex(8)
        self._stopping = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._main, name="leases", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and mark each lease as stopped."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _main(self) -> None:
        while not self._stopping.is_set():
            try:
                with contextlib.closing(connect(self._url)) as connection:
                    connection.execute(_SQL["no_flush"])
                    self._renew(connection)
            except Exception as error:  # without a lease a relay that works would count as dead
                if not self._failed:
                    self._failed = True
                    known = isinstance(error, psycopg.Error | CaptureError)
                    log.warning("leases could not be renewed; trying again", error=str(error),
                                exc_info=not known)  # fmt: skip
                self._stopping.wait(_BEAT_SECONDS)

    def _renew(self, connection: psycopg.Connection[Any]) -> None:
        while not self._stopping.is_set():
            leases = list(self._current())
            if leases:
                connection.execute(_SQL["beat"], self._values(leases))
                self._failed = False
            self._stopping.wait(_BEAT_SECONDS)
        connection.execute(_SQL["stopped"], [self._instance])

    def _values(self, leases: list[GroupLease]) -> dict[str, Any]:
        return {
            "instance": self._instance, "host": socket.gethostname(), "pid": os.getpid(),
            "groups": [of.group for of in leases], "states": [of.state for of in leases],
            "warm": [of.warm for of in leases], "lock_pids": [of.lock_pid for of in leases],
            "codes": [of.code for of in leases], "errors": [_text(of.error) for of in leases],
            "remedies": [_text(of.remedy) for of in leases],
        }  # fmt: skip


def _text(given: str | None) -> str | None:
    """Return a text as Postgres takes it."""
    return None if given is None else given.replace("\0", "")
