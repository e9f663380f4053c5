"""Runs the parts of the benchmark of configurations, and yields their tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from benchmarks.configuration import commands, effects, live, report
from benchmarks.streams.run import Run

PARTS = ("plan", "pages", "change", "effect", "idle", "takeover")


def measure(run: Run, parts: Collection[str], seconds: float, idle_s: float) -> Iterator[str]:
    """Yield the tables of the parts, each as soon as it is done."""
    yield report.facts()
    if "plan" in parts:
        with run.tolerate("plan and apply"):
            yield report.plans(commands.plans(run.rounds))
    if "pages" in parts:
        with run.tolerate("pages"):
            yield report.pages(commands.pages())
    if "change" in parts:
        with run.tolerate("change"):
            yield report.changes(live.changes(run.rounds, seconds), seconds)
    if "effect" in parts:
        with run.tolerate("effect"):
            yield report.effects(effects.effects())
    if "idle" in parts:
        with run.tolerate("idle"):
            yield report.idle(live.idle(idle_s), idle_s)
    if "takeover" in parts:
        with run.tolerate("takeover"):
            yield report.takeovers(live.takeovers(run.rounds))
