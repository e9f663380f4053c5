"""`/v1/syncs/{sync}/…`: what is asked of syncs. The run that has them does it within seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from uuid import UUID

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from penstock.api.manage.access import grant_of
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.settings import configured_of
from penstock.api.problems import documented, wrong
from penstock.api.requests import SUCCESS, Json, body_of, read_object
from penstock.api.schemas import Success
from penstock.config.syncs import Sync, collection_id
from penstock.core.text import nearest
from penstock.desired.actions import Action
from penstock.syncs.controls import SyncControls

_SYNC: Final = "/v1/syncs/{sync}"
_Do = Callable[[SyncControls, UUID, str | None, str], None]

api = new_router()


class _Collection(BaseModel):
    model_config = ConfigDict(extra="forbid")

    collection: str | None = Field(
        None, max_length=300, description="One collection, by its name or its id; null: all."
    )


@api.post(
    f"{_SYNC}/pause",
    response_model=Success,
    summary="Have a sync do nothing until it is resumed",
    responses=documented(409),
)
async def pause_sync(context: AppContext, sync: str, request: Request) -> Response:
    found = await configured_of(context, "sync", sync)
    done = Action("sync", found.name, "pause")
    await context.act(
        request, done, SyncControls(context.store).pause, found.id, grant_of(request).name
    )
    return Json(SUCCESS)


def _add_action(action: str, summary: str, description: str, do: _Do) -> None:
    @api.post(
        f"{_SYNC}/{action}",
        response_model=Success,
        summary=summary,
        description=description,
        operation_id=f"{action}_sync",
        responses=documented(409, 413),
        openapi_extra=body_of(_Collection, required=False),
    )
    async def act(context: AppContext, sync: str, request: Request) -> Response:
        given = await read_object(request) if await request.body() else {}
        asked = _Collection.model_validate(given)
        found = await configured_of(context, "sync", sync)
        collection = None
        if asked.collection is not None:
            collection = _collection_of(found.settings, asked.collection)
        done = Action("sync", found.name, action, {"collection": collection})
        controls, by = SyncControls(context.store), grant_of(request).name
        await context.act(request, done, do, controls, found.id, collection, by)
        return Json(SUCCESS)


_add_action(
    "resume",
    "Let a sync go on",
    "One that is paused, that waits for a repaired credential, or that asks whether a sweep may"
    " delete: to resume is to agree.",
    SyncControls.resume,
)
_add_action(
    "run",
    "Read what has changed now",
    "Whatever its frequency; also what waits after a failure.",
    lambda controls, sync, collection, by: controls.ask(sync, collection, "run", by),
)
_add_action(
    "backfill",
    "Read all again",
    "From the beginning; what is unchanged makes no message.",
    lambda controls, sync, collection, by: controls.ask(sync, collection, "backfill", by),
)


def _collection_of(sync: Sync, text: str) -> str:
    """Return the id of a collection of a sync; raises `Problem`."""
    id_ = collection_id(sync.provider, text)
    if id_ not in sync.collection_ids:
        known = ", ".join(sync.collection_ids)
        hint = nearest(id_, sync.collection_ids)
        raise wrong(
            "collection", f"the sync has no collection {text!r}: expected one of {known}{hint}"
        )
    return id_
