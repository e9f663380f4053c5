"""A manifest of Airbyte with its API, and a connector that reads it."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil

from penstock.config.providers import AirbyteProvider
from penstock.syncs.connectors.airbyte import AirbyteConnector
from penstock.syncs.connectors.contract import Kind, Page
from penstock.syncs.connectors.make import connector_of, session_of
from penstock.syncs.local_budget import LocalBudget

from .loopback_api import Answer, Asked

MANIFEST = Path(__file__).with_name("airbyte.yaml")
TOKEN = "hush-hush-token"


class Api:
    """An API of contacts, two to a page, and of their notes."""

    def __init__(self) -> None:
        self.contacts: list[dict[str, Any]] = [
            {"id": i, "name": f"n{i}", "updated_at": f"2026-05-01T10:00:0{i // 3}Z"}
            for i in range(6)
        ]
        self.notes: dict[str, list[dict[str, Any]]] = {}
        self.failures: list[Answer] = []

    def __call__(self, asked: Asked) -> Answer:
        assert asked.headers["authorization"] == f"Bearer {TOKEN}"
        if self.failures:
            return self.failures.pop(0)
        since = asked.query.get("since", "")
        if asked.path.startswith("/contacts/"):
            of = self.notes.get(asked.path.split("/")[2], [])
            return Answer({"items": [each for each in of if each["updated_at"] >= since]})
        found = [each for each in self.contacts if str(each.get("updated_at")) >= since]
        page = int(asked.query.get("page", 0))
        more = str(page + 2) if page + 2 < len(found) else None
        return Answer({"items": found[page : page + 2], "meta": {"next": more}})


class Read:
    """A connector with its session, whose waits are noted and not waited."""

    def __init__(self, url: str, **more: Any) -> None:
        self.waits: list[float] = []
        spec = {
            "type": "airbyte",
            "manifest": {"file": str(MANIFEST)},
            "config": {"api_url": url, "token": "{secret}"},
            "allow_private": True,
            **more,
        }
        self.settings = AirbyteProvider.model_validate(spec)
        found = connector_of("crm", self.settings, {"secret": TOKEN})
        assert isinstance(found, AirbyteConnector)
        self.connector = found
        self.budget = LocalBudget(1000)
        self.session = session_of(found.access, self.budget, sleep=self.waits.append)

    def pages(
        self, name: str, kind: Kind = Kind.BACKFILL, cursor: Any = None, resume: Any = None
    ) -> Generator[Page, None, None]:
        collection = self.connector.collections(self.session)[name]
        for slice_ in self.connector.plan(collection, cursor, kind, self.session):
            object.__setattr__(slice_, "resume", resume)
            yield from self.connector.read(collection, slice_, self.session)

    def ids(
        self, name: str, kind: Kind = Kind.BACKFILL, cursor: Any = None
    ) -> tuple[list[str], Any]:
        pages = list(self.pages(name, kind, cursor))
        assert pages[-1].is_last
        assert not any(page.is_last for page in pages[:-1])
        return [record.upstream_id for page in pages for record in page.records], pages[-1].cursor


def workers() -> list[int]:
    """Return the processes of airbyte-cdk that this one has."""
    return [
        each.pid
        for each in psutil.Process(os.getpid()).children()
        if each.status() != psutil.STATUS_ZOMBIE and "worker.py" in " ".join(each.cmdline())
    ]
