"""The relay: messages that wait in an outbox become a JetStream stream; throughput and latency.

Each run is a relay group of its own, over a copy of a slot that has kept the WAL of all messages. The
drain of a table with as many rows runs beside it, through the same pipeline in its general form.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from benchmarks import drain, latency, source, usage
from benchmarks.contenders import Contender, ContenderError, Job, Running
from benchmarks.latency import Delayed
from benchmarks.probe import Probe
from benchmarks.rig import Rig, say, wait_for_count
from penstock.core import queries
from penstock.outbox.pipelines import slot_of
from penstock.outbox.sql.install import install

SQL = queries.load("benchmarks.outbox", "outbox.sql")
RATES = (100, 1000)
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Outbox(source.Table):
    """An outbox that is filled like a table, a message a row."""

    snapshot: str = ""  # of when it was empty

    @property
    def rows(self) -> sql.Composed:
        return sql.SQL(SQL["rows"]).format(outbox=sql.Literal(self.name), payload=payload())

    def single_rows(self, first: int, last: int) -> sql.Composed:
        return sql.SQL(SQL["single_rows"]).format(
            outbox=sql.Literal(self.name), payload=payload(), first=first, last=last
        )


def payload() -> sql.Composed:
    """Return the expression of a payload; `i` is the message's number."""
    return sql.SQL(SQL["payload"]).format(i=sql.SQL("i"))


@dataclass(frozen=True, slots=True)
class Variant:
    """How a pipeline relays."""

    name: str
    note: str
    config: dict[str, Any] = field(default_factory=dict)
    is_kept: bool = False  # the messages are read from the table: the pipeline is a new one
    in_order: bool = True


PLAIN = "plain"
KEPT = "kept"
VARIANTS = (
    Variant(PLAIN, "the payload; the outbox keeps its order (the defaults)"),
    Variant("batch-1000", "the same, `batch_size` 1000", {"batch_size": 1000}),
    Variant("cloudevents", "`format` cloudevents", {"format": "cloudevents"}),
    Variant(
        "customers",
        "`group_by` a field with 1,000 values",
        {"group_by": "payload.customer_id"},
        in_order=False,
    ),
    Variant("none", "`group_by` none", {"group_by": "none"}, in_order=False),
    Variant(KEPT, "a new pipeline: kept messages, from the table", is_kept=True),
)


@dataclass(frozen=True, slots=True)
class Relayed:
    """One variant in one round."""

    shape: str
    variant: str
    rate: float  # messages a second
    cpu_us: float  # of the relay's processes, a message
    wall_s: float  # from the start of the process to the last message
    body_bytes: float

    def __str__(self) -> str:
        return (
            f"{self.variant} {self.rate:,.0f} msgs/s, {self.cpu_us:.1f} µs a message,"
            f" {self.wall_s:.1f} s in all"
        )


def measure(
    rig: Rig, rows: int, rounds: int, shapes: Sequence[str], variants: Sequence[Variant]
) -> list[Relayed]:
    """Relay the same messages by each variant in turn, the first of a round the last of the next."""
    results = []
    for shape in shapes:
        with _outbox(rig, "relayed") as outbox:
            source.fill(outbox, 1, rows, drain.SHAPES[shape])
            say(f"relay: published {rows} messages, {drain.SHAPES[shape]} a transaction")
            for turn in range(rounds):
                for variant in variants[:: -1 if turn % 2 else 1]:
                    work = f"relay {shape}, round {turn + 1}"
                    with rig.tolerate(f"{work}, {variant.name}"):
                        results.append(_run(rig, outbox, variant, shape, rows))
                        say(f"{work}: {results[-1]}")
    return results


def measure_latency(rig: Rig, seconds: float, rounds: int) -> list[Delayed]:
    """Publish at each rate, a message a transaction, so many rounds."""
    results = []
    for rate in RATES:
        for turn in range(rounds):
            work = f"relay's latency at {rate} publishes/s, round {turn + 1}"
            with (
                rig.tolerate(work),
                _outbox(rig, "latency") as outbox,
                relayed(rig, outbox, VARIANTS[0]) as (running, stream),
            ):
                results.append(latency.under_load(rig, running, outbox, stream, rate, seconds))
                say(f"{work}: {results[-1]}")
    return results


def _run(rig: Rig, outbox: Outbox, variant: Variant, shape: str, rows: int) -> Relayed:
    with relayed(rig, outbox, variant) as (running, stream), Probe(rig.nats_url) as probe:
        started = time.monotonic_ns()
        first, _ = wait_for_count(running, probe, stream, 1, _TIMEOUT_S)
        cpu = usage.cpu_seconds(running.pid)
        _, last = wait_for_count(running, probe, stream, rows, _TIMEOUT_S)
        cpu = usage.cpu_seconds(running.pid) - cpu
        size = drain.verify(rig, stream, rows, variant.name, ordered=variant.in_order)
    count = last[1] - first[1]
    if count <= 0:
        raise ContenderError(f"{variant.name}: all came at once: give it more messages")
    return Relayed(
        shape,
        variant.name,
        count / ((last[0] - first[0]) / 1e9),
        1e6 * cpu / count,
        (last[0] - started) / 1e9,
        size,
    )


@contextmanager
def relayed(rig: Rig, outbox: Outbox, variant: Variant) -> Iterator[tuple[Running, str]]:
    """Run a relay group with one pipeline from an outbox into a fresh stream.

    Unless its messages are kept ones, as after a stop: all that was published is to come from its slot.
    Yields the relay and the stream's name.
    """
    slot = ""
    with (
        rig.stream() as name,
        psycopg.connect(outbox.url, autocommit=True) as connection,
    ):
        config = {"sink_type": "nats", "url": rig.nats_url, "subject": name + ".{stream_table}"}
        values = {
            "name": name, "outbox": outbox.name, "snapshot": outbox.snapshot,
            "config": json.dumps(config | variant.config),
        }  # fmt: skip
        connection.execute(SQL["set_relay"], values)
        slot = slot_of(name, str(conninfo_to_dict(outbox.url)["dbname"]))
        try:
            if not variant.is_kept:
                source.copy_slot(outbox.url, slot)
                connection.execute(SQL["place"], values)
            connection.execute(SQL["enable"], values)
            folder = rig.folder / f"{name}-{variant.name}"
            job = Job(outbox, slot, rig.nats_url, name, folder)
            with Contender(variant.name, variant.note, "relay").run(job, "") as running:
                yield running, name
        finally:
            connection.execute(SQL["delete_relay"], values)
            source.drop_slot(outbox.url, slot)


@contextmanager
def _outbox(rig: Rig, name: str) -> Iterator[Outbox]:
    """Make an empty outbox, and a slot that keeps the WAL from here on; both are gone afterwards."""
    outbox = sql.Literal(name)
    with psycopg.connect(rig.postgres_url, autocommit=True) as connection:
        connection.execute(sql.SQL(SQL["create"]).format(outbox=outbox))
        source.keep_wal(rig.postgres_url)
        (snapshot,) = connection.execute(SQL["snapshot"]).fetchone() or ("",)
    try:
        yield Outbox(rig.postgres_url, name, snapshot)
    finally:
        source.drop_slot(rig.postgres_url, source.TEMPLATE_SLOT)
        with psycopg.connect(rig.postgres_url, autocommit=True) as connection:
            connection.execute(sql.SQL(SQL["drop"]).format(outbox=outbox))


def prepare(rig: Rig) -> None:
    """Install the schema `tide` in the database of the benchmarks."""
    with psycopg.connect(rig.postgres_url, autocommit=True) as connection:
        install(connection)
