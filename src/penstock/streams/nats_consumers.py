"""The consumers of type nats in the store: what is registered of them, and what is asked of their run.

A run publishes for them, see `penstock.sinks.backlog.consumer`. Pauses and rewinds are asked for here,
by any process, and done by the run that has the source, or by the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal
from uuid import UUID

import psycopg
import pyarrow as pa
from psycopg.types.json import Jsonb

from penstock.config.consumers import Filters
from penstock.config.strict import is_name
from penstock.core import queries
from penstock.core.errors import Concern, StoreError
from penstock.core.health import Failure
from penstock.core.message import Position
from penstock.core.record_forms import form_of
from penstock.core.text import nearest
from penstock.streams import nats_consumers_filter as sql_filter
from penstock.streams import read
from penstock.streams.consumers.types import RewindEffect
from penstock.streams.names import LOCK_MIGRATE
from penstock.streams.read import Selection
from penstock.streams.records import START, StreamRecord, commit_position, stream_end
from penstock.streams.store import Store

Connection = psycopg.Connection[Any]
SQL: Final = queries.load("penstock.streams", "nats_consumers.sql")
_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")
NO_CONSUMER: Final = "no_consumer"
PAUSED: Final = "paused"
"""The code of one that is paused."""
FOLLOWING: Final = ("in_stream", "It publishes what the stream holds.")
"""The code and the text of one that takes part in the pipeline when it has done that."""
ON_PURPOSE: Final = frozenset({PAUSED, FOLLOWING[0]})
"""The codes of those that have not failed."""

Place = Position | datetime | Literal["all", "new"]
"""Where a consumer begins: at a message (as its source has it), at a commit time, or at an end."""


@dataclass(frozen=True, slots=True)
class NatsConsumerRecord:
    """A consumer of type nats; `position` is up to where its messages are published.

    It is None of one that is attached, which has all that the stream holds; `why` is why another is not.
    `rewind` is a position, of the stream, that is asked for. `waiting` counts up to `read.COUNTED`.
    """

    id: UUID
    name: str
    stream: str
    stream_id: int
    kind: str
    source: str
    source_id: int
    base: int
    settings: Mapping[str, Any]
    paused: bool
    rewind: Position | None
    dropped: int
    created_at: datetime
    position: Position | None
    why: Failure | None
    waiting: int

    @property
    def state(self) -> str:
        """`paused`, `behind` or `attached`."""
        if self.paused:
            return "paused"
        return "attached" if self.position is None and self.rewind is None else "behind"

    def verdict(self, connection: Connection, message: pa.RecordBatch) -> str | None:
        """Return what its filter in SQL makes of a message: None where it is left out.

        Empty where it passes, and where there is no such filter; else why that can't be evaluated.
        """
        function = sql_filter.function_of(self.stream, filters_of(self.settings).sql)
        if function is None:
            return ""
        (found,) = sql_filter.evaluated(
            connection, function, form_of(self.source, self.kind), message
        ).to_pylist()
        return None if found is None else str(found)

    def body(self) -> dict[str, Any]:
        """Return it as the API and the CLI show it."""
        position = self.position
        since = None if self.why is None else self.why.since
        return {
            "name": self.name, "id": str(self.id), "type": "nats", "stream": self.stream,
            "source": self.source, "kind": self.kind, "state": self.state, "lag_messages": self.waiting,
            "position": None if position is None or position <= START else
                {"lsn": position.lsn - self.base, "idx": max(position.idx, 0)},
            "rewinding": self.rewind is not None, "dropped": self.dropped,
            "why": None if self.why is None else
                {"code": self.why.code, "reason": self.why.text,
                 "since": None if since is None else datetime.fromtimestamp(since, UTC)},
            "settings": dict(self.settings), "created_at": self.created_at,
        }  # fmt: skip


class NatsConsumers:
    """The consumers of type nats in a store. All methods raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self) -> list[NatsConsumerRecord]:
        """Return all of them, by name."""
        with self._store.connection() as connection:
            return _records(connection, None)

    def streams(self) -> dict[str, str]:
        """Return the stream of each of them, by name."""
        with self._store.connection() as connection:
            return dict(connection.execute(SQL["streams"]).fetchall())

    def page(self, after: str, limit: int) -> list[NatsConsumerRecord]:
        """Return the first of them whose names come after `after`, by name."""
        with self._store.connection() as connection:
            return _records(connection, None, after, limit)

    def get(self, name: str) -> NatsConsumerRecord:
        """Return one of them."""
        with self._store.connection() as connection:
            return self._get(connection, name)

    def register(
        self, stream: StreamRecord, name: str, settings: Mapping[str, Any], start: Place
    ) -> None:
        """Make a consumer that begins at `start`, or find it and take over its settings.

        A filter in SQL that the stream's tables refuse raises `StoreError`, too.
        """
        of = (stream.id, stream.name)
        with self._store.connection() as connection, connection.transaction():
            connection.execute(_STORE_SQL["lock"], [LOCK_MIGRATE, 0])
            found = _records(connection, name)
            if found and found[0].stream_id != stream.id:
                raise StoreError(
                    "name_taken",
                    f"Consumer {name!r} publishes the stream {found[0].stream!r}, not {stream.name!r}.",
                    remedy="Give this one another name.",
                    # The run of that stream's source may remove it yet.
                    transient=found[0].source_id != stream.source_id,
                    concerns=Concern("consumer", name, "stream"),
                )
            sql_filter.install(connection, of, name, filters_of(settings).sql)
            if found:
                # The function of the filter before may be in use yet, see `remove_others`.
                connection.execute(SQL["change"], [Jsonb(dict(settings)), name])
                return
            if (connection.execute(SQL["taken"], [name]).fetchone() or (False,))[0]:
                raise StoreError(
                    "name_taken",
                    f"There is a consumer {name!r} of another type already.",
                    remedy="Give this one another name, or delete the other.",
                    concerns=Concern("consumer", name),
                )
            connection.execute(SQL["create"], [stream.id, name, Jsonb(dict(settings))])
            (made,) = _records(connection, name)
            forget_backlog(connection, stream.source_id, name)
            at = _resolved(connection, made, start)
            leave_in_stream(connection, (stream.source_id, name, stream.id), at, FOLLOWING)

    def remove_others(self, streams: Collection[int], wanted: Mapping[str, int]) -> list[str]:
        """Remove the consumers of these streams but those `wanted`, by name and stream; return them.

        With them go the functions of filters that none has any more: no run may use these.
        """
        with self._store.connection() as connection, connection.transaction():
            gone = [
                of for of in _records(connection, None)
                if of.stream_id in streams and wanted.get(of.name) != of.stream_id
            ]  # fmt: skip
            for of in gone:
                remove(connection, of.source_id, of.name)
            _drop_functions(connection)
        return [of.name for of in gone]

    def pause(self, name: str, *, paused: bool) -> None:
        """Ask that nothing is published for a consumer, or that it goes on where it was."""
        with self._store.connection() as connection:
            self._get(connection, name)
            connection.execute(SQL["pause"], [paused, name])

    def rewind(self, name: str, to: Place) -> None:
        """Ask that a consumer goes on at `to`."""
        with self._store.connection() as connection:
            of = self._get(connection, name)
            at = _resolved(connection, of, to)
            connection.execute(SQL["rewind"], [*at, name])

    def effect_of_rewind(self, name: str, to: Place) -> RewindEffect:
        """Return what a rewind to there would do; it is not done."""
        with self._store.connection() as connection:
            of = self._get(connection, name)
            at = _resolved(connection, of, to)
            function = sql_filter.function_of(of.stream, filters_of(of.settings).sql)
            taken = Selection(of.stream_id, of.kind, filters_of(of.settings), None, function)
            now = of.rewind or of.position
            if now is None:  # it has all that the stream holds
                again = read.count(connection, taken, in_stream(at))
                return RewindEffect(0, again, again < read.COUNTED)
            first, last = sorted((at, now))
            between = read.count(connection, taken, in_stream(first), in_stream(last))
            skipped, again = (between, 0) if at > now else (0, between)
            return RewindEffect(skipped, again, between < read.COUNTED)

    def _get(self, connection: Connection, name: str) -> NatsConsumerRecord:
        for of in _records(connection, name) if is_name(name) else ():
            return of
        names = [of.name for of in _records(connection, None)]
        raise StoreError(
            NO_CONSUMER,
            f"There is no consumer {name!r} of type nats{nearest(name, names) or '.'}",
            remedy="Name one that `penstock consumer list` shows. It shows a new one once a run has it.",
        )


