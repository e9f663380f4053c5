"""Many syncs on one query: each record is delivered once, and each change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.embedded.handles import Database
from penstock.streams.store import Store

from ..loopback_api import Answer, Asked, LoopbackApi
from ..pipeline import PATIENCE, Penstock
from .api import Api

SYNCS, RECORDS = 200, 10
COLLECTION = "crm:contacts"


class Crm:
    """A list of objects."""

    def __init__(self) -> None:
        self.versions = [1] * RECORDS

    def answer(self, asked: Asked) -> Answer:
        return Answer([{"id": n, "version": of} for n, of in enumerate(self.versions)])


@pytest.fixture
def crm() -> Crm:
    return Crm()


def document(url: str, store: str, syncs: int, spark: dict[str, Any]) -> str:
    """Return a configuration with so many syncs of one credential."""
    provider = {
        "type": "rest", "base_url": url, "allow_private": True,
        "paginator": {"type": "single_page"},
        "rate_limit": {"allowed_requests": 10_000, "max_concurrent_requests": syncs},
        "collections": {"contacts": {"path": "contacts", "deletes": {"type": "none"}}},
    }  # fmt: skip
    sync = {
        "provider": "crm", "collections": ["contacts"], "credential": "key", "frequency": "1h",
    }  # fmt: skip
    return yaml.safe_dump(
        {
            "store": store,
            "providers": {"crm": provider},
            "credentials": {"key": {"provider": "crm"}},
            "syncs": {f"s{n}": sync for n in range(syncs)},
            "consumers": {"workers": {"stream": "events"}},
            "spark": spark,
        }
    )


class Worker:
    """Receives and acks; `seen` counts what came."""

    def __init__(self, api: Api) -> None:
        self.seen: Counter[tuple[str, str, str]] = Counter()
        self._api = api

    def has(self, count: int) -> bool:
        path = "/v1/consumers/workers"
        found = self._api("GET", f"{path}/receive?batch_size=1000&wait_for_ms=500")["data"]
        if found:
            tokens = [message["ack_token"] for message in found]
            self._api("POST", f"{path}/ack", {"ack_tokens": tokens})
        events = [message["event"] for message in found]
        self.seen.update((e["sync_id"], e["upstream_id"], e["event"]) for e in events)
        return self.seen.total() >= count


def _sum(run: Penstock, name: str) -> int:
    """Return a count of all syncs together."""
    syncs = run.status().get("syncs", {}).values()
    return sum(sync["collections"].get(COLLECTION, {}).get(name, 0) for sync in syncs)


def test_many_syncs_on_one_query_deliver_each_record_once(
    database: Database, tmp_path: Path, crm: Crm, api: LoopbackApi
) -> None:
    text = document(api.url, database.url, SYNCS, {"master": "local[2]"})
    (tmp_path / "penstock.yaml").write_text(text)
    with Store.open(database.url) as store:
        token = store.tokens.create("admin", "admin")
    with Penstock(tmp_path) as run:
        run.start().wait_ready()
        ask = Api(run, token)
        worker = Worker(ask)
        run.wait_for(lambda: worker.has(SYNCS * RECORDS), PATIENCE, "each record of each sync")
        assert len({sync for sync, _, _ in worker.seen}) == SYNCS
        assert {event for _, _, event in worker.seen} == {"inserted"}
        assert set(worker.seen.values()) == {1}

        crm.versions[3] = 2
        for n in range(SYNCS):
            ask("POST", f"/v1/syncs/s{n}/backfill", {})
        run.wait_for(
            lambda: _sum(run, "changed") == SYNCS, PATIENCE, "each sync to read the change"
        )
        run.wait_for(lambda: worker.has(SYNCS * (RECORDS + 1)), PATIENCE, "what has changed")
        updated = [key for key, count in worker.seen.items() if key[2] == "updated" and count == 1]
        assert Counter(upstream for _, upstream, _ in updated) == {"3": SYNCS}
        assert worker.seen.total() == SYNCS * (RECORDS + 1)

        runs = [event for event in run.events() if event["event"] == "syncs run"]
        assert [event["syncs"] for event in runs] == [SYNCS], "one query has them all"
        assert run.stop() == 0
