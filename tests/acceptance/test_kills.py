"""SIGKILL of whatever serves, writes or keeps a stream, in the middle of receive and ack.

Workers do not stop meanwhile. In the end each version of each row was acked exactly once, in order,
and none was held by two at a time.
"""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import httpx
import psycopg
import pytest

from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.process import free_port

from ..pipeline import COMMAND, PATIENCE, Penstock, kill, penstock, spark_workers, strays
from ..workers_help import Delivery, Ledger, Workers

ACK_WAIT: Final = 1.5
ROWS: Final = 60
WORKERS: Final = 6
CONFIG: Final = """\
store: {store}
sources:
  shop:
    type: postgres
    url: {source}
    tables: [public.items]
sinks:
  items:
    type: stream
    source: shop
consumers:
  workers:
    stream: items
    ack_wait_ms: 1500
spark:
  master: local[2]
"""


class Writer(threading.Thread):
    """Commits new versions of rows until it is stopped, and waits where the workers are far behind.

    Whether a commit that was not answered took place, the table tells.
    """

    def __init__(self, url: str, ledger: Ledger) -> None:
        super().__init__(daemon=True)
        self.written = 0
        self._url = url
        self._ledger = ledger
        self._random = random.Random(7)
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self._url) as connection:
                    self.written = sum(versions(connection).values())
                    while not self._stopping.is_set():
                        self._write(connection)
            except psycopg.OperationalError:
                self._stopping.wait(0.1)

    def _write(self, connection: psycopg.Connection[tuple[int, int]]) -> None:
        insert = (
            "INSERT INTO items SELECT unnest(%s::bigint[]), 1"
            " ON CONFLICT (id) DO UPDATE SET version = items.version + 1"
        )
        count = 0
        for _ in range(self._random.choice((1, 1, 3))):
            rows = self._random.sample(range(ROWS), self._random.choice((1, 3, 10)))
            connection.execute(insert, [rows])
            count += len(rows)
        connection.commit()
        self.written += count
        self._stopping.wait(count / 150)
        while self.written > len(self._ledger.acked) + 500 and not self._stopping.wait(0.05):
            pass

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)
        assert not self.is_alive()


def versions(connection: psycopg.Connection[tuple[int, int]]) -> dict[int, int]:
    return dict(connection.execute("SELECT id, version FROM items").fetchall())


