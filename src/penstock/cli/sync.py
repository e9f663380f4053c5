"""`penstock sync`: the syncs of the store, and what a connector reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from uuid import UUID

import typer

from penstock.cli import sync_airbyte, sync_try
from penstock.cli.common import (
    CONFIG,
    AsJson,
    ConfigFile,
    StoreUrl,
    errors,
    fail,
    json_text,
    local_time,
    print_table,
    unknown,
)
from penstock.cli.store import store_of

if TYPE_CHECKING:
    from penstock.desired.entities import Entity
    from penstock.streams.store import Store
    from penstock.syncs.controls import SyncControls, SyncStatus

syncs = typer.Typer(
    help="Look at syncs; run, pause and resume them; try a connector.", no_args_is_help=True
)

syncs.command("try")(sync_try.try_connector)
syncs.add_typer(sync_airbyte.airbyte, name="airbyte")

SyncName = Annotated[str, typer.Argument(help="The sync's name or id.")]
CollectionName = Annotated[
    str | None,
    typer.Option("--collection", help="One collection alone.", show_default=False),
]


@syncs.command("list")
def list_syncs(
    config: ConfigFile = CONFIG, store_url: StoreUrl = None, as_json: AsJson = False
) -> None:
    """List the syncs that the store has, and how they are."""
    from penstock.config.syncs import collection_ids
    from penstock.syncs.controls import SyncControls

    with errors(), store_of(config, store_url) as store:
        entities = _entities(store)
        found = SyncControls(store).status([entity.id for entity in entities])
    status = {each.id: found[each.id].of(collection_ids(each.spec)) for each in entities}
    if as_json:
        typer.echo(json_text([_body(entity, status[entity.id]) for entity in entities]))
        return
    print_table(
        ("sync", "provider", "collections", "status", "initial backfill", "why"),
        [
            (
                entity.name,
                entity.spec.get("provider"),
                len(status[entity.id].collections),
                _status(entity, status[entity.id]),
                local_time(status[entity.id].initial_backfill_completed_at),
                _why(status[entity.id].health),
            )
            for entity in entities
        ],
        without="There is no sync. An entry of `syncs` in the file adds one.",
    )


@syncs.command("show")
def show_sync(
    name: SyncName,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show how each collection of a sync is, and what it can't see."""
    from penstock.config.syncs import collection_ids
    from penstock.syncs.controls import SyncControls

    with errors(), store_of(config, store_url) as store:
        entity = _entity(store, name)
        found = SyncControls(store).status([entity.id])[entity.id]
    status = found.of(collection_ids(entity.spec))
    if as_json:
        typer.echo(json_text(_body(entity, status)))
        return
    typer.echo(f"{entity.name} ({entity.id}): {_status(entity, status)}")
    print_table(
        ("collection", "phase", "last success", "next run", "read", "inserted", "changed",
         "deleted", "deletes by"),
        [
            (
                id_,
                _phase(shown),
                local_time(shown.get("last_success")),
                local_time(shown.get("next_run")),
                *(shown.get(key) for key in ("records_read", "inserted", "changed", "deleted")),
                shown.get("deletes"),
            )
            for id_, shown in status.collections.items()
        ],
    )  # fmt: skip
    for id_, shown in status.collections.items():
        if health := shown.get("health"):
            typer.echo(f"{id_}: {health.get('cause')} {health.get('remedy', '')}".rstrip())
        if shown.get("deletes") == "none" or shown.get("delete_notes"):
            notes = shown.get("delete_notes") or "The API does not show them."
            typer.echo(f"{id_}: deletes: {shown.get('deletes')}. {notes}")


def _phase(shown: Mapping[str, Any]) -> str:
    phase = str(shown.get("phase", ""))
    backfill = shown.get("backfill") or {}
    share = backfill.get("share")
    return phase if share is None else f"{phase} {share:.0%}"


