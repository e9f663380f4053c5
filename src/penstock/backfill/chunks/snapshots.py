"""The snapshot of a chunk: a transaction that sees all that was decoded before."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from penstock.backfill.session import SQL, Connection, open_session
from penstock.postgres.capture import MAX_UNREAD, Capture, CaptureStats
from penstock.postgres.watermarks import Snapshot, Watch, Window, unseen

_UNREAD_BYTES: Final = MAX_UNREAD // 2
_NEAR_BYTES: Final = 16 << 20
_PAUSES: Final = (0.0025, 0.5)


def is_near(connection: Connection, stats: CaptureStats) -> bool:
    """Return whether a watermark would be decoded, and its chunk be taken, soon."""
    if stats.unread_bytes > _UNREAD_BYTES:
        return False
    (end,) = connection.execute(SQL["end"]).fetchone() or (0,)
    return bool(end - stats.received_lsn <= _NEAR_BYTES)


@dataclass
class Visible:
    """How many of the decoded transactions a snapshot has seen: later snapshots see them too.

    `earlier`: also all that was decoded by an earlier reader of the slot.
    """

    count: int = 0
    earlier: bool = False


class SnapshotHolder:
    """A transaction with a snapshot, on a connection that is used again and again.

    `window` has what changed in the table since before the snapshot.
    """

    def __init__(self, url: str) -> None:
        self.connection = open_session(url, statement="120s")
        self.window = Window()
        self._missing: set[int] = set()
        self._count = self._floor = self._tries = 0

    @property
    def waits_for(self) -> str:
        """What `take` waits for, in words."""
        xids = ", ".join(map(str, sorted(self._missing)[:9]))
        named = f" ({xids})" if xids else ""
        return (
            f"Transactions that were captured{named} are not visible: they may wait for a standby."
        )

    def open_window(self, capture: Capture, watch: Watch, visible: Visible) -> None:
        """Begin to collect what changes; raises `psycopg.Error`."""
        self.window, self._tries = Window(), 0
        with capture.decoder() as decoder:
            watch.windows.append(self.window)
            self._missing = set(decoder.recent.since(visible.count))
            self._count = decoder.recent.count
        self._floor = 0
        if not visible.earlier:
            xids, self._floor = self._waiting()
            self._missing.update(xids)

    def take(self, capture: Capture, table: sql.Composable, visible: Visible) -> float:
        """Begin the transaction, with a snapshot that sees all that was decoded before the window.

        Returns 0, or after how many seconds to try again: what was decoded may wait for a standby, or
        for a core, before it becomes visible. Raises `psycopg.Error`.
        """
        snapshot = self._begin(table)
        missing = self._missing = unseen(snapshot, self._missing)
        if missing or snapshot.xmin < self._floor:
            self.connection.execute("ROLLBACK")
            self._tries += 1
            return min(math.ldexp(_PAUSES[0], self._tries), _PAUSES[1])
        visible.count, visible.earlier = self._count, True
        with capture.decoder() as decoder:
            self.window.set_snapshot(snapshot, decoder.xid)
        return 0.0

    def _waiting(self) -> tuple[list[int], int]:
        """Return the transactions that an earlier capture may have decoded: they wait for a standby.

        Where their ids can't be read, all that are older than the id that comes second may be.
        """
        xids, unclear = self.connection.execute(SQL["waiting"]).fetchone() or ([], False)
        if not unclear:
            return xids, 0
        (newest,) = self.connection.execute(SQL["newest"]).fetchone() or (0,)
        return xids, newest

    def _begin(self, table: sql.Composable) -> Snapshot:
        connection = self.connection
        connection.execute(SQL["begin"])
        connection.execute(sql.SQL(SQL["lock"]).format(table=table))
        row = connection.execute(SQL["snapshot"]).fetchone()
        assert row is not None  # noqa: S101 - a SELECT without FROM
        return Snapshot.parse(row[0])

    def end(self) -> None:
        """End the transaction; a connection that is lost is closed."""
        try:
            self.connection.execute("ROLLBACK")
        except psycopg.Error:
            self.connection.close()

    def close(self) -> None:
        """End the transaction, and the connection."""
        with contextlib.suppress(psycopg.Error):
            self.connection.close()
