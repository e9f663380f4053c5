"""What the benchmarks of configurations found, as tables in Markdown."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence

import psutil

from benchmarks.configuration import commands, live
from benchmarks.configuration.commands import Page, Planned
from benchmarks.configuration.effects import Effect
from benchmarks.configuration.live import Changed, Idle
from benchmarks.report import MIB, at_most, java_version, table, verdict_table


def facts() -> str:
    """Return what the figures hold for."""
    rows = [
        ("cores, memory", f"{os.cpu_count()}, {psutil.virtual_memory().total / 2**30:.0f} GiB"),
        ("python, java", f"{platform.python_version()}, {java_version()}"),
    ]
    return f"## Machine\n\n{table(['what', 'value'], rows)}\n"


def plans(found: Sequence[Planned]) -> str:
    """Return the medians of the commands."""
    lines, medians = [], {}
    for name, what in (
        ("plan", "`penstock plan` of a new file"),
        ("apply", "`penstock apply --yes` of it"),
        ("again", "`penstock plan` where nothing changes"),
    ):
        of = [getattr(each, name) for each in found]
        wall = medians[name] = statistics.median(c.wall_s for c in of)
        cpu = statistics.median(c.cpu_s for c in of)
        lines.append([what, f"{wall:.2f}", f"{max(c.wall_s for c in of):.2f}", f"{cpu:.2f}"])
    both = medians["plan"] + medians["apply"]
    verdicts = [at_most("plan and apply together, s", both, 5, 2.5)]
    header = ["command", "s (median)", "max", "CPU, s"]
    return (
        f"## Plan and apply of {commands.SINKS} sinks and {commands.CONSUMERS} consumers,"
        f" {len(found)} rounds\n\n{table(header, lines)}\n\n{verdict_table(verdicts)}"
    )


def pages(found: Sequence[Page]) -> str:
    """Return how long a page takes."""
    lines, verdicts = [], []
    for page in found:
        what = f"{'with' if page.status else 'without'} status"
        lines.append([what, *(f"{ms:.1f}" for ms in (page.p50_ms, page.p95_ms, page.max_ms))])
        verdicts.append(at_most(f"p95 of a page {what}, ms", page.p95_ms, 50, 10))
    return (
        f"## A page of {commands.PAGE} of {commands.LISTED:,} consumers\n\n"
        f"{table(['page, ms', 'p50', 'p95', 'max'], lines)}\n\n{verdict_table(verdicts)}"
    )


def changes(found: Sequence[Changed], seconds: float) -> str:
    """Return what each kind of change adds to the latency of 100 sinks."""
    return "\n".join(
        _change(what, [each for each in found if each.what == what], seconds)
        for what in (live.JOINS, live.MOVES)
    )


def _change(what: str, found: Sequence[Changed], seconds: float) -> str:
    median = statistics.median
    before = median(c.before_p99_ms for c in found), max(c.before_max_ms for c in found)
    beside = median(c.beside_p99_ms for c in found), max(c.beside_max_ms for c in found)
    lines = [
        [f"{seconds:.0f} s before", *(f"{value:.1f}" for value in before)],
        [f"{live.SPAN_S:.0f} s from the change on", *(f"{value:.1f}" for value in beside)],
    ]
    first = median(c.first_s for c in found)
    verdicts = [
        at_most("p99 more beside the change, ms", beside[0] - before[0], 100, 20),
        at_most("the first message as changed after, s", first, 5, 2),
    ]
    return (
        f"## {live.SINKS} sinks of one source at {live.RATE:,} rows/s, and {what},"
        f" {len(found)} rounds\n\n{table(['latency of all, ms', 'p99', 'max'], lines)}\n\n"
        f"{verdict_table(verdicts)}"
    )


def effects(found: Sequence[Effect]) -> str:
    """Return how long each kind of change took until it counted."""
    lines = [[each.what, f"{each.seconds:.1f}"] for each in found]
    verdicts = [at_most("each of them, s", max(each.seconds for each in found), 5, 2)]
    return (
        f"## Changes of a run of {live.SINKS} sinks at {live.RATE:,} rows/s\n\n"
        f"{table(['change', 's'], lines)}\n\n{verdict_table(verdicts)}"
    )


def idle(found: Sequence[Idle], seconds: float) -> str:
    """Return what an idle run takes."""
    lines = [
        [
            f"{each.sinks} sinks, {each.consumers:,} consumers",
            f"{each.cpu_percent:.2f}",
            f"{each.postgres_percent:.2f}",
            f"{each.memory.pss / MIB:,.0f}",
        ]
        for each in found
    ]
    most = found[-1]
    what = f"{most.sinks} sinks and {most.consumers:,} consumers, % of a core"
    header = ["idle", "CPU, % of a core", "of its Postgres", "PSS, MiB"]
    return (
        f"## Idle, {seconds:.0f} s\n\n{table(header, lines)}\n\n"
        f"{verdict_table([at_most(what, most.cpu_percent, 2, 1)])}"
    )


def takeovers(found: Sequence[float]) -> str:
    """Return how long a standby needs."""
    median, most = statistics.median(found), max(found)
    verdicts = [at_most("takeover, at most, s", most, 15, 5)]
    return (
        f"## Takeover by a standby after SIGKILL, {len(found)} rounds\n\n"
        f"{table(['takeover', 's (median)', 'max'], [['', f'{median:.2f}', f'{most:.2f}']])}\n\n"
        f"{verdict_table(verdicts)}"
    )