@syncs.command("run")
def run_sync(
    name: SyncName,
    collection: CollectionName = None,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
) -> None:
    """Read what has changed now, whatever the sync's frequency."""
    with _asking(name, collection, config, store_url) as to:
        to.controls.ask(to.sync, to.collection, "run", to.by)
        to.note("run")
    typer.echo(f"Asked {name} to read now. The run does so within seconds.")


@syncs.command("backfill")
def backfill_sync(
    name: SyncName,
    collection: CollectionName = None,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
) -> None:
    """Read all again, from the beginning; what is unchanged makes no message."""
    with _asking(name, collection, config, store_url) as to:
        to.controls.ask(to.sync, to.collection, "backfill", to.by)
        to.note("backfill")
    typer.echo(f"Asked for a backfill of {name}. The run begins within seconds.")


@syncs.command("pause")
def pause_sync(name: SyncName, config: ConfigFile = CONFIG, store_url: StoreUrl = None) -> None:
    """Have a sync do nothing until it is resumed."""
    with _asking(name, None, config, store_url) as to:
        to.controls.pause(to.sync, to.by)
        to.note("pause")
    typer.echo(f"Paused {name}. The run does so within seconds.")


@syncs.command("resume")
def resume_sync(
    name: SyncName,
    collection: CollectionName = None,
    config: ConfigFile = CONFIG,
    store_url: StoreUrl = None,
) -> None:
    """Let a sync go on: one that is paused, failed, or asks whether a sweep may delete."""
    with _asking(name, collection, config, store_url) as to:
        to.controls.resume(to.sync, to.collection, to.by)
        to.note("resume")
    typer.echo(f"Resumed {name}. The run does so within seconds.")


class _To(NamedTuple):
    """Whom something is asked of, and by whom."""

    store: Store
    controls: SyncControls
    name: str
    sync: UUID
    collection: str | None
    by: str

    def note(self, action: str) -> None:
        """Add to the audit log what was asked."""
        from penstock.desired.actions import note_action

        note_action(self.store, "sync", self.name, action, {"collection": self.collection})


@contextlib.contextmanager
def _asking(
    name: str, collection: str | None, config: Path, store_url: str | None
) -> Iterator[_To]:
    from penstock.config.syncs import collection_id, collection_ids
    from penstock.desired.actions import who
    from penstock.syncs.controls import SyncControls

    with errors(), store_of(config, store_url) as store, store.transaction():
        entity = _entity(store, name)
        id_ = None
        if collection is not None:
            known = collection_ids(entity.spec)
            id_ = collection_id(str(entity.spec.get("provider")), collection)
            if id_ not in known:
                raise fail(unknown("collection", collection, known), 2)
        yield _To(store, SyncControls(store), entity.name, entity.id, id_, who())


def _entities(store: Store) -> list[Entity]:
    from penstock.desired.state import DesiredState

    found = DesiredState(store).read().of_kind("sync")
    return [found[name] for name in sorted(found)]


def _entity(store: Store, text: str) -> Entity:
    entities = _entities(store)
    for entity in entities:
        if text in (entity.name, str(entity.id)):
            return entity
    known = [entity.name for entity in entities]
    raise fail(unknown("sync", text, known, "the store has none; `penstock apply` makes them"), 2)


def _status(entity: Entity, status: SyncStatus) -> str:
    setting = str(entity.spec.get("status", "active"))
    return "paused" if status.paused and setting == "active" else setting


def _why(health: Any) -> str | None:
    return None if not health else str(health.get("code"))


def _body(entity: Entity, status: SyncStatus) -> dict[str, Any]:
    return {
        "name": entity.name,
        "id": str(entity.id),
        "spec": entity.shown,
        "status": _status(entity, status),
        "health": status.health,
        "initial_backfill_completed_at": status.initial_backfill_completed_at,
        "collections": [{"id": id_, **shown} for id_, shown in status.collections.items()],
    }
