"""Syncs of an API with faults through `penstock run`: kills of all kinds, and what a worker receives.

Two syncs have the same collections and upstream ids. The consumer's list of syncs changes in between.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import psycopg
import pytest
import requests

from penstock.embedded.handles import Database
from penstock.streams.store import Store

from ..faulty_api import COLLECTIONS, PROVIDER, Change, FaultyApi, Turn
from ..loopback_api import Answer, Asked, LoopbackApi
from ..pipeline import PATIENCE, Penstock
from .api import Api

SYNCS = ("one", "two")
FAULTS = ("429", "429 later", "500", "400", "cut", "hang-up", "twice")
IDS = 9


class Apis:
    """Two APIs behind one address, by the token."""

    def __init__(self) -> None:
        self.of = {name: FaultyApi(time.time) for name in SYNCS}
        self.random = random.Random(14)
        self._lock = threading.Lock()

    def answer(self, asked: Asked) -> Answer:
        api = self.of[asked.headers["authorization"].removeprefix("Bearer token-of-")]
        with self._lock:
            try:
                status, headers, body = api.answer(asked.path, asked.query)
            except requests.exceptions.ConnectionError:
                return Answer(b"[]", cut=0)
        headers.pop("Date")
        return Answer(body, status, headers)

    def change(self, name: str, count: int) -> None:
        """Change objects now, and others between the answers to come, some of which fail."""
        api, draw = self.of[name], self.random
        with self._lock:
            for _ in range(count):
                change = Change(
                    draw.choice(COLLECTIONS), draw.randint(1, IDS), draw.random() < 0.3,
                    draw.choice((0, 0, 3)),
                )  # fmt: skip
                if draw.random() < 0.5:
                    api.change(change)
                else:
                    fault = draw.choice(FAULTS) if draw.random() < 0.3 else None
                    api.turns.append(Turn((change,), fault))

    def quiet(self, name: str) -> bool:
        """Whether no change is to come."""
        return not self.of[name].turns


def config(url: str) -> str:
    provider = PROVIDER | {
        "base_url": url, "auth": {"type": "bearer", "token": "{token}"},
        "rate_limit": {"allowed_requests": 1000},
    }  # fmt: skip
    return json.dumps(
        {
            "store": "${STORE}",
            "providers": {"fake": provider},
            "credentials": {
                name: {"provider": "fake", "properties": {"token": f"token-of-{name}"}}
                for name in SYNCS
            },
            "syncs": {
                name: {
                    "provider": "fake", "collections": list(COLLECTIONS), "credential": name,
                    "frequency": "1s", "sweep_interval": "3s", "max_deleted_share": 1,
                }
                for name in SYNCS
            },
            "spark": {"master": "local[2]"},
        }
    )  # fmt: skip


class Rig:
    """A run, its APIs, and a worker that keeps all that it receives."""

    def __init__(self, folder: Path, database: Database, url: str, apis: Apis) -> None:
        (folder / "penstock.yaml").write_text(config(url))
        self.url, self.apis = database.url, apis
        self.run = Penstock(folder, environment={"STORE": database.url})
        self.events: list[dict[str, Any]] = []
        self.ids: dict[str, str] = {}
        with Store.open(database.url) as store:
            self.api = Api(self.run, store.tokens.create("admin", "admin"))

    def begin(self) -> None:
        self.run.start().wait_ready()
        self.ids = {each["name"]: each["id"] for each in self.api("GET", "/v1/syncs")["data"]}
        self.api(
            "POST", "/v1/http-consumers",
            {"name": "workers", "stream": "events", "filters": {"sync_id": [self.ids["one"]]}},
        )  # fmt: skip

    def receive(self) -> list[dict[str, Any]]:
        found = [each["event"] for each in self.api.receive("workers")]
        self.events += found
        return found

    def wait(self, true: Callable[[], bool], what: str) -> None:
        def done() -> bool:
            self.receive()
            return true()

        self.run.wait_for(done, PATIENCE, what)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["sync_id"] == self.ids[name]]

    def is_copied(self, name: str) -> bool:
        """Whether the table has what the API has."""
        api = self.apis.of[name]
        query = "SELECT collection_id, upstream_id, data FROM penstock.records WHERE NOT deleted"
        with psycopg.connect(self.url) as connection:
            rows = connection.execute(
                f"{query} AND sync_id = %s", [UUID(self.ids[name])]
            ).fetchall()
        found: dict[str, Any] = {collection: {} for collection in COLLECTIONS}
        for collection, upstream_id, data in rows:
            found[collection.removeprefix("fake:")][upstream_id] = data
        return self.apis.quiet(name) and found == {c: api.alive(c) for c in COLLECTIONS}

    def kill(self, word: str) -> None:
        """Kill one process of the run's, by a word of its command."""
        for process in psutil.Process(self.run.process.pid).children(recursive=True):
            if word in " ".join(process.cmdline()):
                process.kill()
                return
        pytest.fail(f"no process of the run has {word} in its command")


