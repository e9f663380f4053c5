"""What the benchmarks of streams found, as tables in Markdown."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence

import psutil

from benchmarks import source
from benchmarks.report import MIB, at_least, at_most, java_version, table, verdict_table
from benchmarks.streams import arrival, delivery, held, sizes
from benchmarks.streams.arrival import Arrived
from benchmarks.streams.bed import SETTINGS, Bed, pgmq_version
from benchmarks.streams.crew import SIDES, Cost
from benchmarks.streams.delivery import Delivered
from benchmarks.streams.held import Held
from benchmarks.streams.matrix import Consumed
from benchmarks.streams.run import Run
from benchmarks.streams.sizes import Sized
from benchmarks.streams.webhooks import Pushed

_BAR_BATCH, _BAR_WORKERS = 100, 4


def facts(run: Run, bed: Bed) -> str:
    """Return what the figures hold for."""
    postgres = source.settings(bed.url)
    rows = [
        ("cores, memory", f"{os.cpu_count()}, {psutil.virtual_memory().total / 2**30:.0f} GiB"),
        ("python, java", f"{platform.python_version()}, {java_version()}"),
        (
            "postgres",
            f"{postgres['server_version']}, fsync {postgres['fsync']}, synchronous_commit"
            f" {postgres['synchronous_commit']}, "
            + ", ".join(f"{k} {v}" for k, v in SETTINGS.items()),
        ),
        ("pgmq", pgmq_version(run.peers_python)),
        (
            "backlog",
            f"{run.messages:,} messages of {bed.message_bytes():.0f} bytes in {run.groups:,} groups,"
            " the same for all",
        ),
        *((f"`{side}`", SIDES[side]) for side in run.sides),
    ]
    return f"## Streams: machine and sides\n\n{table(['what', 'value'], rows)}\n"


def matrix(run: Run, results: Sequence[Consumed]) -> str:
    """Return the medians, our ratios to pgmq, and the CPU of a message."""
    if not results:
        return ""
    lines, costs, verdicts = [], [], []
    for batch, workers in dict.fromkeys((r.batch, r.workers) for r in results):
        mine = [r for r in results if (r.batch, r.workers) == (batch, workers)]
        found = {side: [r for r in mine if r.side == side] for side in run.sides}
        rates = {s: statistics.median(r.rate for r in rs) for s, rs in found.items() if rs}
        ratios = {
            side: rate / rates["pgmq"]
            for side, rate in rates.items()
            if side != "pgmq" and "pgmq" in rates
        }
        lines.append(
            [
                f"{batch:,} x {workers}",
                *(f"{rates[side]:,.0f}" if side in rates else "" for side in run.sides),
                *(f"{ratios[s]:.2f}" if s in ratios else "" for s in run.sides if s != "pgmq"),
            ]
        )
        costs.append(
            [
                f"{batch:,} x {workers}",
                *(_cost([r.cost for r in found[side]]) for side in run.sides),
            ]
        )
        if (batch, workers) == (_BAR_BATCH, _BAR_WORKERS) and "http" in ratios:
            verdicts.append(at_least("batches of 100, 4 workers: times pgmq", ratios["http"], 1, 3))
    header = ["msgs/s", *run.sides, *(f"{s} / pgmq" for s in run.sides if s != "pgmq")]
    return (
        f"## Receive and ack: batch x workers\n\nMedians of {run.rounds} rounds of"
        f" {run.seconds:.0f} s.\n\n{table(header, lines)}\n\nCPU, µs a message, postgres + api +"
        f" workers (which parse the messages; `engine`'s are tasks in it and leave them bytes):\n\n"
        f"{table(['batch x workers', *run.sides], costs)}\n\n{verdict_table(verdicts)}"
    )


def snapshot(results: Sequence[Held], seconds: float) -> str:
    """Return each side's pace and cost free and under a snapshot."""
    if not results:
        return ""
    lines = [
        [
            r.side,
            f"{r.free:,.0f}",
            f"{r.first:,.0f}",
            f"{r.last:,.0f}",
            f"{r.last / max(r.free, 1e-9):.2f}",
            f"{r.free_cost.total:.1f}",
            f"{r.last_cost.total:.1f}",
            f"{r.free_kept_bytes / MIB:,.1f}",
            f"{r.kept_bytes / MIB:,.1f}",
        ]
        for r in results
    ]
    header = ["side", "free: last fifth, msgs/s", "held: first", "held: last", "last / free"]
    header += ["free, µs a message", "last, µs", "free: log or queue, MiB", "held: MiB"]
    verdicts = [
        at_least(f"{r.side}: last fifth / free", r.last / max(r.free, 1e-9), 0.9, 0.9)
        for r in results
        if r.side != "pgmq"
    ]
    return (
        f"## The same under a snapshot held for {seconds:.0f} s\n\n{held.WORKERS} workers, batches"
        f" of {held.BATCH}; what is consumed is written anew meanwhile, which the µs contain.\n\n"
        f"{table(header, lines)}\n\n{verdict_table(verdicts)}"
    )


