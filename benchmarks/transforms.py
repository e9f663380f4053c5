"""Transforms: the drain of a filled slot with filters and transforms beside the plain one.

Throughput is that of captured rows, between the first message seen in the stream and the last;
what Postgres itself says of a filter's condition is what must be there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from benchmarks import drain, source, usage
from benchmarks.contenders import Contender, ContenderError
from benchmarks.probe import Probe
from benchmarks.rig import Rig, say, wait_for_count
from benchmarks.source import Table

PER_TRANSACTION = 1000
_TIMEOUT_S = 600

_LUA = """
function transform(message)
  message.record.status = string.upper(message.record.status)
  return message
end
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a sink does with its messages."""

    name: str
    note: str
    settings: dict[str, Any] = field(default_factory=dict)
    keeps: str = "true"  # the filter as Postgres has it
    marker: bytes = b'"pending"'  # what every body that arrives must hold


def _filter(name: str, note: str, condition: str) -> Variant:
    return Variant(name, note, {"filter": condition}, condition.replace("record.", ""))


PLAIN = "plain"
VARIANTS = (
    Variant(PLAIN, "neither filter nor transform"),
    _filter(
        "filter-most",
        "on two columns, keeps 99 %",
        "record.amount >= 0.5 and record.customer_id < 995",
    ),
    _filter(
        "filter-half",
        "on two columns, keeps 50 %",
        "record.amount >= 20 and record.customer_id < 625",
    ),
    Variant(
        "sql",
        "six columns, two of them computed",
        {
            "transform": {
                "sql": "record.id as id, record.customer_id as customer_id,"
                " upper(record.status) as status, record.amount * 2 as amount,"
                " record.note as note, record.created_at as created_at"
            }
        },
        marker=b'"PENDING"',
    ),
    Variant("lua", "one text changed", {"transform": {"lua": _LUA}}, marker=b'"PENDING"'),
    Variant(
        "python",
        "one text changed",
        {"transform": {"python": "benchmarks.functions:upper"}},
        marker=b'"PENDING"',
    ),
)


@dataclass(frozen=True, slots=True)
class Transformed:
    """One variant in one round."""

    variant: str
    rate: float  # captured rows a second
    kept: float  # the part of them that arrived
    wall_s: float  # from the start of the process to the last message
    cpu_us: float  # of Penstock's processes, a captured row
    body_bytes: float

    def __str__(self) -> str:
        return (
            f"{self.variant} {self.rate:,.0f} rows/s, {100 * self.kept:.0f} % kept,"
            f" {self.cpu_us:.1f} µs a row, {self.wall_s:.1f} s in all"
        )


def measure(rig: Rig, rows: int, rounds: int, variants: Sequence[Variant]) -> list[Transformed]:
    """Drain the same WAL through each variant in turn, the first of a round the last of the next."""
    table = source.create_table(rig.postgres_url, "transforms")
    source.fill(table, 1, rows, PER_TRANSACTION)
    results = []
    for turn in range(rounds):
        for variant in variants[:: -1 if turn % 2 else 1]:
            work = f"transforms, round {turn + 1}"
            with rig.tolerate(f"{work}, {variant.name}"):
                results.append(_run(rig, variant, table, rows))
                say(f"{work}: {results[-1]}")
    source.drop_slot(rig.postgres_url, source.TEMPLATE_SLOT)
    return results


def _run(rig: Rig, variant: Variant, table: Table, rows: int) -> Transformed:
    expected = _kept(table, variant.keeps)
    contender = Contender(variant.name, variant.note, "penstock", variant.settings)
    with rig.start(contender, table) as (running, stream), Probe(rig.nats_url) as probe:
        started = time.monotonic_ns()
        first, _ = wait_for_count(running, probe, stream, 1, _TIMEOUT_S)
        cpu = usage.cpu_seconds(running.pid)
        _, last = wait_for_count(running, probe, stream, expected, _TIMEOUT_S)
        cpu = usage.cpu_seconds(running.pid) - cpu
        body_bytes = drain.verify(rig, stream, expected, variant.name, variant.marker)
    captured = (last[1] - first[1]) * rows / expected
    if captured <= 0:
        raise ContenderError(f"{variant.name}: all came at once: give it more rows")
    return Transformed(
        variant.name,
        captured / ((last[0] - first[0]) / 1e9),
        expected / rows,
        (last[0] - started) / 1e9,
        1e6 * cpu / captured,
        body_bytes,
    )


def _kept(table: Table, condition: str) -> int:
    """Return how many rows Postgres takes the condition to hold for."""
    query = sql.SQL("SELECT count(*) FROM {} WHERE ").format(table.identifier)
    with psycopg.connect(table.url, autocommit=True) as connection:
        # The condition is one of those above.
        row = connection.execute(query + sql.SQL(condition)).fetchone()
    assert row is not None
    return int(row[0])
