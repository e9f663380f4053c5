"""`/v1/check`: what `penstock check` finds in the desired state."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel

from penstock.api.manage.context import Context, Tools
from penstock.api.manage.settings import config_of
from penstock.api.requests import json_answer


class _Finding(BaseModel):
    level: Literal["ok", "warning", "error"]
    subject: str
    message: str
    fix: str


class _Report(BaseModel):
    """What was found, in the order in which it was looked at."""

    findings: list[_Finding]
    errors: int
    warnings: int


def add(api: APIRouter, context: Context, tools: Tools) -> None:
    """Add the endpoint to `api`."""

    @api.get(
        "/v1/check",
        response_model=_Report,
        summary="Check sources, sinks and the store",
        description="As `penstock check` does, of the desired state; one check runs at a time.",
    )
    async def check() -> Response:
        config, refused = await config_of(context)
        findings = await context.run_long(tools.check, config, refused)
        levels = [finding.level for finding in findings]
        return json_answer(
            {
                "findings": [dataclasses.asdict(finding) for finding in findings],
                "errors": levels.count("error"),
                "warnings": levels.count("warning"),
            }
        )
