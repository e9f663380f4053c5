"""Runs the parts of the benchmark of syncs, and yields their tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.streams.run import Run
from benchmarks.syncs import copying, live, report

PARTS = ("copy", "change", "many")
RECORDS, SYNCS, PAGE = 1_000_000, 1_000, 1_000
CHANGE_S, IDLE_S = 60.0, 120.0
BOUND = (
    "syncs takes about a quarter of an hour on a quiet machine of two cores, and gives a side up that"
    " copies fewer than 2,000 records a second: at most 75 minutes with its defaults"
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of what."""

    records: int = RECORDS
    syncs: int = SYNCS
    page: int = PAGE
    change_s: float = CHANGE_S
    idle_s: float = IDLE_S


def measure(run: Run, parts: Collection[str], scale: Scale) -> Iterator[str]:
    """Yield the tables of the parts, each as soon as it is done."""
    yield report.facts(run.peers_python)
    if "copy" in parts:
        with run.tolerate("copy"):
            peers: Sequence[copying.Peer] = copying.PEERS
            if not report.version(run.peers_python):
                run.failures.append(
                    f"copy: {run.peers_python} has no dlt: `make bench` installs it"
                )
                peers = ()
            found = copying.measure(
                scale.records, scale.page, run.peers_python, peers, run.failures
            )
            yield report.copies(found, scale.records, scale.page)
    if "change" in parts:
        with run.tolerate("change"):
            yield report.changes(live.changes(scale.change_s, scale.page))
    if "many" in parts:
        with run.tolerate("many"):
            yield report.many(live.many(scale.syncs, scale.idle_s, scale.page), scale.idle_s)
