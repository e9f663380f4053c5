"""Checks the records store, before a run has made the records table in it."""

from __future__ import annotations

from penstock.config.reserved import is_known
from penstock.config.sources import PostgresSource
from penstock.core.errors import StoreError
from penstock.core.finding import Finding
from penstock.core.record_forms import SYNCS
from penstock.syncs.records import schema

TABLES = [("penstock", "records")]


def inspect(source: PostgresSource) -> Finding | None:
    """Return what is found of the store of the source `syncs`; None where its table is there."""
    what = f"source {SYNCS}"
    if not is_known(source):
        return Finding("ok", what, "the records are in the embedded store")
    try:
        if schema.is_made(source.url.get_secret_value()):
            return None
    except StoreError as error:
        return Finding("error", what, error.message, error.remedy)
    return Finding("ok", what, "`penstock run` makes the records table")
