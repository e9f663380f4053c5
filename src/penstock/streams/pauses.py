"""Consumers of every type, paused and resumed by their names."""

from __future__ import annotations

from typing import Final

from penstock.core import queries
from penstock.core.errors import StoreError
from penstock.core.text import nearest
from penstock.streams.nats_consumers import NO_CONSUMER
from penstock.streams.nats_consumers import SQL as NATS_SQL
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.streams", "pauses.sql")


def pause_consumer(store: Store, name: str, by: str) -> None:
    """Have a consumer deliver nothing; raises `StoreError`."""
    _set(store, name, by)


def resume_consumer(store: Store, name: str) -> None:
    """Let a consumer go on, also a webhook that was disabled; raises `StoreError`."""
    _set(store, name, None)


def _set(store: Store, name: str, by: str | None) -> None:
    values = {"name": name, "by": by}
    with store.connection() as connection, connection.transaction():
        if connection.execute(_SQL["http_consumer"], values).rowcount:
            connection.execute(_SQL["notify"])
        elif not connection.execute(NATS_SQL["pause"], [by is not None, name]).rowcount:
            names = [known for (known,) in connection.execute(_SQL["consumers"])]
            raise StoreError(
                NO_CONSUMER,
                f"There is no consumer {name!r}{nearest(name, names) or '.'}",
                remedy="Name one that `penstock status` shows; a run makes those of its file.",
            )
