"""The routes of the Management API, by what an app has to have for them."""

from __future__ import annotations

from typing import Final

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

OF_CONSUMERS: Final = (*streams.api.routes, *http_consumers.api.routes)
"""Those that need nothing but consumers, which may be in memory."""
OF_STORE: Final = (
    *status.api.routes,
    *messages.api.routes,
    *entities.api.routes,
    *nats_consumers.api.routes,
    *sinks.api.routes,
    *databases.api.routes,
    *targets.api.routes,
    *bastions.api.routes,
    *providers.api.routes,
    *syncs.api.routes,
    *records.api.routes,
    *backfills.api.routes,
    *dead_letters.api.routes,
    *tokens.api.routes,
    *plans.api.routes,
    *audit.api.routes,
)
"""Those that need a store."""
OF_TOOLS: Final = (*checks.api.routes, *trials.api.routes)
"""Those that need `Tools`, too."""