def leave_in_stream(
    connection: Connection,
    consumer: tuple[int, str, int],
    at: Position,
    why: tuple[str, str],
    ahead: Collection[Position] = (),
) -> None:
    """Have a consumer's messages behind `at`, a commit position, left in the stream.

    `consumer` is its source, its name and its stream. Messages at the stream's positions `ahead` are not
    among them. One that was behind before keeps what waits for it in blocks, and the reason; for a
    rewind, call `forget_backlog` first.
    """
    (source, name, stream), (code, error) = consumer, why
    values = {
        "source": source, "sink": name, "code": code, "error": error, "lsn": at.lsn,
        "idx": at.idx, "stream": stream, "ahead_lsn": [p.lsn for p in ahead],
        "ahead_idx": [p.idx for p in ahead],
    }  # fmt: skip
    connection.execute(SQL["leave_in_stream"], values)


def forget_backlog(connection: Connection, source_id: int, name: str) -> None:
    """Forget up to where a consumer was, and what waits for it in blocks."""
    connection.execute(SQL["forget_backlog"], [source_id, name])


def skip(connection: Connection, source_id: int, name: str, end: Position) -> None:
    """Note that a consumer which is left in its stream is done with all up to `end`."""
    values = {"source": source_id, "sink": name, "lsn": end.lsn, "idx": end.idx}
    connection.execute(SQL["skip"], values)


