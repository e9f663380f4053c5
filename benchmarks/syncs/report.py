"""What the benchmarks of syncs found, as tables in Markdown."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from benchmarks.configuration import report as machine
from benchmarks.report import MIB, at_least, at_most, table, verdict_table
from benchmarks.syncs.copying import AIRBYTE, AIRBYTE_NOTE, OURS, PEERS, Copied
from benchmarks.syncs.live import EACH, Changed, Many


def facts(python: str) -> str:
    """Return what the figures hold for."""
    rows = [("dlt", version(python) or "not installed"), *((f"`{p.name}`", p.note) for p in PEERS)]
    rows.append((f"`{AIRBYTE}`", AIRBYTE_NOTE))
    return f"{machine.facts()}\n{table(['peer', 'what'], rows)}\n"


def version(python: str) -> str:
    """Return the version of dlt that an interpreter has, nothing where it has none."""
    code = "from importlib.metadata import version as v; print(v('dlt'))"
    try:
        done = subprocess.run(
            [python, "-c", code], check=False, capture_output=True, text=True, timeout=60
        )
    except OSError:
        return ""
    return done.stdout.strip()


def copies(found: Sequence[Copied], records: int, page: int) -> str:
    """Return the pace of the copies."""
    lines, verdicts = [], []
    ours = next((each for each in found if each.side == OURS), None)
    for each in found:
        ratio = "" if ours is None else f"{ours.rate / each.rate:.2f}"
        again = "" if each.again_rate is None else f"{each.again_rate:,.0f}"
        lines.append(
            [each.side, f"{each.rate:,.0f}", f"{each.first_s:.1f}", ratio, again,
             f"{each.requests:,}"]
        )  # fmt: skip
    notes = ""
    if ours is not None:
        if peers := [each for each in found if each.side not in (OURS, AIRBYTE)]:
            best = max(peers, key=lambda each: each.rate)
            verdicts.append(at_least(f"times {best.side}", ours.rate / best.rate, 1.5, 2.0))
        assert ours.again_rate is not None
        verdicts.append(at_least("again, times the first", ours.again_rate / ours.rate, 3.0, 4.0))
        verdicts.append(at_most("messages made by the second copy", ours.messages or 0, 0, 0))
        notes = (
            f"All of the first copy was in the stream `events` {ours.streams_s or 0:.1f} s after the"
            " first request.\n\n"
        )
    header = ["copy", "records/s", "s", "penstock / this", "again, records/s", "requests"]
    return (
        f"## {records:,} records from an API into Postgres, pages of {page:,}\n\n"
        f"{table(header, lines)}\n\n{notes}{verdict_table(verdicts)}"
    )


def changes(found: Changed) -> str:
    """Return how long a change takes to a worker."""
    line = [f"{found.changes} changes", *(f"{ms:,.0f}" for ms in
            (found.p50_ms, found.p99_ms, found.max_ms))]  # fmt: skip
    verdicts = [at_most("p50, ms", found.p50_ms, 1200, 700)]
    return (
        "## From a change at the API to a worker's receive, polled every second\n\n"
        f"{table(['delay, ms', 'p50', 'p99', 'max'], [line])}\n\n{verdict_table(verdicts)}"
    )


def many(found: Sequence[Many], idle_s: float) -> str:
    """Return what many syncs take."""
    lines = [
        [f"{each.syncs:,} syncs, {when}", f"{of.pss / MIB:,.0f}", f"{of.java / MIB:,.0f}",
         f"{of.processes}"]
        for each in found
        for when, of in each.memory.items()
    ]  # fmt: skip
    most = found[-1]
    sizes = [of.pss for of in most.memory.values()]
    verdicts = [at_most("memory at most / at the beginning", max(sizes) / sizes[0], 1.1, 1.05)]
    idle = ""
    if most.cpu_percent is not None:
        verdicts.append(at_most("idle, % of a core", most.cpu_percent, 25, 10))
        idle = (
            f"While they only polled, once a minute, for {idle_s:.0f} s ({most.polls:,} polls), all our"
            f" processes took {most.cpu_percent:.1f} % of a core, and Postgres"
            f" {most.postgres_percent:.1f} %.\n\n"
        )
    return (
        f"## {most.syncs:,} syncs of {EACH} records each on one query\n\n"
        f"All records were there {most.seconds:.1f} s after the first request. Memory of all our"
        f" processes:\n\n{table(['when', 'PSS, MiB', 'of it Java', 'processes'], lines)}\n\n{idle}"
        f"{verdict_table(verdicts)}"
    )
