"""The pipelines that `tide.relays` has, and the names of what a group of them owns."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.rows import class_row

from penstock.config.sources import slot_name
from penstock.core import queries
from penstock.core.tables import qualified_name

PUBLICATION: Final = "tide"
DISABLED: Final = "disabled"
"""The state, and the code of the failure, of a pipeline that is not enabled."""

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")
_INBOX_SQL: Final = queries.load("penstock.outbox.inbox", "inbox.sql")


@dataclass(frozen=True)
class StoredPipeline:
    """A row of `tide.relays` of direction `out` with its checkpoint.

    Attributes:
        checkpointed: Whether a relay runs it, so that each commit goes to its sink or its backlog.
        snapshot: The messages that are visible in it are delivered; None where that is not known.
        delivered: How many messages were delivered.
        created_at: Differs from that of a deleted pipeline of the same name.
        store: The store that holds its backlog.
        outbox_tag: Differs for each outbox of a name, here and elsewhere.
    """

    pipeline: str
    outbox: str
    relay_group: str
    config: dict[str, Any]
    enabled: bool
    checkpointed: bool
    snapshot: str | None
    delivered: int
    created_at: datetime
    store: str | None = None
    outbox_tag: str = ""

    @property
    def table(self) -> str:
        """The outbox's table, as SQL takes it."""
        return qualified_name("tide", f"outbox_{self.outbox}")


@dataclass(frozen=True)
class InboxPipeline:
    """A row of `tide.relays` of direction `in`; `system` is Postgres' identifier of the cluster."""

    pipeline: str
    inbox: str
    relay_group: str
    config: dict[str, Any]
    enabled: bool
    system: int


def find(connection: psycopg.Connection[Any]) -> list[StoredPipeline]:
    """Return the pipelines from outboxes, of all groups."""
    with connection.cursor(row_factory=class_row(StoredPipeline)) as cursor:
        return cursor.execute(_SQL["pipelines"]).fetchall()


def find_inboxes(connection: psycopg.Connection[Any]) -> list[InboxPipeline]:
    """Return the pipelines into inboxes, of all groups."""
    with connection.cursor(row_factory=class_row(InboxPipeline)) as cursor:
        return cursor.execute(_INBOX_SQL["pipelines"]).fetchall()


def source_name(group: str, database: str | None = None) -> str:
    """Return the name of a group's source in the store.

    `database` is part of it where the store is another database.
    """
    name = group if database is None else f"{database}.{group}"
    return "tide." + re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def slot_of(group: str, database: str) -> str:
    """Return the name of a group's slot, as `tide._slot` does.

    Slots belong to the server, so the name depends on the database too.
    """
    digest = hashlib.sha256(f"{database}\0{group}".encode()).hexdigest()[:8]
    return f"tide_{slot_name(group)[:49]}_{digest}"
