"""The start of a group's run: its slot, and a backfill for each pipeline that has missed messages.

Messages that are committed from now on come from the slot. A pipeline gets those from before by a
backfill of its outbox's table if it never ran, was left out for a while, or has lost its slot or
store: the messages that are visible now and that it has not delivered.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from penstock.backfill.request import OPEN, BackfillRequest, Backfills
from penstock.core import queries
from penstock.outbox.pipelines import StoredPipeline, find
from penstock.outbox.relay.desired_state import DesiredPipelines
from penstock.postgres import setup
from penstock.sinks.backlog import store as backlog
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")

log = structlog.get_logger("penstock")


def begin(
    connection: psycopg.Connection[Any], store: Store, desired: DesiredPipelines
) -> frozenset[str]:
    """Prepare slot and checkpoints; return the pipelines that have a backfill to come.

    `connection` is to the outboxes' database. Raises `CaptureError`, `StoreError` and `psycopg.Error`.
    """
    _read_checkpoints(connection, desired)
    here = f"{store.made_at()} {desired.source}"
    made = _make_slot(connection, desired)
    going_on = [
        name for name in desired.sinks if not made and _continues(desired.pipelines[name], here)
    ]
    # First, so that a relay that ends in the middle of this starts the others again.
    _clear_checkpoints(connection, desired, going_on)
    forget(store, desired.source, going_on)
    (now,) = connection.execute(_SQL["snapshot"]).fetchone() or ("",)
    backfills = Backfills(store)
    for name in desired.sinks:
        if name not in going_on:
            _catch_up(connection, backfills, desired, desired.pipelines[name], now, here)
    return _starting(backfills, desired)


def give_up_slot(connection: psycopg.Connection[Any], desired: DesiredPipelines) -> None:
    """Drop the slot of a group that misses messages; `begin` makes it again."""
    connection.execute(_SQL["drop_slot"], [desired.config.sources[desired.source].slot])


def leave(connection: psycopg.Connection[Any], store: Store, desired: DesiredPipelines) -> None:
    """Drop the slot of a group that has nothing to run: the outboxes keep the messages."""
    slot = desired.config.sources[desired.source].slot
    with contextlib.suppress(psycopg.errors.ObjectInUse):
        give_up_slot(connection, desired)
    if connection.execute(_SQL["slot"], [slot]).fetchone() is not None:
        return  # its reader is ending: the next call drops it
    _clear_checkpoints(connection, desired, ())
    forget(store, desired.source, ())
    _read_checkpoints(connection, desired)


def forget(store: Store, source: str, sinks: Collection[str]) -> None:
    """Drop the backlogs and backfills of the source's pipelines that are not among `sinks`."""
    Backfills(store).forget(source, sinks)
    with store.connection() as connection:
        for of in backlog.all_behind(connection):
            if of.source == source and of.sink not in sinks:
                backlog.join(connection, of.source_id, of.sink)


def _read_checkpoints(connection: psycopg.Connection[Any], desired: DesiredPipelines) -> None:
    """Read the checkpoints again: another relay may have written them meanwhile."""
    for found in find(connection):
        known = desired.pipelines.get(found.pipeline)
        if known is not None and known.created_at == found.created_at:
            desired.pipelines[found.pipeline] = dataclasses.replace(
                known,
                checkpointed=found.checkpointed,
                snapshot=found.snapshot,
                delivered=found.delivered,
                store=found.store,
            )


def _continues(pipeline: StoredPipeline, here: str) -> bool:
    """Return whether a pipeline continues from its checkpoint: its backlog is in this store."""
    if pipeline.checkpointed and pipeline.store not in (None, here):
        log.warning(
            "the store has changed: messages that are not delivered are read from the outbox's table",
            pipeline=pipeline.pipeline, group=pipeline.relay_group,
        )  # fmt: skip
        return False
    return pipeline.checkpointed


def _clear_checkpoints(
    connection: psycopg.Connection[Any], desired: DesiredPipelines, but: Collection[str]
) -> None:
    connection.execute(_SQL["clear_checkpoints"], {"group": desired.group, "but": list(but)})


def _make_slot(connection: psycopg.Connection[Any], desired: DesiredPipelines) -> bool:
    """Make the group's slot unless it is there; return whether it was made."""
    source = desired.config.sources[desired.source]
    found = connection.execute(_SQL["slot"], [source.slot]).fetchone()
    if found is not None and not found[0]:
        return False
    if desired.begun:
        log.warning(
            "the group's slot is gone: it is made again, and messages that are not delivered are read"
            " from the outboxes' tables", group=desired.group, slot=source.slot,
        )  # fmt: skip
    # First, so that a relay that ends in the middle of this starts again.
    _clear_checkpoints(connection, desired, ())
    if found is not None:
        give_up_slot(connection, desired)
    setup.ensure(source)
    return True


def _catch_up(
    connection: psycopg.Connection[Any],
    backfills: Backfills,
    desired: DesiredPipelines,
    pipeline: StoredPipeline,
    now: str,
    here: str,
) -> None:
    """Request a backfill of the messages that a pipeline has missed, and write its checkpoint."""
    condition = _visible(now)
    if pipeline.snapshot is not None:
        condition = sql.SQL("{} AND NOT {}").format(condition, _visible(pipeline.snapshot))
    schema, table = "tide", f"outbox_{pipeline.outbox}"
    query = sql.SQL(_SQL["has_rows"]).format(
        table=sql.Identifier(schema, table), condition=condition
    )
    (has_rows,) = connection.execute(query).fetchone() or (False,)
    if has_rows:
        where = condition.as_string(connection)
        backfills.create([BackfillRequest(desired.source, pipeline.pipeline, schema, table, where)])
    values = {
        "group": desired.group, "pipeline": pipeline.pipeline, "store": here,
        "created_at": pipeline.created_at, "lsn": "0/0",
        "snapshot": None if has_rows else now, "last_id": None, "delivered": pipeline.delivered,
        "state": "starting", "code": None, "error": None, "remedy": None,
        "dead_letters": None, "dead_letter": None, "dead_letter_at": None,
    }  # fmt: skip
    connection.execute(_SQL["put_checkpoint"], values)


def _starting(backfills: Backfills, desired: DesiredPipelines) -> frozenset[str]:
    """Return the pipelines that have a backfill to come; pause those of paused sinks."""
    starting: set[str] = set()
    for found in backfills.find(source=desired.source, states=OPEN):
        if found.sink in desired.paused and found.state != "paused":
            backfills.command(found.id, "pause")
        elif found.sink not in desired.paused:
            if found.state == "paused":
                backfills.command(found.id, "resume")
            starting.add(found.sink)
    return frozenset(starting)


def _visible(snapshot: str) -> sql.Composed:
    return sql.SQL("pg_catalog.pg_visible_in_snapshot(xid, {}::pg_catalog.pg_snapshot)").format(
        sql.Literal(snapshot)
    )