def arrivals(run: Run, results: Sequence[Arrived]) -> str:
    """Return the latency of the stream's own part."""
    if not results:
        return ""
    lines = [
        [f"{r.achieved:,.0f}", f"{r.p50_ms:.2f}", f"{r.p99_ms:.2f}", f"{r.max_ms:.1f}"]
        for r in results
    ]
    return (
        f"## From the commit in the store to a worker, rounds of {run.seconds:.0f} s\n\n"
        f"{arrival.WORKERS} workers with long polls; {arrival.ROUND} messages a commit.\n\n"
        f"{table(['msgs/s', 'p50, ms', 'p99, ms', 'max, ms'], lines)}\n"
    )


def delays(run: Run, results: Sequence[Delivered]) -> str:
    """Return the latency of the whole way."""
    if not results:
        return ""
    lines = [
        [
            f"{r.achieved:,.0f}",
            f"{r.p50_ms:.1f}",
            f"{r.p99_ms:.1f}",
            f"{r.max_ms:.1f}",
            f"{r.cpu_percent:.0f}",
        ]
        for r in results
    ]
    p50 = statistics.median(r.p50_ms for r in results)
    return (
        f"## From COMMIT to a worker, {delivery.RATE:,} rows/s, rounds of {run.seconds:.0f} s\n\n"
        f"{delivery.WORKERS} workers with long polls, batches of {delivery.BATCH}.\n\n"
        f"{table(['rows/s', 'p50, ms', 'p99, ms', 'max, ms', 'penstock run, % of a core'], lines)}"
        f"\n\n{verdict_table([at_most('p50, ms', p50, 100, 50)])}"
    )


def pushes(run: Run, results: Sequence[Pushed]) -> str:
    """Return the medians of the webhook deliveries."""
    if not results:
        return ""
    lines = []
    for concurrency, batch in dict.fromkeys((r.concurrency, r.batch) for r in results):
        mine = [r for r in results if (r.concurrency, r.batch) == (concurrency, batch)]
        lines.append(
            [
                f"{concurrency} at a time, {batch} a request",
                *(
                    f"{statistics.median(getattr(r, name) for r in mine):,.0f}"
                    for name in ("requests", "messages", "postgres_us", "push_us", "endpoint_us")
                ),
            ]
        )
    header = ["webhook", "requests/s", "msgs/s", "postgres, µs a request", "push, µs"]
    return (
        f"## Webhooks, signed, to an endpoint on this machine\n\nMedians of {run.rounds} rounds of"
        f" {run.seconds:.0f} s.\n\n{table([*header, 'endpoint, µs'], lines)}\n"
    )


def costs(results: Sequence[Sized]) -> str:
    """Return the cost of a message by the stream's size."""
    if not results:
        return ""
    lines = [
        [
            f"{r.size:,}, {r.part}",
            f"{r.messages:,}",
            *(f"{us:.1f}" for us in (r.cost.postgres, r.cost.api, r.cost.workers, r.cost.total)),
        ]
        for r in results
    ]
    totals = [r.cost.total for r in results]
    header = ["messages in the stream", "consumed", "postgres, µs", "api", "workers"]
    return (
        f"## Cost of a message by the size of the stream\n\nOver HTTP, {sizes.WORKERS} workers,"
        f" batches of {sizes.BATCH}.\n\n{table([*header, 'all'], lines)}\n\nThe dearest costs"
        f" {max(totals) / min(totals):.2f} times the cheapest.\n"
    )


def _cost(costs: Iterable[Cost]) -> str:
    listed = list(costs)
    if not listed:
        return ""
    parts = [
        statistics.median(getattr(c, name) for c in listed)
        for name in ("postgres", "api", "workers")
    ]
    return f"{' + '.join(f'{part:.1f}' for part in parts)} = {sum(parts):.1f}"
