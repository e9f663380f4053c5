"""Latency: from the moment COMMIT returned to the writer until a consumer has the message.

Writer and consumer read the same monotonic clock. A counting contender's messages arrive when their
batch reaches the handler; its order is the commit order, so the count says which row each is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import source, usage
from benchmarks.contenders import HERE, Batches, Contender, ContenderError, Running
from benchmarks.probe import ROW_ID, Probe, Received
from benchmarks.rig import Rig, say, wait_for_count
from benchmarks.source import Table

WARM_UP_S = 5
START_TIMEOUT_S = 120
SETTLE_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Delayed:
    """One contender at one rate."""

    contender: str
    rate: int
    rows_per_transaction: int
    achieved: float  # rows a second that the writer committed
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_percent: float  # of one core, over the measured seconds
    memory: usage.Memory  # when the last row had come

    def __str__(self) -> str:
        return f"{self.contender} p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms"


def rows_per_transaction(rate: int) -> int:
    """Return 1 as long as one connection can commit so often, which is up to 2,000 a second."""
    return 1 if rate <= 2000 else 10


def measure(rig: Rig, rates: tuple[int, ...], seconds: float, rounds: int) -> list[Delayed]:
    """Run all contenders in turn at each rate, so many rounds."""
    results = []
    for rate in rates:
        for turn in range(rounds):
            for contender in rig.contenders:
                work = f"latency at {rate} rows/s, round {turn + 1}"
                with rig.tolerate(work):
                    results.append(run(rig, contender, rate, seconds))
                    say(f"{work}: {results[-1]}")
    return results


def run(rig: Rig, contender: Contender, rate: int, seconds: float) -> Delayed:
    """Start a contender on an empty table, warm it up, and measure `seconds` at `rate`."""
    table = source.create_table(rig.postgres_url, "latency")
    with rig.start(contender, table) as (running, stream):
        delayed = under_load(rig, running, table, stream, rate, seconds)
    source.drop_slot(rig.postgres_url, source.TEMPLATE_SLOT)
    return delayed


def under_load(
    rig: Rig, running: Running, table: Table, stream: str, rate: int, seconds: float
) -> Delayed:
    """Warm up what reads an empty table into an empty stream, and measure `seconds` at `rate`."""
    per_transaction = rows_per_transaction(rate)
    ready = wait_until_ready(rig, running, table, stream)
    with consumer(rig, running, stream) as received:
        _, first = write(rig.folder, table, ready + 1, rate, WARM_UP_S, per_transaction)
        cpu, start = usage.cpu_seconds(running.pid), time.monotonic()
        committed, after = write(rig.folder, table, first, rate, seconds, per_transaction)
        cpu = 100 * (usage.cpu_seconds(running.pid) - cpu) / (time.monotonic() - start)
        with Probe(rig.nats_url) as probe:
            wait_for_count(running, probe, stream, after - 1, SETTLE_TIMEOUT_S)
        memory = usage.memory(running.pid)
    arrivals = _handler_arrivals(running.batches) if running.batches else arrivals_of(received)
    times = committed[2::3]
    delays = [delay for _, delay in delays_of(running.name, committed, arrivals)]
    cuts = statistics.quantiles(delays, n=100, method="inclusive")
    achieved = (len(delays) - per_transaction) / max((times[-1] - times[0]) / 1e9, 1e-9)
    return Delayed(
        running.name,
        rate,
        per_transaction,
        achieved,
        cuts[49],
        cuts[98],
        max(delays),
        cpu,
        memory,
    )


def delays_of(
    name: str, committed: array[int], arrivals: dict[int, int]
) -> Iterator[tuple[int, float]]:
    """Yield for each row when it was committed (monotonic ns) and its latency in ms.

    Raises `ContenderError` at a row that never arrived.
    """
    for begin, end, when in zip(committed[::3], committed[1::3], committed[2::3], strict=True):
        for row in range(begin, end + 1):
            if row not in arrivals:
                raise ContenderError(f"{name} never delivered row {row}")
            yield when, (arrivals[row] - when) / 1e6


def wait_until_ready(rig: Rig, running: Running, table: Table, stream: str) -> int:
    """Write a row, wait until it has arrived and return its id: now the contender works."""
    source.fill(table, 1, 1, 1)
    with Probe(rig.nats_url) as probe:
        wait_for_count(running, probe, stream, 1, START_TIMEOUT_S)
    return 1


def write(
    folder: Path, table: Table, first: int, rate: int, seconds: float, per_transaction: int
) -> tuple[array[int], int]:
    """Have the writer write; return what it committed, and the id that comes next."""
    file = folder / "committed.bin"
    rows = table.rows.as_string()
    arguments = [table.url, rows, first, rate, seconds, per_transaction, file]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.writer", *map(str, arguments)],
        cwd=HERE.parent,
        check=True,
        timeout=seconds * 4 + 30,
    )
    committed: array[int] = array("q")
    committed.frombytes(Path(file).read_bytes())
    return committed, committed[-2] + 1


@contextmanager
def consumer(rig: Rig, running: Running, stream: str, subject: str = ">") -> Iterator[Received]:
    """Receive the stream's messages, of `subject` alone, in a thread while the block runs."""
    received = Received()
    if running.batches is not None:
        yield received
        return
    stop = threading.Event()

    def receive() -> None:
        with Probe(rig.nats_url) as probe:
            probe.subscribe(stream, subject)
            while not stop.is_set():
                probe.receive(received, 0.2)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    try:
        yield received
        time.sleep(0.5)  # the stream has the last message; now it is on its way to the consumer
    finally:
        stop.set()
        thread.join()


def arrivals_of(received: Received) -> dict[int, int]:
    """Return when each row's message was there."""
    arrivals: dict[int, int] = {}
    for when, _, body in received.messages():
        found = ROW_ID.search(body)
        if found is None:
            raise ContenderError(f"no row id in the message {body[:200]!r}")
        arrivals.setdefault(int(found[1]), when)
    return arrivals


def _handler_arrivals(batches: Batches) -> dict[int, int]:
    """Return when each row's batch reached the handler."""
    arrivals: dict[int, int] = {}
    for when, size in zip(batches.times_ns, batches.sizes, strict=True):
        for _ in range(size):
            arrivals[len(arrivals) + 1] = when
    return arrivals
