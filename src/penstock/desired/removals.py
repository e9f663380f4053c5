"""What is left of deleted sources, sinks and NATS consumers, dropped once it is unused.

Deleting an entity only notes it here. A run drops what is left when its source, or the sink, has left
the query, and before it starts another entity of that name. The slot of a source that reads another one
now is left, too: it is dropped once the source streams from that.
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
from pydantic import SecretStr

from penstock.config import reserved
from penstock.config.document import Spec
from penstock.config.secret_values import masked
from penstock.config.settings import Config
from penstock.config.sources import PostgresSource, slot_name
from penstock.config.yaml_lines import Document, filled
from penstock.core import queries
from penstock.core.connect import address
from penstock.core.errors import CaptureError
from penstock.core.record_forms import SYNCS
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
    """A deleted source, sink or consumer of type nats, as it was, of which something is left.

    Of kind `slot` it is a source as it was before it came to read another slot.
    """

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

    Of a sink: its backlog, its pause, and the stream of its name, with the consumers; the sink may have
    been of another type at its end. Of a consumer of type nats: its place. Of a source: its slot, unless
    another source has it now, what the store knows of its position, and its checkpoints on this machine.
    A publication stays, and of the source `syncs` its streams, too. Of kind `slot`: the slot, unless a
    source has it now. Raises `StoreError`, and `CaptureError` where the source can't be reached from
    here: then it is to be tried again, unless another source has its name by now.
    """
    if removal.kind == "source":
        _drop_slot(store, removal, base, environ)
        shutil.rmtree(base.checkpoint_folder(removal.name), ignore_errors=True)
    elif removal.kind == "slot":
        _drop_former_slot(store, removal, environ)
    with store.connection() as connection, connection.transaction():
        connection.execute(_STORE_SQL["lock"], [LOCK_MIGRATE, 0])
        if not connection.execute(_SQL["remove_removal"], [removal.id]).rowcount:
            return  # another thread has done it, and what has the name now is new
        if removal.kind == "slot":
            return  # the source goes on
        if removal.kind == "source":
            connection.execute(_SQL["delete_position"], [removal.name])
        elif removal.kind == "consumer":
            for (source_id,) in connection.execute(
                _SQL["nats_consumer"], [removal.name]
            ).fetchall():
                nats_consumers.remove(connection, source_id, removal.name)
        else:
            source = str(removal.spec.get("source", ""))
            for query in ("delete_backlog", "delete_pause"):
                connection.execute(_SQL[query], {"source": source, "sink": removal.name})
            connection.execute(_SQL["delete_backfills"], [removal.name])
            _drop_stream(connection, removal.name)
        # Last, as a stream is served under its id until it goes.
        connection.execute(_SQL["delete_id"], {"kind": removal.kind, "name": removal.name})


def _drop_slot(store: Store, removal: Removal, base: Config, environ: Mapping[str, str]) -> None:
    with store.connection() as connection:
        state = read(connection)
    try:
        if removal.name == SYNCS:
            source = reserved.source(base.records.store or SecretStr(store.url))
        else:
            source = _usable(removal, environ)
        if _is_read(source, removal.name, state, environ):
            return
        with open_catalog(reachable(source, removal.name, store)) as catalog:
            if catalog.slot() is not None:
                catalog.drop_slot()
    except CaptureError as error:
        is_back = removal.name == SYNCS and any(state.of_kind("sync"))
        if not is_back and ("source", removal.name) not in state.entities:
            raise
        # Another source has its name by now, which need not wait for the former one.
        log.warning("the slot of a deleted source is left behind; drop it there", source=removal.name,
                    database=_database(removal.spec, environ), error=error.message,
                    statement=drop_slot(slot_of(removal)))  # fmt: skip


def _drop_former_slot(store: Store, removal: Removal, environ: Mapping[str, str]) -> None:
    """Drop the slot that a source has read before, which nothing may read any more."""
    with store.connection() as connection:
        state = read(connection)
    source = _usable(removal, environ)
    if _is_read(source, removal.name, state, environ):
        return
    with open_catalog(reachable(source, removal.name, store)) as catalog:
        slot = catalog.slot()
        if slot is None:
            return
        if slot.active:
            raise CaptureError(
                "slot_in_use",
                f"A session of the server reads it (pid {slot.active_pid}).",
                remedy="End what reads it, or leave it there.",
                transient=True,
            )
        catalog.drop_slot()


def slot_of(removal: Removal) -> str:
    """Return the name of the slot of a source that was removed, or changed."""
    return str(removal.spec.get("slot", slot_name(f"penstock_{removal.name}")))


def database_of(removal: Removal, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address of its database, as far as it is known here."""
    return _database(removal.spec, environ)


def _usable(removal: Removal, environ: Mapping[str, str]) -> PostgresSource:
    parts, problems = validated({("source", removal.name): removal.spec}, environ)
    source = parts.sources.get(removal.name)
    if not problems and source is not None:
        return source
    reasons = "; ".join(text_of(problem) for problem in problems)
    raise CaptureError(
        "not_removed",
        f"The former slot of source {removal.name} can't be dropped from here: {reasons}.",
        remedy="Set what it names where `penstock run` runs, until the slot is dropped.",
    )


def _is_read(
    source: PostgresSource, name: str, state: Snapshot, environ: Mapping[str, str]
) -> bool:
    """Whether a source reads the slot that `source`, once called `name`, had, or may do so."""
    others = validated(state.specs, environ)[0].sources
    if any(reads_of(other) == reads_of(source) for other in others.values()):
        return True
    for other, entity in state.of_kind("source").items():
        # One that can't be used here may be of this server.
        named = entity.spec.get("slot", slot_name(f"penstock_{other}"))
        if other not in others and (named == source.slot or "${" in str(named)):
            log.warning("the former slot of a source is left behind: another source may read it",
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


def reads_of(source: PostgresSource) -> tuple[str, str, str]:
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
