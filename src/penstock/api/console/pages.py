"""The pages, in the order of the navigation."""

from __future__ import annotations

from typing import Final

from penstock.api.console import dead_letters, overview, streams, tokens
from penstock.api.console.page import Page

PAGES: Final[tuple[Page, ...]] = (
    overview.PAGE,
    streams.PAGE,
    dead_letters.PAGE,
    tokens.PAGE,
)