def remove(connection: Connection, source_id: int, name: str) -> None:
    """Remove a consumer, with what waits for it."""
    forget_backlog(connection, source_id, name)
    connection.execute(SQL["delete"], [name])


def _drop_functions(connection: Connection) -> None:
    """Drop the functions of filters that no consumer has any more."""
    sql_filter.drop_unused(connection, connection.execute(SQL["conditions"]).fetchall())


def note_dropped(
    connection: Connection, stream: StreamRecord, through: Position
) -> list[tuple[str, int]]:
    """Count the messages up to `through` that retention takes before consumers have read them."""
    found = []
    for source, name, settings, *numbers, has_ahead in connection.execute(
        SQL["readers"], [stream.id]
    ).fetchall():
        drained, since = Position(*numbers[:2]), Position(*numbers[2:])
        filters, own = filters_of(settings), (source, name) if has_ahead else None
        function = sql_filter.function_of(stream.name, filters.sql)
        of = Selection(stream.id, stream.kind, filters, own, function)
        count = read.count(connection, of, in_stream(max(drained, since)), through)
        if count:
            connection.execute(SQL["add_dropped"], [count, name])
            found.append((name, count))
    return found


def low_watermarks(connection: Connection, stream: StreamRecord) -> list[Position]:
    """Return up to where each consumer has read a stream that its messages are left in.

    One that has not begun is left out: it needs nothing that is gone when it does.
    """
    rows = connection.execute(SQL["readers"], [stream.id]).fetchall()
    read_to = (max(Position(*row[3:5]), Position(*row[5:7])) for row in rows)
    return [in_stream(position) for position in read_to if position > START]


def in_stream(position: Position) -> Position:
    """Return the last position in a stream of what lies up to a commit position."""
    return Position(position.lsn, stream_end(position.idx))


def filters_of(settings: Mapping[str, Any]) -> Filters:
    """Return the filters in a consumer's registered settings."""
    return Filters.model_validate(settings.get("filters") or {})


def _resolved(connection: Connection, of: NatsConsumerRecord, place: Place) -> Position:
    """Return the commit position, of the stream, behind which a consumer begins."""
    if place == "all":
        return START
    if place == "new":
        at = read.last(connection, of.stream_id)
        return commit_position(*at) if at > START else START
    if isinstance(place, datetime):
        at = read.at_time(connection, of.stream_id, place)
        return commit_position(*at) if at.idx >= 0 else at
    assert isinstance(place, Position)  # noqa: S101 - nothing else is left
    # What lies behind the end is not there, and a stream goes on behind all that was spoken of.
    newest = commit_position(*max(read.last(connection, of.stream_id), START))
    return max(START, min(Position(place.lsn + of.base, place.idx - 1), newest))


def _records(
    connection: Connection, name: str | None, after: str = "", limit: int | None = None
) -> list[NatsConsumerRecord]:
    values = {"name": name, "after": after, "limit": limit}
    rows = connection.execute(SQL["all"], values).fetchall()
    return [_record(connection, row) for row in rows]


def _record(connection: Connection, row: tuple[Any, ...]) -> NatsConsumerRecord:
    (
        id_, name, stream_id, stream, kind, source_id, source, base, settings, paused, rewind_lsn,
        rewind_idx, dropped, created_at, since, code, error, lsn, idx, from_stream, from_lsn, from_idx,
        has_ahead,
    ) = row  # fmt: skip
    position = None if lsn is None else Position(lsn, idx)
    waiting = 0
    if position is not None:
        ((waiting,),) = connection.execute(SQL["in_blocks"], [source_id, name])
        if from_stream is not None:
            filters, own = filters_of(settings), (source_id, name) if has_ahead else None
            function = sql_filter.function_of(stream, filters.sql)
            of = Selection(stream_id, kind, filters, own, function)
            after = in_stream(max(position, Position(from_lsn, from_idx)))
            waiting += read.count(connection, of, after)
    return NatsConsumerRecord(
        id_, name, stream, stream_id, kind, source, source_id, base, settings, paused,
        None if rewind_lsn is None else Position(rewind_lsn, rewind_idx), dropped, created_at,
        position,
        None if code is None else Failure(code, error, "", since.timestamp()), waiting,
    )  # fmt: skip
