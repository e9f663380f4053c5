"""`/v1/records` and `/v1/events`: what syncs have copied, and its changes; and purges."""

from __future__ import annotations

from typing import Annotated, Any, Final
from uuid import UUID

import orjson
import psycopg
from fastapi import Query, Request
from fastapi.responses import Response
from psycopg.rows import dict_row
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from penstock.api.manage.context import Context, actor_of
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.pages import Limit, after, cursor_of, following
from penstock.api.manage.settings import name_of
from penstock.api.problems import Problem, documented, wrong
from penstock.api.requests import Json, body_of, json_answer, read_object
from penstock.api.schemas import Page
from penstock.config.consumers import storable
from penstock.config.strict import Whole
from penstock.core import queries
from penstock.desired.actions import note_action
from penstock.streams.connect import connect
from penstock.streams.consumers.browse import END, Criteria, browse
from penstock.streams.consumers.search import EventKey
from penstock.streams.consumers.types import UnknownStream
from penstock.streams.errors import store_error
from penstock.streams.records import START
from penstock.syncs.records import purge
from penstock.syncs.records.rows import record_id

_SQL: Final = queries.load("penstock.api.manage", "records.sql")
_TABLE_MISSING: Final = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)
_EVENTS: Final = "events"

_Text = Annotated[str, Field(min_length=1, max_length=1_000), AfterValidator(storable)]

api = new_router()


class _Filters(Limit):
    cursor: str | None = Field(None, description="The `next` of the page before.")
    sync_id: _Text | None = Field(None, description="Those of this sync, by name or id.")
    provider: _Text | None = Field(None, description="Those of this provider.")
    collection_id: _Text | None = Field(
        None, description="Those of this collection, as `stripe:customers`."
    )
    upstream_id: _Text | None = Field(None, description="Those with this id at the API.")
    deleted: bool | None = Field(None, description="Those that are deleted, or are not.")


class _Record(BaseModel):
    """An object of an API, as it is known."""

    id: UUID
    sync_id: UUID
    resource_id: UUID = Field(description="The same as `sync_id`.")
    provider: str
    collection_id: str
    upstream_id: str
    data: Any = Field(description="The object as it came.")
    upstream_created_at: AwareDatetime | None
    upstream_updated_at: AwareDatetime | None
    deleted: bool
    inserted_at: AwareDatetime
    updated_at: AwareDatetime


class _Records(Page):
    """Records, by their ids."""

    data: list[_Record]


class _Event(BaseModel):
    """A change of a record, as consumers of the stream `events` get it."""

    event: dict[str, Any]
    metadata: dict[str, Any]


class _Events(Page):
    """Events, the oldest first."""

    data: list[_Event]


class _Purge(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sync_id: _Text = Field(description="The sync, by name or id; one that was deleted by its id.")
    collection_id: _Text | None = Field(None, description="One of its collections; null: all.")
    count: Whole | None = Field(
        None, ge=0, description="How many there are, as a request without it has answered."
    )


class _Purged(BaseModel):
    """How many records there are, and how many were removed."""

    count: int
    purged: int


async def _sync_of(context: Context, text: str | None) -> UUID | None:
    """Return the id of a sync; of one that is no more the id is taken as it is."""
    if text is None:
        return None
    try:
        return UUID(text)
    except ValueError:
        pass
    name = await name_of(context, "sync", text)
    found = await context.run(_sync_id, context, name)
    if found is None:
        raise wrong("sync_id", f"there is no sync {text!r}: give its name, or its id")
    return found


@api.get(
    "/v1/records",
    response_model=_Records,
    summary="List the records of syncs",
    description="The newest state of each; the deleted ones too, until they are purged.",
)
async def list_records(context: AppContext, query: Annotated[_Filters, Query()]) -> Response:
    (last,) = after(query.cursor, str) or (None,)
    try:
        begin = None if last is None else UUID(last)
    except ValueError:
        raise wrong("cursor", "it is not the `next` of an answer: begin without one") from None
    sync = await _sync_of(context, query.sync_id)
    values = {
        "after": begin, "sync": sync, "provider": query.provider,
        "collection": query.collection_id, "upstream": query.upstream_id,
        "deleted": query.deleted, "limit": query.limit + 1,
    }  # fmt: skip
    found = await context.run(_asked, context, "records", values)
    page, cursor = following(found, query.limit, lambda row: (str(row["id"]),))
    # Its numbers keep all their digits.
    data = [{**row, "data": orjson.Fragment(row["data"])} for row in page]
    return json_answer({"data": data, "next": cursor})


@api.get(
    "/v1/events",
    response_model=_Events,
    summary="List the events of records",
    description="As far back as the stream `events` keeps them; none is taken.",
)
async def list_events(context: AppContext, query: Annotated[_Filters, Query()]) -> Response:
    begin = after(query.cursor, int, int) or START
    sync = await _sync_of(context, query.sync_id)
    given = {
        "sync_id": None if sync is None else str(sync), "provider": query.provider,
        "collection_id": query.collection_id, "upstream_id": query.upstream_id,
        "deleted": None if query.deleted is None else str(query.deleted).lower(),
    }  # fmt: skip
    key = EventKey({name: text for name, text in given.items() if text is not None})
    if sync is not None and query.collection_id and query.upstream_id:
        key = key._replace(record_id=record_id(sync, query.collection_id, query.upstream_id))
    try:
        search = await context.consumers.search(_EVENTS)
    except UnknownStream:
        return json_answer({"data": [], "next": None})
    listed = await browse(search, Criteria(key), (begin[0], begin[1]), END, query.limit)
    last = None if listed.end is None else cursor_of(*listed.end)
    data = b",".join([found.message for found in listed.found])
    return Json(b'{"data":[%b],"next":%b}' % (data, orjson.dumps(last)))


@api.post(
    "/v1/purge-records",
    response_model=_Purged,
    summary="Remove records for ever",
    description="Without a `count` it only counts. With the count it removes them, unless it differs"
    " meanwhile. The API that they were copied from stays as it is, and no event is made.",
    responses=documented(409, 413),
    openapi_extra=body_of(_Purge),
)
async def purge_records(context: AppContext, request: Request) -> Response:
    asked = _Purge.model_validate(await read_object(request))
    sync = await _sync_of(context, asked.sync_id)
    assert sync is not None  # noqa: S101 - the body has one
    of = context.records_url, sync, asked.collection_id
    count = await context.run(purge.count, *of)
    if asked.count is None or count == 0:
        return json_answer({"count": count, "purged": 0})
    if asked.count != count:
        raise Problem(409, f"There are {count} records now, not {asked.count}: count them again.")
    # The line first: the records may be in another database, and go piece by piece.
    name = await name_of(context, "sync", str(sync))
    details = {"collection": asked.collection_id, "count": count}
    await context.run(
        note_action, context.store, "sync", name, "purge records", details,
        by=actor_of(request),
    )  # fmt: skip
    purged = await context.run_long(purge.purge, *of)
    return json_answer({"count": count, "purged": purged})


def _sync_id(context: Context, name: str) -> UUID | None:
    with context.store.connection() as connection:
        row = connection.execute(_SQL["sync_id"], [name]).fetchone()
    return None if row is None else row[0]


def _asked(context: Context, query: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a query of the records store; none where no sync has run so far."""
    try:
        with connect(context.records_url) as connection:
            return connection.cursor(row_factory=dict_row).execute(_SQL[query], values).fetchall()
    except _TABLE_MISSING:
        return []
    except psycopg.Error as error:
        raise store_error(error, context.records_url) from None
