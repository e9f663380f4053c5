"""A copy of a collection, kept by a connector as a sync keeps it."""

from __future__ import annotations

import json
from typing import Any

from penstock.syncs.connectors.contract import Collection, Json, Kind, Page, Record
from penstock.syncs.connectors.make import connector_of, ready_settings, session_of
from penstock.syncs.connectors.rest import RestConnector
from penstock.syncs.local_budget import LocalBudget


class Copy:
    """A copy of a collection, kept as a sync keeps it."""

    def __init__(self, connector: RestConnector, name: str) -> None:
        self.connector = connector
        self.collection: Collection = connector.collection(name)
        self.session = session_of(connector.access, LocalBudget(10_000), sleep=lambda _: None)
        self.cursor: Json = {}
        self.records: dict[str, Record] = {}

    def job(self, kind: Kind) -> list[Page]:
        pages: list[Page] = []
        for slice_ in self.connector.plan(self.collection, self.cursor or None, kind, self.session):
            for page in self.connector.read(self.collection, slice_, self.session):
                assert not page.unreadable
                pages.append(page)
                self.cursor |= page.cursor or {}
                for record in page.records:
                    self.records[record.upstream_id] = record
        return pages

    def alive(self) -> dict[str, Any]:
        return {
            key: json.loads(each.data) for key, each in self.records.items() if not each.deleted
        }


def made(provider: str, url: str, **properties: str) -> RestConnector:
    """Return a ready connector whose API is at `url`."""
    ready = ready_settings(provider)
    changes: dict[str, Any] = {"allow_private": True}
    found = connector_of(provider, None, properties)
    assert isinstance(found, RestConnector)
    return type(found)(provider, ready.model_copy(update=changes), {"api_url": url, **properties})
