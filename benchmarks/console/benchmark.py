"""Runs the benchmark of the console, and yields its tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping

import psutil

from benchmarks import source
from benchmarks.console import bed, visits
from benchmarks.console.bed import Scale
from benchmarks.console.visits import Asked, Open
from benchmarks.report import at_most, table, verdict_table
from benchmarks.rig import POSTGRES_SETTINGS
from benchmarks.streams.run import Run

_BAR_MS, _AIM_MS = 200, 100
_BAR_PERCENT, _AIM_PERCENT = 2, 1


def measure(run: Run, scale: Scale, seconds: float) -> Iterator[str]:
    """Yield the tables, each as soon as it is done."""
    with (
        run.tolerate("console"),
        bed.serving(scale) as (of, running),
        visits.browser(of, running) as browsing,
    ):
        yield _facts(of.url, scale)
        yield _pages(visits.ask(browsing, scale), scale)
        yield _open(visits.leave_open(of, running, browsing, seconds), seconds)


def _facts(url: str, scale: Scale) -> str:
    postgres = source.settings(url)
    rows = [
        ("cores, memory", f"{os.cpu_count()}, {psutil.virtual_memory().total / 2**30:.0f} GiB"),
        ("python", platform.python_version()),
        (
            "postgres",
            f"{postgres['server_version']}, "
            + ", ".join(f"{k} {v}" for k, v in POSTGRES_SETTINGS.items()),
        ),
        (
            "streams",
            f"{scale.sinks:,}, the sinks of one source: one of {scale.messages:,} messages, the"
            f" others of {bed.SMALL:,} each",
        ),
        (
            "consumers",
            f"{scale.consumers:,} and each stream's own; of one in {bed.BEHIND} up to"
            f" {bed.SMALL:,} messages wait, of the streams' own all",
        ),
        (
            "besides",
            f"{bed.WITH_LETTERS * bed.LETTERS:,} dead letters, {bed.BACKFILLS} backfills,"
            f" {bed.SYNCS} syncs, {bed.TARGETS} targets",
        ),
    ]
    return f"## Console: machine and store\n\n{table(['what', 'value'], rows)}\n"


def _pages(found: Mapping[str, Asked], scale: Scale) -> str:
    header = ["page, ms", "p50", "p95", "max", "the first time", "KiB"]
    lines = [
        [
            name,
            *(f"{ms:.0f}" for ms in (each.p50_ms, each.p95_ms, each.max_ms, each.first_ms)),
            f"{each.size / 1024:.0f}",
        ]
        for name, each in found.items()
    ]
    name, slowest = max(found.items(), key=lambda item: item[1].p95_ms)
    verdicts = [at_most(f"p95 of the slowest page, {name}, ms", slowest.p95_ms, _BAR_MS, _AIM_MS)]
    return (
        f"## Pages of the console, each {scale.asks} times after a first one\n\n"
        f"{table(header, lines)}\n\n{verdict_table(verdicts)}"
    )


def _open(found: Open, seconds: float) -> str:
    both = [after - before for before, after in zip(found.idle, found.live, strict=True)]
    rows = (("nothing", found.idle), ("open", found.live), ("the difference", both))
    lines = [[name, *(f"{value:.2f}" for value in values)] for name, values in rows]
    header = ["CPU, % of a core", "API", "its Postgres"]
    verdicts = [
        at_most("an open overview, API and Postgres, % of a core", sum(both), _BAR_PERCENT,
                _AIM_PERCENT)
    ]  # fmt: skip
    return (
        f"## An open overview, {seconds:.0f} s: {found.parts} times parts were new,"
        f" {found.figures} times a chart\n\n"
        f"{table(header, lines)}\n\n{verdict_table(verdicts)}"
    )
