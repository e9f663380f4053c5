"""Syncs through `penstock run`: kills lose nothing, and settings change without a restart."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from penstock.embedded.handles import Database

from ..loopback_api import Answer, Asked, LoopbackApi
from ..pipeline import PATIENCE, WORKER, Penstock, penstock, runs

CONFIG = """\
store: ${STORE}
providers:
  crm:
    type: rest
    base_url: ${API}
    allow_private: true
    auth: {type: bearer, token: "{token}"}
    paginator: {type: offset, limit: 20}
    rate_limit: {allowed_requests: 1000}
    collections:
      contacts: &collection
        path: contacts
        data_selector: data
        params: {since: "{cursor}"}
        incremental: {cursor_path: changed, format: number, order: ascending, overlap: 1s}
        deletes: {type: sweep}
      deals: {<<: *collection, path: deals}
credentials:
  key: {provider: crm, properties: {token: "${TOKEN}"}}
spark:
  master: local[2]
"""
SYNCS = """\
syncs:
  customers: {provider: crm, collections: [COLLECTIONS], credential: key, frequency: 1s}
"""


class Crm:
    """Two collections of objects, by id and when each was changed."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[int, int]] = {"contacts": {}, "deals": {}}
        self.slowly = threading.Event()
        self.go = threading.Semaphore(0)

    def answer(self, asked: Asked) -> Answer:
        if self.slowly.is_set():
            self.go.acquire(timeout=0.2)
        if asked.headers["authorization"] != "Bearer good-token":
            return Answer({"message": "no such token"}, 401)
        since, at = int(asked.query.get("since", 0)), int(asked.query.get("offset", 0))
        objects = self.objects[asked.path.strip("/")]
        found = sorted((when, id_) for id_, when in objects.items() if when >= since)
        return Answer({"data": [{"id": id_, "changed": when} for when, id_ in found[at : at + 20]]})


@pytest.fixture
def crm() -> Crm:
    return Crm()


class Rig:
    """A run in a folder, and its table of records."""

    def __init__(self, folder: Path, database: Database, api: LoopbackApi) -> None:
        self.folder = folder
        self.url = database.url
        self.environment = {"STORE": database.url, "API": api.url, "TOKEN": "good-token"}
        self.configure("contacts")
        self.run = Penstock(folder, environment=self.environment)

    def configure(self, collections: str | None) -> None:
        path = self.folder / "penstock.yaml"
        syncs = "" if collections is None else SYNCS.replace("COLLECTIONS", collections)
        path.write_text(CONFIG + syncs)

    def slots(self) -> int:
        with psycopg.connect(self.url) as connection:
            query = "SELECT 1 FROM pg_replication_slots WHERE slot_name = 'penstock_syncs'"
            return connection.execute(query).rowcount

    def count(self, collection: str = "crm:contacts") -> int:
        with psycopg.connect(self.url) as connection:
            row = connection.execute(
                "SELECT count(*) FROM penstock.records WHERE collection_id = %s AND NOT deleted",
                [collection],
            ).fetchone()
        return 0 if row is None else int(row[0])

    def collection(self, name: str = "crm:contacts") -> dict[str, Any]:
        status = self.run.status().get("syncs", {})
        found: dict[str, Any] = status.get("customers", {}).get("collections", {}).get(name, {})
        return found

    def wait(self, true: Any, what: str) -> None:
        self.run.wait_for(true, PATIENCE, what)


def test_kills_lose_nothing_and_settings_change_in_the_run(
    database: Database, tmp_path: Path, crm: Crm, api: LoopbackApi
) -> None:
    crm.objects["contacts"] = {n: n for n in range(1, 1001)}
    crm.objects["deals"] = {n: n for n in range(1, 41)}
    crm.slowly.set()
    rig = Rig(tmp_path, database, api)
    with rig.run as run:
        run.start().wait_ready()
        rig.wait(lambda: rig.count() > 100, "a part of the backfill")
        run.kill_tree()
        there = rig.count()
        asked = len(api.asked)
        assert there < 1000
        run.start().wait_ready()
        rig.wait(lambda: rig.count() > there + 100, "more of the backfill")
        for process in psutil.Process(run.process.pid).children(recursive=True):
            if runs(process, WORKER):
                process.kill()  # the daemon of Spark's workers, and what it has forked
                break
        crm.slowly.clear()
        crm.go.release(10_000)
        rig.wait(lambda: rig.collection().get("phase") == "polling", "the end of the backfill")
        assert rig.count() == 1000
        sinces = [int(a.query.get("since", 0)) for a in api.asked[asked:] if a.query]
        assert min(s for s in sinces) > 0, "it went on where it was"

        crm.objects["contacts"][5] = 2000
        rig.wait(lambda: rig.collection()["changed"] == 1, "a change")

        rig.configure("contacts, deals")
        assert penstock("apply", "--yes", cwd=tmp_path, environment=rig.environment).returncode == 0
        rig.wait(lambda: rig.count("crm:deals") == 40, "the collection that was added")
        rig.configure("deals")
        assert penstock("apply", "--yes", cwd=tmp_path, environment=rig.environment).returncode == 0
        rig.wait(lambda: not rig.collection(), "the collection that was removed")
        assert rig.count() == 1000

        starts = [event for event in run.events() if event["event"] == "syncs run"]
        assert len(starts) <= 2, "only the killed workers began the query anew"

        assert rig.slots() == 1
        rig.configure(None)
        assert (
            penstock(
                "apply", "--yes", "--prune", cwd=tmp_path, environment=rig.environment
            ).returncode
            == 0
        )
        rig.wait(lambda: rig.slots() == 0, "the end of the slot")
        assert run.stop() == 0
