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


def note_action(
    store: Store,
    kind: str,
    name: str,
    action: str,
    details: Mapping[str, Any] | None = None,
    *,
    by: Actor | None = None,
) -> None:
    """Add to the audit log what was done; raises `StoreError`.

    Where that is done in the store alone, both are one transaction of it (`Store.transaction`).

    Args:
        store: Where it was done.
        kind: Of what it was done to: that of an entity, `token` or `backfill`.
        name: The name of that; of a backfill its number.
        action: A verb, as in `rewind`.
        details: How, as JSON: nothing secret.
        by: Who did it; None: `who`, by a command.
    """
    actor = by or Actor(who(), "command")
    values = {
        "who": actor.who, "door": actor.door, "kind": kind, "name": name, "action": action,
        "details": Jsonb({k: v for k, v in (details or {}).items() if v is not None}),
    }  # fmt: skip
    with store.connection() as connection:
        connection.execute(_SQL["note_action"], values)
