"""What is done beside changes of the desired state, for its audit log: rewinds, new tokens."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from psycopg.types.json import Jsonb

from penstock.core import queries
from penstock.desired.entities import AuditDoor
from penstock.streams.connection import Also
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.desired", "state.sql")


def of_letters(sink: str | None, consumer: str | None) -> tuple[str, str]:
    """Return the kind and the name that the log has of dead letters: what they are of, if it is one."""
    if sink is not None:
        return "sink", sink
    return ("dead letters", "of any") if consumer is None else ("consumer", consumer)


def who() -> str:
    """Return who gives this process its commands: the user and the machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Actor(NamedTuple):
    """Who does something, and how they came."""

    who: str
    door: AuditDoor


class Action(NamedTuple):
    """What the audit log has of an action.

    Attributes:
        kind: Of what it was done to: that of an entity, `token` or `backfill`.
        name: The name of that; of a backfill its number.
        action: A verb, as in `rewind`.
        details: How, as JSON: nothing secret.
    """

    kind: str
    name: str
    action: str
    details: Mapping[str, Any] | None = None

    def line(self, by: Actor | None = None, number: int | None = None) -> Also:
        """Return what adds it to the audit log, for the transaction of the store that does it.

        `by` did it; None: `who`, by a command. `number`: see `counting`.
        """
        actor = by or Actor(who(), "command")
        details = {k: v for k, v in (self.details or {}).items() if v is not None}
        values = {
            **actor._asdict(), **self._asdict(), "details": Jsonb(details), "number": number,
        }  # fmt: skip
        return ((_SQL["note_action"], values),)

    def counting(self, store: Store, by: Actor | None = None) -> Also:
        """Return a line for several transactions: its `count` is how many of them there were.

        Raises `StoreError`.
        """
        with store.connection() as connection:
            row = connection.execute(_SQL["audit_number"]).fetchone()
        assert row is not None  # noqa: S101 - it always has one
        return self._replace(details={**(self.details or {}), "count": 1}).line(by, row[0])


def note_action(
    store: Store,
    kind: str,
    name: str,
    action: str,
    details: Mapping[str, Any] | None = None,
    *,
    by: Actor | None = None,
) -> None:
    """Add an `Action` to the audit log, in the transaction that does it (`Store.transaction`).

    Raises `StoreError`.
    """
    with store.connection() as connection:
        for statement in Action(kind, name, action, details).line(by):
            connection.execute(*statement)
