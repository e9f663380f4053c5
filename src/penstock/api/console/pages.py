"""The pages, in the order of the navigation."""

from __future__ import annotations

from typing import Final

from penstock.api.console import consumer_form, overview, sink_trial, tokens
from penstock.api.console.page import Page

PAGES: Final[tuple[Page, ...]] = (
    overview.PAGE,
    sink_trial.PAGE,
    consumer_form.PAGE,
    tokens.PAGE,
)
