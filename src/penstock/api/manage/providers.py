"""`/v1/collections`, and `/v1/credentials/{credential}/check`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query
from fastapi.responses import Response
from pydantic import BaseModel, Field

from penstock.api.manage.context import Context
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.pages import Paged, paged
from penstock.api.manage.settings import configured_of
from penstock.api.problems import documented
from penstock.api.requests import json_answer
from penstock.api.schemas import Page
from penstock.config.providers import READY, ProviderSettings
from penstock.config.syncs import Credential
from penstock.desired.configured import validated
from penstock.syncs import probe
from penstock.syncs.connectors.contract import Collection
from penstock.syncs.connectors.make import connector_of
from penstock.syncs.errors import SyncError

api = new_router()


class _List(Paged):
    provider: str | None = Field(None, description="Those of this provider, by name or id.")


class _Collection(BaseModel):
    """A collection that syncs may name."""

    id: str
    provider: str
    name: str
    key: list[str] = Field(description="The fields that identify an object.")
    cursor_field: str | None = Field(
        description="The field by which it is polled; null: each poll reads all."
    )
    deletes: Literal["tombstone", "flag", "events", "sweep", "none"] = Field(
        description="How deletes are seen."
    )
    delete_notes: str = Field(description="What the API does not report about deletes.")


class _Collections(Page):
    """Collections by their ids, those that only an API knows left out."""

    data: list[_Collection]


class _Checked(BaseModel):
    """A credential that its provider takes."""

    provider: str
    milliseconds: float


@api.get(
    "/v1/collections",
    response_model=_Collections,
    summary="List the collections of providers",
    description="Those that a provider's description names; many APIs have others too, which syncs"
    " may name as well.",
    responses=documented(409),
)
async def list_collections(context: AppContext, query: Annotated[_List, Query()]) -> Response:
    found = await _providers(context, query.provider)
    each = await context.run(_collections, found)
    page, cursor = paged(each, query, lambda collection: str(collection["id"]))
    return json_answer({"data": page, "next": cursor})


async def _providers(context: Context, text: str | None) -> Mapping[str, ProviderSettings | None]:
    if text in READY:
        return {text: None}
    if text is not None:
        found = await configured_of(context, "provider", text)
        return {found.name: found.settings}
    own = await context.run(_own, context)
    return {**dict.fromkeys(READY), **own}


@api.post(
    "/v1/credentials/{credential}/check",
    response_model=_Checked,
    summary="Try a credential with one harmless request",
    responses=documented(409, 424),
)
async def check_credential(context: AppContext, credential: str) -> Response:
    name, _, settings = await configured_of(context, "credential", credential)
    provider = None
    if settings.provider not in READY:
        provider = (await configured_of(context, "provider", settings.provider)).settings
    return json_answer(await context.run_test(_checked, context, name, settings, provider))


def _own(context: Context) -> Mapping[str, ProviderSettings]:
    specs = context.state.read(["provider"]).specs
    return validated(specs, os.environ)[0].providers


def _collections(providers: Mapping[str, ProviderSettings | None]) -> list[dict[str, Any]]:
    found = []
    for provider, settings in providers.items():
        try:
            known = connector_of(provider, settings, {}).collections()
        except SyncError:
            continue  # a function that can't be imported here; `check` reports that
        found += [_body(provider, collection) for collection in known.values()]
    return found


def _body(provider: str, collection: Collection) -> dict[str, Any]:
    return {
        "id": f"{provider}:{collection.name}",
        "provider": provider,
        "name": collection.name,
        "key": list(collection.key),
        "cursor_field": collection.cursor_field,
        "deletes": collection.deletes.value,
        "delete_notes": collection.delete_notes,
    }


def _checked(
    context: Context, name: str, credential: Credential, provider: ProviderSettings | None
) -> dict[str, Any]:
    began = time.monotonic()
    keeper = partial(probe.keeper_of, context.store, name, credential)
    properties = probe.properties_of(credential)
    opened = probe.opened(credential.provider, provider, properties, keeper, probe.CHECK_ATTEMPTS)
    with opened as (connector, session):
        connector.check(session)
    milliseconds = round((time.monotonic() - began) * 1000, 1)
    return {"provider": credential.provider, "milliseconds": milliseconds}
