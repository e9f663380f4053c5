"""The desired state in the store: read whole, changed by change sets, with an audit log."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.types.json import Jsonb

from penstock.config.document import Key, Spec
from penstock.config.models import BUILT_IN, REFERENCES
from penstock.config.secret_values import masked
from penstock.core import queries
from penstock.core.errors import PenstockError
from penstock.core.record_forms import SYNCS
from penstock.desired import consumers, streams
from penstock.desired.entities import AuditEntry, Change, Door, Entity, Snapshot
from penstock.streams.names import LOCK_MIGRATE, LOCK_PROCESS
from penstock.streams.store import Store
from penstock.syncs import controls

CHANNEL: Final = "penstock_state"
"""Notifications: the state's new version, one a change set."""
_MOVED: Final = "PS004"  # raised by penstock.change_entities
_SQL: Final = queries.load("penstock.desired", "state.sql")
_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")


class StateMoved(PenstockError):  # noqa: N818 - it reads better where it is caught
    """An entity has another version than the one that a change was made for; nothing is written."""

    def __init__(self, entities: str) -> None:
        super().__init__(
            "state_moved",
            f"The desired state has moved since: {entities}.",
            remedy="Read it again, or plan anew: penstock plan",
            transient=True,
        )
        self.entities = entities

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.entities,)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entity that a process can't run as it is."""

    kind: str
    name: str
    reason: str
    at: datetime


class DesiredState:
    """The desired state of a store. All methods raise `StoreError`.

    `environ` fills the variables of consumers' settings, which the store keeps filled.
    """

    def __init__(self, store: Store, environ: Mapping[str, str] = os.environ) -> None:
        self._store = store
        self._environ = environ

    def version(self) -> int:
        """Return the state's version."""
        with self._store.connection() as connection:
            return int(_one(connection, _SQL["version"]))

    def read(self, kinds: Collection[str] | None = None) -> Snapshot:
        """Return the whole state, or its entities of these kinds."""
        with self._store.connection() as connection:
            return read(connection, kinds)

    def write(
        self,
        changes: Sequence[Change],
        *,
        by: str,
        door: Door,
        expected: Mapping[Key, int] | None = None,
        at: int | None = None,
        lenient: bool = False,
    ) -> Snapshot:
        """Apply a change set in one transaction; the entities are managed by `door` from then on.

        Args:
            changes: At most one for each entity; their `before` is not looked at.
            by: Who changes it, for the audit log.
            door: How the change came.
            expected: The version that an entity must have, 0 for one that must not be there.
            at: The version that the whole state must have.
            lenient: Refuse a consumer whose filter can't be planned alone, and not the change set.

        Raises `StateMoved` where an entity or the state has another version, or where what an entity
        refers to is gone; nothing is written then.
        """
        if not changes:
            return self.read()
        rows = [_row(change, expected or {}) for change in changes]
        with self._store.connection() as connection:
            try:
                with connection.transaction():
                    # In the order in which others take them: what is registered, then the state.
                    connection.execute(_STORE_SQL["lock"], [LOCK_MIGRATE, 0])
                    former = connection.execute(_SQL["former_slots"], [Jsonb(rows)]).fetchall()
                    version = _one(connection, _SQL["change"], [Jsonb(rows), by, door])
                    for name, spec in former:
                        connection.execute(_SQL["remove_slot"], [name, Jsonb(spec), version])
                    if at is not None and version != at + 1:
                        raise StateMoved(_one(connection, _SQL["moved"], [at, version]))
                    if any(c.after is None and c.kind == "sync" for c in changes):
                        connection.execute(_SQL["remove_syncs"], [SYNCS, version])
                    streams.follow(connection, changes, self._environ)
                    consumers.follow(connection, changes, self._environ, lenient=lenient)
                    if any(c.after is None and c.kind in ("sync", "credential") for c in changes):
                        controls.forget(connection)
                    state = read(connection)
                    _check_references(state, changes)
                    return state
            except psycopg.Error as error:
                if error.sqlstate != _MOVED:
                    raise
                raise StateMoved(error.diag.message_primary or "an entity") from None

    def history(
        self,
        *,
        kind: str | None = None,
        name: str | None = None,
        search: str | None = None,
        before: int | None = None,
        after: int | None = None,
        oldest: bool = False,
        limit: int = 100,
    ) -> list[AuditEntry]:
        """Return the audit log, the newest or the `oldest` first, at most `limit` lines.

        `before` and `after` are entries' ids. A line has `search` in its who, door, action, kind, name
        or version, in upper or lower case.
        """
        values = {
            "kind": kind, "name": name, "search": search, "before": before, "after": after,
            "limit": limit,
        }  # fmt: skip
        query = _SQL["history"].replace("{direction}", "ASC" if oldest else "DESC")
        with self._store.connection() as connection:
            rows = connection.execute(query, values).fetchall()
        return [AuditEntry(*row) for row in rows]

    def refusals(self) -> list[Refusal]:
        """Return the entities that a process can't run as they are, and why."""
        with self._store.connection() as connection:
            return [Refusal(*row) for row in connection.execute(_SQL["refusals"]).fetchall()]

    def refuse(self, kind: str, name: str, reason: str, process: int = 0) -> None:
        """Record that a process can't run an entity as it is, or with 0 that none can.

        The record goes with the entity's next change, and with the process.
        """
        values = {"kind": kind, "name": name, "reason": reason, "process": process}
        with self._store.connection() as connection:
            connection.execute(_SQL["refuse"], values)

    def accept(self, kind: str, name: str, process: int | None = None) -> None:
        """Record that a process runs an entity after all, or without one that all can."""
        values = {"kind": kind, "name": name, "process": process}
        with self._store.connection() as connection:
            connection.execute(_SQL["accept"], values)

    def forget_ended(self) -> None:
        """Delete what processes have refused that have ended."""
        with self._store.connection() as connection:
            connection.execute(_SQL["forget_ended"])


