"""`/v1/sinks/{sink}/…`: sinks to NATS are paused and resumed. Their run does it within seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastapi import Request
from fastapi.responses import Response

from penstock.api.manage.access import grant_of
from penstock.api.manage.context import Context
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.settings import name_of
from penstock.api.problems import Problem, documented
from penstock.api.requests import SUCCESS, Json
from penstock.api.schemas import Success
from penstock.core.errors import StoreError
from penstock.desired.actions import Action
from penstock.streams.pauses import NO_SINK, NOT_PAUSABLE, pause_sink, resume_sink

_SINK: Final = "/v1/sinks/{sink}"
_STATUSES: Final = {NO_SINK: 404, NOT_PAUSABLE: 409}

api = new_router()


async def _act(
    context: Context, request: Request, action: str, work: Callable[[str], None], text: str
) -> Response:
    """Do `work` for the sink that a path has by its name or UUID, and add it to the audit log."""
    name = await name_of(context, "sink", text)
    try:
        await context.act(request, Action("sink", name, action), work, name)
    except StoreError as error:
        if error.code in _STATUSES:
            raise Problem(_STATUSES[error.code], str(error)) from None
        raise
    return Json(SUCCESS)


@api.post(
    f"{_SINK}/pause",
    response_model=Success,
    summary="Deliver nothing to a sink until it is resumed",
    description="Its messages wait in the store. A stream is not paused: its consumers are.",
    responses=documented(409),
)
async def pause(context: AppContext, sink: str, request: Request) -> Response:
    by = grant_of(request).name
    return await _act(
        context, request, "pause", lambda name: pause_sink(context.store, name, by), sink
    )


@api.post(
    f"{_SINK}/resume",
    response_model=Success,
    summary="Let a sink go on",
    description="What waits for it goes first.",
    responses=documented(409),
)
async def resume(context: AppContext, sink: str, request: Request) -> Response:
    return await _act(
        context, request, "resume", lambda name: resume_sink(context.store, name), sink
    )