@pytest.fixture
def rig(database: Database, tmp_path: Path) -> Iterator[Rig]:
    apis = Apis()
    with LoopbackApi(apis.answer) as server:
        made = Rig(tmp_path, database, server.url, apis)
        with made.run:
            yield made


def fold(events: list[dict[str, Any]], state: dict[Any, Any]) -> dict[Any, Any]:
    """Return what events make of a state: by collection and id the version, None where it is deleted."""
    for event in events:
        key = event["collection_id"].removeprefix("fake:"), event["upstream_id"]
        before, version = state.get(key), event["data"]["v"]
        if event["event_type"] == "deleted":
            assert before is not None, f"{key} is deleted twice"
            state[key] = None
            continue
        assert (event["event_type"] == "inserted") == (before is None), (
            f"{key}: {event} after {before}"
        )
        assert version > (before or 0), f"{key} has version {version} after {before}"
        state[key] = version
    return state


def versions(api: FaultyApi) -> dict[Any, Any]:
    return {(c, id_): of["v"] for c in COLLECTIONS for id_, of in api.alive(c).items()}


def test_kills_and_a_changed_list_of_syncs_lose_and_repeat_nothing(rig: Rig) -> None:
    run, apis = rig.run, rig.apis
    for name in SYNCS:
        apis.change(name, 30)
    rig.begin()
    rig.wait(lambda: len(rig.of("one")) > 5, "a part of the backfill")
    rig.kill("penstock.spark.daemon")  # Spark's Python workers
    for name in SYNCS:
        apis.change(name, 20)
    rig.wait(lambda: all(map(rig.is_copied, SYNCS)), "all, after the kill of the workers")

    # A change of `one` that is received is behind all of `two`.
    before = len(rig.events)
    apis.of["one"].change(Change("flagged", 1))
    rig.wait(lambda: len(rig.events) > before, "a change")
    assert rig.of("two") == []
    begun = versions(apis.of["two"])
    both = {"filters": {"sync_id": [rig.ids[name] for name in SYNCS]}}
    rig.api("PATCH", "/v1/http-consumers/workers", both)

    for name in SYNCS:
        apis.change(name, 20)
    rig.wait(lambda: bool(rig.of("two")), "an event of the sync that was added")
    rig.kill("java")
    assert run.wait() != 0
    for name in SYNCS:
        apis.change(name, 20)
    run.start().wait_ready()
    before = len(rig.events)
    rig.wait(lambda: len(rig.events) > before, "events after the kill of the JVM")
    for name in SYNCS:
        apis.change(name, 20)
    run.kill_tree()
    run.start().wait_ready()
    rig.wait(lambda: all(map(rig.is_copied, SYNCS)), "all, after the kill of the run")

    def all_came() -> bool:
        states = [fold(rig.of("one"), {}), fold(rig.of("two"), dict(begun))]
        found = [{k: v for k, v in state.items() if v is not None} for state in states]
        return found == [versions(apis.of[name]) for name in SYNCS]

    rig.wait(all_came, "the events of all")
    ids = [event["event_id"] for event in rig.events]
    assert len(set(ids)) == len(ids)
    assert sum((api.faults for api in apis.of.values()), start=type(apis.of["one"].faults)())
    assert run.stop() == 0
