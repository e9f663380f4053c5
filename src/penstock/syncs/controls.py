"""What is asked of syncs, by any process, and done by the run that has them; and what is shown of them.

Pauses last until they are taken back. Commands stay in the store until what they have brought about is
stored, so that a run which is killed in between does them again. A notification on `CHANNEL` says that
something has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

import psycopg

from penstock.core import queries
from penstock.streams.store import Store

CHANNEL: Final = "penstock_syncs"
_WAITING: Final[Mapping[str, Any]] = {"phase": "waiting", "initial_backfill_completed_at": None}
_SQL: Final = queries.load("penstock.syncs", "controls.sql")

Command = Literal["run", "backfill", "resume"]
"""`run`: poll now; `backfill`: read all again; `resume`: go on after a question or a failed login."""


class SyncCommand(NamedTuple):
    """A command that is not done; without a collection it is for all of the sync."""

    sync: UUID
    collection: str | None
    command: Command
    id: int


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """What is shown of a sync: whether it is paused, and its collections by id."""

    paused: bool = False
    collections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, collections: Iterable[str]) -> SyncStatus:
        """Return the same of these collections alone; one that no run has taken yet waits."""
        shown = {id_: self.collections.get(id_, _WAITING) for id_ in collections}
        return SyncStatus(self.paused, shown)

    @property
    def health(self) -> Mapping[str, Any] | None:
        """Why the first collection that fails does so; None where none does."""
        found = (shown.get("health") for shown in self.collections.values())
        return next((health for health in found if health), None)

    @property
    def initial_backfill_completed_at(self) -> str | None:
        """When the first backfill of all collections was complete; None where it is not."""
        times = [c.get("initial_backfill_completed_at") for c in self.collections.values()]
        return None if not times or None in times else max(str(time) for time in times)


class SyncControls:
    """Asks of syncs in a store. All methods raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def pause(self, sync: UUID, by: str) -> None:
        """Have a sync do nothing until it is resumed."""
        self._change("pause", [sync, by])

    def resume(self, sync: UUID, collection: str | None, by: str) -> None:
        """Let a sync go on: one that is paused, has failed, or asks whether a sweep may delete."""
        with self._store.connection() as connection, connection.transaction():
            if collection is None:
                connection.execute(_SQL["unpause"], [sync])
            connection.execute(_SQL["ask"], [sync, collection, "resume", by])
            connection.execute(_SQL["notify"])

    def ask(self, sync: UUID, collection: str | None, command: Command, by: str) -> None:
        """Ask the run for something, of one collection or of all."""
        self._change("ask", [sync, collection, command, by])

    def paused(self) -> set[UUID]:
        """Return the ids of the syncs that are paused."""
        with self._store.connection() as connection:
            return {row[0] for row in connection.execute(_SQL["paused"])}

    def asked(self) -> list[SyncCommand]:
        """Return what is not done yet, oldest first."""
        with self._store.connection() as connection:
            return [SyncCommand(*row) for row in connection.execute(_SQL["asked"]).fetchall()]

    def status(self, syncs: Iterable[UUID]) -> dict[UUID, SyncStatus]:
        """Return what is shown of syncs, by id."""
        with self._store.connection() as connection:
            rows = connection.execute(_SQL["status"], [list(syncs)]).fetchall()
        found: dict[UUID, SyncStatus] = {}
        collections: dict[UUID, dict[str, Mapping[str, Any]]] = {}
        for sync, paused, collection, shown in rows:
            of_sync = collections.setdefault(sync, {})
            if collection is not None:
                of_sync[collection] = shown
            found[sync] = SyncStatus(paused, of_sync)
        return found

    def _change(self, query: str, values: list[Any]) -> None:
        with self._store.connection() as connection, connection.transaction():
            connection.execute(_SQL[query], values)
            connection.execute(_SQL["notify"])


def done(connection: psycopg.Connection[Any], ids: Iterable[int]) -> None:
    """Remove commands, with the transaction that stores what they have brought about."""
    connection.execute(_SQL["done"], [list(ids)])


def forget(connection: psycopg.Connection[Any]) -> None:
    """Remove what is left of syncs and credentials that are no more; records stay."""
    connection.execute(_SQL["forget"])
