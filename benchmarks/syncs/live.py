"""Syncs that go on: from a change at the API to a worker, and many syncs on one query."""

from __future__ import annotations

import random
import statistics
import threading
import time
from dataclasses import dataclass

import orjson

from benchmarks import usage
from benchmarks.contenders import ContenderError
from benchmarks.rig import say
from benchmarks.streams.keepalive import Client, HttpError
from benchmarks.syncs.bed import CONSUMER, START_S, Syncing, patience, servers, syncing

RECORDS = 1_000
"""How many objects the list has whose changes are timed."""
EACH = 100
"""How many objects each of many syncs has."""
FEW = 10
SAMPLES = (0.1, 0.5, 1.0)
_GAP_S = 0.25
_BATCH = 100
_SETTLE_S = 60.0
_SEED = 14


@dataclass(frozen=True, slots=True)
class Changed:
    """From changes at the API to their receipt by a worker, in ms."""

    changes: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    def __str__(self) -> str:
        return f"{self.changes} changes: p50 {self.p50_ms:.0f} ms, p99 {self.p99_ms:.0f} ms"


@dataclass(frozen=True, slots=True)
class Many:
    """So many syncs on one query; memory by what was done then, and CPU in percent of a core."""

    syncs: int
    seconds: float
    memory: dict[str, usage.Memory]
    cpu_percent: float | None
    postgres_percent: float | None
    polls: int

    def __str__(self) -> str:
        cpu = "" if self.cpu_percent is None else f", idle {self.cpu_percent:.1f} % of a core"
        last = list(self.memory.values())[-1]
        return f"{self.syncs:,} syncs: {self.seconds:.0f} s, {last.pss / 2**20:,.0f} MiB{cpu}"


def changes(seconds: float, page: int) -> Changed:
    """Change objects for so long, and time how long each takes to a worker."""
    with (
        servers(RECORDS) as (postgres, served, work),
        syncing(postgres, served, work, frequency="1s", page=page) as of,
    ):
        of.bed.wait_ready(of.running)
        received: dict[int, int] = {}  # when it came, by when it was changed; in ns
        first, stop = [0], threading.Event()
        thread = threading.Thread(target=_work, args=(of, received, first, stop), daemon=True)
        thread.start()
        try:
            of.wait("getting the first objects", lambda: first[0] >= RECORDS, patience(RECORDS))
            made = _change(of, seconds)
            of.wait("getting all changes", lambda: made <= received.keys(), START_S)
        finally:
            stop.set()
            thread.join()
    delays = [(received[at] - at) / 1e6 for at in made]
    p99 = statistics.quantiles(delays, n=100, method="inclusive")[98]
    found = Changed(len(delays), statistics.median(delays), p99, max(delays))
    say(f"change: {found}")
    return found


def _change(of: Syncing, seconds: float) -> set[int]:
    """Change an object now and then, each once; return when, by the API's clock."""
    gaps = random.Random(_SEED)
    made = set[int]()
    deadline = time.monotonic() + seconds
    for number in range(RECORDS):
        made.add(of.api.change(number))
        of.running.check()
        if time.monotonic() >= deadline:
            break
        time.sleep(2 * _GAP_S * gaps.random())
    return made


def _work(of: Syncing, received: dict[int, int], first: list[int], stop: threading.Event) -> None:
    path = f"/v1/http-consumers/{CONSUMER}"
    following = f"{path}/next?batch_size={_BATCH}&wait_for_ms=1000".encode()
    with Client(of.running.url, of.bed.token) as client:
        while not stop.is_set():
            try:
                data = orjson.loads(client.get(following))["data"]
                now = time.time_ns()
                for message in data:
                    if at := message["event"]["data"]["at"]:
                        received.setdefault(at, now)
                    else:
                        first[0] += 1
                if data:
                    tokens = [message["ack_token"] for message in data]
                    client.post(f"{path}/ack".encode(), orjson.dumps({"ack_tokens": tokens}))
            except HttpError as error:
                of.running.process.terminate()
                say(f"change: the worker fails: {error}")
                return


def many(syncs: int, idle_s: float, page: int) -> list[Many]:
    """Run few syncs, and then many: memory while they read all twice, CPU while they only poll."""
    found = []
    for number in (min(FEW, syncs), syncs):
        with (
            servers(EACH) as (postgres, served, work),
            syncing(postgres, served, work, syncs=number, frequency="1m", page=page) as of,
        ):
            found.append(_many(of, number, idle_s if number == syncs else 0.0))
        say(f"many: {found[-1]}")
    return found


def _many(of: Syncing, syncs: int, idle_s: float) -> Many:
    of.bed.wait_ready(of.running)
    wanted, pid = syncs * EACH, of.running.pid
    limit = patience(wanted) + syncs / 4
    memory: dict[str, usage.Memory] = {}
    for share in SAMPLES:
        part = int(wanted * share)
        of.wait(f"having {part:,} records", lambda part=part: of.count() >= part, limit)  # type: ignore[misc]
        memory[f"{share:.0%} of the records read"] = usage.memory(pid)
    asked = of.api.asked()
    read = _read(of)
    for n in range(syncs):
        of.post(f"/v1/syncs/s{n}/backfill")
    of.wait("reading all again", lambda: _read(of) >= read + wanted, limit)
    memory["all read again"] = usage.memory(pid)
    seconds = asked.last - asked.first
    if not idle_s:
        return Many(syncs, seconds, memory, None, None, 0)
    time.sleep(_SETTLE_S)
    of.api.reset()
    server = of.bed.postgres.pid or 0
    before = [usage.cpu_seconds(each) for each in (pid, server)]
    began = time.monotonic()
    time.sleep(idle_s)
    taken = time.monotonic() - began
    cpu, database = (
        100 * (usage.cpu_seconds(each) - was) / taken
        for each, was in zip((pid, server), before, strict=True)
    )
    of.running.check()
    polls = of.api.asked().requests
    if polls < 0.9 * syncs * int(idle_s / 60):
        raise ContenderError(f"{polls:,} polls of {syncs:,} syncs in {idle_s:.0f} s")
    memory[f"{idle_s:.0f} s of polls"] = usage.memory(pid)
    return Many(syncs, seconds, memory, cpu, database, polls)


def _read(of: Syncing) -> int:
    """Return how many records all syncs have read."""
    _, status = of.bed.ask(of.running, "/status")
    return sum(
        shown["records_read"]
        for sync in (status or {}).get("syncs", {}).values()
        for shown in sync.get("collections", {}).values()
    )
