"""The pages, in the order of the navigation."""

from __future__ import annotations

from typing import Final

from penstock.api.console import (
    backfills,
    changes,
    consumer_form,
    credentials,
    dead_letters,
    overview,
    sink_trial,
    sources,
    streams,
    syncs,
    targets,
    tokens,
)
from penstock.api.console.page import ConsolePage

PAGES: Final[tuple[ConsolePage, ...]] = (
    overview.PAGE,
    sources.PAGE,
    sink_trial.PAGE,
    streams.PAGE,
    consumer_form.PAGE,
    dead_letters.PAGE,
    backfills.PAGE,
    syncs.PAGE,
    credentials.PAGE,
    targets.PAGE,
    changes.PAGE,
    tokens.PAGE,
)
