"""`/v1/audit`: who changed or did what, when, and through which door."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, Field

from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.pages import Paged, after, following
from penstock.api.requests import json_answer
from penstock.api.schemas import Page
from penstock.config.consumers import storable
from penstock.desired.entities import AuditDoor

api = new_router()


class _Query(Paged):
    order: Literal["newest", "oldest"] = Field("newest", description="Which ones come first.")
    q: Annotated[str, AfterValidator(storable)] | None = Field(
        None, max_length=200, description="A part of who, door, kind, name, action or version."
    )
    kind: (
        Literal[
            "source",
            "sink",
            "consumer",
            "target",
            "provider",
            "credential",
            "sync",
            "backfill",
            "dead letters",
            "token",
        ]
        | None
    ) = None
    name: Annotated[str, AfterValidator(storable)] | None = Field(
        None,
        description="The name of an entity or a token, a backfill's number; what was deleted has its "
        "lines still.",
    )


class _Entry(BaseModel):
    id: int
    at: datetime
    who: str = Field(description="The token's name, or the user and machine of a command.")
    door: AuditDoor
    version: int | None = Field(
        description="Of the desired state after the change; null of an action, which is none."
    )
    kind: str
    name: str
    action: str = Field(
        description="create, update or delete; of what changes no entity a verb as in rewind or pause."
    )
    before: dict[str, Any] | None
    after: dict[str, Any] | None = Field(
        description="The entity as it was written; of an action how it was done."
    )


class _Audit(Page):
    """The audit log; secrets are masked."""

    data: list[_Entry]


@api.get("/v1/audit", response_model=_Audit, summary="Read the audit log")
async def audit(context: AppContext, query: Annotated[_Query, Query()]) -> Response:
    (last,) = after(query.cursor, int) or (None,)
    oldest = query.order == "oldest"
    found = await context.run(
        context.state.history,
        kind=query.kind,
        name=query.name,
        search=query.q,
        before=None if oldest else last,
        after=last if oldest else None,
        oldest=oldest,
        limit=query.limit + 1,
    )
    page, last = following(found, query.limit, lambda entry: (entry.id,))
    return json_answer({"data": [dataclasses.asdict(entry) for entry in page], "next": last})
