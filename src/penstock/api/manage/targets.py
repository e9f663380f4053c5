"""`/v1/targets/{target}/test`: whether a target can be reached from here."""

from __future__ import annotations

import time
from typing import Any, Final, Literal

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field

from penstock.api.manage.context import Context
from penstock.api.manage.settings import target_of
from penstock.api.problems import documented
from penstock.api.requests import json_answer
from penstock.config.bastion import Bastion
from penstock.config.targets import Target
from penstock.push.reach import reach

_SERVER_SECONDS: Final = 4.0


class _TestedTarget(BaseModel):
    """A target that answered; one of type nats has taken the login, one of type http the connection."""

    type: Literal["nats", "http"]
    address: str
    bastion: str | None = Field(description="The bastion that the connection went through.")
    version: str | None = Field(description="The NATS server's.")
    jetstream: bool | None = Field(description="Whether the NATS server has JetStream.")
    milliseconds: float


def add(api: APIRouter, context: Context) -> None:
    """Add the endpoint to `api`."""

    @api.post(
        "/v1/targets/{target}/test",
        response_model=_TestedTarget,
        summary="Test the connection of a target",
        description="The `code` of a problem begins with `bastion_` where the bastion is at fault.",
        responses=documented(409, 502),
    )
    async def test_target(target: str) -> Response:
        settings, bastion = await target_of(context, target)
        return json_answer(await context.run_test(_tested, settings, bastion))


def _tested(target: Target, bastion: Bastion | None) -> dict[str, Any]:
    began = time.monotonic()
    reached = reach(target, bastion, "penstock test", _SERVER_SECONDS)
    return {
        "type": target.type,
        **reached._asdict(),
        "bastion": None if bastion is None else str(bastion),
        "milliseconds": round((time.monotonic() - began) * 1000, 1),
    }
