"""What makes, changes and deletes consumers: store and desired state, in one transaction each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from penstock.config.consumers import ConsumerSettings, HttpConsumer, settings_of
from penstock.config.deletes import OF_CHANGES
from penstock.config.secret_values import masked
from penstock.config.sinks import GROUP_SETTINGS
from penstock.config.yaml_lines import escaped
from penstock.core import queries
from penstock.streams.catalogs import read_catalog
from penstock.streams.connection import Also
from penstock.streams.consumers import sql_filter
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.joined import OF_TARGET, here, joined, written
from penstock.streams.consumers.sessions import SQL, Connection, Sessions, composed, execute_all
from penstock.streams.consumers.state import START, State
from penstock.streams.consumers.stream_list import head_of
from penstock.streams.consumers.types import (
    ConsumerInfo,
    ConsumerSpec,
    NameTaken,
    Refused,
    UnknownConsumer,
    UnknownStream,
    WrongSetting,
)
from penstock.streams.names import consumer_table

if TYPE_CHECKING:
    from penstock.expressions.postgres.translate import Translated

_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")
_SCHEMA: Final = queries.load("penstock.streams", "schema.sql")

Check = Callable[[int | None], None]
"""Takes the version that is to be changed, None of what is not in the desired state, and may raise."""


def accept(_: int | None) -> None:
    """Let every version be changed."""


class ConsumerChanges:
    """Changes the consumers of a store, and notifies every process.

    The desired state has it too, with `by` in its audit log. `check` gets the version that is changed,
    and may raise.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def create(self, spec: ConsumerSpec, by: str) -> None:
        """Make a consumer; raises `NameTaken`, `UnknownStream`, `pydantic.ValidationError`."""
        keys = written({**spec.settings, "type": spec.type, "stream": spec.stream})
        rows = await self._sessions.rows(SQL["stream"], (spec.stream,))
        if not rows:
            raise UnknownStream(f"There is no stream {spec.stream!r}.")
        stream, source, kind = rows[0]
        check_settings(keys, kind)
        made = await self._planned(keys, stream)
        policy = keys.deliver_policy
        start = await head_of(self._sessions, source) if policy == "new" else START
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
                await _change_entity(connection, ("consumer", spec.name), escaped(stored), by)
        except psycopg.errors.UniqueViolation:
            raise taken from None

    async def update(
        self, consumer: Consumer, changes: Mapping[str, Any], by: str, check: Check, also: Also
    ) -> None:
        """Change settings, and do `also` where the desired state does not have them.

        Raises `UnknownConsumer` and `pydantic.ValidationError`.

        Those of a stream's own group are the sink's that fills it; raises `Refused` for what that lacks.
        """
        info = consumer.info
        async with self._changing_state() as connection:
            rows = await _rows(connection, SQL["settings"], (info.id,))
            if not rows:
                raise unknown(info.name)
            kind, stored = rows[0]
            found = await _rows(connection, SQL["entity"], entity_of(info))
            if info.own and found:
                _check_own(info, changes)
            beside = {} if info.own else {"stream": info.stream}
            old = found[0][0] if found else escaped({**stored, "type": kind})
            spec = _without_none({**old, **escaped(changes), **beside})
            values = _without_none({**stored, **changes})
            checked: ConsumerSettings
            if "target" not in spec and "via" not in stored:
                checked = settings_of(kind, values)
            elif (keys := here(spec, kind, os.environ)) is not None:
                checked = await _joined(connection, keys)
            elif OF_TARGET.isdisjoint(changes):
                checked = settings_of(kind, values)  # what the store has filled stays
            else:
                raise Refused(
                    f"{info.name!r} names variables that this process lacks: set them here."
                )
            check_settings(checked, consumer.stream.kind)
            await _check_version(connection, info, check)
            of = consumer.stream
            made = await self._planned(checked, of.id) if "filters" in changes else None
            settings = Jsonb(checked.stored())
            await connection.execute(SQL["set_settings"], (settings, info.id))
            if made is not None:
                await connection.execute(sql_filter.create(info.id, made))
            if found or not info.own:
                await _change_entity(connection, entity_of(info), spec, by)
            else:
                await execute_all(connection, also)

    async def delete(self, info: ConsumerInfo, by: str, check: Check) -> None:
        """Delete a consumer and its state; raises `UnknownConsumer`, `Refused` for a stream's own."""
        if info.own:
            raise Refused(
                f"{info.name!r} is the stream's own consumer group: it lasts as long as the stream."
            )
        async with self._changing_state() as connection:
            await _check_version(connection, info, check)
            # The log first, as in a step: one with dead letters locks the consumer's row after it.
            await connection.execute(composed("drop_log", log=consumer_table(info.id)))
            if not (await connection.execute(SQL["delete_consumer"], (info.id,))).rowcount:
                raise unknown(info.name)
            await connection.execute(sql_filter.drop(info.id))
            await _change_entity(connection, entity_of(info), None, by)

    async def disable(
        self, info: ConsumerInfo, disabled: str | None, *, paused: bool, also: Also
    ) -> None:
        """Note why a consumer is disabled and whether it is paused, or with None that it is not."""
        async with self._changing() as connection:
            values = {"disabled": disabled, "paused": paused, "consumer": info.id}
            done = await connection.execute(SQL["set_disabled"], values)
            if not done.rowcount:
                raise unknown(info.name)
            await execute_all(connection, also)

    async def _planned(self, settings: ConsumerSettings, stream: int) -> Translated | None:
        """Return a consumer's filter in SQL; raises `WrongSetting` and `Refused`."""
        if settings.filters.sql is None:
            return None
        rows = await self._sessions.rows(sql_filter.FILTER_SQL["catalog"], (stream,))
        tables, source, version = rows[0]
        columns = None if tables is None else read_catalog(tables)
        return sql_filter.planned(settings.filters.sql, columns, source, version)

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[Connection]:
        """Lend a connection in a transaction that notifies every process."""
        async with self._sessions.session() as connection, connection.transaction():
            yield connection
            await connection.execute(_STORE_SQL["notify"], ("k",))

    @contextlib.asynccontextmanager
    async def _changing_state(self) -> AsyncIterator[Connection]:
        """Lend the same where the desired state changes too."""
        async with self._changing() as connection:
            await connection.execute(_STORE_SQL["lock_state"])
            yield connection


