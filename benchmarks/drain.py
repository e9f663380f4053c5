"""Drain: how fast does a filled slot become a JetStream stream?

Throughput is taken between the first messages seen in the stream and the last, so that the start of
an interpreter or a JVM doesn't count; the wall time from the start of the process stands beside it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks import source
from benchmarks.contenders import Contender, ContenderError
from benchmarks.probe import MESSAGE_ID, ROW_ID, Probe
from benchmarks.rig import Rig, say, wait_for_count
from benchmarks.source import Table

SHAPES = {"large": 1000, "single": 1}
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Drained:
    """One contender in one round."""

    shape: str
    contender: str
    rate: float  # messages a second
    wall_s: float  # from the start of the process to the last message
    body_bytes: float  # mean of what was published

    def __str__(self) -> str:
        return f"{self.contender} {self.rate:,.0f} msgs/s, {self.wall_s:.1f} s in all"


def measure(rig: Rig, rows: int, rounds: int, shapes: tuple[str, ...]) -> list[Drained]:
    """Run all contenders in turn, so many rounds, for each shape of transactions."""
    results = []
    for shape in shapes:
        per_transaction = SHAPES[shape]
        table = source.create_table(rig.postgres_url, f"drain_{shape}")
        start = time.monotonic()
        source.fill(table, 1, rows, per_transaction)
        say(
            f"drain: filled {rows} rows, {per_transaction} a transaction,"
            f" in {time.monotonic() - start:.1f} s"
        )
        for turn in range(rounds):
            for contender in rig.contenders:
                work = f"drain {shape}, round {turn + 1}"
                with rig.tolerate(work):
                    results.append(_run(rig, contender, table, shape, rows))
                    say(f"{work}: {results[-1]}")
        source.drop_slot(rig.postgres_url, source.TEMPLATE_SLOT)
    return results


def _run(rig: Rig, contender: Contender, table: Table, shape: str, rows: int) -> Drained:
    body_bytes = 0.0
    with rig.start(contender, table) as (running, stream), Probe(rig.nats_url) as probe:
        started = time.monotonic_ns()
        first, last = wait_for_count(running, probe, stream, rows, TIMEOUT_S)
        if not contender.counts_only:
            body_bytes = verify(rig, stream, rows, contender.name)
    return Drained(
        shape,
        contender.name,
        (last[1] - first[1]) / max((last[0] - first[0]) / 1e9, 1e-9),
        (last[0] - started) / 1e9,
        body_bytes,
    )


def verify(
    rig: Rig, stream: str, rows: int, name: str, marker: bytes = b"", *, ordered: bool = False
) -> float:
    """Check that the stream holds each row once, under a dedup id of its own, with `marker` in it.

    If `ordered`, also that they come in the order of their ids. Returns the mean size of a body: the
    contenders put different things in it.
    """
    keys: set[bytes] = set()
    seen: dict[int, None] = {}
    messages = size = marked = 0
    with Probe(rig.nats_url) as probe:
        for _, headers, body in probe.read(stream, rows).messages():
            messages, size, marked = messages + 1, size + len(body), marked + (marker in body)
            key, row = MESSAGE_ID.search(headers), ROW_ID.search(body)
            if key and row:
                keys.add(key[1])
                seen[int(row[1])] = None
    with Probe(rig.nats_url) as probe:
        count = probe.count(stream)
    if not rows == count == messages == len(keys) == len(seen) == marked:
        raise ContenderError(
            f"{name} left {count} messages for {rows} rows; {messages} were read back, with"
            f" {len(keys)} distinct dedup ids and {len(seen)} distinct rows, {marked} as expected"
        )
    if ordered and list(seen) != sorted(seen):
        raise ContenderError(f"{name} left {rows} messages out of their order")
    return size / messages
