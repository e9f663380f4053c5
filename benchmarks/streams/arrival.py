"""Latency of the stream's own part: from the commit in the store until a worker has parsed the message.

As `penstock run` does with short rounds, a writer commits a few messages at a time; `penstock api` and
workers with long polls are processes of their own.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from benchmarks.contenders import ContenderError
from benchmarks.rig import say
from benchmarks.streams.bed import Bed, add_to_stream, writer_of
from benchmarks.streams.crew import crew
from benchmarks.streams.run import Run

BATCH, WORKERS = 100, 4
ROUND, ROUNDS_A_SECOND = 10, 100  # messages a commit, commits a second
_WARM_UP_S = 1.0
_END_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Arrived:
    """One round."""

    achieved: float  # messages a second that the writer committed
    p50_ms: float
    p99_ms: float
    max_ms: float

    def __str__(self) -> str:
        return (
            f"p50 {self.p50_ms:.2f} ms, p99 {self.p99_ms:.2f} ms, at most {self.max_ms:.1f} ms;"
            f" {self.achieved:.0f} msgs/s"
        )


def measure(run: Run, bed: Bed) -> list[Arrived]:
    """Write to a stream and receive by `WORKERS` workers, so many rounds."""
    results = []
    for turn in range(run.rounds):
        work = f"store to worker, round {turn + 1}"
        with run.tolerate(work):
            results.append(_run(run, bed))
            say(f"{work}: {results[-1]}")
    return results


def _run(run: Run, bed: Bed) -> Arrived:
    stream = bed.stream(1, 1)
    consumers = bed.consumers(stream)
    with (
        crew(bed, "http", consumers, batch=BATCH, workers=WORKERS, for_ever=True) as team,
        writer_of(bed, stream) as writer,
    ):
        team.go()
        committed: dict[int, int] = {}  # when, in monotonic ns, by the last message's number
        last, begin = 1, time.monotonic()
        due = begin
        while due < begin + _WARM_UP_S + run.seconds:
            time.sleep(max(due - time.monotonic(), 0))
            add_to_stream(writer, stream, last + 1, last + ROUND, run.groups)
            last += ROUND
            committed[last] = time.monotonic_ns()
            due += 1 / ROUNDS_A_SECOND
        deadline = time.monotonic() + _END_TIMEOUT_S
        while (there := team.run_for(0.2).acked) < last:
            if time.monotonic() > deadline:
                raise ContenderError(f"{there} of {last} messages came")
        team.stop()
    arrivals = {number: at for one in team.harvests() for number, at in one.arrivals().items()}
    return _delays(committed, arrivals, begin + _WARM_UP_S)


def _delays(committed: dict[int, int], arrivals: dict[int, int], since: float) -> Arrived:
    measured = {last: at for last, at in committed.items() if at >= since * 1e9}
    delays = [
        (arrivals[number] - at) / 1e6
        for last, at in measured.items()
        for number in range(last - ROUND + 1, last + 1)
    ]
    cuts = statistics.quantiles(delays, n=100, method="inclusive")
    times = sorted(measured.values())
    achieved = ROUND * (len(times) - 1) / max((times[-1] - times[0]) / 1e9, 1e-9)
    return Arrived(achieved, cuts[49], cuts[98], max(delays))
