"""A crew of workers: `python -m benchmarks.streams.worker SPEC`, SPEC being JSON.

Each worker is a process that receives, parses what it got and acks it, one batch after the other;
for `engine` all workers are tasks of one process, beside the engine itself. The crew says `ready`
once all are connected, begins at a line from its standard input, and says `done` where nothing is
left, at its limit, or when told to end. What each worker received is then in its file.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson
import psycopg
import uvloop
from psycopg.types.json import set_json_loads
from pydantic import BaseModel

from benchmarks.streams.keepalive import Client
from benchmarks.streams.progress import Harvest, Progress
from penstock.core import queries
from penstock.streams.consumers.registry import Consumers
from penstock.streams.records import PLACES

_SQL = queries.load("benchmarks.streams", "bench.sql")
_VISIBILITY_S = 30  # the consumers' default too
_START_TIMEOUT_S = 60


class Spec(BaseModel):
    """What a crew does; it drains the consumers one after the other."""

    kind: str
    url: str  # of the API or of the database
    token: str = ""
    consumers: list[str] = []
    batch: int
    wait_ms: int = 1000
    for_ever: bool = False  # nothing there is no reason to end
    limit: int = sys.maxsize  # of messages a worker
    workers: int
    progress: Path
    harvest: Path  # the number of the worker is added

    def harvest_of(self, worker: int) -> Path:
        """Return the file of a worker; an engine has one alone."""
        return self.harvest.with_name(f"{self.harvest.name}.{worker}")


class Source(Protocol):
    """Where a worker has its messages from."""

    def receive(self) -> tuple[list[int], Any]:
        """Return the numbers of the messages that came, and what `ack` needs."""

    def ack(self, handles: Any) -> None:
        """Take them as done."""


class _Http:
    def __init__(self, client: Client, consumer: str, spec: Spec) -> None:
        self._client = client
        path = f"/v1/http-consumers/{consumer}"
        self._next = f"{path}/next?batch_size={spec.batch}&wait_for_ms={spec.wait_ms}".encode()
        self._ack = f"{path}/ack".encode()

    def receive(self) -> tuple[list[int], Any]:
        data = orjson.loads(self._client.get(self._next))["data"]
        return [m["record"]["id"] for m in data], [m["ack_token"] for m in data]

    def ack(self, handles: Any) -> None:
        self._client.post(self._ack, orjson.dumps({"ack_tokens": handles}))


class _Pgmq:
    def __init__(self, connection: psycopg.Connection[Any], spec: Spec) -> None:
        self._cursor = connection.cursor()
        self._batch = spec.batch

    def receive(self) -> tuple[list[int], Any]:
        rows = self._cursor.execute(
            _SQL["read"], [_VISIBILITY_S, self._batch], prepare=True
        ).fetchall()
        return [row[2]["record"]["id"] for row in rows], [row[0] for row in rows]

    def ack(self, handles: Any) -> None:
        ids = "{" + ",".join(map(str, handles)) + "}"
        deleted = self._cursor.execute(_SQL["delete"], [ids], prepare=True).fetchone()
        if deleted is None or deleted[0] != len(handles):
            raise SystemExit(f"pgmq deleted {deleted} of {len(handles)} messages")


def main() -> None:
    """Work as the argument says."""
    spec = Spec.model_validate_json(sys.argv[1])
    if spec.kind == "engine":
        uvloop.run(_engine(spec))
        return
    processes = multiprocessing.get_context("fork")  # what is imported is there at once
    barrier = processes.Barrier(spec.workers + 1, timeout=_START_TIMEOUT_S)
    work = _http if spec.kind == "http" else _pgmq
    crew = [
        processes.Process(target=work, args=(spec, number, barrier.wait), daemon=True)
        for number in range(spec.workers)
    ]
    for worker in crew:
        worker.start()
    barrier.wait()
    _say("ready")
    barrier.wait()
    for worker in crew:
        worker.join()
    if any(worker.exitcode for worker in crew):
        sys.exit("a worker failed")
    _say("done")


def _say(word: str) -> None:
    """Tell the benchmark, and wait for its line: the CPU time of who has ended can't be read."""
    print(word, flush=True)
    sys.stdin.readline()


def _http(spec: Spec, number: int, meet: Callable[[], int]) -> None:
    with Client(spec.url, spec.token) as client:
        _work(spec, number, meet, [_Http(client, consumer, spec) for consumer in spec.consumers])


def _pgmq(spec: Spec, number: int, meet: Callable[[], int]) -> None:
    set_json_loads(orjson.loads)
    with psycopg.connect(spec.url, autocommit=True) as connection:
        _work(spec, number, meet, [_Pgmq(connection, spec)])


def _work(spec: Spec, number: int, meet: Callable[[], int], sources: Sequence[Source]) -> None:
    harvest, acked = Harvest.empty(), 0
    with Progress(spec.progress) as progress:
        meet()  # all are connected
        meet()  # and the crew was told to begin
        for source in sources:
            while not progress.stopped and acked < spec.limit:
                ids, handles = source.receive()
                if not ids:
                    if spec.for_ever:
                        continue
                    break
                harvest.add(ids)
                source.ack(handles)
                acked += len(ids)
                progress.mark(number, acked)
    harvest.write(spec.harvest_of(number))


async def _engine(spec: Spec) -> None:
    engine = Consumers(spec.url)
    await engine.open()
    harvest = Harvest.empty()
    with Progress(spec.progress) as progress:
        _say("ready")
        tasks = [_engine_worker(engine, spec, i, progress, harvest) for i in range(spec.workers)]
        await asyncio.gather(*tasks)
    harvest.write(spec.harvest_of(0))
    _say("done")
    await engine.close()


async def _engine_worker(
    engine: Consumers, spec: Spec, number: int, progress: Progress, harvest: Harvest
) -> None:
    """Receive and ack as the API would; the messages stay bytes, as there."""
    acked = 0
    for name in spec.consumers:
        consumer = await engine.get(name)
        while not progress.stopped and acked < spec.limit:
            deliveries = (await consumer.receive(spec.batch, spec.wait_ms / 1000)).deliveries
            if not deliveries:
                if spec.for_ever:
                    continue
                break
            # As bench.messages counts them.
            harvest.add(
                [
                    (d.position.lsn - 1_000_000) * 100 + d.position.idx // PLACES + 1
                    for d in deliveries
                ]
            )
            outcome = await consumer.ack([d.token for d in deliveries], followed=True)
            if outcome.refused:
                raise SystemExit(f"acks were refused: {outcome.refused[:3]}")
            acked += len(deliveries)
            progress.mark(number, acked)


if __name__ == "__main__":
    main()