class ApiProcess:
    """`penstock api`, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.log_path = folder / f"api-{self.address.rpartition(':')[2]}.log"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*COMMAND, "api", "--listen", self.address],
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        return self

    def wait_ready(self) -> Self:
        deadline = time.monotonic() + PATIENCE
        while not self._ready():
            assert self._process is not None
            assert self._process.poll() is None, self.log_path.read_text()
            assert time.monotonic() < deadline, self.log_path.read_text()
            threading.Event().wait(0.05)
        return self

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/readyz", timeout=5):
                return True
        except OSError:
            return False

    def end(self, number: int = signal.SIGKILL) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(60)

    def __enter__(self) -> Self:
        return self.start().wait_ready()

    def __exit__(self, *_: object) -> None:
        self.end()


class World:
    """A source, a store, a pipeline between them, two APIs, workers and a writer."""

    def __init__(self, folder: Path, servers: Path) -> None:
        with ExitStack() as stack:
            enter = stack.enter_context
            self.source = enter(EmbeddedPostgres(servers / "source"))
            self.store = enter(EmbeddedPostgres(servers / "store"))
            urls = {"source": self.source.url, "store": self.store.url}
            (folder / "penstock.yaml").write_text(CONFIG.format(**urls))
            database = Database("postgres", self.source.url)
            database.execute("CREATE TABLE items (id bigint PRIMARY KEY, version bigint NOT NULL)")
            database.close()
            self.pipeline = enter(Penstock(folder, own_jvm=True)).start()
            made = penstock("token", "create", "worker", cwd=folder)
            assert made.returncode == 0, made.stderr
            self.token = made.stdout.strip()
            self.apis = [enter(ApiProcess(folder)) for _ in range(2)]
            self.pipeline.wait_ready()
            self.addresses = [self.pipeline.listen, *(api.address for api in self.apis)]
            workers = Workers(WORKERS, self.addresses, self.token, "workers", ACK_WAIT)
            self.ledger = workers.ledger
            self.workers = enter(workers)
            self._stack = stack.pop_all()
            self.write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self) -> None:
        """Commit from now on."""
        self.writer = Writer(self.source.url, self.ledger)
        self._stack.callback(self.writer.stop)
        self.writer.start()

    def kill_worker(self) -> None:
        """Kill processes in which tasks of Spark's deliver, until a batch has to be done again."""
        before = self._restarts()
        last = 0.0

        def restarted() -> bool:
            nonlocal last
            if self._restarts() > before:
                return True
            if time.monotonic() - last > 0.5:  # one between two tasks is not missed
                last = time.monotonic()
                kill(spark_workers(self.pipeline.tree()))
            return False

        self._wait(restarted, "starting the query again")

    def _restarts(self) -> int:
        return int(self.pipeline.status()["sources"]["shop"]["restarts"])

    def counted(self) -> None:
        """Wait until the sink's counter is what was committed; nothing is committed meanwhile."""
        self.writer.stop()
        with psycopg.connect(self.source.url) as connection:
            committed = sum(versions(connection).values())
        self._wait(
            lambda: self._sink()["delivered"] >= committed, f"counting the {committed} committed"
        )
        sink = self._sink()
        assert (sink["delivered"], sink["dead_lettered"], sink["filtered"]) == (committed, 0, 0)
        assert sink["duplicates"] >= 0
        self.write()

    def reported(self) -> None:
        """Wait until the run reports of the consumer what its workers, of other processes too, did."""
        self._wait(lambda: self._consumer()["lag_messages"] == 0, "reported as done")
        consumer = self._consumer()
        assert (consumer["in_flight"], consumer["lag_seconds"], consumer["state"]) == (0, 0, "ok")
        repeated = len(self.ledger.deliveries) - len(self.ledger.acked)
        assert consumer["redeliveries"] >= repeated > 0

    def _consumer(self) -> dict[str, Any]:
        found: dict[str, Any] = self.pipeline.status()["consumers"]["workers"]
        return found

    def _sink(self) -> dict[str, Any]:
        found: dict[str, Any] = self.pipeline.status()["sinks"]["items"]
        return found

    def go_on(self, messages: int = 150) -> None:
        """Wait until so many more messages are acked."""
        target = len(self.ledger.acked) + messages
        self._wait(lambda: len(self.ledger.acked) >= target, f"acking {messages} more")

    def catch_up(self) -> None:
        """Wait until as many messages are acked as are written by now."""
        target = self.writer.written
        self._wait(lambda: len(self.ledger.acked) >= target, "acking what is written")

    def wait_broken(self) -> None:
        """Wait until a request came to nothing that was under way or sent just now."""
        before = self.ledger.broken
        self._wait(lambda: self.ledger.broken > before, "breaking a request")

    def _wait(self, condition: object, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + PATIENCE
        while not condition():
            acked, written = len(self.ledger.acked), self.writer.written
            if time.monotonic() > deadline:
                sinks = self.pipeline.status().get("sinks")
                raise AssertionError(f"not {what}: {acked} of {written} are acked; {sinks}")
            threading.Event().wait(0.02)


@pytest.fixture
def world(server_dir: Path, tmp_path: Path) -> Iterator[World]:
    with World(tmp_path, server_dir / f"kills-{uuid.uuid4().hex[:8]}") as world:
        yield world


def test_killed_in_the_middle_of_receive_and_ack(world: World) -> None:
    pipeline = world.pipeline
    world.go_on()
    for api in world.apis:
        api.end()
        world.wait_broken()
        world.go_on()  # by the others
        api.start().wait_ready()
    for _ in range(3):
        world.store.kill()
        world.wait_broken()
        world.store.start()
        world.go_on()
    run = pipeline.process.pid
    world.source.kill()
    world.source.start()
    world.go_on()
    for _ in range(2):
        world.kill_worker()
        world.go_on()
    world.catch_up()
    world.counted()
    assert pipeline.running
    assert pipeline.process.pid == run
    pipeline.kill_tree()
    world.wait_broken()
    world.apis[0].end()
    world.store.kill()
    world.store.start()
    world.apis[0].start()
    pipeline.start().wait_ready()
    world.apis[0].wait_ready()
    world.catch_up()

    world.writer.stop()
    with psycopg.connect(world.source.url) as connection:
        committed = versions(connection)
    world.writer.written = sum(committed.values())
    world.catch_up()
    seen = len(world.ledger.deliveries)
    threading.Event().wait(ACK_WAIT + 0.5)
    again = world.ledger.deliveries[seen:]
    world.workers.stop()
    print(
        f"{len(world.ledger.acked)} messages, {len(world.ledger.deliveries)} deliveries,"
        f" {world.ledger.broken} broken requests"
    )
    faults = world.ledger.faults(committed, ACK_WAIT)
    assert not faults, "\n".join(faults[:20])
    assert again == []
    answer = httpx.get(
        f"http://{world.apis[1].address}/v1/http-consumers/workers/next",
        headers={"Authorization": f"Bearer {world.token}"}, trust_env=False,
    )  # fmt: skip
    assert answer.json() == {"data": [], "info": {"num_pending": 0, "num_ack_pending": 0}}
    world.reported()
    assert pipeline.stop() == 0
    assert pipeline.stray() == []
    for api in world.apis:
        assert api.end(signal.SIGTERM) == 0
        assert strays(api.log_path.read_text()) == []


def _delivery(version: int, sent: float, **changes: object) -> Delivery:
    """Return a delivery that was acked in time, changed by `changes`."""
    delivery = Delivery(1, version, "0/0", "", sent, sent + 0.1, "ack", sent + 0.2, 1, sent + 0.2)
    delivery.answered, delivery.accepted = sent + 0.3, True
    for name, value in changes.items():
        setattr(delivery, name, value)
    return delivery


_LATE: Final = {"settled": 12.0, "asked": 12.0, "answered": 12.1}
_NEVER: Final = {"fate": "none", "settled": 99.0, "accepted": None}


@pytest.mark.parametrize(
    ("deliveries", "shown"),
    [
        ([_delivery(1, 10), _delivery(2, 11)], None),
        ([_delivery(1, 10, **_NEVER), _delivery(1, 11.5), _delivery(2, 13)], None),
        ([_delivery(1, 10, **_LATE), _delivery(2, 13)], None),
        ([_delivery(1, 10)], "version 2 of 1 was lost"),
        ([_delivery(1, 10, accepted=False), _delivery(2, 11)], "in time was refused"),
        ([_delivery(1, 10), _delivery(1, 11), _delivery(2, 12)], "came again after its ack"),
        ([_delivery(1, 10), _delivery(1, 10.05), _delivery(2, 12)], "was acked 2 times"),
        ([_delivery(1, 10), _delivery(1, 10.05), _delivery(2, 12)], "another worker held"),
        ([_delivery(2, 10), _delivery(1, 11)], "before the version before it was acked"),
        ([_delivery(1, 10), _delivery(2, 10.05)], "before the version before it was acked"),
        ([_delivery(1, 10), _delivery(2, 11), _delivery(3, 12)], "never committed"),
        (
            [_delivery(1, 10, **_LATE), _delivery(1, 11.6, **_NEVER), _delivery(2, 14)],
            "late ack was accepted",
        ),
    ],
)
def test_the_ledger_knows_what_is_wrong(deliveries: list[Delivery], shown: str | None) -> None:
    ledger = Ledger()
    ledger.deliveries = deliveries
    faults = ledger.faults({1: 2}, ACK_WAIT)
    assert faults == [] if shown is None else any(shown in fault for fault in faults), faults
