"""What a drainer drains for a sink: its blocks in the store."""

from __future__ import annotations

import contextlib

import psycopg

from penstock.core.errors import SinkError
from penstock.core.message import Position
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.store import Behind, Connection, Taken
from penstock.streams.letters import Publishing
from penstock.streams.nats_consumers import PAUSED
from penstock.streams.segments import lock_writers


class SinkBacklog:
    """The backlog of the sink `name` of a source; used by its drainer's thread alone."""

    kind: Publishing = "sink"
    """What it is the backlog of, as the log and its dead letters have it."""
    paused = False
    """Whether nothing is to be delivered now."""
    rewinds = 0
    """How often it began to deliver again what was delivered before."""

    def __init__(self, source_id: int, name: str) -> None:
        self.source_id = source_id
        self.name = name

    def attend(self, connection: Connection, done: Position | None) -> Behind | None:
        """Pause or resume the sink where that is asked for, and return its row if it is behind.

        `done`: all parts of all rounds up to there, of the stream, have ended; None if none has yet.
        """
        pause = backlog.pause_of(connection, self.source_id, self.name)
        self.paused = pause is not None
        behind = backlog.behind(connection, self.source_id, self.name)
        if behind is None:
            if pause is None or done is None:
                return None
            self._put_behind(connection, pause, done)
        elif (behind.code == PAUSED) != self.paused:
            backlog.put_behind(connection, self.source_id, self.name, pause or backlog.RESUMED)
        else:
            return behind
        return backlog.behind(connection, self.source_id, self.name)

    def _put_behind(self, connection: Connection, why: SinkError, done: Position) -> None:
        """Have what comes from now on wait, unless the writers are busy: then it is tried again."""
        with contextlib.suppress(psycopg.errors.LockNotAvailable), connection.transaction():
            lock_writers(connection, self.source_id)
            backlog.fall_behind(connection, self.source_id, self.name, why, done)

    def take(
        self, connection: Connection, of: Behind, until: Position | None = None
    ) -> Taken | None:
        """Return some of the first messages behind `of.drained` and up to `until` (None: all there are).

        Returns None if there can't be any.
        """
        return backlog.take(connection, of, until)

    def size(self, connection: Connection) -> tuple[int, int]:
        """Return how many messages wait, and the bytes that are kept for them."""
        return backlog.size(connection, self.source_id, self.name)
