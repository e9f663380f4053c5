"""What is left of deleted sources, sinks and NATS consumers, dropped once it is unused.

Deleting an entity only notes it here. A run drops what is left when its source, or the sink, has left
the query, and before it starts another entity of that name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from penstock.config.document import Spec
from penstock.config.secret_values import masked
from penstock.config.settings import Config
from penstock.config.sources import PostgresSource, slot_name
from penstock.config.yaml_lines import Document, filled
from penstock.core import queries
from penstock.core.connect import address
from penstock.core.errors import CaptureError
from penstock.desired import consumers
from penstock.desired.configured import text_of, validated
from penstock.desired.entities import Snapshot
from penstock.desired.state import read
from penstock.postgres.admin import open_catalog
from penstock.postgres.connect import drop_slot
from penstock.streams import nats_consumers
from penstock.streams.bastions import reachable
from penstock.streams.names import LOCK_MIGRATE, LOCK_WRITE, segment_table
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.desired", "state.sql")
_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")

log = structlog.get_logger("penstock")


@dataclass(frozen=True, slots=True)
class Removal:
    """A deleted source, sink or consumer of type nats, as it was, of which something is left."""

    id: int
    kind: str
    name: str
    spec: Spec
    version: int
    at: datetime


def pending(store: Store) -> list[Removal]:
    """Return what is to be removed, oldest first; raises `StoreError`."""
    with store.connection() as connection:
        return [Removal(*row) for row in connection.execute(_SQL["removals"]).fetchall()]


def finish(
    store: Store, removal: Removal, base: Config, environ: Mapping[str, str] = os.environ
) -> None:
    """Drop what is left of a deleted entity, which nothing may use any more.

    Of a sink: its backlog, and the stream of its name, with the consumers; the sink may have been of
    another type at its end. Of a consumer of type nats: its place. Of a source: its slot, unless another
    source has it now, what the store knows of its position, and its checkpoints on this machine. A
    publication stays. Raises `StoreError`, and `CaptureError` where the source can't be reached from
    here: then it is to be tried again, unless another source has its name by now.
    """
    if removal.kind == "source":
        _drop_slot(store, removal, environ)
        shutil.rmtree(base.checkpoint_folder(removal.name), ignore_errors=True)
    with store.connection() as connection, connection.transaction():
        connection.execute(_STORE_SQL["lock"], [LOCK_MIGRATE, 0])
        if not connection.execute(_SQL["remove_removal"], [removal.id]).rowcount:
            return  # another thread has done it, and what has the name now is new
        if removal.kind == "source":
            connection.execute(_SQL["delete_position"], [removal.name])
        elif removal.kind == "consumer":
            for (source_id,) in connection.execute(
                _SQL["nats_consumer"], [removal.name]
            ).fetchall():
                nats_consumers.remove(connection, source_id, removal.name)
        else:
            source = str(removal.spec.get("source", ""))
            connection.execute(_SQL["delete_backlog"], {"source": source, "sink": removal.name})
            connection.execute(_SQL["delete_backfills"], [removal.name])
            _drop_stream(connection, removal.name)
        # Last, as a stream is served under its id until it goes.
        connection.execute(_SQL["delete_id"], {"kind": removal.kind, "name": removal.name})


def _drop_slot(store: Store, removal: Removal, environ: Mapping[str, str]) -> None:
    with store.connection() as connection:
        state = read(connection)
    try:
        source = _usable(removal, environ)
        if _is_read(source, removal.name, state, environ):
            return
        with open_catalog(reachable(source, removal.name, store)) as catalog:
            if catalog.slot() is not None:
                catalog.drop_slot()
    except CaptureError as error:
        if (removal.kind, removal.name) not in state.entities:
            raise
        # Another source has its name by now, which need not wait for the former one.
        slot = str(removal.spec.get("slot", slot_name(f"penstock_{removal.name}")))
        log.warning("the slot of a deleted source is left behind; drop it there", source=removal.name,
                    database=_database(removal.spec, environ), error=error.message,
                    statement=drop_slot(slot))  # fmt: skip


def _usable(removal: Removal, environ: Mapping[str, str]) -> PostgresSource:
    parts, problems = validated({(removal.kind, removal.name): removal.spec}, environ)
    source = parts.sources.get(removal.name)
    if not problems and source is not None:
        return source
    reasons = "; ".join(text_of(problem) for problem in problems)
    raise CaptureError(
        "not_removed",
        f"The slot of the deleted source {removal.name} can't be dropped from here: {reasons}.",
        remedy="Set what it names where `penstock run` runs, until the slot is dropped.",
    )


def _is_read(
    source: PostgresSource, name: str, state: Snapshot, environ: Mapping[str, str]
) -> bool:
    """Whether another source reads the slot of the deleted source `name`, or may do so."""
    others = validated(state.specs, environ)[0].sources
    if any(_slot(other) == _slot(source) for other in others.values()):
        return True
    for other, entity in state.of_kind("source").items():
        # One that can't be used here may be of this server.
        named = entity.spec.get("slot", slot_name(f"penstock_{other}"))
        if other not in others and (named == source.slot or "${" in str(named)):
            log.warning("the slot of a deleted source is left behind: another source may read it",
                        source=name, other=other, slot=source.slot)  # fmt: skip
            return True
    return False


def _database(spec: Spec, environ: Mapping[str, str]) -> str:
    """Return the address of a source's database; without its variables, as its URL names it."""
    document = Document()
    url = str(filled(spec.get("url", ""), environ, (), document))
    if document.problems:
        return str(masked("source", spec).get("url"))
    with contextlib.suppress(psycopg.Error):
        return address(url)
    return ""


def _slot(source: PostgresSource) -> tuple[str, str, str]:
    """Return which slot a source reads: its server and its name."""
    bastion = source.bastion
    behind = "" if bastion is None else f"{bastion.host}:{bastion.port}"
    server = address(source.url.get_secret_value()).rpartition("/")[0]
    return server, behind, source.slot


def _drop_stream(connection: psycopg.Connection[Any], name: str) -> None:
    row = connection.execute(_SQL["stream_source"], [name]).fetchone()
    if row is None:
        return
    connection.execute(_STORE_SQL["lock"], [LOCK_WRITE, row[0]])
    ids = [id_ for (id_,) in connection.execute(_SQL["stream_consumers"], [name]).fetchall()]
    consumers.drop(connection, ids)
    connection.execute(_SQL["delete_reader_backlogs"], [name])
    segments = connection.execute(_SQL["stream_segments"], [name]).fetchall()
    if segments:
        tables = sql.SQL(", ").join(segment_table(id_) for (id_,) in segments)
        connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(tables))
    connection.execute(_SQL["delete_stream"], [name])
    connection.execute(_SQL["delete_id"], {"kind": "consumer", "name": name})  # its own one's
    connection.execute(_STORE_SQL["notify"], ["k"])
