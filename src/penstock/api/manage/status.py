"""`/v1/status`: how the process and its parts are, and the last hour."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from fastapi.responses import Response
from pydantic import BaseModel, Field

from penstock.api.manage.endpoints import AppStatus, new_router
from penstock.api.requests import json_answer
from penstock.api.status import PERIOD

Level = Literal["ready", "degraded", "starting", "failed"]

api = new_router()


class _Problem(BaseModel):
    subject: str
    level: Level
    code: str
    cause: str
    remedy: str
    since: datetime | None


class _Status(BaseModel):
    """What `/status` of `penstock run` has; of an API alone, what the store shows."""

    runs: bool = Field(
        description="Whether this process runs the sources; if not, another one may."
    )
    level: Level
    parts: dict[str, Level]
    problems: list[_Problem] = Field(description="The worst first.")
    sources: dict[str, dict[str, Any]]
    sinks: dict[str, dict[str, Any]]
    nats_consumers: dict[str, dict[str, Any]]
    consumers: dict[str, dict[str, Any]] = {}
    syncs: dict[str, dict[str, Any]] = {}
    budgets: dict[str, dict[str, Any]] = Field({}, description="What credentials have used.")
    backfills: list[dict[str, Any]]


class _History(BaseModel):
    """Samples of the last hour at most, the oldest first; a rate is null where it is not known."""

    period_seconds: float
    at: list[float] = Field(description="Unix times.")
    captured_per_second: list[float | None]
    delivered_per_second: list[float | None]
    latency_seconds: list[float | None] = Field(
        description="From the commit of a transaction until every sink of its source has it, or the"
        " backlog of one that is behind: the mean of those delivered since the sample before."
    )
    lag_messages: list[float] = Field(description="Not acked yet, or in backlogs.")
    lag_seconds: list[float] = Field(description="The age of the oldest message not acked yet.")
    waiting_seconds: list[float] = Field(
        description="How long the oldest message that is captured and not delivered has waited."
    )


@api.get("/v1/status", response_model=_Status, summary="Show how everything is")
async def show_status(status: AppStatus) -> Response:
    return Response(await status.written(), media_type="application/json")


@api.get("/v1/status/history", response_model=_History, summary="Show the last hour's figures")
async def show_history(status: AppStatus) -> Response:
    await status.read()
    return json_answer({"period_seconds": PERIOD, **status.history.as_json()})
