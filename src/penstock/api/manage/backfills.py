"""`/v1/backfills`: the rows of tables that sinks are sent; list, request, pause, resume, cancel."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final

from fastapi import Path, Query, Request
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from penstock.api.manage.context import actor_of
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.pages import Paged, after, following
from penstock.api.manage.settings import name_of, pipelines_of
from penstock.api.problems import Problem, documented
from penstock.api.requests import body_of, json_answer, read_object
from penstock.api.schemas import Page
from penstock.backfill import tables
from penstock.backfill.request import Backfill, BackfillRequest, Backfills, BackfillState, Command
from penstock.config.consumers import storable
from penstock.config.strict import DIGITS
from penstock.desired.actions import Action, note_action

_BACKFILLS: Final = "/v1/backfills"
_MAX_ID: Final = 2**63 - 1

_COMMANDS: Final[tuple[tuple[Command, str], ...]] = (
    ("pause", "Stop a backfill behind the rows that are under way"),
    ("resume", "Continue a backfill that was paused, or failed"),
    ("cancel", "End a backfill for good"),
)

_Text = Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(storable)]
_Id = Annotated[int, Path(alias="id", ge=1, le=_MAX_ID), DIGITS]

api = new_router()


class _Query(Paged):
    sink: str | None = Field(None, description="Those to this sink, by name or id.")
    source: str | None = Field(None, description="Those of this source, by name or id.")
    state: BackfillState | None = None


class _New(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    sink: _Text = Field(description="The sink that gets the rows, by name or id.")
    table: _Text | None = Field(None, description="One table, as schema.table; null: each.")
    where: _Text | None = Field(None, description="SQL: only rows that fit.")
    start: _Text | None = Field(
        None, alias="from", description="Begin at this value of the sink's `sort_by`, in UTC."
    )


class _Backfill(BaseModel):
    id: int
    source: str
    sink: str
    table: str
    where: str | None
    sort_by: str | None
    start: str | None = Field(alias="from")
    initial: bool
    state: BackfillState
    rows_done: int
    rows_total: int | None = Field(description="An estimate.")
    error: str | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    is_run: bool = Field(description="Whether a run has its source now.")


class _Page(Page):
    """Backfills, the oldest first."""

    data: list[_Backfill]


class _Made(BaseModel):
    """Backfills that were asked for, and what is left out."""

    data: list[_Backfill]
    warnings: list[str]


@api.get(_BACKFILLS, response_model=_Page, summary="List backfills")
async def list_backfills(context: AppContext, query: Annotated[_Query, Query()]) -> Response:
    (last,) = after(query.cursor, int) or (0,)
    sink = None if query.sink is None else await name_of(context, "sink", query.sink)
    source = None if query.source is None else await name_of(context, "source", query.source)
    found = await context.run(
        Backfills(context.store).find,
        sink=sink,
        source=source,
        states=None if query.state is None else [query.state],
        after=last,
        limit=query.limit + 1,
    )
    page, cursor = following(found, query.limit, lambda backfill: (backfill.id,))
    return json_answer({"data": [_body(backfill) for backfill in page], "next": cursor})


@api.get(f"{_BACKFILLS}/{{id}}", response_model=_Backfill, summary="Show a backfill")
async def show_backfill(context: AppContext, number: _Id) -> Response:
    found = await context.run(Backfills(context.store).get, number)
    if found is None:
        raise Problem(404, f"There is no backfill {number}.")
    return json_answer(_body(found))


@api.post(
    _BACKFILLS,
    status_code=201,
    response_model=_Made,
    summary="Ask for a backfill",
    description="The rows of a sink's tables, or of one, are read beside its live changes.",
    responses=documented(409, 413, 424),
    openapi_extra=body_of(_New),
)
async def create_backfills(context: AppContext, request: Request) -> Response:
    new = _New.model_validate(await read_object(request))
    config = await pipelines_of(context)
    name = await name_of(context, "sink", new.sink)
    sink = config.sinks.get(name)
    if sink is None:
        raise Problem(404, f"There is no sink {name!r}.")
    source = config.sources[sink.source]
    selection = tables.Selection(source, name, sink, new.table, new.where, new.start)
    selected = await context.run_at_source(tables.select, selection)
    asked = [
        BackfillRequest(
            sink.source, name, read.schema, read.table, new.where, read.sort_by, read.start,
            rows_total=read.rows,
        )
        for read in selected.reads
    ]  # fmt: skip
    backfills = Backfills(context.store)

    def create() -> Sequence[Backfill]:
        with context.store.transaction():
            made = backfills.find(ids=backfills.create(asked))
            for each in made:
                action = "backfill", str(each.id), "start", each.asked
                note_action(context.store, *action, by=actor_of(request))
        return made

    made = await context.run(create)
    data = [_body(each) for each in made]
    return json_answer({"data": data, "warnings": selected.warnings}, 201)


def _add_command(command: Command, summary: str) -> None:
    @api.post(
        f"{_BACKFILLS}/{{id}}/{command}",
        response_model=_Backfill,
        summary=summary,
        operation_id=f"{command}_backfill",
        responses=documented(409),
    )
    async def change(context: AppContext, number: _Id, request: Request) -> Response:
        done = Action("backfill", str(number), command)
        backfills = Backfills(context.store)
        changed = await context.act(request, done, backfills.command, number, command)
        return json_answer(_body(changed))


for _command, _summary in _COMMANDS:
    _add_command(_command, _summary)


def _body(backfill: Backfill) -> dict[str, Any]:
    return {
        "id": backfill.id,
        "source": backfill.source,
        "sink": backfill.sink,
        "table": backfill.table,
        "where": backfill.condition,
        "sort_by": backfill.sort_by,
        "from": backfill.start,
        "initial": backfill.initial,
        "state": backfill.state,
        "rows_done": backfill.rows_done,
        "rows_total": backfill.rows_total,
        "error": backfill.error,
        "created_at": backfill.created_at,
        "started_at": backfill.started_at,
        "ended_at": backfill.ended_at,
        "is_run": backfill.is_run,
    }
