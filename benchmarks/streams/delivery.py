"""Latency: from the moment COMMIT returned to the writer until a worker has parsed the message.

The whole way: a table, `penstock run` with a stream, the API that it serves, long polls.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import orjson
import yaml

from benchmarks import latency, source, usage
from benchmarks.contenders import ContenderError
from benchmarks.rig import say
from benchmarks.streams.bed import Bed
from benchmarks.streams.crew import Crew, crew, start, wait_for_api
from benchmarks.streams.keepalive import Client
from benchmarks.streams.run import Run
from penstock.embedded.process import free_port

RATE = 1000
BATCH, WORKERS = 100, 4
CONSUMER = "workers"
_START_TIMEOUT_S = 120
_SETTLE_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Delivered:
    """One round."""

    achieved: float  # rows a second that the writer committed
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_percent: float  # of one core, `penstock run` as a whole

    def __str__(self) -> str:
        return (
            f"p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms, at most {self.max_ms:.1f} ms;"
            f" {self.achieved:.0f} rows/s, {self.cpu_percent:.0f} % of a core"
        )


def measure(run: Run, bed: Bed) -> list[Delivered]:
    """Write at `RATE` and receive by `WORKERS` workers, so many rounds."""
    results = []
    for turn in range(run.rounds):
        work = f"delivery at {RATE} rows/s, round {turn + 1}"
        with run.tolerate(work):
            results.append(_run(bed, run.seconds))
            say(f"{work}: {results[-1]}")
    return results


def _run(bed: Bed, seconds: float) -> Delivered:
    table = source.create_table(bed.url, "delivery")
    slot = f"bench_{bed.number()}"
    folder = bed.folder / slot
    folder.mkdir()
    source.copy_slot(bed.url, slot)
    file = folder / "penstock.yaml"
    file.write_text(_configuration(bed, table, slot, folder))
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "penstock", "run", "-c", str(file)]
    command += ["--listen", url.removeprefix("http://")]
    try:
        with start("penstock run", command, folder / "run.log", folder) as running:
            wait_for_api(running, url, f"/v1/http-consumers/{_name(slot)}".encode(), bed.token)
            source.fill(table, 1, 1, 1)
            _await_first(bed, url, _name(slot))
            with crew(
                bed, "http", [_name(slot)], batch=BATCH, workers=WORKERS,
                wait_ms=5000, for_ever=True, url=url,
            ) as team:  # fmt: skip
                team.go()
                _, first = latency.write(folder, table, 2, RATE, latency.WARM_UP_S, 1)
                cpu, began = usage.cpu_seconds(running.pid), time.monotonic()
                committed, after = latency.write(folder, table, first, RATE, seconds, 1)
                cpu = 100 * (usage.cpu_seconds(running.pid) - cpu) / (time.monotonic() - began)
                _await_acks(team, after - 2)
                team.stop()
            running.check()
    finally:
        source.drop_slot(bed.url, slot)
        source.drop_slot(bed.url, source.TEMPLATE_SLOT)
    arrivals: dict[int, int] = {}
    for harvest in team.harvests():
        arrivals.update(harvest.arrivals())
    return _delays(committed[::3].tolist(), committed[2::3].tolist(), arrivals, cpu)


def _name(slot: str) -> str:
    return f"{CONSUMER}-{slot}"


def _configuration(bed: Bed, table: source.Table, slot: str, folder: Path) -> str:
    return yaml.safe_dump(
        {
            "store": bed.url,
            "sources": {
                slot: {
                    "type": "postgres",
                    "url": bed.url,
                    "tables": [table.qualified],
                    "slot": slot,
                    "publication": source.PUBLICATION,
                }
            },
            "sinks": {slot: {"type": "stream", "source": slot}},
            "consumers": {_name(slot): {"stream": slot}},
            "spark": {"checkpoint": str(folder / "checkpoints")},
        }
    )


def _await_first(bed: Bed, url: str, consumer: str) -> None:
    """Receive and ack the row that shows that the pipeline works."""
    path = f"/v1/http-consumers/{consumer}"
    deadline = time.monotonic() + _START_TIMEOUT_S
    with Client(url, bed.token) as client:
        while time.monotonic() < deadline:
            data = orjson.loads(client.get(f"{path}/next?wait_for_ms=5000".encode()))["data"]
            if data:
                tokens = [message["ack_token"] for message in data]
                client.post(f"{path}/ack".encode(), orjson.dumps({"ack_tokens": tokens}))
                return
    raise ContenderError(f"penstock run: no message within {_START_TIMEOUT_S} s")


def _await_acks(team: Crew, messages: int) -> None:
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while (there := team.run_for(0.2).acked) < messages:
        if time.monotonic() > deadline:
            raise ContenderError(f"penstock run: {there} of {messages} messages came")


def _delays(rows: list[int], times: list[int], arrivals: dict[int, int], cpu: float) -> Delivered:
    missing = [row for row in rows if row not in arrivals]
    if missing:
        raise ContenderError(f"penstock run never delivered the rows {missing[:5]}")
    delays = [(arrivals[row] - at) / 1e6 for row, at in zip(rows, times, strict=True)]
    cuts = statistics.quantiles(delays, n=100, method="inclusive")
    achieved = (len(times) - 1) / max((times[-1] - times[0]) / 1e9, 1e-9)
    return Delivered(achieved, cuts[49], cuts[98], max(delays), cpu)
