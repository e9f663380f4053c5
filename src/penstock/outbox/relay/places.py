"""How far each pipeline of a group is, written to `tide.places` while its run lasts.

All that is committed before an LSN was delivered when the capture may let the server forget it (it is
in JetStream then, or in the pipeline's backlog) and nothing from before it waits in the backlog. What
was committed by then is also known as a snapshot, by which the outbox is swept: one is taken, then the
WAL's end, and it is written once that end is delivered.
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
from penstock.outbox.relay.wanted import DISABLED, Pipeline, Wanted
from penstock.runtime.run import Run
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")
_LSN_SECONDS: Final = 30.0
"""How often a place is written where nothing but the LSN has moved: each write moves that itself."""

_DEAD_LETTER_SECONDS: Final = 10.0
"""How often they are counted where there is no new one: they are replayed and purged elsewhere."""

_RESUME: Final = "Mend that, then: penstock backfill resume (the store is the relay's)."

log = structlog.get_logger("penstock")


@dataclass(frozen=True)
class _DeadLetters:
    """How many wait in the store for one pipeline; the cause of the newest, and when it came."""

    count: int = 0
    cause: str | None = None
    at: datetime | None = None


@dataclass
class _Place:
    """What is known of one pipeline's place, and what was written of it."""

    pipeline: Pipeline
    pending: tuple[str, int] | None = None
    sampled: list[int] | None = None
    ever_sampled: bool = False
    snapshot: str | None = None
    last_id: int | None = None
    written: tuple[Any, ...] | None = None
    written_at: float = 0.0


