"""The same while another connection holds a snapshot: a backlog that is fed as fast as it is consumed.

Each side works twice for as long, on a fresh backlog each time: without a snapshot, and under one.
What counts is the last fifth, as feeding and consuming find their balance only by and by.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psycopg

from benchmarks.rig import say
from benchmarks.streams import bed as beds
from benchmarks.streams.bed import SQL, Bed
from benchmarks.streams.crew import Cost, Crew, Sample, backlog, crew
from benchmarks.streams.progress import acked
from benchmarks.streams.run import Run
from penstock.core.errors import SinkError
from penstock.streams.maintenance import Maintenance
from penstock.streams.records import StreamRecord

BATCH, WORKERS = 100, 4
_FEED_S = 0.5
_SPANS = 5


@dataclass(frozen=True, slots=True)
class Held:
    """One side: its pace in the last fifth without a snapshot, and in the first and last under one."""

    side: str
    free: float  # messages a second
    first: float
    last: float
    free_cost: Cost  # µs a message, feeding included
    last_cost: Cost
    kept_bytes: int  # the consumer's log, or the queue with its backlog, at the end
    free_kept_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.side} {self.free:,.0f} msgs/s free; {self.first:,.0f}, at last {self.last:,.0f}"
            f" under the snapshot; {self.free_cost}, at last {self.last_cost}"
        )


def measure(run: Run, bed: Bed, seconds: float) -> list[Held]:
    """Run each side for `seconds` without a snapshot, and for as long under one.

    The engine has its turn only where it is not measured through the API.
    """
    results = []
    for side in run.sides:
        if side == "engine" and "http" in run.sides:
            continue
        with run.tolerate(f"held snapshot, {side}"):
            _, free, free_kept = _fed(run, bed, side, seconds, held=False)
            first, last, kept = _fed(run, bed, side, seconds, held=True)
            results.append(
                Held(side, free[0], first[0], last[0], free[1], last[1], kept, free_kept)
            )
            say(f"held snapshot for {seconds:.0f} s: {results[-1]}")
    return results


def _fed(
    run: Run, bed: Bed, side: str, seconds: float, *, held: bool
) -> tuple[tuple[float, Cost], tuple[float, Cost], int]:
    """Return rate and cost of the first and of the last fifth, and the bytes kept at the end."""
    with ExitStack() as stack:
        stream = bed.stream(run.messages, run.groups) if side != "pgmq" else None
        consumers = stack.enter_context(backlog(bed, side, stream, run.messages, run.groups))
        if held:
            stack.enter_context(_snapshot(bed))
        if stream is not None:
            stack.enter_context(Maintenance(bed.url))
        team = stack.enter_context(crew(bed, side, consumers, batch=BATCH, workers=WORKERS))
        stack.enter_context(_feeder(run, bed, stream, team))
        team.go()
        samples: list[Sample] = [team.warm_up()]
        samples += [team.run_for(seconds / _SPANS) for _ in range(_SPANS)]
        kept = bed.kept_bytes(consumers[0] if consumers else None)
        team.stop()
        team.harvests()
    pairs = [
        (after.rate_since(before), after.cost_since(before))
        for before, after in (samples[:2], samples[-2:])
    ]
    return pairs[0], pairs[1], kept


@contextmanager
def _snapshot(bed: Bed) -> Iterator[None]:
    with bed.connect() as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute(SQL["hold"])
        yield
        connection.execute("COMMIT")


@contextmanager
def _feeder(run: Run, bed: Bed, stream: StreamRecord | None, team: Crew) -> Iterator[None]:
    """Write, from a thread, as many messages as were consumed meanwhile."""
    ended = threading.Event()
    errors: list[Exception] = []

    def feed() -> None:
        fed = 0
        with _adder(run, bed, stream) as add:
            while not ended.wait(_FEED_S):
                due = acked(team.progress.marks()) - fed
                if due:
                    add(run.messages + fed + 1, run.messages + fed + due)
                    fed += due

    def guarded() -> None:
        try:
            feed()
        except (psycopg.Error, SinkError) as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def _adder(
    run: Run, bed: Bed, stream: StreamRecord | None
) -> Iterator[Callable[[int, int], object]]:
    """Give what adds the messages from one number to another, to the stream or to the queue."""
    if stream is None:
        with bed.connect() as connection:
            yield lambda first, last: beds.add_to_queue(connection, first, last, run.groups)
    else:
        with beds.writer_of(bed, stream) as writer:
            yield lambda first, last: beds.add_to_stream(writer, stream, first, last, run.groups)
