"""`/v1/check`: what `penstock check` finds in the desired state, or of one source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fastapi.responses import Response
from pydantic import BaseModel

from penstock.api.manage.endpoints import AppContext, AppTools, new_router
from penstock.api.manage.settings import config_of, configured_of, pipelines_of
from penstock.api.problems import Problem, documented
from penstock.api.requests import json_answer
from penstock.core.finding import Finding

api = new_router()


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


@api.get(
    "/v1/check",
    response_model=_Report,
    summary="Check sources, sinks and the store",
    description="As `penstock check` does, of the desired state; one check runs at a time.",
)
async def check(context: AppContext, tools: AppTools) -> Response:
    config, refused = await config_of(context)
    return _report(await context.run_long(tools.check, config, refused))


@api.get(
    "/v1/sources/{source}/check",
    response_model=_Report,
    summary="Check a source",
    description="Its server, role, publication, slot and tables: what is missing, and its remedy.",
    responses=documented(409, 424),
)
async def check_source(context: AppContext, tools: AppTools, source: str) -> Response:
    name = (await configured_of(context, "source", source)).name
    config = await pipelines_of(context)
    if name not in config.sources:
        raise Problem(409, f"Source {name!r} can't be used beside the others: see `refusal` of it.")
    return _report(await context.run_test(tools.check_source, config, name))


def _report(findings: Sequence[Finding]) -> Response:
    levels = [finding.level for finding in findings]
    return json_answer(
        {
            "findings": [finding.as_json() for finding in findings],
            "errors": levels.count("error"),
            "warnings": levels.count("warning"),
        }
    )
