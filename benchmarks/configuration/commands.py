"""Plan and apply of a large file, and pages of a long list."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass

from benchmarks.configuration.bed import Command, bed, document
from benchmarks.rig import say
from benchmarks.streams.keepalive import Client

SINKS, CONSUMERS = 200, 500
LISTED, PAGE = 10_000, 100
_PAGES = 200
_WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Planned:
    """One round: the commands of a file that is new, and the plan of the same file after that."""

    plan: Command
    apply: Command
    again: Command

    def __str__(self) -> str:
        plan, apply, again = (
            f"{c.wall_s:.2f} s ({c.cpu_s:.2f} s of CPU)"
            for c in (self.plan, self.apply, self.again)
        )
        return f"plan {plan}, apply {apply}, plan of nothing {again}"


@dataclass(frozen=True, slots=True)
class Page:
    """How long pages of a list took, in ms."""

    status: bool
    p50_ms: float
    p95_ms: float
    max_ms: float

    def __str__(self) -> str:
        what = "with" if self.status else "without"
        return (
            f"{what} status p50 {self.p50_ms:.1f} ms, p95 {self.p95_ms:.1f} ms, at most"
            f" {self.max_ms:.1f} ms"
        )


def plans(rounds: int) -> list[Planned]:
    """Plan and apply the file in a store that is empty, so many rounds."""
    found = []
    for number in range(rounds):
        with bed(SINKS) as of:
            file = of.file(document(of, nats=SINKS // 2, streams=SINKS // 2, consumers=CONSUMERS))
            plan = of.command("plan", str(file), codes=(2,))
            apply = of.command("apply", "--yes", str(file))
            again = of.command("plan", str(file))
        found.append(Planned(plan, apply, again))
        say(f"plan and apply, round {number + 1}: {found[-1]}")
    return found


def pages() -> list[Page]:
    """List consumers by `penstock api`, page after page."""
    with bed(10) as of:
        file = of.file(document(of, nats=0, streams=10, consumers=LISTED))
        taken = of.command("apply", "--yes", str(file))
        say(f"{LISTED:,} consumers applied in {taken.wall_s:.0f} s")
        with of.serve("api", "api", "--store", of.url) as running:
            of.wait(running, "ready", lambda: of.ask(running, "/healthz")[0] == 200)
            with Client(running.url, of.token) as client:
                found = [_pages(client, status=status) for status in (False, True)]
    for page in found:
        say(f"a page of {PAGE} of {LISTED:,} consumers: {page}")
    return found


def _pages(client: Client, *, status: bool) -> Page:
    taken, cursor = [], ""
    for _ in range(_WARM_UP + _PAGES):
        path = f"/v1/consumers?limit={PAGE}&status={str(status).lower()}{cursor}"
        began = time.monotonic()
        body = client.get(path.encode())
        taken.append(1000 * (time.monotonic() - began))
        after = json.loads(body)["next"]
        cursor = f"&cursor={after}" if after else ""
    taken = taken[_WARM_UP:]
    cuts = statistics.quantiles(taken, n=100, method="inclusive")
    return Page(status, cuts[49], cuts[94], max(taken))
