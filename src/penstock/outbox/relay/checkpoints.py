"""Writes the checkpoints of a group's pipelines to `tide.checkpoints` while its run lasts.

A checkpoint has an LSN. All that was committed before it is delivered: the capture has confirmed it (so
it is in JetStream, or in the pipeline's backlog), and nothing from before it waits in the backlog. A
checkpoint has a snapshot too, and the outbox is swept by it. The relay takes a snapshot, then reads the
WAL's end, and writes the snapshot once that end is delivered.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from penstock.core import queries
from penstock.core.message import format_lsn
from penstock.outbox.pipelines import DISABLED, StoredPipeline
from penstock.outbox.relay.desired_state import DesiredPipelines
from penstock.runtime.run import Run
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")
_LSN_SECONDS: Final = 30.0
"""How often a checkpoint is written of which only the LSN has moved: each write moves it itself."""

_DEAD_LETTER_SECONDS: Final = 10.0
"""How often they are counted without a new one: other processes replay and purge them."""

_RESUME: Final = "Correct that, then: penstock backfill resume (the store is the relay's)."

log = structlog.get_logger("penstock")


@dataclass(frozen=True)
class _DeadLetters:
    """How many dead letters of a pipeline are in the store; the newest one's cause and time."""

    count: int = 0
    cause: str | None = None
    at: datetime | None = None


_Unread = tuple[bool, str | None]
"""Of a pipeline whose backfill is not done: whether it has failed, and why it stands still."""


@dataclass
class _Status:
    """The columns of a checkpoint that report how a pipeline is."""

    state: str
    code: str | None = None
    error: str | None = None
    remedy: str | None = None


@dataclass
class _Checkpoint:
    """A pipeline's checkpoint, and what was written of it.

    Attributes:
        pending: A snapshot, and the end of the WAL by which all in it was committed.
        sampled: What the run had done when `pending` was taken.
    """

    pipeline: StoredPipeline
    pending: tuple[str, int] | None = None
    sampled: list[int] | None = None
    ever_sampled: bool = False
    snapshot: str | None = None
    last_id: int | None = None
    written: tuple[Any, ...] | None = None
    written_at: float = 0.0


