"""Resources: CPU and memory when nothing happens, under load, and the peak of a long drain."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks import latency, source, usage
from benchmarks.contenders import Contender
from benchmarks.probe import Probe
from benchmarks.rig import Rig, say, wait_for_count
from benchmarks.source import Table

LOAD_RATE = 1000
SITUATIONS = ("idle", "load", "drain")
DRAIN_TIMEOUT_S = 900
SETTLE_S = 10


@dataclass(frozen=True, slots=True)
class Used:
    """What one contender took in one situation; CPU in percent of one core."""

    contender: str
    situation: str
    cpu_percent: float
    memory: usage.Memory

    def __str__(self) -> str:
        pss, rss = self.memory.pss / 2**20, self.memory.rss / 2**20
        return (
            f"{self.contender}, {self.situation}: {self.cpu_percent:.1f} % of a core,"
            f" {pss:.0f} MiB PSS, {rss:.0f} MiB RSS"
        )


def measure(rig: Rig, idle_s: float, load_s: float, drain_rows: int) -> list[Used]:
    """Measure every contender idle, at 1,000 rows/s and, last, draining `drain_rows`."""
    results = []
    for contender in rig.contenders:
        with rig.tolerate("resources, idle"):
            results.append(_idle(rig, contender, idle_s))
            say(f"resources: {results[-1]}")
        with rig.tolerate("resources, load"):
            load = latency.run(rig, contender, LOAD_RATE, load_s)
            results.append(Used(contender.name, "load", load.cpu_percent, load.memory))
            say(f"resources: {results[-1]}")
    table = source.create_table(rig.postgres_url, "drain_long")
    large = drain_rows // 3
    source.fill(table, 1, large, large)
    source.fill(table, large + 1, drain_rows, 1000)
    say(f"resources: filled {drain_rows} rows, {large} of them in one transaction")
    for contender in rig.contenders:
        with rig.tolerate("resources, drain"):
            results.append(_drain(rig, contender, table, drain_rows))
            say(f"resources: {results[-1]}")
    source.drop_slot(rig.postgres_url, source.TEMPLATE_SLOT)
    return results


def _drain(rig: Rig, contender: Contender, table: Table, rows: int) -> Used:
    with (
        rig.start(contender, table) as (running, stream),
        Probe(rig.nats_url) as probe,
        usage.PeakMemory(running.pid) as peak,
    ):
        start = time.monotonic()
        wait_for_count(running, probe, stream, rows, DRAIN_TIMEOUT_S)
        cpu = 100 * usage.cpu_seconds(running.pid) / (time.monotonic() - start)
    return Used(contender.name, "drain", cpu, peak.peak)


def _idle(rig: Rig, contender: Contender, seconds: float) -> Used:
    table = source.create_table(rig.postgres_url, "idle")
    with rig.start(contender, table) as (running, stream):
        latency.wait_until_ready(rig, running, table, stream)
        time.sleep(SETTLE_S)
        cpu = usage.cpu_percent(running.pid, seconds)
        memory = usage.memory(running.pid)
        running.check()
    source.drop_slot(rig.postgres_url, source.TEMPLATE_SLOT)
    return Used(contender.name, "idle", cpu, memory)
