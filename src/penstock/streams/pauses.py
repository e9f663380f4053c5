"""Consumers of every type and sinks to NATS, paused and resumed by their names."""

from __future__ import annotations

from typing import Any, Final

import psycopg

from penstock.core import queries
from penstock.core.errors import StoreError
from penstock.core.text import nearest
from penstock.streams.nats_consumers import NO_CONSUMER
from penstock.streams.nats_consumers import SQL as NATS_SQL
from penstock.streams.store import Store

NO_SINK: Final = "no_sink"
NOT_PAUSABLE: Final = "not_pausable"
Connection = psycopg.Connection[Any]
SQL: Final = queries.load("penstock.streams", "pauses.sql")


def pause_consumer(store: Store, name: str, by: str) -> None:
    """Have a consumer deliver nothing; raises `StoreError`."""
    _set(store, name, by)


def resume_consumer(store: Store, name: str) -> None:
    """Let a consumer go on, also a webhook that was disabled; raises `StoreError`."""
    _set(store, name, None)


def _set(store: Store, name: str, by: str | None) -> None:
    values = {"name": name, "by": by}
    with store.connection() as connection, connection.transaction():
        if connection.execute(SQL["http_consumer"], values).rowcount:
            connection.execute(SQL["notify"])
        elif not connection.execute(NATS_SQL["pause"], [by is not None, name]).rowcount:
            names = [known for (known,) in connection.execute(SQL["consumers"])]
            raise StoreError(
                NO_CONSUMER,
                f"There is no consumer {name!r}{nearest(name, names) or '.'}",
                remedy="Name one that `penstock status` shows. It shows a new one once a run has it.",
            )


def pause_sink(store: Store, name: str, by: str) -> None:
    """Have a sink deliver nothing: its run keeps its messages in the store; raises `StoreError`."""
    with store.connection() as connection, connection.transaction():
        source = _source_of(connection, name)
        connection.execute(SQL["pause_sink"], {"source": source, "sink": name, "by": by})


def resume_sink(store: Store, name: str) -> None:
    """Have a sink deliver what waits for it, and go on; raises `StoreError`."""
    with store.connection() as connection, connection.transaction():
        source = _source_of(connection, name)
        connection.execute(SQL["resume_sink"], {"source": source, "sink": name})


def paused_sinks(store: Store) -> dict[tuple[str, str], str]:
    """Return who has paused each paused sink, by source and name; raises `StoreError`."""
    with store.connection() as connection:
        return {(source, sink): by for source, sink, by in connection.execute(SQL["paused_sinks"])}


def _source_of(connection: Connection, name: str) -> str:
    """Return the source of a sink that can be paused."""
    row = connection.execute(SQL["sink"], [name]).fetchone()
    if row is None:
        names = [known for (known,) in connection.execute(SQL["sinks"])]
        raise StoreError(
            NO_SINK,
            f"There is no sink {name!r}{nearest(name, names) or '.'}",
            remedy="Name one that `penstock status` shows. It shows a new one once a run has it.",
        )
    source, type_ = row
    if type_ == "stream":
        raise StoreError(
            NOT_PAUSABLE,
            f"Sink {name} is a stream, which only keeps what its consumers have not had.",
            remedy="Pause its consumers: penstock consumer pause CONSUMER",
        )
    return str(source)
