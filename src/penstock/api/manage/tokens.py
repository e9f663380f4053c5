"""`/v1/tokens`: who may use the API."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from penstock.api.auth import Role
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.pages import Paged, paged
from penstock.api.problems import Problem, documented, wrong
from penstock.api.requests import SUCCESS, Json, body_of, json_answer, read_object
from penstock.api.schemas import Page, Success
from penstock.config.strict import Name
from penstock.desired.actions import Action
from penstock.streams.records import Token

_TOKENS: Final = "/v1/tokens"

api = new_router()


class _NewToken(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name
    role: Role = "worker"
    consumers: Annotated[list[Name], Field(min_length=1, max_length=1000)] | None = Field(
        None, description="Those that a worker may use; null stands for all."
    )


class _Token(BaseModel):
    id: UUID
    name: str
    role: Role
    consumers: list[str] | None
    created_at: datetime
    revoked_at: datetime | None


class _Tokens(Page):
    """Tokens by name, revoked ones too."""

    data: list[_Token]


class _MadeToken(_Token):
    """A token, and its secret, which is shown this once."""

    token: str


@api.get(_TOKENS, response_model=_Tokens, summary="List the tokens, without their secrets")
async def list_tokens(context: AppContext, query: Annotated[Paged, Query()]) -> Response:
    found = await context.run(context.store.tokens.all)
    page, last = paged(found, query, lambda token: token.name)
    return json_answer({"data": [_body(token) for token in page], "next": last})


@api.post(
    _TOKENS,
    status_code=201,
    response_model=_MadeToken,
    summary="Make a token",
    description="Its secret is in this answer alone: the store keeps its hash.",
    responses=documented(409, 413),
    openapi_extra=body_of(_NewToken),
)
async def create_token(context: AppContext, request: Request) -> Response:
    new = _NewToken.model_validate(await read_object(request))
    if new.role != "worker" and new.consumers is not None:
        raise wrong("consumers", f"only a worker's token is for some: leave it out of {new.role}'s")
    details = {"role": new.role, "consumers": new.consumers}
    made = Action("token", new.name, "create", details)
    create = context.store.tokens.create
    secret = await context.act(request, made, create, new.name, new.role, new.consumers)
    for token in await context.run(context.store.tokens.all):
        if token.name == new.name:
            return json_answer(
                {**_body(token), "token": secret}, 201, {"Cache-Control": "no-store"}
            )
    raise Problem(409, f"The token {new.name!r} was deleted by hand as it was made.")


@api.delete(
    f"{_TOKENS}/{{name}}",
    response_model=Success,
    summary="Revoke a token",
    description="Named by its name or its id. It is worthless for ever; its name stays taken.",
    responses=documented(409),
)
async def revoke_token(context: AppContext, name: str, request: Request) -> Response:
    known = await context.run(context.store.tokens.all)
    named = {str(each.id): each.name for each in known} | {each.name: each.name for each in known}
    if name not in named:
        raise Problem(404, f"There is no token {name!r}.")

    def revoke() -> None:
        if not context.store.tokens.revoke(named[name]):
            raise Problem(409, f"The token {name!r} is revoked already.")

    await context.act(request, Action("token", named[name], "revoke"), revoke)
    return Json(SUCCESS)


def _body(token: Token) -> dict[str, Any]:
    return dataclasses.asdict(token)
