"""Receive and ack: all sizes of batches and crews, all sides in turn."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.rig import say
from benchmarks.streams.bed import Bed
from benchmarks.streams.crew import Cost, backlog, crew
from benchmarks.streams.run import Run

BATCHES = (1, 10, 100, 1000)
WORKERS = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class Consumed:
    """One side in one round."""

    side: str
    batch: int
    workers: int
    rate: float  # messages received and acked a second
    cost: Cost  # µs a message

    def __str__(self) -> str:
        return f"{self.side} {self.rate:,.0f} msgs/s, {self.cost}"


def measure(
    run: Run, bed: Bed, batches: tuple[int, ...], workers: tuple[int, ...]
) -> list[Consumed]:
    """Run all sides in turn, the first of a round the last of the next."""
    results = []
    stream = bed.stream(run.messages, run.groups) if run.ours else None
    for turn in range(run.rounds):
        for batch in batches:
            for count in workers:
                for side in run.sides[:: -1 if turn % 2 else 1]:
                    work = f"{count} workers, batches of {batch}, round {turn + 1}"
                    with run.tolerate(work):
                        with (
                            backlog(bed, side, stream, run.messages, run.groups) as consumers,
                            crew(bed, side, consumers, batch=batch, workers=count) as team,
                        ):
                            team.go()
                            before = team.warm_up()
                            after = team.run_for(run.seconds)
                            team.stop()
                            team.harvests()
                        rate, cost = after.rate_since(before), after.cost_since(before)
                        results.append(Consumed(side, batch, count, rate, cost))
                        say(f"{work}: {results[-1]}")
    return results
