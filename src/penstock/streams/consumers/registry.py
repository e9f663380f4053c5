"""The consumers of a store, as one process and event loop serves them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import psycopg
import structlog
from psycopg import sql
from psycopg.types.json import Jsonb

from penstock.config.bastion import Bastion
from penstock.config.consumers import Consumer as WrittenConsumer
from penstock.config.consumers import ConsumerSettings, settings_of
from penstock.config.deletes import OF_CHANGES
from penstock.config.secret_values import masked
from penstock.config.yaml_lines import escaped
from penstock.core import queries
from penstock.streams.bastions import SQL as BASTIONS_SQL
from penstock.streams.bastions import filled
from penstock.streams.catalogs import read_catalog
from penstock.streams.consumers import sql_filter
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.facts import ConsumerFacts
from penstock.streams.consumers.joined import OF_TARGET, here, joined, written
from penstock.streams.consumers.moved import Moved
from penstock.streams.consumers.notices import Notices
from penstock.streams.consumers.receive_limit import ReceiveLimit
from penstock.streams.consumers.search import StreamSearch
from penstock.streams.consumers.sessions import SQL, Connection, Sessions, composed
from penstock.streams.consumers.state import START, State
from penstock.streams.consumers.status import AT_ONCE, Status
from penstock.streams.consumers.types import (
    ConsumerError,
    ConsumerInfo,
    ConsumerSpec,
    NameTaken,
    Refused,
    StoreUnavailable,
    StreamInfo,
    UnknownConsumer,
    UnknownStream,
    WrongSetting,
)
from penstock.streams.consumers.view import StreamRef
from penstock.streams.names import batches_table, consumer_table
from penstock.streams.records import commit_position

if TYPE_CHECKING:
    from penstock.expressions.postgres.translate import Translated

_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")
_WRITE_SQL: Final = queries.load("penstock.streams", "write.sql")
_SCHEMA: Final = queries.load("penstock.streams", "schema.sql")
_FACTS_AT_ONCE: Final = 4
_FACTS_PATIENCE: Final = 10.0  # seconds for one consumer's
_log: Final = structlog.get_logger("penstock.streams")


Check = Callable[[int | None], None]
"""Takes the version that is to be changed, None of what is not in the desired state, and may raise."""


def accept(_: int | None) -> None:
    """Let every version be changed."""


class Consumers:
    """All consumers of the store at `url`, with at most `pool_size` connections and one to listen."""

    def __init__(self, url: str, *, pool_size: int = 8) -> None:
        self._sessions = Sessions(url, pool_size)
        self._consumers: dict[int, Consumer] = {}
        self._names: dict[str, ConsumerInfo] = {}
        self._uuids: dict[str, ConsumerInfo] = {}
        self._streams: dict[str, str] = {}
        self._rows: dict[int, tuple[tuple[Any, ...], ConsumerInfo]] = {}
        self._stale = True
        self._loading = asyncio.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._notices = Notices(
            self._sessions, connected=self._listening, received=self._notified, lost=self._missed
        )

        self._moved = Moved()
        self._status = Status(self._sessions, self._newest)
        self._limit = ReceiveLimit(self._sessions, self._notices.send)

    async def open(self) -> None:
        """Connect; where the store does not answer, every later call tries again."""
        await self._notices.open()

    async def close(self) -> None:
        """Answer what waits with nothing, and disconnect."""
        await self._notices.close()
        for consumer in self._consumers.values():
            await consumer.close()
        await self._limit.close()
        await self._sessions.close()

    async def get(self, name: str) -> Consumer:
        """Return a consumer by its name or its UUID; raises `UnknownConsumer`."""
        info = self._found(name)
        if info is None or self._stale:
            await self._load(name)
            info = self._found(name)
        if info is None:
            raise _unknown(name)
        return self._consumers[info.id]

    def _found(self, name: str) -> ConsumerInfo | None:
        return self._names.get(name) or self._uuids.get(name)

    async def own(self, stream: str) -> Consumer:
        """Return the own consumer group of the stream with a name or UUID; raises `UnknownStream`."""
        if stream not in self._names and stream not in self._streams:
            await self._load(stream)
        try:
            consumer = await self.get(self._streams.get(stream, stream))
        except UnknownConsumer:
            consumer = None
        if consumer is None or not consumer.info.own:
            raise UnknownStream(f"There is no stream {stream!r}.")
        return consumer

    async def streams(self) -> list[StreamInfo]:
        """Return all streams by name."""
        found = []
        heads: dict[int, tuple[int, int]] = {}
        for row in await self._sessions.rows(SQL["streams"]):
            id_, name, kind, source, retention, segments, at, source_id, base, uuid = row
            if source_id not in heads:
                heads[source_id] = await self._head(source_id)
            head = heads[source_id]
            position = None if head == START else commit_position(head[0] - base, head[1])
            found.append(
                StreamInfo(id_, name, kind, source, retention, segments, position, at, uuid)
            )
        return found

    async def search(self, stream: str) -> StreamSearch:
        """Return what finds messages of a stream; raises `UnknownStream`."""
        name = (await self.own(stream)).info.stream
        rows = await self._sessions.rows(SQL["stream_ref"], (name,))
        if not rows:
            raise UnknownStream(f"There is no stream {stream!r}.")
        *ref, base = rows[0]
        return StreamSearch(self._sessions, StreamRef(*ref), base)

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

    async def known(self) -> Sequence[ConsumerInfo]:
        """Return all consumers; the store is read only where the list may have changed."""
        if self._stale:
            await self._load()
        return list(self._names.values())

    def moved(self) -> Callable[[ConsumerInfo], bool]:
        """Return the function that says whether a consumer may have changed since the last call.

        One without messages that wait, are in flight or are dead changes only with a notice.
        """
        found = self._moved.take()
        return lambda info: (
            not self._notices.is_used
            or info.id not in self._consumers
            or found.has(info.id, self._consumers[info.id].stream.source_id)
        )

    async def refusals(self) -> Mapping[str, tuple[str, float]]:
        """Return why consumers can't be served as the desired state has them, and since when."""
        rows = await self._sessions.rows(SQL["refusals"])
        return {name: (reason, since) for name, reason, since in rows}

    async def page(self, after: str, limit: int) -> Sequence[ConsumerInfo]:
        """Return the first `limit` consumers whose names come behind `after`, by name.

        It costs what the page does, however many consumers there are.
        """
        rows = await self._sessions.rows(SQL["consumer_page"], (after, limit))
        return [_info(row) for row in rows]

    async def named(self, names: Sequence[str]) -> Sequence[ConsumerInfo]:
        """Return the consumers of these names, as far as there are such."""
        rows = await self._sessions.rows(SQL["consumers_named"], (list(names),))
        return [_info(row) for row in rows]

    async def facts(
        self, infos: Sequence[ConsumerInfo] | None = None
    ) -> Sequence[tuple[ConsumerInfo, ConsumerFacts | None]]:
        """Return all consumers by name, or those of `infos`, and how each is.

        None where the store gave no answer to that. What is gone is left out.
        """
        infos = await self.list() if infos is None else infos
        found: dict[int, ConsumerFacts | None] = {}
        for first in range(0, len(infos), AT_ONCE):
            found |= await self._facts_of(infos[first : first + AT_ONCE])
        return [(info, found[info.id]) for info in infos if info.id in found]

    async def _facts_of(self, infos: Sequence[ConsumerInfo]) -> dict[int, ConsumerFacts | None]:
        found: dict[int, ConsumerFacts | None]
        try:
            async with asyncio.timeout(_FACTS_PATIENCE):
                found = await self._status.read(infos)
        except (StoreUnavailable, psycopg.errors.UndefinedTable, TimeoutError):
            found = dict.fromkeys(info.id for info in infos)
        except Exception:
            _log.exception("the status of consumers can't be read")
            found = dict.fromkeys(info.id for info in infos)
        rest = [info for info in infos if found.get(info.id, True) is None]
        some = asyncio.Semaphore(_FACTS_AT_ONCE)
        looked = await asyncio.gather(*[self._one_facts(info.name, some) for info in rest])
        found |= {info.id: facts for info, facts in zip(rest, looked, strict=True)}
        gone = {info.id for info in rest if info.name not in self._names}
        return {id_: facts for id_, facts in found.items() if id_ not in gone}

    async def _one_facts(self, name: str, some: asyncio.Semaphore) -> ConsumerFacts | None:
        """Return how one consumer is, None where that can't be read."""
        try:
            async with some, asyncio.timeout(_FACTS_PATIENCE):
                return await (await self.get(name)).facts()
        except (ConsumerError, TimeoutError):
            pass
        except Exception:
            _log.exception("the status of a consumer can't be read", consumer=name)
        return None

    def _newest(self, consumer: int) -> tuple[int, State] | None:
        found = self._consumers.get(consumer)
        return None if found is None else found.newest

    async def create(self, spec: ConsumerSpec, *, by: str = "api") -> ConsumerInfo:
        """Make a consumer; raises `NameTaken`, `UnknownStream`, `pydantic.ValidationError`.

        Here and below the desired state has it in the same transaction, with `by` in its audit log.
        """
        keys = written({**spec.settings, "type": spec.type, "stream": spec.stream})
        rows = await self._sessions.rows(SQL["stream"], (spec.stream,))
        if not rows:
            raise UnknownStream(f"There is no stream {spec.stream!r}.")
        stream, source, kind = rows[0]
        check_settings(keys, kind)
        made = await self._planned(keys, stream)
        policy = keys.deliver_policy
        start = await self._head(source) if policy == "new" else START
        taken = NameTaken(
            f"There is a stream or a consumer {spec.name!r} already: take another name."
        )
        try:
            async with self._changing_state() as connection:
                if await _rows(connection, SQL["named"], {"name": spec.name}):
                    raise taken
                settings = await _joined(connection, keys)
                values = {
                    "stream": stream,
                    "name": spec.name,
                    "type": spec.type,
                    "own": False,
                    "settings": Jsonb(settings.stored()),
                }
                rows = await _rows(connection, _STORE_SQL["create_consumer"], values)
                number = rows[0][0]
                log = consumer_table(number)
                table = sql.Identifier(f"consumer_{number}")
                await connection.execute(sql.SQL(_SCHEMA["consumer_table"]).format(table=table))
                if policy in ("all", "new"):
                    first = State(start).encode().decode()
                    await connection.execute(composed("first_entry", log=log), (first,))
                if made is not None:
                    await connection.execute(sql_filter.create(number, made))
                stored = {"type": spec.type, **keys.written()}
                await _change_entity(connection, spec.name, escaped(stored), by)
        except psycopg.errors.UniqueViolation:
            raise taken from None
        consumer = await self.get(spec.name)
        await consumer.begin()
        return consumer.info

    async def version(self, name: str) -> int | None:
        """Return the version of a consumer in the desired state; None of what is not in it."""
        info = (await self.get(name)).info
        rows = await self._sessions.rows(SQL["entity_version"], (info.name,))
        return rows[0][0] if rows else None

    async def update(
        self, name: str, changes: Mapping[str, Any], *, by: str = "api", check: Check = accept
    ) -> ConsumerInfo:
        """Change settings, those given alone; None sets one to its default.

        `check` gets the version that is changed, and may raise. Raises `UnknownConsumer` and
        `pydantic.ValidationError`.
        """
        consumer = await self.get(name)
        info = consumer.info
        async with self._changing_state() as connection:
            rows = await _rows(connection, SQL["settings"], (info.id,))
            if not rows:
                raise _unknown(name)
            kind, stored = rows[0]
            found = await _rows(connection, _STORE_SQL["entity"], ("consumer", info.name))
            old = found[0][0] if found else escaped({**stored, "type": kind})
            spec = {**old, **escaped(changes), "stream": info.stream}
            spec = {key: value for key, value in spec.items() if value is not None}
            values = {key: v for key, v in {**stored, **changes}.items() if v is not None}
            checked: ConsumerSettings
            if "target" not in spec and "via" not in stored:
                checked = settings_of(kind, values)
            elif (keys := here(spec, kind, os.environ)) is not None:
                checked = await _joined(connection, keys)
            elif OF_TARGET.isdisjoint(changes):
                checked = settings_of(kind, values)  # what the store has filled stays
            else:
                raise Refused(f"{name!r} names variables that this process lacks: set them here.")
            check_settings(checked, consumer.stream.kind)
            await _check_version(connection, info, check)
            of = consumer.stream
            made = await self._planned(checked, of.id) if "filters" in changes else None
            settings = Jsonb(checked.stored())
            await connection.execute(SQL["set_settings"], (settings, info.id))
            if made is not None:
                await connection.execute(sql_filter.create(info.id, made))
            if not info.own:
                await _change_entity(connection, info.name, spec, by)
        return (await self.get(name)).info

    async def _planned(self, settings: ConsumerSettings, stream: int) -> Translated | None:
        """Return a consumer's filter in SQL; raises `WrongSetting` and `Refused`."""
        if settings.filters.sql is None:
            return None
        rows = await self._sessions.rows(sql_filter.FILTER_SQL["catalog"], (stream,))
        tables, source, version = rows[0]
        columns = None if tables is None else read_catalog(tables)
        return sql_filter.planned(settings.filters.sql, columns, source, version)

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

    @contextlib.asynccontextmanager
    async def _changing_state(self) -> AsyncIterator[Connection]:
        """Lend the same where the desired state changes too."""
        async with self._changing() as connection:
            await connection.execute(_STORE_SQL["lock_state"])
            yield connection

    async def delete(self, name: str, *, by: str = "api", check: Check = accept) -> None:
        """Delete a consumer and its state; raises `UnknownConsumer`, `Refused` for a stream's own.

        `check` gets the version that is deleted, and may raise.
        """
        info = (await self.get(name)).info
        if info.own:
            raise Refused(
                f"{name!r} is the stream's own consumer group: it lasts as long as the stream."
            )
        async with self._changing_state() as connection:
            await _check_version(connection, info, check)
            # The log first, as in a step: one with dead letters locks the consumer's row after it.
            await connection.execute(composed("drop_log", log=consumer_table(info.id)))
            if not (await connection.execute(SQL["delete_consumer"], (info.id,))).rowcount:
                raise _unknown(name)
            await connection.execute(sql_filter.drop(info.id))
            await _change_entity(connection, info.name, None, by)

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
            if name is not None and not self._stale and self._found(name) is not None:
                return
            self._stale = not self._notices.is_used
            try:
                rows = await self._sessions.rows(SQL["consumers"])
            except BaseException as error:
                self._stale = True
                if isinstance(error, psycopg.errors.UndefinedTable):
                    raise self._sessions.unavailable(error) from None
                raise
            self._names, self._uuids, self._streams = {}, {}, {}
            found: dict[int, tuple[tuple[Any, ...], ConsumerInfo]] = {}
            for row in rows:
                id_, (stream_id, kind, source, stream_uuid) = row[0], row[10:]
                old, was = self._rows.get(id_, (None, None))
                info = was if was is not None and old == row else _info(row)
                found[id_] = row, info
                self._names[info.name] = self._uuids[info.uuid] = info
                self._streams[stream_uuid] = info.stream
                consumer = self._consumers.get(id_)
                if consumer is None:
                    of = StreamRef(stream_id, kind, source)
                    self._consumers[id_] = Consumer(
                        self._sessions, info, of, self._save, self._freed,
                        self._limit.of(id_),
                    )  # fmt: skip
                elif consumer.info != info:
                    consumer.change(info)
            self._rows = found  # what has not changed is not validated again
            for id_ in self._consumers.keys() - found.keys():
                gone = self._consumers.pop(id_)
                self._limit.forget(id_)
                why = UnknownConsumer(f"There is no consumer {gone.info.name!r} any more.")
                await gone.close(why)

    # Other processes

    def _freed(self, consumer: int) -> None:
        self._moved.note(consumer)
        self._notices.send(f"c{consumer}")

    def _missed(self) -> None:
        self._stale = True
        self._moved.note_all()

    async def _listening(self) -> None:
        self._stale = True
        self._moved.note_all()
        for consumer in self._consumers.values():
            consumer.head_moved()
            consumer.log_moved()
        await self._changed()

    def _notified(self, payload: str) -> None:
        kind, number = payload[:1], payload[1:]
        if kind == "s":
            self._moved.note_source(number)
            for consumer in self._consumers.values():
                if str(consumer.stream.source_id) == number:
                    consumer.head_moved()
        elif kind == "c" and number.isdigit():
            self._moved.note(int(number))
            if (found := self._consumers.get(int(number))) is not None:
                found.log_moved()
        elif kind == "w" and number.isdigit():
            self._limit.asked(int(number))
        elif kind == "f" and number.isdigit():
            self._limit.freed(int(number))
        elif kind == "k":
            self._stale = True
            self._notices.run(self._changed())

    async def _changed(self) -> None:
        with contextlib.suppress(ConsumerError):  # the next request reads the list
            await self._load()
            for consumer in list(self._consumers.values()):
                if consumer.info.settings.deliver_policy != "all":
                    await consumer.begin()
        for callback in self._callbacks:
            callback()


