"""What is registered in the store: sources, streams and consumers, in the schema `penstock`.

Everything here is outside the hot path. `penstock.sinks.stream` writes messages, consumers read them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from penstock.config.consumers import settings_of
from penstock.config.sinks import GROUP_SETTINGS
from penstock.core import queries
from penstock.core.conflicts import again_after_conflict
from penstock.core.errors import Concern, StoreError
from penstock.core.message import Position
from penstock.expressions.catalog import Columns
from penstock.streams.catalogs import catalog_body
from penstock.streams.claim import Claim
from penstock.streams.connection import StoreConnection
from penstock.streams.consumers import sql_filter
from penstock.streams.consumers.types import ConsumerError
from penstock.streams.letters import DeadLetters
from penstock.streams.migrate import migrate
from penstock.streams.names import LOCK_MIGRATE, LOCK_WRITE, batches_table
from penstock.streams.records import START, ConsumerRecord, SourceRecord, StreamRecord
from penstock.streams.tokens import Tokens

_START_SECONDS: Final = 60.0

_SQL: Final = queries.load("penstock.streams", "store.sql")
_SCHEMA: Final = queries.load("penstock.streams", "schema.sql")


class Store:
    """One connection to the store; a context manager. Calls from several threads take turns.

    A connection that was lost is made again by the next call. All methods raise `StoreError`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._connection = StoreConnection(url)
        self.transaction = self._connection.transaction
        self.letters = DeadLetters(self._connection)
        self.tokens = Tokens(self._connection)

    @classmethod
    def open(cls, url: str) -> Store:
        """Connect, and bring the schema up to date; wait for a server that is starting up."""
        store, deadline = cls(url), time.monotonic() + _START_SECONDS
        while True:
            try:
                with store.connection() as connection:
                    again_after_conflict(partial(migrate, connection))
                return store
            except BaseException as error:
                store.close()
                starting = isinstance(error, StoreError) and error.code == "server_not_ready"
                if not starting or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def close(self) -> None:
        """Close the connection; a call of another thread has a second, and is then ended."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connection(self) -> contextlib.AbstractContextManager[psycopg.Connection[Any]]:
        """Lend the connection, in autocommit mode; what psycopg raises becomes a `StoreError`."""
        return self._connection.lend()

    @contextlib.contextmanager
    def _registering(self) -> Iterator[psycopg.Connection[Any]]:
        with self.connection() as connection, connection.transaction():
            connection.execute(_SQL["lock"], [LOCK_MIGRATE, 0])
            yield connection

    def made_at(self) -> str:
        """Return when the store was made, to the microsecond: no other one was then."""
        ((made_at,),) = self._connection.rows(_SQL["made_at"])
        return str(made_at)

    def ids_of(self, kind: str, names: Collection[str]) -> dict[str, str]:
        """Return the UUIDs of sources, sinks, consumers or targets; they are made where missing."""
        if not names:
            return {}
        rows = self._connection.rows(_SQL["ids_of"], [kind, sorted(names)])
        return {name: str(found) for name, found in rows}

    # Sources

    def sources(self) -> list[SourceRecord]:
        """Return all sources."""
        return [SourceRecord(*row) for row in self._connection.rows(_SQL["sources"])]

    def source(self, name: str) -> SourceRecord | None:
        """Return a source, None if there is none of that name."""
        rows = self._connection.rows(_SQL["source"], [name])
        return SourceRecord(*rows[0]) if rows else None

    def make_source(self, name: str, tag: str) -> SourceRecord:
        """Make a source, or find it as it is: it may be another run's, until it is claimed."""
        with self._registering() as connection:
            row = connection.execute(_SQL["source"], [name]).fetchone()
            if row is not None:
                return SourceRecord(*row)
            row = connection.execute(_SQL["create_source"], [name, tag]).fetchone()
            source = SourceRecord(*_found(row))
            table = sql.Identifier(f"batches_{source.id}")
            connection.execute(_sql(_SCHEMA["source_table"], table=table))
            return source

    def register_source(
        self, name: str, tag: str, wal_end: Callable[[], int | None] = lambda: None
    ) -> SourceRecord:
        """Make a source, or find it and see to it that its LSNs go on where its streams end.

        `tag` identifies cluster and slot (`penstock.core.message.source_tag`), and `wal_end` reads where
        the source's WAL ends now, None if that is not known. With another tag, or an end before
        what was written, LSNs start anew: the streams go on behind their highest position.
        """
        source = self.make_source(name, tag)
        with self._registering() as connection:
            parts = {"batches": batches_table(source.id), "source": sql.Literal(source.id)}
            query = _sql(_SQL["last_lsn"], **parts)
            last = _found(connection.execute(query).fetchone())[0]
            # Read after what was written, as another run may write meanwhile.
            end = wal_end() if source.tag == tag and last > source.base else None
            if source.tag == tag and (end is None or last - source.base <= end):
                return source
            connection.execute(_SQL["lock"], [LOCK_WRITE, source.id])
            base = _found(connection.execute(query).fetchone())[0]
            row = connection.execute(_SQL["change_source"], [tag, base, source.id]).fetchone()
            return SourceRecord(*_found(row))

    @contextlib.contextmanager
    def claim_source(self, source_id: int) -> Iterator[bool]:
        """Hold the source's lock while the context lasts; gives False where another run holds it."""
        with contextlib.closing(Claim(self.url, source_id)) as claim:
            yield claim.acquire()

    def head(self, source_id: int) -> Position:
        """Return up to where (in the streams' positions) a source's messages are all there."""
        rows = self._connection.rows(_sql(_SQL["head"], batches=batches_table(source_id)))
        return Position(*rows[0]) if rows else START

    # Streams

    def streams(self) -> list[StreamRecord]:
        """Return all streams."""
        return [StreamRecord(*row) for row in self._connection.rows(_SQL["streams"])]

    def stream(self, name: str) -> StreamRecord | None:
        """Return a stream, None if there is none of that name."""
        return next((stream for stream in self.streams() if stream.name == name), None)

    def register_stream(
        self,
        name: str,
        source: SourceRecord,
        kind: str,
        retention: timedelta | None,
        group: Mapping[str, Any] | None = None,
    ) -> StreamRecord:
        """Make a stream with its first segment and its own consumer, or find it.

        `retention` is taken over, as are the settings of its own consumer in `group`, where one that is
        missing is a default; without a `group` they stay. Source and kind of a stream cannot change.
        """
        with self._registering() as connection:
            stream = self.stream(name)
            if stream is not None:
                _same("source", stream.source, source.name, name)
                _same("kind", stream.kind, kind, name)
                change_stream(connection, stream, retention, group)
            else:
                values = {"name": name, "source": source.id, "kind": kind, "retention": retention}
                row = connection.execute(_SQL["create_stream"], values).fetchone()
                stream_id = _found(row)[0]
                create_segment(connection, stream_id, kind, START)
                self._create_consumer(
                    connection, stream_id, name, "pull", True, _stored(group or {})
                )
                connection.execute(_SQL["notify"], ["k"])
            found = self.stream(name)
        assert found is not None  # noqa: S101 - made above
        return found

    # Consumers

    def consumers(self) -> list[ConsumerRecord]:
        """Return all consumers, the streams' own too."""
        return [ConsumerRecord(*row) for row in self._connection.rows(_SQL["consumers"])]

    def register_consumer(
        self, stream: str, name: str, type: str, settings: Mapping[str, Any]  # noqa: A002 - the field's name
    ) -> ConsumerRecord:  # fmt: skip
        """Make a consumer, or find it and take over type and settings."""
        with self._registering() as connection:
            of = self.stream(stream)
            if of is None:
                raise StoreError(
                    "no_stream", f"There is no stream {stream!r} for {name!r} to read."
                )
            old = self._consumer(name)
            if old is None:
                self._create_consumer(connection, of.id, name, type, False, settings)
            elif old.own:
                raise StoreError(
                    "name_taken",
                    f"Stream {name!r} has a consumer of its own by that name.",
                    remedy="Give yours another.",
                )
            elif old.stream != stream:
                raise StoreError(
                    "name_taken",
                    f"Consumer {name!r} reads the stream {old.stream!r}, not {stream!r}.",
                    remedy="Give this one another name, or delete the other.",
                )
            self._filter(connection, of, name, type, settings)
            if old is not None and (old.type, old.settings) != (type, settings):
                connection.execute(_SQL["change_consumer"], [type, Jsonb(settings), old.id])
                connection.execute(_SQL["notify"], [f"c{old.id}"])
            connection.execute(_SQL["notify"], ["k"])
            found = self._consumer(name)
        assert found is not None  # noqa: S101 - made above
        return found

    def _filter(
        self,
        connection: psycopg.Connection[Any],
        stream: StreamRecord,
        name: str,
        type_: str,
        settings: Mapping[str, Any],
    ) -> None:
        """Make the function of a consumer's filter in SQL, if it has one."""
        text = settings_of(type_, settings).filters.sql
        consumer = self._consumer(name)
        if text is None or consumer is None:
            return
        try:
            sql_filter.install(connection, consumer.id, stream.id, text)
        except ConsumerError as error:
            of = Concern("consumer", name, error.field)
            raise StoreError("expression", f"consumers.{name}.{error}", concerns=of) from None

    def save_catalog(self, source: str, columns: Columns) -> bool:
        """Note the tables and columns of a source, which consumers' filters are checked against.

        Returns whether others were noted before.
        """
        with self.connection() as connection:
            values = [source, Jsonb(catalog_body(columns))]
            saved = connection.execute(sql_filter.FILTER_SQL["save_catalog"], values)
            return saved.rowcount > 0

    def _consumer(self, name: str) -> ConsumerRecord | None:
        return next((consumer for consumer in self.consumers() if consumer.name == name), None)

    @staticmethod
    def _create_consumer(
        connection: psycopg.Connection[Any],
        stream_id: int,
        name: str,
        type_: str,
        own: bool,
        settings: Mapping[str, Any],
    ) -> None:
        values = {
            "stream": stream_id,
            "name": name,
            "type": type_,
            "own": own,
            "settings": Jsonb(dict(settings)),
        }
        try:
            row = connection.execute(_SQL["create_consumer"], values).fetchone()
        except psycopg.errors.UniqueViolation:
            raise StoreError(
                "name_taken",
                f"There is a consumer {name!r} already.",
                remedy="Give the stream or the consumer another name.",
                concerns=Concern("sink" if own else "consumer", name),
            ) from None
        table = sql.Identifier(f"consumer_{_found(row)[0]}")
        connection.execute(_sql(_SCHEMA["consumer_table"], table=table))