class Checkpoints:
    """Keeps the checkpoints of `desired`'s pipelines while `run` lasts; one thread calls it.

    `starting` are the pipelines whose first rows are still being read. Its methods raise `StoreError`
    and `psycopg.Error`.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        store: Store,
        desired: DesiredPipelines,
        run: Run,
        starting: frozenset[str],
    ) -> None:
        self._connection = connection
        self._store = store
        self._desired = desired
        self._run = run
        self._starting = set(starting)
        self._checkpoints = {name: _Checkpoint(desired.pipelines[name]) for name in desired.sinks}
        self._failing: dict[str, str | None] = {}
        # The run counts on from the run before it, which the checkpoints include.
        self._before = {name: run.state.sinks[name].delivered for name in desired.sinks}
        self._dead: dict[str, _DeadLetters] = {}
        self._dead_seen = -1
        self._dead_due = 0.0

    def tick(self) -> None:
        """Write the checkpoints that have changed.

        An error of one, such as a lock of another session, does not keep the others from being written.
        """
        source = self._run.state.sources[self._desired.source]
        # In this order: what is durable now is delivered, or is in a backlog that is read below.
        flushed, done = source.confirmed_lsn, source.done
        if flushed:
            waiting = self._waiting()
            unread = self._unread()
            self._count_dead_letters()
            for name, checkpoint in self._checkpoints.items():
                upto = waiting.get(name, flushed)
                try:
                    if name not in unread:
                        self._sample(checkpoint, upto, done)
                    self._write(name, checkpoint, min(upto, flushed), unread.get(name))
                except psycopg.Error as error:
                    self._failed(name, error)
                else:
                    self._failing.pop(name, None)

    def _failed(self, name: str, error: psycopg.Error) -> None:
        """Log an error of one checkpoint once; raise it where the session ended."""
        if self._connection.closed:
            raise error
        if self._failing.get(name) != error.sqlstate:
            self._failing[name] = error.sqlstate
            log.warning("checkpoint could not be written; trying again", pipeline=name,
                        error=str(error))  # fmt: skip

    def _waiting(self) -> dict[str, int]:
        """Return for each pipeline with a backlog the LSN of the first message in it."""
        source = self._run.store.source(self._desired.source)
        with self._store.connection() as connection:
            rows = connection.execute(_SQL["backlog"], [source.id]).fetchall()
        # What goes before all other messages has a negative LSN.
        return {sink: max(first - source.base, 0) for sink, first in rows if first is not None}

    def _unread(self) -> dict[str, _Unread]:
        """Return the pipelines whose backfill is not done; release those whose backfill is."""
        with self._store.connection() as connection:
            rows = connection.execute(_SQL["open_backfills"], [self._desired.source]).fetchall()
        unread = {sink: (failed, error) for sink, failed, error in rows}
        for name in sorted(self._starting):
            failed, error = unread.get(name, (False, None))
            if name in unread and not failed:
                continue
            self._run.resume(name)
            self._starting.discard(name)
            if failed:
                log.error("the messages in the outbox can't be read", pipeline=name, error=error)
        return unread

    def _count_dead_letters(self) -> None:
        """Count the dead letters in the store, where there are new ones, and every few seconds."""
        seen = sum(sink.dead_lettered for sink in self._run.state.sinks.values())
        if seen == self._dead_seen and time.monotonic() < self._dead_due:
            return
        tag = self._run.store.source(self._desired.source).tag
        with self._store.connection() as connection:
            values = {"sinks": list(self._checkpoints), "tag": tag}
            rows = connection.execute(_SQL["dead_letters"], values).fetchall()
        self._dead = {sink: _DeadLetters(*of) for sink, *of in rows}
        self._dead_seen, self._dead_due = seen, time.monotonic() + _DEAD_LETTER_SECONDS

    def _sample(self, of: _Checkpoint, upto: int, done: list[int] | None) -> None:
        """Take a snapshot where something is new, and keep one whose end is delivered."""
        if of.pending is not None and upto >= of.pending[1]:
            of.snapshot, of.pending = of.pending[0], None
            table = sql.Identifier("tide", f"outbox_{of.pipeline.outbox}")
            query = sql.SQL(_SQL["last_id"]).format(table=table)
            row = self._connection.execute(query, [of.snapshot]).fetchone()
            of.last_id = None if row is None else row[0]
        if of.pending is None and not (of.ever_sampled and of.sampled == done):
            (snapshot,) = self._one(_SQL["snapshot"])
            (end,) = self._one(_SQL["wal_end"])
            of.pending, of.sampled, of.ever_sampled = (snapshot, end), done, True

    def _one(self, query: Any) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self._connection.execute(query).fetchone()
        assert row is not None  # noqa: S101 - a SELECT without FROM
        return row

    def _write(self, name: str, of: _Checkpoint, upto: int, unread: _Unread | None) -> None:
        sink = self._run.state.sinks[name]
        status = self._status(name, unread)
        delivered = of.pipeline.delivered + sink.delivered - self._before[name]
        dead = self._dead.get(name, _DeadLetters())
        written = (of.snapshot, delivered, dead, status)
        late = time.monotonic() - of.written_at > _LSN_SECONDS
        if written == of.written and not late:
            return
        values = {
            "group": self._desired.group, "pipeline": name, "store": None,
            "created_at": of.pipeline.created_at, "lsn": format_lsn(upto),
            "snapshot": of.snapshot, "last_id": of.last_id, "delivered": delivered,
            "state": status.state, "code": status.code, "error": status.error,
            "remedy": status.remedy,
            "dead_letters": dead.count, "dead_letter": dead.cause, "dead_letter_at": dead.at,
        }  # fmt: skip
        self._connection.execute(_SQL["put_checkpoint"], values)
        of.written, of.written_at = written, time.monotonic()

    def _status(self, name: str, unread: _Unread | None) -> _Status:
        """Return how a pipeline is, and what keeps it from moving."""
        if (failure := self._desired.paused.get(name)) is not None:
            if failure.code == DISABLED:
                return _Status(DISABLED)
            return _Status("error", failure.code, failure.cause, failure.remedy)
        sink = self._run.state.sinks[name]
        source = self._run.state.sources[self._desired.source]
        if (failure := sink.failure) is not None:
            return _Status("error", failure.code, failure.cause, failure.remedy or None)
        if source.error is not None:
            return _Status("error", source.code, source.error)
        if unread is not None:
            failed, why = unread
            if failed:
                cause = f"The messages in the outbox can't be read: {why}"
                return _Status("error", "backfill_failed", cause, _RESUME)
            return _Status("starting", error=why)
        return _Status("catching up" if sink.behind else "running")
