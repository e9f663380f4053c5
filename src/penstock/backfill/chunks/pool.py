"""The backfiller's sessions: those that hold snapshots, and the one that writes watermarks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg.pq import TransactionStatus

from penstock.backfill.chunks.snapshots import SnapshotHolder
from penstock.backfill.session import Connection, open_session

_CANCEL_SECONDS: Final = 5.0


class SessionPool:
    """Sessions for one thread; another may interrupt what they do."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._free: list[SnapshotHolder] = []
        self._writer: Connection | None = None
        self._open: list[Connection] = []

    def holder(self) -> SnapshotHolder:
        """Return a holder of snapshots that is free; raises `BackfillError`."""
        while self._free:
            holder = self._free.pop()
            if not holder.connection.closed:
                return holder
        holder = SnapshotHolder(self._url)
        self._opened(holder.connection)
        return holder

    def free(self, holder: SnapshotHolder) -> None:
        """End a holder's transaction, if there is one, and keep it for another."""
        holder.end()
        if not holder.connection.closed:
            self._free.append(holder)

    def writer(self) -> Connection:
        """Return the session that writes watermarks; raises `BackfillError`."""
        if self._writer is None or self._writer.closed:
            self._writer = open_session(self._url, statement="30s")
            self._opened(self._writer)
        return self._writer

    def close(self) -> None:
        """Close the sessions that are free."""
        for holder in self._free:
            holder.close()
        self._free.clear()
        if self._writer is not None:
            with contextlib.suppress(psycopg.Error):
                self._writer.close()
            self._writer = None

    def interrupt(self) -> None:
        """Have the server cancel what runs now, without waiting for it; from any thread."""
        running = [c for c in self._open if _is_running(c)]
        if running:
            threading.Thread(target=_cancel, args=(running,), daemon=True).start()

    def _opened(self, connection: Connection) -> None:
        self._open = [*(c for c in self._open if not c.closed), connection]


def _is_running(connection: Connection) -> bool:
    return connection.pgconn.transaction_status == TransactionStatus.ACTIVE


def _cancel(connections: Sequence[Connection]) -> None:
    for connection in connections:
        with contextlib.suppress(psycopg.Error):
            connection.cancel_safe(timeout=_CANCEL_SECONDS)
