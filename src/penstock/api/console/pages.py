"""The pages, in the order of the navigation."""

from __future__ import annotations

from typing import Final

from penstock.api.console import overview, sources, targets, tokens
from penstock.api.console import backfills, changes, overview, syncs, tokens
from penstock.api.console import dead_letters, overview, streams, tokens
from penstock.api.console.page import Page

PAGES: Final[tuple[Page, ...]] = (
    overview.PAGE,
    sources.PAGE,
    targets.PAGE,
    backfills.PAGE,
    syncs.PAGE,
    changes.PAGE,
    streams.PAGE,
    dead_letters.PAGE,
    tokens.PAGE,
)
