"""`/v1/targets/{target}`: whether a target can be reached from here, and what uses it."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final, Literal

from fastapi import Query
from fastapi.responses import Response
from psycopg.rows import dict_row
from pydantic import BaseModel, Field

from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.pages import Paged, after, following
from penstock.api.manage.settings import name_of, target_of
from penstock.api.problems import Problem, documented
from penstock.api.requests import json_answer
from penstock.api.schemas import Page
from penstock.config.bastion import Bastion
from penstock.config.targets import Target
from penstock.core import queries
from penstock.push.reach import reach

_SQL: Final = queries.load("penstock.api.manage", "manage.sql")
_SERVER_SECONDS: Final = 4.0

api = new_router()


class _TestedTarget(BaseModel):
    """A target that answered; one of type nats has taken the login, one of type http the connection."""

    type: Literal["nats", "http"]
    address: str
    bastion: str | None = Field(description="The bastion that the connection went through.")
    version: str | None = Field(description="The NATS server's.")
    jetstream: bool | None = Field(description="Whether the NATS server has JetStream.")
    milliseconds: float


class _Use(BaseModel):
    kind: Literal["sink", "consumer"]
    name: str
    type: str


class _Uses(Page):
    """The sinks and consumers that name a target, by kind and name."""

    data: list[_Use]


@api.post(
    "/v1/targets/{target}/test",
    response_model=_TestedTarget,
    summary="Test the connection of a target",
    description="The `code` of a problem begins with `bastion_` where the bastion is at fault.",
    responses=documented(409, 424),
)
async def test_target(context: AppContext, target: str) -> Response:
    settings, bastion = await target_of(context, target)
    return json_answer(await context.run_test(_tested, settings, bastion))


@api.get("/v1/targets/{target}/uses", response_model=_Uses, summary="List what uses a target")
async def list_uses(context: AppContext, target: str, query: Annotated[Paged, Query()]) -> Response:
    kind, name = after(query.cursor, str, str) or ("", "")
    values = {
        "target": await name_of(context, "target", target), "kind": kind, "name": name,
        "limit": query.limit + 1,
    }  # fmt: skip

    def read() -> list[dict[str, Any]]:
        with context.store.connection() as connection:
            key = "target", values["target"]
            if connection.execute(_SQL["spec"], key).fetchone() is None:
                raise Problem(404, f"There is no target {target!r}.")
            with connection.cursor(row_factory=dict_row) as cursor:
                return cursor.execute(_SQL["target_uses"], values).fetchall()

    page, last = following(
        await context.run(read), query.limit, lambda use: (use["kind"], use["name"])
    )
    return json_answer({"data": page, "next": last})


def _tested(target: Target, bastion: Bastion | None) -> dict[str, Any]:
    began = time.monotonic()
    reached = reach(target, bastion, "penstock test", _SERVER_SECONDS)
    return {
        "type": target.type,
        **reached._asdict(),
        "bastion": None if bastion is None else str(bastion),
        "milliseconds": round((time.monotonic() - began) * 1000, 1),
    }