def change_stream(
    connection: psycopg.Connection[Any],
    stream: StreamRecord,
    retention: timedelta | None,
    group: Mapping[str, Any] | None,
) -> None:
    """Set how long a stream keeps messages and the settings of its own consumer, where they differ.

    A setting that is missing in `group` is a default; without a `group` all of them stay.
    """
    if stream.retention != retention:
        connection.execute(_SQL["set_retention"], [retention, stream.id])
    if group is None:
        return
    for id_, settings in connection.execute(_SQL["own_consumer"], [stream.id]).fetchall():
        others = {k: v for k, v in settings.items() if k not in GROUP_SETTINGS}
        wanted = _stored({**others, **group})
        if wanted != settings:
            connection.execute(_SQL["change_consumer"], ["pull", Jsonb(wanted), id_])
            for notice in (f"c{id_}", "k"):
                connection.execute(_SQL["notify"], [notice])


def create_segment(
    connection: psycopg.Connection[Any], stream_id: int, kind: str, after: Position
) -> int:
    """Make a stream's last segment, which begins behind `after`, and return its id."""
    row = connection.execute(_SQL["create_segment"], [stream_id, *after]).fetchone()
    segment_id = int(_found(row)[0])
    table = sql.Identifier(f"segment_{segment_id}")
    connection.execute(_sql(_SCHEMA["segment_table"], table=table))
    connection.execute(_sql(_SCHEMA["segment_indexes"], table=table))
    if kind == "rows":
        connection.execute(_sql(_SCHEMA["segment_key_index"], table=table))
    return segment_id


def _sql(text: LiteralString, **parts: sql.Composable) -> sql.Composed:
    return sql.SQL(text).format(**parts)


def _stored(group: Mapping[str, Any]) -> dict[str, Any]:
    return settings_of("pull", group).stored()


def _found(row: tuple[Any, ...] | None) -> tuple[Any, ...]:
    assert row is not None  # noqa: S101 - these statements always return one
    return row


def _same(what: str, old: str, new: str, stream: str) -> None:
    if old != new:
        raise StoreError(
            f"{what}_changed",
            f"Stream {stream!r} has the {what} {old!r}, and the configuration names {new!r}.",
            remedy="A stream's stays as it is: give the sink another name.",
            concerns=Concern("sink", stream, what),
        )
