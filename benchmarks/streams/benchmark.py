"""All parts of the benchmark of streams, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.streams import arrival, delivery, held, matrix, report, sizes, webhooks
from benchmarks.streams import bed as beds
from benchmarks.streams.run import Run

PARTS = ("matrix", "held", "arrival", "latency", "webhooks", "sizes")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    parts: Sequence[str]
    batches: tuple[int, ...]
    workers: tuple[int, ...]
    held_s: float
    sizes: tuple[int, ...]


def measure(run: Run, plan: Plan) -> Iterator[str]:
    """Yield each part's tables as soon as it is done."""
    with beds.server() as (postgres, folder):
        for number, part in enumerate(plan.parts):
            # A database for each: what one leaves for autovacuum is gone before the next.
            with beds.bed(postgres, folder, run.peers_python) as bed:
                if number == 0:
                    yield report.facts(run, bed)
                if part == "matrix":
                    consumed = matrix.measure(run, bed, plan.batches, plan.workers)
                    yield report.matrix(run, consumed)
                elif part == "held":
                    yield report.snapshot(held.measure(run, bed, plan.held_s), plan.held_s)
                elif part == "arrival":
                    yield report.arrivals(run, arrival.measure(run, bed))
                elif part == "latency":
                    yield report.delays(run, delivery.measure(run, bed))
                elif part == "webhooks":
                    yield report.pushes(run, webhooks.measure(run, bed))
                else:
                    yield report.costs(sizes.measure(run, bed, plan.sizes))
