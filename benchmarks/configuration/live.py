"""What a running `penstock run` does: a change under load, nothing, and a takeover."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from benchmarks import usage
from benchmarks.configuration.bed import ADD_ROWS, STREAM, Bed, bed, document
from benchmarks.contenders import HERE, ContenderError, Running
from benchmarks.latency import arrivals_of, delays_of
from benchmarks.probe import Probe, Received
from benchmarks.rig import POLL_S, say
from penstock.embedded.handles import JetStream

SINKS, CONSUMERS = 100, 1_000
RATE = 1_000
_PER_TRANSACTION = 10
SPAN_S = 5.0
"""Seconds from the change on whose messages count as those beside it."""
_SETTLE_S = 15.0
_NEW = "new"
JOINS, MOVES = "another sink joins", "one has another subject"


@dataclass(frozen=True, slots=True)
class Changed:
    """One round: latency of the 100 sinks' messages before the change and beside it."""

    what: str
    before_p99_ms: float
    before_max_ms: float
    beside_p99_ms: float
    beside_max_ms: float
    first_s: float
    """From the request to the first message of the new sink, or under the new subject."""

    def __str__(self) -> str:
        return (
            f"{self.what}: p99 {self.before_p99_ms:.0f} ms and at most {self.before_max_ms:.0f} before,"
            f" {self.beside_p99_ms:.0f} and {self.beside_max_ms:.0f} beside the change;"
            f" first message after {self.first_s:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class Idle:
    """What an idle run takes; CPU in percent of a core, that of its Postgres apart."""

    sinks: int
    consumers: int
    cpu_percent: float
    postgres_percent: float
    memory: usage.Memory

    def __str__(self) -> str:
        return (
            f"{self.sinks} sinks and {self.consumers:,} consumers idle: {self.cpu_percent:.2f} % of a"
            f" core, Postgres {self.postgres_percent:.2f} %, {self.memory.pss / 2**20:.0f} MiB PSS"
        )


def changes(rounds: int, seconds: float) -> list[Changed]:
    """Change the sinks of a source with 100 of them while rows are written, so many rounds each."""
    found = []
    for number in range(rounds):
        for what in (JOINS, MOVES):
            with bed(SINKS) as of:
                file = of.file(document(of, nats=SINKS))
                with of.serve("run", "run", "-c", str(file)) as running:
                    of.wait_ready(running)
                    found.append(_change(of, running, seconds, what))
            say(f"change beside {SINKS} sinks, round {number + 1}: {found[-1]}")
    return found


def _change(of: Bed, running: Running, seconds: float, what: str) -> Changed:
    with (
        JetStream(of.nats_url) as streams,
        _received(of) as received,
        writer(of, 2 * seconds + SPAN_S) as writing,
    ):
        streams.add_stream(_NEW, f"{_NEW}.>")  # its messages are another sink's, too
        time.sleep(seconds)
        if what == JOINS:
            changed, subjects = f"{_NEW}.{{table}}", (_NEW, f"{_NEW}.>")
            body = document(of, nats=1)["sinks"]["s0"] | {"subject": changed}
            request = f"/v1/sinks/{_NEW}", body, "PUT"
        else:
            changed, subjects = f"{STREAM}.live.moved.{{table}}", (STREAM, f"{STREAM}.live.moved.>")
            request = "/v1/sinks/s0", {"subject": changed}, "PATCH"
        asked = time.monotonic_ns()
        code, answer = of.ask(running, *request)
        if code not in (200, 201):
            raise ContenderError(f"the change was refused with {code}: {answer}")
        with Probe(of.nats_url) as probe:
            of.wait(running, "delivering as changed", lambda: probe.count_of(*subjects) > 0)
        first_s = (time.monotonic_ns() - asked) / 1e9
        writing.wait(6 * seconds + 60)
        last = _committed(of)[-2]
        with Probe(of.nats_url) as probe:
            of.wait(
                running, "caught up", lambda: probe.count_of(STREAM, f"{STREAM}.live.>") >= last
            )
    committed, arrivals = _committed(of), arrivals_of(received)
    delays = list(delays_of("penstock", committed, arrivals))
    begin = committed[2]
    before = [d for when, d in delays if begin + 2e9 <= when < asked]
    beside = [d for when, d in delays if asked <= when < asked + SPAN_S * 1e9]
    return Changed(what, _p99(before), max(before), _p99(beside), max(beside), first_s)


def _p99(delays: list[float]) -> float:
    return statistics.quantiles(delays, n=100, method="inclusive")[98]


def _committed(of: Bed) -> array[int]:
    found: array[int] = array("q")
    found.frombytes((of.folder / "committed.bin").read_bytes())
    return found


@contextmanager
def writer(of: Bed, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Write rows at `RATE` for so long, or until the block is left."""
    values = [of.url, ADD_ROWS, 1, RATE, seconds, _PER_TRANSACTION, of.folder / "committed.bin"]
    command = [sys.executable, "-m", "benchmarks.writer", *map(str, values)]
    with subprocess.Popen(command, cwd=HERE.parent) as writing:
        try:
            yield writing
        finally:
            writing.kill()


@contextmanager
def _received(of: Bed) -> Iterator[Received]:
    """Receive what the sinks publish that are there from the start."""
    received, stop = Received(), threading.Event()

    def receive() -> None:
        with Probe(of.nats_url) as probe:
            probe.subscribe(STREAM, f"{STREAM}.live.>")
            while not stop.is_set():
                probe.receive(received, 0.2)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    try:
        yield received
        time.sleep(0.5)  # the stream has the last message; now it is on its way
    finally:
        stop.set()
        thread.join()


def idle(seconds: float) -> list[Idle]:
    """Run with few sinks and consumers, and with many, and measure while nothing happens."""
    found = []
    for sinks, consumers in ((1, 1), (SINKS, CONSUMERS)):
        with bed(SINKS) as of:
            streams = max(sinks // 2, 1)
            file = of.file(
                document(of, nats=sinks - sinks // 2, streams=streams, consumers=consumers)
            )
            with of.serve("run", "run", "-c", str(file)) as running:
                of.wait_ready(running)
                time.sleep(_SETTLE_S)
                server = of.postgres.pid or 0
                before = [_cpu(pid) for pid in (running.pid, server)]
                time.sleep(seconds)
                after = [_cpu(pid) for pid in (running.pid, server)]
                cpu, postgres = (
                    100 * sum(used - then.get(key, 0.0) for key, used in now.items()) / seconds
                    for then, now in zip(before, after, strict=True)
                )
                memory = usage.memory(running.pid)
                running.check()
            found.append(Idle(sinks, consumers, cpu, postgres, memory))
            say(f"idle: {found[-1]}")
    return found


def _cpu(pid: int) -> dict[tuple[int, float], float]:
    """Return what each process of a tree has used: one that ends meanwhile is no negative use."""
    found = {}
    for process in usage.tree(pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid, process.create_time()] = times.user + times.system
    return found


def takeovers(rounds: int) -> list[float]:
    """Kill a run beside a standby; return the seconds until the standby delivered a new row."""
    found = []
    for number in range(rounds):
        with bed(1) as of:
            file = of.file(document(of, nats=1))
            with of.serve("first", "run", "-c", str(file)) as first:
                of.wait_ready(first)  # alone: else either may have the source
                with of.serve("second", "run", "-c", str(file)) as second:
                    of.wait_ready(second, "standing by")
                    of.wait_logged(second, b"ready to take the source over")
                    found.append(_taken_over(of, first, second))
        say(f"takeover, round {number + 1}: {found[-1]:.2f} s")
    return found


def _taken_over(of: Bed, first: Running, second: Running) -> float:
    of.add_rows(0, 0)
    with Probe(of.nats_url) as probe:
        of.wait(first, "delivering", lambda: probe.count(STREAM) == 1)
        began = time.monotonic()
        for process in usage.tree(first.pid):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        of.add_rows(1, 1)
        while probe.count(STREAM) < 2:
            second.check()
            if time.monotonic() - began > 120:
                raise ContenderError(f"no takeover; the standby ends with:\n{second.tail()}")
            time.sleep(POLL_S)
        return time.monotonic() - began
