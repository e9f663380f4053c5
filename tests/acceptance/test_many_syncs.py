"""Many syncs on one query: each record once, and the fetching spreads over a Spark cluster."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
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
    """A list of objects, and which processes have asked for it."""

    def __init__(self) -> None:
        self.versions = [1] * RECORDS
        self.askers: dict[int, int] = {}  # by the client's port
        self.spreads = False
        self.spread = threading.Event()
        """Is set once two executors have asked: where it `spreads`, none is answered before."""

    def answer(self, asked: Asked) -> Answer:
        if asked.port not in self.askers:
            self.askers[asked.port] = _owner(asked.port)
        if len(set(self.askers.values())) > 1:
            self.spread.set()
        if self.spreads:
            self.spread.wait(PATIENCE)
        return Answer([{"id": n, "version": of} for n, of in enumerate(self.versions)])


def _owner(port: int) -> int:
    """Return the executor whose Python worker has a port."""
    found = [c.pid for c in psutil.net_connections("tcp4") if c.laddr and c.laddr.port == port]
    for pid in found:
        for process in psutil.Process(pid).parents() if pid else ():
            if any("CoarseGrainedExecutorBackend" in text for text in process.cmdline()):
                return process.pid
    return 0


@pytest.fixture
def crm() -> Crm:
    return Crm()


@pytest.fixture
def api(crm: Crm) -> Iterator[LoopbackApi]:
    with LoopbackApi(crm.answer) as made:
        yield made


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


def test_the_fetching_spreads_over_the_workers_of_a_cluster(
    database: Database, tmp_path: Path, crm: Crm, api: LoopbackApi, cluster: str
) -> None:
    syncs = 40  # more than one task takes at a time
    crm.spreads = True
    spark = {
        "master": cluster,
        "conf": {
            "spark.executor.memory": "512m", "spark.cores.max": 4,
            "spark.driver.host": "127.0.0.1",
            # The query of the table of records would take one worker alone, were that the first.
            "spark.scheduler.minRegisteredResourcesRatio": 1.0,
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "240s",
        },
    }  # fmt: skip
    (tmp_path / "penstock.yaml").write_text(document(api.url, database.url, syncs, spark))
    with Penstock(tmp_path) as run:
        run.start()
        run.wait_for(crm.spread.is_set, PATIENCE, "asking the API from two executors")
        run.wait_for(lambda: _sum(run, "inserted") == syncs * RECORDS, PATIENCE, "all records")
        executors = set(crm.askers.values())
        assert 0 not in executors, "executors alone ask the API"
        assert len(executors) == 2
        with database.connect() as connection:
            rows = connection.execute(
                "SELECT count(DISTINCT sync_id), count(*) FROM penstock.records"
            )
            assert rows.fetchone() == (syncs, syncs * RECORDS)
        assert run.stop() == 0
