"""The consumers of a store, as one process and event loop serves them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql
from psycopg.types.json import Jsonb

from penstock.config.bastion import Bastion
from penstock.config.consumers import settings_of
from penstock.core import queries
from penstock.streams.bastions import SQL as BASTIONS_SQL
from penstock.streams.bastions import filled
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.facts import ConsumerFacts
from penstock.streams.consumers.notices import Notices
from penstock.streams.consumers.sessions import SQL, Connection, Sessions, composed
from penstock.streams.consumers.state import START, State
from penstock.streams.consumers.types import (
    ConsumerError,
    ConsumerInfo,
    ConsumerSpec,
    NameTaken,
    Refused,
    StreamInfo,
    UnknownConsumer,
    UnknownStream,
)
from penstock.streams.consumers.view import StreamRef
from penstock.streams.names import batches_table, consumer_table
from penstock.streams.records import commit_position

_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")
_WRITE_SQL: Final = queries.load("penstock.streams", "write.sql")
_SCHEMA: Final = queries.load("penstock.streams", "schema.sql")
_FACTS_AT_ONCE: Final = 4
_FACTS_PATIENCE: Final = 10.0  # seconds for one consumer's
_log: Final = structlog.get_logger("penstock.streams")


class Consumers:
    """All consumers of the store at `url`, with at most `pool_size` connections and one to listen."""

    def __init__(self, url: str, *, pool_size: int = 8) -> None:
        self._sessions = Sessions(url, pool_size)
        self._consumers: dict[int, Consumer] = {}
        self._names: dict[str, ConsumerInfo] = {}
        self._stale = True
        self._loading = asyncio.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._notices = Notices(
            self._sessions, connected=self._listening, received=self._notified, lost=self._missed
        )

    async def open(self) -> None:
        """Connect; where the store does not answer, every later call tries again."""
        await self._notices.open()

    async def close(self) -> None:
        """Answer what waits with nothing, and disconnect."""
        await self._notices.close()
        for consumer in self._consumers.values():
            await consumer.close()
        await self._sessions.close()

    async def get(self, name: str) -> Consumer:
        """Return a consumer; raises `UnknownConsumer`."""
        info = self._names.get(name)
        if info is None or self._stale:
            await self._load(name)
            info = self._names.get(name)
        if info is None:
            raise _unknown(name)
        return self._consumers[info.id]

    async def own(self, stream: str) -> Consumer:
        """Return a stream's own consumer group; raises `UnknownStream`."""
        try:
            consumer = await self.get(stream)
        except UnknownConsumer:
            consumer = None
        if consumer is None or not consumer.info.own:
            raise UnknownStream(f"There is no stream {stream!r}.")
        return consumer

    async def streams(self) -> list[StreamInfo]:
        """Return all streams by name."""
        found = []
        for row in await self._sessions.rows(SQL["streams"]):
            id_, name, kind, source, retention, segments, at, source_id, base = row
            head = await self._head(source_id)
            position = None if head == START else commit_position(head[0] - base, head[1])
            found.append(StreamInfo(id_, name, kind, source, retention, segments, position, at))
        return found

    async def base(self, consumer: Consumer) -> int:
        """Return what its stream's LSNs have over the `commit_lsn` of messages of today's source."""
        rows = await self._sessions.rows(_WRITE_SQL["base"], (consumer.stream.source_id,))
        return int(rows[0][0]) if rows else 0

    async def _head(self, source: int) -> tuple[int, int]:
        query = sql.SQL(_STORE_SQL["head"]).format(batches=batches_table(source))
        rows = await self._sessions.rows(query)
        return (rows[0][0], rows[0][1]) if rows else START

    async def list(self) -> list[ConsumerInfo]:
        """Return all consumers by name."""
        await self._load()
        return sorted(self._names.values(), key=lambda info: info.name)

    async def facts(self) -> Sequence[tuple[ConsumerInfo, ConsumerFacts | None]]:
        """Return all consumers by name and how each is; None where the store gave no answer to that."""
        infos = await self.list()
        some = asyncio.Semaphore(_FACTS_AT_ONCE)

        async def one(name: str) -> ConsumerFacts | None:
            try:
                async with some, asyncio.timeout(_FACTS_PATIENCE):
                    return await (await self.get(name)).facts()
            except (ConsumerError, TimeoutError):
                pass
            except Exception:
                _log.exception("the status of a consumer can't be read", consumer=name)
            return None

        found = await asyncio.gather(*[one(info.name) for info in infos])
        pairs = zip(infos, found, strict=True)
        return [(info, facts) for info, facts in pairs if info.name in self._names]

    async def create(self, spec: ConsumerSpec) -> ConsumerInfo:
        """Make a consumer; raises `NameTaken`, `UnknownStream`, `pydantic.ValidationError`."""
        settings = settings_of(spec.type, spec.settings)
        rows = await self._sessions.rows(SQL["stream"], (spec.stream,))
        if not rows:
            raise UnknownStream(f"There is no stream {spec.stream!r}.")
        stream, source = rows[0]
        start = await self._head(source) if settings.deliver_policy == "new" else START
        taken = NameTaken(
            f"There is a stream or a consumer {spec.name!r} already: take another name."
        )
        try:
            async with self._changing() as connection:
                if await _rows(connection, SQL["named"], {"name": spec.name}):
                    raise taken
                values = (stream, spec.name, spec.type, False, Jsonb(settings.stored()))
                made = await _rows(connection, _STORE_SQL["create_consumer"], values)
                log = consumer_table(made[0][0])
                table = sql.Identifier(f"consumer_{made[0][0]}")
                await connection.execute(sql.SQL(_SCHEMA["consumer_table"]).format(table=table))
                first = State(start).encode().decode()
                await connection.execute(composed("first_entry", log=log), (first,))
        except psycopg.errors.UniqueViolation:
            raise taken from None
        return (await self.get(spec.name)).info

    async def update(self, name: str, changes: Mapping[str, Any]) -> ConsumerInfo:
        """Change settings, those given alone; None sets one to its default.

        Raises `UnknownConsumer` and `pydantic.ValidationError`.
        """
        info = (await self.get(name)).info
        async with self._changing() as connection:
            rows = await _rows(connection, SQL["settings"], (info.id,))
            if not rows:
                raise _unknown(name)
            kind, stored = rows[0]
            values = {**stored, **changes}
            given = {key: value for key, value in values.items() if value is not None}
            settings = Jsonb(settings_of(kind, given).stored())
            await connection.execute(SQL["set_settings"], (settings, info.id))
        return (await self.get(name)).info

    async def _save(self, info: ConsumerInfo, disabled: str | None) -> None:
        async with self._changing() as connection:
            done = await connection.execute(
                SQL["set_disabled"], {"disabled": disabled, "consumer": info.id}
            )
            if not done.rowcount:
                raise _unknown(info.name)

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[Connection]:
        """Lend a connection in a transaction that notifies every process."""
        async with self._sessions.session() as connection, connection.transaction():
            yield connection
            await connection.execute(_STORE_SQL["notify"], ("k",))
        await self._load()

    async def delete(self, name: str) -> None:
        """Delete a consumer and its state; raises `UnknownConsumer`, `Refused` for a stream's own."""
        info = (await self.get(name)).info
        if info.own:
            raise Refused(
                f"{name!r} is the stream's own consumer group: it lasts as long as the stream."
            )
        async with self._changing() as connection:
            # The log first, as in a step: one with dead letters locks the consumer's row after it.
            await connection.execute(composed("drop_log", log=consumer_table(info.id)))
            if not (await connection.execute(SQL["delete_consumer"], (info.id,))).rowcount:
                raise _unknown(name)

    async def bastion(self, bastion: Bastion) -> Bastion:
        """Return a bastion with the keys that the store has of it; raises `StoreUnavailable`."""
        rows = await self._sessions.rows(BASTIONS_SQL["bastions"], ([bastion.owner],))
        return filled(bastion, *(rows[0][1:] if rows else (None, None)))

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback`, in the event loop, whenever the list or a consumer's settings changed."""
        self._callbacks.append(callback)

    # The list

    async def _load(self, name: str | None = None) -> None:
        """Read the list, unless another call has while this one waited and has found `name`."""
        async with self._loading:
            if name is not None and not self._stale and name in self._names:
                return
            self._stale = not self._notices.is_used
            try:
                rows = await self._sessions.rows(SQL["consumers"])
            except BaseException as error:
                self._stale = True
                if isinstance(error, psycopg.errors.UndefinedTable):
                    raise self._sessions.unavailable(error) from None
                raise
            self._names = {}
            for row in rows:
                id_, name_, stream, type_, own, settings, *state, stream_id, kind, source = row
                checked = settings_of(type_, settings)
                info = ConsumerInfo(id_, name_, stream, type_, own, checked, *state)
                self._names[name_] = info
                consumer = self._consumers.get(id_)
                if consumer is None:
                    of = StreamRef(stream_id, kind, source)
                    self._consumers[id_] = Consumer(
                        self._sessions, info, of, self._save, self._freed
                    )
                elif consumer.info != info:
                    consumer.change(info)
            known = {info.id for info in self._names.values()}
            for id_ in self._consumers.keys() - known:
                gone = self._consumers.pop(id_)
                why = UnknownConsumer(f"There is no consumer {gone.info.name!r} any more.")
                await gone.close(why)

    # Other processes

    def _freed(self, consumer: int) -> None:
        self._notices.send(f"c{consumer}")

    def _missed(self) -> None:
        self._stale = True

    async def _listening(self) -> None:
        self._stale = True
        for consumer in self._consumers.values():
            consumer.head_moved()
            consumer.log_moved()
        await self._changed()

    def _notified(self, payload: str) -> None:
        kind, number = payload[:1], payload[1:]
        if kind == "s":
            for consumer in self._consumers.values():
                if str(consumer.stream.source_id) == number:
                    consumer.head_moved()
        elif kind == "c" and number.isdigit():
            if (found := self._consumers.get(int(number))) is not None:
                found.log_moved()
        elif kind == "k":
            self._stale = True
            self._notices.run(self._changed())

    async def _changed(self) -> None:
        with contextlib.suppress(ConsumerError):  # the next request reads the list
            await self._load()
            for consumer in list(self._consumers.values()):
                if consumer.info.settings.deliver_policy == "new":
                    await consumer.begin()
        for callback in self._callbacks:
            callback()


def _unknown(name: str) -> UnknownConsumer:
    return UnknownConsumer(f"There is no consumer {name!r}.")


async def _rows(connection: Connection, query: Any, params: Any) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query, params)).fetchall()
