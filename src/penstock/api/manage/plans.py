"""`/v1/plan`, `/v1/apply`, `/v1/export`: the desired state as a document in YAML or JSON."""

from __future__ import annotations

import json
import os
import re
from typing import Annotated, Any, Final, Literal

import orjson
from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from penstock.api.manage import etags
from penstock.api.manage.access import grant_of
from penstock.api.manage.changes import planned_with
from penstock.api.manage.context import Context
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.etags import etag
from penstock.api.problems import Problem, documented
from penstock.api.requests import json_answer
from penstock.config.document import document_of
from penstock.desired.entities import Snapshot
from penstock.desired.export import exported
from penstock.desired.plan import Plan, plan_of
from penstock.desired.state import StateMoved
from penstock.desired.variables import stored_variables

_PAIR: Final = re.compile(r"\\u[dD][89abAB]")
_NOT_IN_YAML: Final = re.compile("[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]")
_DOCUMENT: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "What penstock.yaml holds. `${NAME}` stays as it is: each process fills it from "
        "its own environment. A variable that an export has put in a secret's place stands for that.",
        "content": {
            "application/yaml": {"schema": {"type": "object"}},
            "application/json": {"schema": {"type": "object"}},
        },
    }
}

api = new_router()


class _Prune(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prune: bool = Field(
        False, description="Delete what a document managed and this one no longer names."
    )


class _Field(BaseModel):
    path: str
    before: Any
    after: Any
    secret: bool


class _Planned(BaseModel):
    """A change; `consequences` are in words. `spec` is of what is created or deleted."""

    kind: str
    name: str
    action: Literal["create", "update", "delete", "take over"]
    spec: dict[str, Any] | None = None
    fields: list[_Field]
    taken_from: str | None = None
    consequences: list[str]
    losses: list[str] = Field(description="Those of them by which something is lost.")


class _Plan(BaseModel):
    """What a document changes; `kept` is what `prune` would delete."""

    version: int = Field(description="Of the state that it was planned for: the `ETag`.")
    changes: list[_Planned]
    kept: list[_Planned]
    warnings: list[str]
    counts: dict[str, int]


class _Applied(_Plan):
    applied: int = Field(description="The version of the state now.")


async def _planned(context: Context, request: Request, *, prune: bool) -> tuple[Plan, Snapshot]:
    text = await _text(request)

    def plan() -> tuple[Plan, Snapshot]:
        snapshot = context.state.read()
        environ = {**stored_variables(snapshot, os.environ), **os.environ}
        made = plan_of(document_of(text, environ), snapshot, prune=prune)
        return planned_with(context, made, snapshot), snapshot

    return await context.run_change(plan)


@api.post(
    "/v1/plan",
    response_model=_Plan,
    summary="Show what a document would change",
    description="Changes nothing, so a viewer may ask for it.",
    responses=documented(413),
    openapi_extra=_DOCUMENT,
)
async def plan(
    context: AppContext, request: Request, query: Annotated[_Prune, Query()]
) -> Response:
    made, _ = await _planned(context, request, prune=query.prune)
    return json_answer(made.shown(), headers=etag(made.version))


@api.post(
    "/v1/apply",
    response_model=_Applied,
    summary="Change the desired state as a document has it",
    description="In one transaction; what the document names is managed by `file` then. With "
    "`If-Match`, the `ETag` of a plan, it is refused where the state has moved since. Where it "
    "deletes, that must be given.",
    responses=documented(409, 412, 413, 428),
    openapi_extra={
        **_DOCUMENT,
        "parameters": [
            {
                "name": "If-Match", "in": "header", "required": False,
                "schema": {"type": "string"}, "description": "The `ETag` of the plan.",
            }
        ],
    },
)  # fmt: skip
async def apply(
    context: AppContext, request: Request, query: Annotated[_Prune, Query()]
) -> Response:
    made, snapshot = await _planned(context, request, prune=query.prune)
    etags.check(request.headers, snapshot.version, "the desired state")
    gone = [f"{p.change.kind} {p.change.name}" for p in made.changes if p.change.after is None]
    if gone and "if-match" not in request.headers:
        raise Problem(
            428,
            f"This deletes {', '.join(gone)}: plan it, and send the ETag of that plan as If-Match.",
        )
    by = grant_of(request).name
    at = snapshot.version if "if-match" in request.headers else None

    def write() -> int:
        changes = [each.change for each in made.changes]
        return context.state.write(
            changes, by=by, door="file", expected=made.expected, at=at
        ).version

    try:
        version = await context.run_change(write)
    except StateMoved as error:
        raise Problem(412, str(error)) from None
    return json_answer({**made.shown(), "applied": version}, headers=etag(version))


@api.get(
    "/v1/export",
    summary="Write the desired state as a document",
    description="It plans as empty; secrets are variables in it.",
    response_class=Response,
    responses={200: {"content": {"application/yaml": {"schema": {"type": "object"}}}}},
)
async def export(context: AppContext) -> Response:
    snapshot = await context.run(context.state.read)
    text = await context.run(exported, snapshot, {})
    return Response(text, 200, etag(snapshot.version), "application/yaml")


async def _text(request: Request) -> str:
    try:
        text = (await request.body()).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Problem(400, "The body is not UTF-8.") from None
    if not _PAIR.search(text):
        return text
    # JSON writes a character beyond U+FFFF as two escapes, which YAML takes for two characters.
    try:
        text = json.dumps(orjson.loads(text), ensure_ascii=False)
    except orjson.JSONDecodeError:
        return text
    return _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
