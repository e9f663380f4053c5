"""What `/v1/…` shows of entities beside their specs, by kind."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

from pydantic import BaseModel, Field

from penstock.api.manage.context import Context
from penstock.api.manage.pages import Paged
from penstock.api.schemas import ConsumerStatus
from penstock.config.collections import collections_of
from penstock.config.providers import READY
from penstock.config.syncs import collection_ids
from penstock.core import queries
from penstock.streams.consumers.facts import ConsumerFacts, facts_body
from penstock.streams.consumers.types import ConsumerError, ConsumerInfo
from penstock.streams.pauses import paused_sinks
from penstock.syncs.controls import SyncControls

_SQL: Final = queries.load("penstock.api.manage", "manage.sql")

Entities = Sequence[dict[str, Any]]


class _Refusal(BaseModel):
    """Why a process can't run the entity as it is."""

    reason: str
    at: datetime


class EntityBody(BaseModel):
    """An entity of the desired state; secrets of its `spec` are masked."""

    name: str
    id: UUID
    version: int = Field(description="Its `ETag`.")
    managed_by: Literal["file", "api", "console"]
    changed_at: datetime
    spec: dict[str, Any] = Field(description="Its keys, as penstock.yaml has them.")
    refusal: _Refusal | None


class _List(Paged):
    pass


class _ConsumerList(Paged):
    status: bool = Field(False, description="Show each one's `status`, too.")


class _Consumer(EntityBody):
    status: ConsumerStatus | None = Field(None, description="Null where it is not served yet.")


class _Sink(EntityBody):
    paused: str | None = Field(description="Who has paused it; null where it is not paused.")


class _Target(EntityBody):
    sinks: int = Field(description="How many sinks name it.")
    consumers: int = Field(description="How many consumers do.")


class _Provider(BaseModel):
    """A provider: one that is ready, which has a name alone, or an entity."""

    name: str
    ready: bool = Field(description="Whether it is one of Penstock's own.")
    id: UUID | None
    version: int | None
    managed_by: Literal["file", "api", "console"] | None
    changed_at: datetime | None
    spec: dict[str, Any] | None
    refusal: _Refusal | None
    collections: list[str] | None = Field(
        description="The ids of its collections; null where only its API, or its code, knows them."
    )


class Health(BaseModel):
    """Why something is not read, and what to do."""

    code: str
    cause: str
    remedy: str
    since: datetime


class _Backfill(BaseModel):
    started_at: datetime | None
    read: int
    share: float = Field(description="How much of it is done, from 0 to 1.")
    estimated_end: datetime | None


class _SyncCollection(BaseModel):
    """How far a collection of a sync is, as the run that has it reports."""

    id: str
    phase: str = Field(
        description="`waiting` for a run, `backfill`, `polling`, `asks`, `stopped` or `disabled`."
    )
    initial_backfill_completed_at: datetime | None = None
    health: Health | None = None
    last_run: datetime | None = None
    last_success: datetime | None = None
    next_run: datetime | None = None
    lag_seconds: float | None = None
    records_read: int = 0
    inserted: int = 0
    changed: int = 0
    deleted: int = 0
    unreadable: int = Field(0, description="Dead letters.")
    skipped: int = Field(0, description="Objects older than `max_age_days`.")
    requests: int = 0
    deletes: str | None = Field(None, description="How its deletes are seen.")
    delete_notes: str = Field("", description="What the API does not report about deletes.")
    backfill: _Backfill | None = None


_NOT_REPORTED: Final = _SyncCollection(id="", phase="").model_dump()
"""Of a collection that no run has taken yet."""


class _Sync(EntityBody):
    status: Literal["active", "disabled", "paused"]
    health: Health | None = Field(description="Why a collection of it is not read.")
    initial_backfill_completed_at: datetime | None = Field(description="That of all collections.")
    collections: list[_SyncCollection]


async def _as_they_are(_: Context, entities: Entities, __: Paged | None) -> Entities:
    return entities


class View(NamedTuple):
    """What is shown of a kind.

    Attributes:
        model: Of one entity.
        query: Of a list of them.
        completed: Completes entities as the store has them; of a list with its query.
        built_in: Those that are there without being configured.
    """

    model: type[BaseModel] = EntityBody
    query: type[Paged] = _List
    completed: Callable[[Context, Entities, Paged | None], Awaitable[Entities]] = _as_they_are
    built_in: Sequence[dict[str, Any]] = ()


async def _consumers(context: Context, entities: Entities, query: Paged | None) -> Entities:
    if isinstance(query, _ConsumerList) and not query.status:
        return entities
    consumers = context.consumers
    found: Sequence[tuple[ConsumerInfo, ConsumerFacts | None]] = []
    with contextlib.suppress(ConsumerError):
        found = await consumers.facts(await consumers.named([each["name"] for each in entities]))
    status = {info.name: facts_body(info, facts) for info, facts in found if facts is not None}
    return [{**entity, "status": status.get(entity["name"])} for entity in entities]


async def _sinks(context: Context, entities: Entities, _: Paged | None) -> Entities:
    paused = await context.run(paused_sinks, context.store)
    keys = ((entity["spec"].get("source"), entity["name"]) for entity in entities)
    return [
        {**entity, "paused": paused.get(key)} for entity, key in zip(entities, keys, strict=True)
    ]


async def _targets(context: Context, entities: Entities, _: Paged | None) -> Entities:
    names = [entity["name"] for entity in entities]

    def read() -> dict[str, tuple[int, int]]:
        with context.store.connection() as connection:
            rows = connection.execute(_SQL["target_counts"], {"names": names})
            return {name: (sinks, consumers) for name, sinks, consumers in rows}

    counts = await context.run(read)
    shown = []
    for entity in entities:
        sinks, of_target = counts.get(entity["name"], (0, 0))
        shown.append({**entity, "sinks": sinks, "consumers": of_target})
    return shown


async def _providers(_: Context, entities: Entities, __: Paged | None) -> Entities:
    shown = []
    for entity in entities:
        name, spec = entity["name"], entity["spec"]
        names: Any = collections_of(name, None)
        if spec is not None:
            given = spec.get("collections")
            names = given if isinstance(given, dict) and "*" not in given else None
        ids = None if names is None else sorted(f"{name}:{each}" for each in names)
        shown.append({**entity, "ready": spec is None, "collections": ids})
    return shown


async def _syncs(context: Context, entities: Entities, _: Paged | None) -> Entities:
    ids = [entity["id"] for entity in entities]
    found = await context.run(SyncControls(context.store).status, ids)
    shown = []
    for entity in entities:
        status = found[entity["id"]].of(collection_ids(entity["spec"]))
        setting = entity["spec"].get("status", "active")
        is_paused = status.paused and setting == "active"
        shown.append(
            {
                **entity,
                "status": "paused" if is_paused else setting,
                "health": status.health,
                "initial_backfill_completed_at": status.initial_backfill_completed_at,
                "collections": [
                    {**_NOT_REPORTED, "id": id_, **each} for id_, each in status.collections.items()
                ],
            }
        )
    return shown


def _ready(name: str) -> dict[str, Any]:
    keys = ("id", "version", "managed_by", "changed_at", "spec", "refusal")
    return {"name": name, **dict.fromkeys(keys)}


VIEWS: Final = {
    "consumer": View(_Consumer, _ConsumerList, _consumers),
    "provider": View(_Provider, _List, _providers, [_ready(name) for name in sorted(READY)]),
    "sink": View(_Sink, _List, _sinks),
    "sync": View(_Sync, _List, _syncs),
    "target": View(_Target, _List, _targets),
}
"""The views of the kinds that show more than their specs."""