def check_settings(settings: ConsumerSettings, kind: str) -> None:
    """Raise `WrongSetting` for what does not go with a stream of this kind."""
    if settings.deletes and kind != "rows":
        raise WrongSetting(f"{OF_CHANGES}.", "deletes")


def entity_of(info: ConsumerInfo) -> tuple[str, str]:
    """Return the kind and the name of the entity that has a consumer's settings."""
    return ("sink", info.stream) if info.own else ("consumer", info.name)


def _check_own(info: ConsumerInfo, changes: Mapping[str, Any]) -> None:
    """Raise `Refused` for settings that a stream's own group does not have from its sink."""
    for key in changes:
        if key in ConsumerSettings.model_fields and key not in GROUP_SETTINGS:
            raise Refused(
                f"{key}: {info.name!r} is the stream's own group, whose settings are those of sink"
                f" {info.stream!r}. Set it on a consumer of this stream."
            )


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def unknown(name: str) -> UnknownConsumer:
    """Return the error of a consumer that is not there."""
    return UnknownConsumer(f"There is no consumer {name!r}.")


async def _check_version(connection: Connection, info: ConsumerInfo, check: Check) -> None:
    rows = await _rows(connection, SQL["entity"], entity_of(info))
    check(rows[0][1] if rows else None)


async def _joined(connection: Connection, consumer: HttpConsumer) -> HttpConsumer:
    """Return a consumer with what its target has by now; raises `WrongSetting` and `Refused`."""
    name = getattr(consumer, "target", None)
    if name is None:
        return consumer
    rows = await _rows(connection, _STORE_SQL["entity"], ("target", name))
    return joined(consumer, rows[0][0] if rows else None, os.environ)


async def _change_entity(
    connection: Connection, entity: tuple[str, str], spec: Mapping[str, Any] | None, by: str
) -> None:
    """Write an entity into the desired state, or without `spec` delete it there."""
    kind, name = entity
    shown = None if spec is None else masked(kind, spec)
    change = {"kind": kind, "name": name, "spec": spec, "shown": shown}
    await connection.execute(_STORE_SQL["change_entities"], (Jsonb([change]), by))


async def _rows(connection: Connection, query: Any, params: Any) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query, params)).fetchall()
