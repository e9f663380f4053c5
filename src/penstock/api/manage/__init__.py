"""The Management API, a module a noun: what operators, their tooling and a console call."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from penstock.api.manage import (
    audit,
    backfills,
    bastions,
    checks,
    databases,
    dead_letters,
    entities,
    http_consumers,
    messages,
    nats_consumers,
    plans,
    providers,
    records,
    sinks,
    status,
    streams,
    syncs,
    targets,
    tokens,
    trials,
)
from penstock.api.manage.access import permitted
from penstock.api.manage.context import Context
from penstock.api.problems import documented
from penstock.api.status import Status
from penstock.streams.consumers.registry import Consumers


def router(
    consumers: Consumers, context: Context | None = None, state: Status | None = None
) -> APIRouter:
    """Return the endpoints for admins and viewers.

    Without a `context` those alone that need nothing but `consumers`, which may be in memory.
    """
    api = APIRouter(dependencies=[Depends(permitted)], responses=documented(), tags=["manage"])
    api.routes.extend(streams.api.routes)
    api.routes.extend(http_consumers.api.routes)
    if state is not None:
        api.routes.extend(status.api.routes)
    if context is not None:
        api.routes.extend(messages.api.routes)
        api.routes.extend(entities.api.routes)
        api.routes.extend(nats_consumers.api.routes)
        api.routes.extend(sinks.api.routes)
        api.routes.extend(databases.api.routes)
        api.routes.extend(targets.api.routes)
        api.routes.extend(bastions.api.routes)
        api.routes.extend(providers.api.routes)
        api.routes.extend(syncs.api.routes)
        api.routes.extend(records.api.routes)
        api.routes.extend(backfills.api.routes)
        api.routes.extend(dead_letters.api.routes)
        api.routes.extend(tokens.api.routes)
        api.routes.extend(plans.api.routes)
        api.routes.extend(audit.api.routes)
        if context.tools is not None:
            api.routes.extend(checks.api.routes)
            api.routes.extend(trials.api.routes)
    return api
