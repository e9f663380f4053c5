"""Syncs on a Spark standalone master: both workers fetch, one budget holds, and one worker is killed."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import yaml

from penstock.embedded.handles import Database
from penstock.streams.store import Store

from ..faulty_api import COLLECTIONS, PROVIDER, Change, FaultyApi, Served, Turn, made
from ..loopback_api import Answer, Asked, LoopbackApi
from ..pipeline import PATIENCE, Penstock
from ..spark_cluster import ENVIRONMENT, QUICK_JAVA, SparkCluster, spark_cluster
from ..sync_oracle import wrong_with
from .api import Api

SYNCS, IDS, SEED = 4, 60, 14
ALLOWED, INTERVAL, CONCURRENT = 40, 1.0, 4
PAGES: Final = 20
"""So many pages each worker has fetched when the API begins to change."""
FAULTS: Final = ("429 later", "500", "cut", "hang-up", "twice")
"""Those after which a sync goes on within seconds."""
TURNS: Final = 200


class Crm:
    """The API, of which all syncs read the same; from `begin` on it changes and fails as it is asked."""

    def __init__(self) -> None:
        at_first = [Change(name, id_, late=10 * id_) for name in COLLECTIONS for id_ in range(IDS)]
        self.faulty = made(FaultyApi(time.time), at_first)
        self.times: list[float] = []
        self.most = 0
        """How many requests were under way at most."""
        self._served = Served(self.faulty)
        self._under_way = 0
        self._ports: dict[int, int] = {}
        self._workers: dict[int, int] = {}
        self._look_at = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        chance = random.Random(SEED)
        self.faulty.turns = [_turn(chance) for _ in range(TURNS)]

    def answer(self, asked: Asked) -> Answer:
        with self._lock:
            self.times.append(time.monotonic())
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            self._ports[asked.port] = self._ports.get(asked.port, 0) + 1
        time.sleep(0.05)  # an API is waited for most of the time
        answer = self._served.answer(asked)
        with self._lock:
            self._under_way -= 1
        return answer

    def pages(self, cluster: SparkCluster) -> list[int]:
        """Return how many requests the processes of each worker have made, by their connections."""
        with self._lock:
            counts = dict(self._ports)
        if counts.keys() - self._workers and time.monotonic() > self._look_at:
            for worker in range(len(cluster.workers)):
                for process in cluster.tree(worker):
                    with contextlib.suppress(psutil.Error):
                        ports = {c.laddr.port for c in process.net_connections("tcp4") if c.laddr}
                        self._workers |= dict.fromkeys(ports, worker)
            self._look_at = time.monotonic() + 1.0  # it takes a while
        found = [0] * len(cluster.workers)
        for port, count in counts.items():
            if (of := self._workers.get(port)) is not None:
                found[of] += count
        return found


def _turn(chance: random.Random) -> Turn:
    changes: tuple[Change, ...] = ()
    if chance.random() < 0.3:
        changes = (
            Change(chance.choice(COLLECTIONS), chance.randrange(IDS), chance.random() < 0.3),
        )
    return Turn(changes, chance.choice(FAULTS) if chance.random() < 0.03 else None)


@pytest.fixture
def crm() -> Crm:
    return Crm()


def document(url: str, store: str, master: str) -> str:
    rate = {
        "allowed_requests": ALLOWED, "interval": f"{INTERVAL:g}s",
        "max_concurrent_requests": CONCURRENT,
    }  # fmt: skip
    sync = {
        "provider": "fake", "collections": [*COLLECTIONS], "credential": "key", "frequency": "2s",
        "sweep_interval": "15s", "max_deleted_share": 1.0,
    }  # fmt: skip
    conf = {
        "spark.executor.memory": "512m", "spark.executor.extraJavaOptions": QUICK_JAVA,
        "spark.cores.max": 4, "spark.driver.host": "127.0.0.1",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    }  # fmt: skip
    return yaml.safe_dump(
        {
            "store": store,
            "providers": {"fake": {**PROVIDER, "base_url": url, "rate_limit": rate}},
            "credentials": {"key": {"provider": "fake"}},
            "syncs": {f"s{n}": sync for n in range(SYNCS)},
            "consumers": {"workers": {"stream": "events"}},
            "spark": {"master": master, "conf": conf},
        }
    )


class Worker:
    """Receives and acks; `events` are what came."""

    def __init__(self, api: Api) -> None:
        self.events: list[Any] = []
        self._api = api

    def receive(self) -> None:
        path = "/v1/consumers/workers"
        found = self._api("GET", f"{path}/receive?batch_size=1000&wait_for_ms=200")["data"]
        if found:
            tokens = [message["ack_token"] for message in found]
            self._api("POST", f"{path}/ack", {"ack_tokens": tokens})
        self.events += [message["event"] for message in found]


@pytest.mark.timeout(1500)
def test_both_workers_fetch_and_the_death_of_one_loses_and_repeats_nothing(
    database: Database, tmp_path: Path, crm: Crm, api: LoopbackApi
) -> None:
    with spark_cluster(tmp_path, cores=2) as cluster:
        text = document(api.url, database.url, cluster.master)
        (tmp_path / "penstock.yaml").write_text(text)
        with Store.open(database.url) as store:
            token = store.tokens.create("admin", "admin")
        with Penstock(tmp_path, environment=ENVIRONMENT) as run:
            run.start().wait_ready()
            run.wait_for(
                lambda: min(crm.pages(cluster)) >= PAGES, PATIENCE, "pages of both workers"
            )
            crm.begin()
            half = lambda: len(crm.faulty.turns) < TURNS / 2  # noqa: E731 - it is passed on
            run.wait_for(half, PATIENCE, "half of the changes")
            assert 1 < crm.most <= CONCURRENT, "one budget over both"
            cluster.kill(0)
            run.wait_for(lambda: not crm.faulty.turns, PATIENCE, "the others, by the other worker")
            run.wait_ready()
            worker = Worker(Api(run, token))
            wrong: list[str] = ["not judged"]
            judged_at = 0.0

            def is_right() -> bool:
                nonlocal judged_at
                worker.receive()
                if time.monotonic() < judged_at + 2.0:  # judging all takes the cores from the run
                    return False
                judged_at = time.monotonic()
                wrong[:] = wrong_with(crm.faulty, database.url, SYNCS, worker.events)
                return not wrong

            try:
                # The slots that are left go to the syncs and to the source in turns of a minute.
                run.wait_for(is_right, 2 * PATIENCE, "what the API has")
            except AssertionError as error:
                raise AssertionError(f"{wrong[:1]}\n{error}") from None
            seconds = crm.times[-1] - crm.times[0]
            most = ALLOWED * (int((seconds + 1.0) / INTERVAL) + 1)  # they arrive with some delay
            assert len(crm.times) <= most, "one budget over both"
            starts = [event for event in run.events() if event["event"] == "syncs run"]
            assert len(starts) == 1, "the query goes on"
            assert run.stop() == 0
