"""Cost of a message in streams of several sizes, at the stream's beginning and at its end."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from benchmarks.contenders import ContenderError
from benchmarks.rig import say
from benchmarks.streams import bed as beds
from benchmarks.streams.bed import Bed
from benchmarks.streams.crew import Cost, crew
from benchmarks.streams.keepalive import Client
from benchmarks.streams.run import Run

SIZES = (10_000, 1_000_000)
LARGE = 10_000_000
_GROUP = 10  # messages, on average
BATCH, WORKERS = 100, 4
_TIMEOUT_S = 120
_WAIT_MS = 200  # that a worker waits before it takes a consumer as drained


@dataclass(frozen=True, slots=True)
class Sized:
    """What a part of a stream cost."""

    size: int  # of the stream, in messages
    part: str
    messages: int
    cost: Cost  # µs a message

    def __str__(self) -> str:
        return f"{self.size:,} messages, {self.part}: {self.cost} a message"


def measure(run: Run, bed: Bed, sizes: tuple[int, ...]) -> list[Sized]:
    """Consume `run.messages` / 5 messages over HTTP from streams of each size.

    A smaller stream is consumed by one consumer after the other.
    """
    results = []
    wanted = run.messages // 5
    for size in sizes:
        with run.tolerate(f"stream of {size:,} messages"):
            stream = bed.stream(size, max(size // _GROUP, 1))
            for part in ("beginning", "end") if size > wanted else ("whole",):
                consumers = bed.consumers(stream, max(wanted // size, 1))
                with crew(
                    bed, "http", consumers, batch=BATCH, workers=WORKERS,
                    wait_ms=_WAIT_MS, limit=wanted // WORKERS,
                ) as team:  # fmt: skip
                    if part == "end":
                        first = beds.position(size - wanted + 1)
                        to = orjson.dumps({"to": {"lsn": first.lsn, "idx": first.idx}})
                        with Client(team.spec.url, bed.token) as client:
                            client.post(f"/v1/http-consumers/{consumers[0]}/rewind".encode(), to)
                    before = team.sample()
                    team.go()
                    after = team.wait(_TIMEOUT_S)
                    team.harvests()
                if after.acked < wanted:
                    raise ContenderError(f"only {after.acked:,} of {wanted:,} messages came")
                results.append(Sized(size, part, after.acked, after.cost_since(before)))
                say(str(results[-1]))
    return results
