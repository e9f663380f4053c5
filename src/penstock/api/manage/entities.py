"""`/v1/sources`, `/v1/sinks`, `/v1/consumers`, …: the entities of the desired state."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from penstock.api.manage.access import door_of, grant_of
from penstock.api.manage.changes import Asked, Changed, delete, put
from penstock.api.manage.context import Context
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.etags import IF_MATCH, etag
from penstock.api.manage.pages import Paged, after, following, paged
from penstock.api.manage.secrets import merged
from penstock.api.manage.settings import name_of
from penstock.api.manage.views import VIEWS, EntityBody, View
from penstock.api.problems import Problem, documented
from penstock.api.requests import body_of, json_answer, read_object
from penstock.api.schemas import DryRun, Page
from penstock.config.document import Spec
from penstock.config.models import SECTIONS
from penstock.core import queries

_SQL: Final = queries.load("penstock.api.manage", "manage.sql")

api = new_router()


class _FieldChange(BaseModel):
    path: str
    before: Any
    after: Any
    secret: bool


class _Change(BaseModel):
    """What a change does; `consequences` are in words."""

    action: Literal["create", "update", "delete", "take over", "nothing"]
    fields: list[_FieldChange]
    taken_from: Literal["file"] | None = Field(
        description="`file` where a file managed it: the next apply of that changes it back."
    )
    consequences: list[str]
    losses: list[str] = Field(description="Those of them by which something is lost.")
    warnings: list[str] = Field(description="What could not be checked, or may not be meant.")
    dry_run: bool


class _Changed(_Change):
    entity: EntityBody | None = Field(description="As it is now; null where there is none.")


def _add_reads(kind: str, section: str) -> None:
    path, one = f"/v1/{section}", f"/v1/{section}/{{{kind}}}"
    view = VIEWS.get(kind, View())

    async def listed(context: Context, query: Paged) -> tuple[Sequence[dict[str, Any]], str | None]:
        if view.built_in:  # there are but a few
            found = await context.run(_rows, context, "entities", {"kind": kind})
            return paged([*view.built_in, *found], query, lambda entity: str(entity["name"]))
        (last,) = after(query.cursor, str) or ("",)
        values = {"kind": kind, "after": last, "limit": query.limit + 1}
        found = await context.run(_rows, context, "entity_page", values)
        return following(found, query.limit, lambda entity: (entity["name"],))

    async def list_entities(context: AppContext, query: Annotated[Paged, Query()]) -> Response:
        page, cursor = await listed(context, query)
        return json_answer({"data": await view.completed(context, page, query), "next": cursor})

    list_entities.__annotations__["query"] = Annotated[view.query, Query()]
    api.add_api_route(
        path, list_entities, response_model=_page_of(kind, view.model),
        summary=f"List the {section}", operation_id=f"list_{section}",
    )  # fmt: skip

    async def show_entity(context: AppContext, request: Request) -> Response:
        text: str = request.path_params[kind]
        built_in = next((each for each in view.built_in if each["name"] == text), None)
        entity = built_in or await _entity(context, kind, text)
        (shown,) = await view.completed(context, [entity], None)
        headers = None if built_in is not None else etag(entity["version"])
        return json_answer(shown, headers=headers)

    api.add_api_route(
        one, show_entity, response_model=view.model, summary=f"Show a {kind}",
        operation_id=f"show_{kind}", openapi_extra=_named(kind),
    )  # fmt: skip


def _add_writes(kind: str, section: str) -> None:
    one = f"/v1/{section}/{{{kind}}}"
    body = body_of(
        {"type": "object", "description": f"The {kind}'s keys, as penstock.yaml has them."}
    )

    async def asked(context: Context, request: Request, query: DryRun) -> Asked:
        given: str = request.path_params[kind]
        name = await name_of(context, kind, given)
        if name == given and _is_id(given):
            raise Problem(404, f"There is no {kind} with the id {given}.")
        by = grant_of(request).name
        return Asked(kind, name, request.headers, by, door_of(request), query.dry_run)

    async def answer(context: Context, changed: Changed, of: Asked) -> Response:
        planned = changed.planned
        entity = None
        if changed.after is not None:
            with contextlib.suppress(Problem):  # deleted by another meanwhile
                entity = await _entity(context, kind, of.name)
        shown = None if planned is None else planned.shown()
        result = {
            "entity": entity,
            "action": "nothing" if shown is None else shown["action"],
            "fields": [] if shown is None else shown["fields"],
            "taken_from": None if planned is None else planned.taken_from,
            "consequences": [] if planned is None else list(planned.consequences),
            "losses": [] if planned is None else list(planned.losses),
            "warnings": list(changed.warnings),
            "dry_run": of.dry_run,
        }
        made = changed.before is None and changed.after is not None
        headers = None if entity is None else etag(entity["version"])
        return json_answer(result, 201 if made else 200, headers)

    async def replace(
        context: AppContext, request: Request, query: Annotated[DryRun, Query()]
    ) -> Response:
        spec = await read_object(request)
        of = await asked(context, request, query)
        return await answer(context, await context.run_change(put, context, of, lambda _: spec), of)

    api.add_api_route(
        one, replace, methods=["PUT"], response_model=_Changed, summary=f"Create or replace a {kind}",
        description="The same once more changes nothing. A secret that comes back as shown stays.",
        operation_id=f"put_{kind}", openapi_extra=_named(kind, IF_MATCH, body),
        responses={201: {"model": _Changed, "description": "Created"}, **documented(409, 412, 413)},
    )  # fmt: skip

    async def change(
        context: AppContext, request: Request, query: Annotated[DryRun, Query()]
    ) -> Response:
        patch = await read_object(request)
        of = await asked(context, request, query)

        def spec_of(old: Spec | None) -> Mapping[str, Any]:
            if old is None:
                raise Problem(404, f"There is no {kind} {of.name!r}.")
            result: dict[str, Any] = merged(old, patch)
            return result

        return await answer(context, await context.run_change(put, context, of, spec_of), of)

    api.add_api_route(
        one, change, methods=["PATCH"], response_model=_Changed, summary=f"Change a {kind}",
        description="A merge patch (RFC 7396): changes the keys that it gives; null sets one to its "
        "default.",
        operation_id=f"patch_{kind}", openapi_extra=_named(kind, IF_MATCH, body),
        responses=documented(409, 412, 413),
    )  # fmt: skip

    async def remove(
        context: AppContext, request: Request, query: Annotated[DryRun, Query()]
    ) -> Response:
        of = await asked(context, request, query)
        return await answer(context, await context.run_change(delete, context, of), of)

    api.add_api_route(
        one, remove, methods=["DELETE"], response_model=_Changed, summary=f"Delete a {kind}",
        description="Refused while others refer to it. The answer has its consequences; with `dry_run` "
        "nothing else happens.",
        operation_id=f"delete_{kind}", openapi_extra=_named(kind, IF_MATCH),
        responses=documented(409, 412),
    )  # fmt: skip


def _named(kind: str, *more: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAPI's description of a path's name, and of more."""
    name = {
        "name": kind, "in": "path", "required": True, "schema": {"type": "string"},
        "description": "Its name or its id.",
    }  # fmt: skip
    result: dict[str, Any] = {"parameters": [name]}
    for part in more:
        for key, value in part.items():
            result[key] = [*result[key], *value] if key == "parameters" else value
    return result


def _page_of(kind: str, model: type[BaseModel]) -> type[BaseModel]:
    return type(
        f"_{kind.capitalize()}Page",
        (Page,),
        {"__annotations__": {"data": list[model]}, "__doc__": "Entities by name.",  # type: ignore[valid-type]  # a model that is known here alone
         "__module__": __name__},
    )  # fmt: skip


for _kind, _section in SECTIONS.items():
    _add_reads(_kind, _section)
    _add_writes(_kind, _section)


def _is_id(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


async def _entity(context: Context, kind: str, text: str) -> dict[str, Any]:
    name = await name_of(context, kind, text)
    found = await context.run(_rows, context, "entity", {"kind": kind, "name": name})
    if not found:
        raise Problem(404, f"There is no {kind} {text!r}.")
    return found[0]


def _rows(context: Context, query: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    with context.store.connection() as connection:
        rows = connection.execute(_SQL[query], values).fetchall()
    return [
        {
            "name": name,
            "id": id_,
            "version": version,
            "managed_by": managed_by,
            "changed_at": at,
            "spec": shown,
            "refusal": None if reason is None else {"reason": reason, "at": since},
        }
        for name, id_, version, managed_by, at, shown, reason, since in rows
    ]
