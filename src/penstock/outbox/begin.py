"""How a group begins: with a slot, and with what its pipelines have missed, read from the outboxes.

What is committed from now on comes from the slot. A pipeline that never ran, or whose slot was lost,
gets the messages from before from its outbox's table, by a backfill: those that are visible now and
that it has not delivered yet.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from penstock import queries
from penstock.outbox.wanted import Pipeline, Wanted
from penstock.postgres import setup
from penstock.streams import backlog
from penstock.streams.backfills import OPEN, Backfills, Request
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.outbox", "relay.sql")

log = structlog.get_logger("penstock")


def begin(connection: psycopg.Connection[Any], store: Store, wanted: Wanted) -> frozenset[str]:
    """See to slot and places; return the pipelines that have messages to come from the table.

    `connection` is to the outboxes' database. Raises `CaptureError`, `StoreError` and what psycopg
    raises.
    """
    forget(store, wanted.source, wanted.sinks)
    anew = _make_slot(connection, wanted)
    (now,) = connection.execute(_SQL["snapshot"]).fetchone() or ("",)
    backfills = Backfills(store)
    for name in wanted.sinks:
        pipeline = wanted.pipelines[name]
        if anew or not pipeline.placed:
            _catch_up(connection, backfills, wanted, pipeline, now)
    return _starting(backfills, wanted)


def forget(store: Store, source: str, sinks: Container[str]) -> None:
    """Drop what pipelines of a source had waiting that are not among `sinks` any more."""
    backfills = Backfills(store)
    for found in backfills.find(source=source, states=OPEN):
        if found.sink not in sinks:
            backfills.command(found.id, "cancel")
    with store.connection() as connection:
        for of in backlog.all_behind(connection):
            if of.source == source and of.sink not in sinks:
                backlog.join(connection, of.source_id, of.sink)


def _make_slot(connection: psycopg.Connection[Any], wanted: Wanted) -> bool:
    """Make the group's slot where there is none; return whether that was so."""
    source = wanted.config.sources[wanted.source]
    found = connection.execute(_SQL["slot"], [source.slot]).fetchone()
    if found is not None and not found[0]:
        return False
    if wanted.begun:
        log.warning(
            "the group's slot is gone: it is made anew, and what was not delivered is read from the"
            " outboxes' tables", group=wanted.group, slot=source.slot,
        )  # fmt: skip
    # First, so that a relay that ends in the middle of this begins anew.
    connection.execute(_SQL["unplace"], [wanted.group])
    if found is not None:
        connection.execute(_SQL["drop_slot"], [source.slot])
    setup.ensure(source)
    return True


def _catch_up(
    connection: psycopg.Connection[Any],
    backfills: Backfills,
    wanted: Wanted,
    pipeline: Pipeline,
    now: str,
) -> None:
    """Ask for what a pipeline has missed, if there is any, and note that it has begun."""
    open_ = backfills.find(source=wanted.source, sink=pipeline.pipeline, states=OPEN)
    for found in open_:
        backfills.command(found.id, "cancel")
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
        backfills.create([Request(wanted.source, pipeline.pipeline, schema, table, where)])
    values = {
        "group": wanted.group, "pipeline": pipeline.pipeline, "lsn": "0/0",
        "snapshot": None if has_rows else now, "last_id": None, "delivered": pipeline.delivered,
        "state": "starting", "code": None, "error": None, "remedy": None,
    }  # fmt: skip
    connection.execute(_SQL["put_place"], values)


def _starting(backfills: Backfills, wanted: Wanted) -> frozenset[str]:
    """Return the pipelines that have a backfill to come; those of held ones wait."""
    starting: set[str] = set()
    for found in backfills.find(source=wanted.source, states=OPEN):
        if found.sink in wanted.held and found.state != "paused":
            backfills.command(found.id, "pause")
        elif found.sink not in wanted.held:
            if found.state == "paused":
                backfills.command(found.id, "resume")
            starting.add(found.sink)
    return frozenset(starting)


def _visible(snapshot: str) -> sql.Composed:
    return sql.SQL("pg_catalog.pg_visible_in_snapshot(xid, {}::pg_catalog.pg_snapshot)").format(
        sql.Literal(snapshot)
    )
