"""How a group begins: with a slot, and with what its pipelines have missed, read from the outboxes.

What is committed from now on comes from the slot. A pipeline that never ran, or that was left out for a
while, or whose slot or store was lost, gets the messages from before from its outbox's table, by a
backfill: those that are visible now and that it has not delivered yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from penstock.backfill.request import OPEN, Backfills, Request
from penstock.core import queries
from penstock.outbox.relay.wanted import Pipeline, Wanted, find
from penstock.postgres import setup
from penstock.sinks.backlog import store as backlog
from penstock.streams.store import Store

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")

log = structlog.get_logger("penstock")


def begin(connection: psycopg.Connection[Any], store: Store, wanted: Wanted) -> frozenset[str]:
    """See to slot and places; return the pipelines that have messages to come from the table.

    `connection` is to the outboxes' database. Raises `CaptureError`, `StoreError` and what psycopg
    raises.
    """
    _look_again(connection, wanted)
    here = f"{store.made_at()} {wanted.source}"
    anew = _make_slot(connection, wanted)
    going_on = [
        name for name in wanted.sinks if not anew and _is_placed(wanted.pipelines[name], here)
    ]
    # First, so that a relay that ends in the middle of this begins the others anew.
    _unplace(connection, wanted, going_on)
    forget(store, wanted.source, going_on)
    (now,) = connection.execute(_SQL["snapshot"]).fetchone() or ("",)
    backfills = Backfills(store)
    for name in wanted.sinks:
        if name not in going_on:
            _catch_up(connection, backfills, wanted, wanted.pipelines[name], now, here)
    return _starting(backfills, wanted)


def give_up_slot(connection: psycopg.Connection[Any], wanted: Wanted) -> None:
    """Drop the slot of a group behind which messages are missed; `begin` makes it anew."""
    connection.execute(_SQL["drop_slot"], [wanted.config.sources[wanted.source].slot])


def leave(connection: psycopg.Connection[Any], store: Store, wanted: Wanted) -> None:
    """Give up the slot of a group that has nothing to run: what is to come stays in the outboxes."""
    slot = wanted.config.sources[wanted.source].slot
    with contextlib.suppress(psycopg.errors.ObjectInUse):
        give_up_slot(connection, wanted)
    if connection.execute(_SQL["slot"], [slot]).fetchone() is not None:
        return  # who read it is just going: the next look drops it
    _unplace(connection, wanted, ())
    forget(store, wanted.source, ())
    _look_again(connection, wanted)


def forget(store: Store, source: str, sinks: Collection[str]) -> None:
    """Drop what pipelines of a source had waiting that are not among `sinks`."""
    Backfills(store).forget(source, sinks)
    with store.connection() as connection:
        for of in backlog.all_behind(connection):
            if of.source == source and of.sink not in sinks:
                backlog.join(connection, of.source_id, of.sink)


def _look_again(connection: psycopg.Connection[Any], wanted: Wanted) -> None:
    """Take the places as they are now: since they were looked at, a relay may have written them."""
    for found in find(connection):
        known = wanted.pipelines.get(found.pipeline)
        if known is not None and known.created_at == found.created_at:
            wanted.pipelines[found.pipeline] = dataclasses.replace(
                known, placed=found.placed, snapshot=found.snapshot, delivered=found.delivered,
                store=found.store,
            )  # fmt: skip


def _is_placed(pipeline: Pipeline, here: str) -> bool:
    """Tell whether a pipeline goes on where it was; in another store waits what it did not deliver."""
    if pipeline.placed and pipeline.store not in (None, here):
        log.warning(
            "the store is another one: what was not delivered is read from the outbox's table",
            pipeline=pipeline.pipeline, group=pipeline.relay_group,
        )  # fmt: skip
        return False
    return pipeline.placed


def _unplace(connection: psycopg.Connection[Any], wanted: Wanted, but: Collection[str]) -> None:
    connection.execute(_SQL["unplace"], {"group": wanted.group, "but": list(but)})


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
    _unplace(connection, wanted, ())
    if found is not None:
        give_up_slot(connection, wanted)
    setup.ensure(source)
    return True


def _catch_up(
    connection: psycopg.Connection[Any],
    backfills: Backfills,
    wanted: Wanted,
    pipeline: Pipeline,
    now: str,
    here: str,
) -> None:
    """Ask for what a pipeline has missed, if there is any, and note that it has begun."""
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
        "group": wanted.group, "pipeline": pipeline.pipeline, "store": here,
        "created_at": pipeline.created_at, "lsn": "0/0",
        "snapshot": None if has_rows else now, "last_id": None, "delivered": pipeline.delivered,
        "state": "starting", "code": None, "error": None, "remedy": None,
        "dead_letters": None, "dead_letter": None, "dead_letter_at": None,
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