def new_process(connection: psycopg.Connection[Any]) -> int:
    """Return a number for a process, whose refusals count while `connection` lasts."""
    return int(_one(connection, _SQL["new_process"], [LOCK_PROCESS]))


def read(connection: psycopg.Connection[Any], kinds: Collection[str] | None = None) -> Snapshot:
    """Return the state over a connection, as `DesiredState.read` does; raises what psycopg does."""
    values = {"kinds": None if kinds is None else list(kinds)}
    rows = connection.execute(_SQL["read"], values, binary=True).fetchall()
    version = rows[0][0] if rows else 0
    rows = [row for row in rows if row[1] is not None]
    # All of them at once, in a fraction of the time.
    specs = json.loads(f"[{','.join([row[4] for row in rows])}]")
    entities = {
        (kind, name): Entity(kind, name, id_, spec, *rest)
        for (_, kind, name, id_, _, *rest), spec in zip(rows, specs, strict=True)
    }
    return Snapshot(version, entities)


def changed_row(kind: str, name: str, spec: Spec | None, expected: int | None) -> dict[str, Any]:
    """Return a change as `penstock.change_entities` takes it."""
    shown = None if spec is None else masked(kind, spec)
    return {"kind": kind, "name": name, "spec": spec, "shown": shown, "expected": expected}


def _row(change: Change, expected: Mapping[Key, int]) -> dict[str, Any]:
    return changed_row(change.kind, change.name, change.after, expected.get(change.key))


def _check_references(state: Snapshot, changes: Sequence[Change]) -> None:
    """Refuse changes whose references others have taken away since they were validated."""
    changed = {change.key for change in changes}
    for entity in state.entities.values():
        for key, kind in REFERENCES.get(entity.kind, {}).items():
            named = (kind, str(entity.spec.get(key)))
            there = named in state.entities or named in BUILT_IN
            if key not in entity.spec or there or "${" in named[1]:
                continue
            if entity.key in changed or named in changed:
                raise StateMoved(f"{entity.kind} {entity.name} needs the {' '.join(named)}")


def _one(connection: psycopg.Connection[Any], query: Any, values: Any = None) -> Any:
    row = connection.execute(query, values).fetchone()
    assert row is not None  # noqa: S101 - these statements always return one
    return row[0]