def check_settings(settings: ConsumerSettings, kind: str) -> None:
    """Raise `WrongSetting` for what does not go with a stream of this kind."""
    if settings.deletes and kind != "rows":
        raise WrongSetting(f"deletes: {OF_CHANGES}.", "deletes")


def _info(row: tuple[Any, ...]) -> ConsumerInfo:
    id_, name, stream, type_, own, settings, *state, uuid = row[:10]
    checked = settings_of(type_, settings)
    return ConsumerInfo(id_, name, stream, type_, own, checked, *state, uuid=uuid)


def _unknown(name: str) -> UnknownConsumer:
    return UnknownConsumer(f"There is no consumer {name!r}.")


async def _check_version(connection: Connection, info: ConsumerInfo, check: Check) -> None:
    rows = await _rows(connection, SQL["entity_version"], (info.name,))
    check(rows[0][0] if rows else None)


async def _joined(connection: Connection, consumer: WrittenConsumer) -> WrittenConsumer:
    """Return a consumer with what its target has by now; raises `WrongSetting` and `Refused`."""
    name = getattr(consumer, "target", None)
    if name is None:
        return consumer
    rows = await _rows(connection, _STORE_SQL["entity"], ("target", name))
    return joined(consumer, rows[0][0] if rows else None, os.environ)


async def _change_entity(
    connection: Connection, name: str, spec: Mapping[str, Any] | None, by: str
) -> None:
    """Write a consumer into the desired state, or without `spec` delete it there."""
    shown = None if spec is None else masked("consumer", spec)
    change = {"kind": "consumer", "name": name, "spec": spec, "shown": shown}
    await connection.execute(_STORE_SQL["change_entities"], (Jsonb([change]), by))


async def _rows(connection: Connection, query: Any, params: Any) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query, params)).fetchall()
