"""Runs the parts of the outbox's benchmark, and yields their tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from benchmarks import drain
from benchmarks.outbox import publish, relay, report
from benchmarks.outbox.relay import Variant
from benchmarks.rig import Rig

PARTS = ("publish", "relay", "latency")


def measure(
    rig: Rig,
    parts: Collection[str],
    rows: int,
    rounds: int,
    seconds: float,
    shapes: tuple[str, ...],
    variants: Sequence[Variant],
) -> Iterator[str]:
    """Yield the tables of the parts, each as soon as it is done; `rig.contenders` has Penstock."""
    relay.prepare(rig)
    if "publish" in parts:
        rates, bulks = publish.measure(rig, rounds, publish.SECONDS)
        yield report.published(rates, bulks, publish.SECONDS)
    if "relay" in parts:
        drained = drain.measure(rig, rows, rounds, shapes)
        found = relay.measure(rig, rows, rounds, shapes, variants)
        yield report.relayed(found, drained, rows, rounds)
    if "latency" in parts:
        yield report.delayed(relay.measure_latency(rig, seconds, rounds), seconds, rounds)