class Places:
    """Keeps the places of `wanted`'s pipelines while `run` lasts; one thread calls it.

    `starting` are the pipelines whose first rows are still being read. Its methods raise `StoreError`
    and what psycopg raises.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        store: Store,
        wanted: Wanted,
        run: Run,
        starting: frozenset[str],
    ) -> None:
        self._connection = connection
        self._store = store
        self._wanted = wanted
        self._run = run
        self._starting = set(starting)
        self._places = {name: _Place(wanted.pipelines[name]) for name in wanted.sinks}
        self._failing: dict[str, str | None] = {}
        # The run counts on from where the one before ended, of which the places know.
        self._before = {name: run.state.sinks[name].delivered for name in wanted.sinks}
        self._dead: dict[str, _DeadLetters] = {}
        self._dead_seen = -1
        self._dead_due = 0.0

    def tick(self) -> None:
        """Look how far the pipelines are, and write what has changed.

        What Postgres has against one place, a lock that somebody has on it, keeps none of the others.
        """
        source = self._run.state.sources[self._wanted.source]
        # In this order: what was durable by then is delivered, or found in a backlog below.
        flushed, done = source.confirmed_lsn, source.done
        if flushed:
            waiting = self._waiting()
            unread = self._unread()
            self._count_dead_letters()
            for name, place in self._places.items():
                upto = waiting.get(name, flushed)
                try:
                    if name not in unread:
                        self._sample(place, upto, done)
                    self._write(name, place, min(upto, flushed), unread.get(name))
                except psycopg.Error as error:
                    self._failed(name, error)
                else:
                    self._failing.pop(name, None)

    def _failed(self, name: str, error: psycopg.Error) -> None:
        """Log once what is wrong with a place; raise it where the session ended."""
        if self._connection.closed:
            raise error
        if self._failing.get(name) != error.sqlstate:
            self._failing[name] = error.sqlstate
            log.warning("place could not be written; trying again", pipeline=name, error=str(error))

    def _waiting(self) -> dict[str, int]:
        """Return of each pipeline that has messages waiting where the first of them was committed."""
        source = self._run.store.source(self._wanted.source)
        with self._store.connection() as connection:
            rows = connection.execute(_SQL["backlog"], [source.id]).fetchall()
        # What goes before all others is in negative places.
        return {sink: max(first - source.base, 0) for sink, first in rows if first is not None}

    def _unread(self) -> dict[str, tuple[bool, str | None]]:
        """Return the pipelines whose first rows are still to come; release those that wait no more.

        Of each: whether what reads the rows has failed, and why it stands still.
        """
        with self._store.connection() as connection:
            rows = connection.execute(_SQL["open_backfills"], [self._wanted.source]).fetchall()
        unread = {sink: (failed, error) for sink, failed, error in rows}
        for name in sorted(self._starting):
            failed, error = unread.get(name, (False, None))
            if name in unread and not failed:
                continue
            self._run.resume(name)
            self._starting.discard(name)
            if failed:
                log.error("the outbox's kept messages can't be read", pipeline=name, error=error)
        return unread

    def _count_dead_letters(self) -> None:
        """Count what waits in the store, where there are new ones, and now and then."""
        seen = sum(sink.dead_lettered for sink in self._run.state.sinks.values())
        if seen == self._dead_seen and time.monotonic() < self._dead_due:
            return
        tag = self._run.store.source(self._wanted.source).tag
        with self._store.connection() as connection:
            values = {"sinks": list(self._places), "tag": tag}
            rows = connection.execute(_SQL["dead_letters"], values).fetchall()
        self._dead = {sink: _DeadLetters(*of) for sink, *of in rows}
        self._dead_seen, self._dead_due = seen, time.monotonic() + _DEAD_LETTER_SECONDS

    def _sample(self, place: _Place, upto: int, done: list[int] | None) -> None:
        """Take a snapshot where there is something new to be told, and keep one that is reached."""
        if place.pending is not None and upto >= place.pending[1]:
            place.snapshot, place.pending = place.pending[0], None
            table = sql.Identifier("tide", f"outbox_{place.pipeline.outbox}")
            query = sql.SQL(_SQL["last_id"]).format(table=table)
            row = self._connection.execute(query, [place.snapshot]).fetchone()
            place.last_id = None if row is None else row[0]
        if place.pending is None and not (place.ever_sampled and place.sampled == done):
            (snapshot,) = self._one(_SQL["snapshot"])
            (end,) = self._one(_SQL["wal_end"])
            place.pending, place.sampled, place.ever_sampled = (snapshot, end), done, True

    def _one(self, query: Any) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self._connection.execute(query).fetchone()
        assert row is not None  # noqa: S101 - a SELECT without FROM
        return row

    def _write(
        self, name: str, place: _Place, upto: int, unread: tuple[bool, str | None] | None
    ) -> None:
        sink = self._run.state.sinks[name]
        told = self._told(name, unread)
        delivered = place.pipeline.delivered + sink.delivered - self._before[name]
        dead = self._dead.get(name, _DeadLetters())
        written = (place.snapshot, delivered, dead, *told)
        late = time.monotonic() - place.written_at > _LSN_SECONDS
        if written == place.written and not late:
            return
        state, code, error, remedy = told
        values = {
            "group": self._wanted.group, "pipeline": name, "store": None,
            "created_at": place.pipeline.created_at, "lsn": format_lsn(upto),
            "snapshot": place.snapshot, "last_id": place.last_id, "delivered": delivered,
            "state": state, "code": code, "error": error, "remedy": remedy,
            "dead_letters": dead.count, "dead_letter": dead.cause, "dead_letter_at": dead.at,
        }  # fmt: skip
        self._connection.execute(_SQL["put_place"], values)
        place.written, place.written_at = written, time.monotonic()

    def _told(
        self, name: str, unread: tuple[bool, str | None] | None
    ) -> tuple[str, str | None, str | None, str | None]:
        """Return a pipeline's state, and code, error and remedy of what holds it up."""
        if (failure := self._wanted.held.get(name)) is not None:
            if failure.code == DISABLED:
                return DISABLED, None, None, None
            return "error", failure.code, failure.cause, failure.remedy
        sink = self._run.state.sinks[name]
        source = self._run.state.sources[self._wanted.source]
        if sink.error is not None:
            message = sink.error.removesuffix(sink.remedy).strip()
            return "error", sink.code, message, sink.remedy or None
        if source.error is not None:
            return "error", source.code, source.error, None
        if unread is not None:
            failed, why = unread
            if failed:
                return "error", "backfill_failed", f"Kept messages can't be read: {why}", _RESUME
            return "starting", None, why, None
        return ("catching up" if sink.behind else "running"), None, None, None
