"""The Management API of consumers of type nats, which a run publishes for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from penstock.api.auth import Grant
from penstock.api.problems import Problem, documented, wrong
from penstock.api.requests import SUCCESS, Json, body_of, read_object
from penstock.api.schemas import BEARER, PositionBody, Rewind, Success
from penstock.core.errors import StoreError
from penstock.core.message import Position
from penstock.streams.nats_consumers import NO_CONSUMER, NatsConsumers, Place

_ALL: Final = "/v1/nats-consumers"
_ONE: Final = f"{_ALL}/{{consumer}}"

T = TypeVar("T")


class Why(BaseModel):
    """Why a consumer is not attached."""

    code: str
    reason: str
    since: datetime | None


class NatsConsumerBody(BaseModel):
    """A consumer that a run publishes to NATS for; its login is never shown."""

    name: str
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


class NatsConsumersBody(BaseModel):
    """All consumers of type nats."""

    data: list[NatsConsumerBody]


def _admin(request: Request, _: Annotated[Any, Depends(BEARER)]) -> None:
    grant: Grant = request.scope["grant"]
    if grant.role != "admin":
        raise Problem(
            403, f"The token {grant.name!r} may only consume: this request needs an admin's."
        )


def router(consumers: NatsConsumers) -> APIRouter:
    """Return the endpoints, which need an admin's token."""
    api = APIRouter(dependencies=[Depends(_admin)], responses=documented(), tags=["manage"])

    @api.get(_ALL, response_model=NatsConsumersBody, summary="List the NATS consumers")
    async def list_nats_consumers() -> Response:
        found = await _in_thread(consumers.all)
        return _json({"data": [of.body() for of in found]})

    @api.get(_ONE, response_model=NatsConsumerBody, summary="Show a NATS consumer")
    async def show_nats_consumer(consumer: str) -> Response:
        found = await _in_thread(lambda: consumers.get(consumer))
        return _json(found.body())

    @api.post(
        f"{_ONE}/pause",
        response_model=Success,
        summary="Pause a NATS consumer",
        description="What its stream gets meanwhile waits there, for as long as that keeps it.",
    )
    async def pause_nats_consumer(consumer: str) -> Response:
        await _in_thread(lambda: consumers.pause(consumer, paused=True))
        return Json(SUCCESS)

    @api.post(f"{_ONE}/resume", response_model=Success, summary="Let a NATS consumer go on")
    async def resume_nats_consumer(consumer: str) -> Response:
        await _in_thread(lambda: consumers.pause(consumer, paused=False))
        return Json(SUCCESS)

    @api.post(
        f"{_ONE}/rewind",
        response_model=Success,
        summary="Publish from another position on",
        responses=documented(413),
        openapi_extra=body_of(Rewind),
    )
    async def rewind_nats_consumer(consumer: str, request: Request) -> Response:
        to = _place(await read_object(request))
        await _in_thread(lambda: consumers.rewind(consumer, to))
        return Json(SUCCESS)

    return api


async def _in_thread(work: Callable[[], T]) -> T:
    """Return what `work` does with the store, whose calls block."""
    try:
        return await asyncio.to_thread(work)
    except StoreError as error:
        status = 404 if error.code == NO_CONSUMER else 503
        headers = None if status == 404 else {"Retry-After": "1"}
        raise Problem(status, str(error), headers=headers) from None


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def _place(body: dict[str, Any]) -> Place:
    try:
        to = Rewind.model_validate(body).to
        if isinstance(to, datetime):
            return to.astimezone(UTC)
    except (ValueError, OverflowError):
        raise wrong(
            "to",
            'expected "all", "new", a position as in {"lsn": 23876608, "idx": 0}, or a time with '
            "its offset as in 2026-01-31T12:00:00Z",
        ) from None
    return Position(to.lsn, to.idx) if isinstance(to, PositionBody) else to
