"""The Management API of consumers of type nats, which a run publishes for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from penstock.api.manage.context import Context
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.http_consumers import effect_answer, place
from penstock.api.manage.pages import Paged, after, following
from penstock.api.manage.settings import name_of
from penstock.api.problems import Problem, documented
from penstock.api.requests import SUCCESS, Json, body_of, json_answer, read_object
from penstock.api.schemas import DryRun, Page, PositionBody, Rewind, RewindEffectBody, Success
from penstock.core.errors import StoreError
from penstock.desired.actions import Action
from penstock.streams.nats_consumers import NO_CONSUMER, NatsConsumers

_ALL: Final = "/v1/nats-consumers"
_ONE: Final = f"{_ALL}/{{consumer}}"

api = new_router()


class Why(BaseModel):
    """Why a consumer is not attached."""

    code: str
    reason: str
    since: datetime | None


class NatsConsumerBody(BaseModel):
    """A consumer that a run publishes to NATS for; its login is never shown."""

    name: str
    id: UUID
    type: Literal["nats"]
    stream: str
    source: str
    kind: Literal["changes", "rows"]
    state: Literal["attached", "behind", "paused"] = Field(
        description="Attached: it gets messages as its stream does."
    )
    lag_messages: int = Field(description="Messages of the stream to come; at most 100,000 count.")
    position: PositionBody | None = Field(
        description="Up to where all is published; null where it is attached, or at the beginning."
    )
    rewinding: bool = Field(description="A rewind was asked for, and the run has not done it yet.")
    dropped: int = Field(description="Messages that retention took before they were published.")
    why: Why | None
    settings: dict[str, Any]
    created_at: datetime


class NatsConsumersBody(Page):
    """Consumers of type nats, by name."""

    data: list[NatsConsumerBody]


@contextlib.contextmanager
def _found() -> Iterator[None]:
    """Raise a `Problem` where there is no such consumer."""
    try:
        yield
    except StoreError as error:
        if error.code == NO_CONSUMER:
            raise Problem(404, str(error)) from None
        raise


async def _act(
    context: Context,
    request: Request,
    action: str,
    work: Callable[[NatsConsumers, str], None],
    text: str,
    **details: Any,
) -> Response:
    """Do `work` for the consumer that a path names, and add it to the audit log."""
    name = await name_of(context, "consumer", text)
    consumers = NatsConsumers(context.store)
    with _found():
        await context.act(request, Action("consumer", name, action, details), work, consumers, name)
    return Json(SUCCESS)


@api.get(_ALL, response_model=NatsConsumersBody, summary="List the NATS consumers")
async def list_nats_consumers(context: AppContext, query: Annotated[Paged, Query()]) -> Response:
    (last,) = after(query.cursor, str) or ("",)
    found = await context.run(NatsConsumers(context.store).page, last, query.limit + 1)
    page, cursor = following(found, query.limit, lambda of: (of.name,))
    return json_answer({"data": [of.body() for of in page], "next": cursor})


@api.get(_ONE, response_model=NatsConsumerBody, summary="Show a NATS consumer")
async def show_nats_consumer(context: AppContext, consumer: str) -> Response:
    name = await name_of(context, "consumer", consumer)
    with _found():
        return json_answer((await context.run(NatsConsumers(context.store).get, name)).body())


@api.post(
    f"{_ONE}/pause",
    response_model=Success,
    summary="Pause a NATS consumer",
    description="What its stream gets meanwhile waits there, for as long as that keeps it.",
)
async def pause_nats_consumer(context: AppContext, consumer: str, request: Request) -> Response:
    return await _act(
        context, request, "pause", partial(NatsConsumers.pause, paused=True), consumer
    )


@api.post(f"{_ONE}/resume", response_model=Success, summary="Let a NATS consumer go on")
async def resume_nats_consumer(context: AppContext, consumer: str, request: Request) -> Response:
    return await _act(
        context, request, "resume", partial(NatsConsumers.pause, paused=False), consumer
    )


@api.post(
    f"{_ONE}/rewind",
    response_model=Success | RewindEffectBody,
    summary="Publish from another position on",
    description="With `dry_run` nothing is done: the answer has what would be.",
    responses=documented(413),
    openapi_extra=body_of(Rewind),
)
async def rewind_nats_consumer(
    context: AppContext, consumer: str, request: Request, query: Annotated[DryRun, Query()]
) -> Response:
    given = await read_object(request)
    to = place(given)
    if query.dry_run:
        name = await name_of(context, "consumer", consumer)
        with _found():
            look = NatsConsumers(context.store).effect_of_rewind
            return effect_answer(name, await context.run(look, name, to))
    return await _act(
        context, request, "rewind", partial(NatsConsumers.rewind, to=to), consumer, **given
    )
