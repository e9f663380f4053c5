"""Trials: what a sink would make of messages, and a source's next changes to try it with."""

from __future__ import annotations

import os
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from penstock.api.manage.context import Context, TrialRefusal
from penstock.api.manage.endpoints import AppContext, AppTools, new_router
from penstock.api.manage.secrets import restored
from penstock.api.manage.settings import source_of
from penstock.api.problems import Problem, documented
from penstock.api.requests import Json, body_of, read_object
from penstock.config.document import Key, Spec
from penstock.config.settings import Config
from penstock.config.strict import Whole
from penstock.core.tables import TablePattern
from penstock.core.text import dotted
from penstock.desired.configured import usable, validated
from penstock.streams.bastions import with_bastions

_MOST: Final = 100
_NAME: Final = "trial"

api = new_router()


def _pattern(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError("is a table's name, or a pattern")
    TablePattern.parse(text)
    return text


class _Try(BaseModel):
    """A sink's keys, as penstock.yaml has them, and messages as consumers get them."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    sink: dict[str, Any]
    name: str = Field(
        _NAME, description="The sink's name; masked secrets are those that it has by now."
    )
    messages: list[dict[str, Any]] = Field(
        min_length=1, max_length=_MOST, description="`record` has to be there, the rest is made up."
    )


class _Sent(BaseModel):
    message: dict[str, Any]
    to: str | None = Field(description="Its subject or path.")


class _Outcome(BaseModel):
    """What would become of a message; `why` and `code` are null where it is sent."""

    message: dict[str, Any]
    result: Literal["sent", "dropped", "failed", "passed by"]
    out: list[_Sent]
    code: str | None
    why: str | None
    milliseconds: float = Field(description="Those of its transform and route, without Spark's.")


class _Outcomes(BaseModel):
    """An outcome for each message, in their order."""

    data: list[_Outcome]


class _Next(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tables: list[Annotated[str, BeforeValidator(_pattern)]] | None = Field(
        None, min_length=1, max_length=1000, description="By default all of the source."
    )
    limit: Whole = Field(5, ge=1, le=_MOST)
    wait_for_ms: Whole = Field(10_000, ge=100, le=20_000)


class _Change(BaseModel):
    record: dict[str, Any]
    changes: dict[str, Any] | None
    action: str
    metadata: dict[str, Any]


class _Changes(BaseModel):
    """Changes in the order of their commits; none where nothing was changed."""

    data: list[_Change]


@api.post(
    "/v1/try-sink",
    response_model=_Outcomes,
    summary="Try a sink on messages",
    description="Filter, transform and route of a sink, which need not exist, over messages: what "
    "`penstock try` does. Nothing is delivered. The first trial with an expression takes "
    "seconds: it starts Spark, in a process of its own.",
    responses=documented(409, 413, 424),
    openapi_extra=body_of(_Try),
)
async def try_sink(context: AppContext, tools: AppTools, request: Request) -> Response:
    given = await read_object(request)
    asked = _Try.model_validate(given)
    config = await context.run_change(_config, context, asked.name, asked.sink)
    messages = msgspec.json.encode(given["messages"])
    try:
        found = await context.run_trial(tools.try_sink, config, asked.name, messages)
    except TrialRefusal as error:
        key, text = error.key, error.text
        errors = [(key, text)] if key else ()
        raise Problem(422, f"{key}: {text}" if key else text, errors) from None
    return Json(msgspec.json.encode({"data": found}))


@api.post(
    "/v1/sources/{source}/next-changes",
    response_model=_Changes,
    summary="Wait for the next changes of a source",
    description="Through a slot of its own, which ends with the request; nothing is taken from "
    "the pipeline.",
    responses=documented(409, 413, 424),
    openapi_extra=body_of(_Next),
)
async def next_changes(
    context: AppContext, tools: AppTools, source: str, request: Request
) -> Response:
    asked = _Next.model_validate(await read_object(request))
    settings = await source_of(context, source)
    tables = settings.patterns
    if asked.tables is not None:
        tables = tuple(TablePattern.parse(text) for text in asked.tables)
    found = await context.run_trial(
        tools.next_changes, settings, tables, asked.limit, asked.wait_for_ms / 1000
    )
    return Json(msgspec.json.encode({"data": found}))


def _config(context: Context, name: str, spec: Spec) -> Config:
    """Return the configuration of the desired state with a sink as it is given; raises `Problem`."""
    key: Key = "sink", name
    snapshot = context.state.read(["source", "target", "sink"])
    old = snapshot.entities.get(key)
    kinds = ("source", "target")
    specs: dict[Key, Spec] = {k: each for k, each in snapshot.specs.items() if k[0] in kinds}
    specs[key] = restored("sink", spec, None if old is None else old.spec)
    wrong = [
        (dotted(path) or "body", text)
        for problem, path, text in validated(specs, os.environ)[1]
        if problem == key
    ]
    if wrong:
        raise Problem(422, "; ".join(f"{field}: {text}" for field, text in wrong) + ".", wrong)
    base = Config(sources={}, sinks={}, store=SecretStr(context.store.url))
    config, refused = usable(specs, os.environ, base)
    if key in refused:
        raise Problem(409, f"The sink can't be tried in this process: {refused[key]}.")
    return with_bastions(config, context.store)
