"""Backfill: how fast does a table that is there become messages, and what do live changes feel of it?

Beside it stands `COPY … TO STDOUT` of the same table, in the same round. First and last message are
taken where they are stored, from JetStream's times of arrival and Postgres's times of commit, so
nothing polls a growing stream; all clocks are this machine's.
"""

from __future__ import annotations

import statistics
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from benchmarks import drain, latency, source
from benchmarks.contenders import CONFIGURATION, PENSTOCK, SINK, Contender, ContenderError, Running
from benchmarks.probe import Probe
from benchmarks.rig import Rig, say, wait_for_count
from benchmarks.source import Table
from penstock.core import queries
from penstock.streams.names import segment_table

SQL = queries.load("benchmarks", "backfill.sql")
LIVE_RATE = 1000
SINKS = (
    Contender("jetstream", "a nats sink", "penstock"),
    Contender("stream", "a stream of the store, in the same Postgres", "penstock",
              {"type": "stream"}),
)  # fmt: skip
_COPIES = 3
_START_TIMEOUT_S = 120
_TIMEOUT_S = 300
_QUIET_S = 1.0
_LEAST = 200  # live rows, for a p99


@dataclass(frozen=True, slots=True)
class Filled:
    """One backfill of the whole table, beside COPY of it."""

    sink: str
    rows: int
    copy_s: float
    command_s: float  # from the start of `penstock backfill start` to the last message
    span_s: float  # from the first message to the last

    @property
    def ratio(self) -> float:
        """Return the pace, from the command on, as a part of COPY's."""
        return self.copy_s / self.command_s

    def __str__(self) -> str:
        return (
            f"{self.sink} {self.rows / self.command_s:,.0f} rows/s from the command on,"
            f" {self.rows / self.span_s:,.0f} from the first message on; COPY"
            f" {self.rows / self.copy_s:,.0f}, ratio {self.ratio:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Beside:
    """Latency of live changes into JetStream, in ms: p50 and p99 without and with a backfill."""

    idle: tuple[float, float]
    busy: tuple[float, float]
    rows: int  # live ones that were committed while the backfill ran
    rate: float  # rows a second of the backfill

    def __str__(self) -> str:
        return (
            f"p50 {self.idle[0]:.1f} ms, p99 {self.idle[1]:.1f} ms idle; {self.busy[0]:.1f} and"
            f" {self.busy[1]:.1f} beside a backfill of {self.rate:,.0f} rows/s"
        )


def fill(rig: Rig, rows: int) -> Table:
    """Make the table, with so many rows in it."""
    table = source.create_table(rig.postgres_url, "backfill")
    start = time.monotonic()
    with _connect(table.url) as connection:
        connection.execute(_query("widen", table))
    source.fill(table, 1, rows, 10_000)
    with _connect(table.url) as connection:
        connection.execute(_query("settle", table))
        size = connection.execute(_query("row_bytes", table)).fetchone()
    assert size is not None
    say(f"backfill: {rows:,} rows of {size[0]:.0f} bytes in {time.monotonic() - start:.0f} s")
    return table


def measure(rig: Rig, table: Table, rounds: int, sinks: Sequence[Contender]) -> list[Filled]:
    """Backfill the table into each kind of sink in turn, so many rounds."""
    results = []
    for turn in range(rounds):
        copy_s, rows = _copy(table)
        for contender in sinks:
            work = f"backfill into {contender.name}, round {turn + 1}"
            with rig.tolerate(work):
                results.append(_run(rig, table, contender, rows, copy_s))
                say(f"{work}: {results[-1]}")
    return results


def measure_live(rig: Rig, table: Table, seconds: float, rounds: int) -> list[Beside]:
    """Write live rows for `seconds` without and, at least as long, with a backfill."""
    results = []
    for turn in range(rounds):
        work = f"live latency beside a backfill, round {turn + 1}"
        with rig.tolerate(work):
            results.append(_beside(rig, table, seconds))
            say(f"{work}: {results[-1]}")
    return results


def _run(rig: Rig, table: Table, contender: Contender, rows: int, copy_s: float) -> Filled:
    with _started(rig, contender, table) as (running, stream, store):
        began = _begin(running, table)
        if contender.settings:
            first, last = _wait_for_stream(running, store, rows)
        else:
            subject = f"{stream}.>"
            with Probe(rig.nats_url) as probe:
                wait_for_count(running, probe, stream, rows, _TIMEOUT_S)
                first, last = (probe.time_of(stream, subject, first=f) for f in (True, False))
                reads = probe.count_of(stream, f"{stream}.*.*.read")
            if reads != rows:
                raise ContenderError(f"{reads} of {rows} messages are reads")
            drain.verify(rig, stream, rows, contender.name)
    return Filled(
        contender.name,
        rows,
        copy_s,
        (last - began).total_seconds(),
        max((last - first).total_seconds(), 1e-9),
    )


def _beside(rig: Rig, table: Table, seconds: float) -> Beside:
    with _connect(table.url) as connection:
        row = connection.execute(_query("last_id", table)).fetchone()
    assert row is not None
    with _started(rig, SINKS[0], table) as (running, stream, _), Probe(rig.nats_url) as probe:
        live, reads = f"{stream}.*.*.insert", f"{stream}.*.*.read"
        with latency.consumer(rig, running, stream, live) as received:
            _, first = latency.write(rig.folder, table, row[0] + 1, LIVE_RATE, latency.WARM_UP_S, 1)
            idle, first = latency.write(rig.folder, table, first, LIVE_RATE, seconds, 1)
            _begin(running, table)
            busy, after = latency.write(rig.folder, table, first, LIVE_RATE, seconds, 1)
            _wait_for(running, probe, stream, reads, int(row[0]))
            _wait_for(running, probe, stream, live, after - 1 - int(row[0]))
        count = probe.count_of(stream, reads)
        begin, end = (probe.time_of(stream, reads, first=f) for f in (True, False))
    arrivals = latency.arrivals_of(received)
    # The writer's clock is the monotonic one.
    offset = time.time_ns() - time.monotonic_ns()
    since, until = (at.timestamp() * 1e9 - offset for at in (begin, end))
    alone = [delay for _, delay in latency.delays_of("penstock", idle, arrivals)]
    beside = [
        delay
        for when, delay in latency.delays_of("penstock", busy, arrivals)
        if since <= when <= until
    ]
    if len(beside) < _LEAST:
        raise ContenderError(
            f"the backfill of {count:,} rows ran for {(end - begin).total_seconds():.1f} s, in which"
            f" only {len(beside)} live rows were written: give it more rows"
        )
    rate = count / max((end - begin).total_seconds(), 1e-9)
    return Beside(_p50_p99(alone), _p50_p99(beside), len(beside), rate)


def _p50_p99(delays: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(delays, n=100, method="inclusive")
    return cuts[49], cuts[98]


@contextmanager
def _started(rig: Rig, contender: Contender, table: Table) -> Iterator[tuple[Running, str, str]]:
    """Run Penstock until it is ready, with nothing to capture yet, over a store of its own.

    Yields it, the JetStream stream and the store's URL.
    """
    source.keep_wal(table.url)
    with (
        _database(table.url) as store,
        _explained(store),
        rig.start(contender, table, store) as (running, stream),
    ):
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _ready(running):
            running.check()
            if time.monotonic() > deadline:
                raise ContenderError(
                    f"{running.name} is not ready after {_START_TIMEOUT_S} s;"
                    f" its last output:\n{running.tail()}"
                )
            time.sleep(0.1)
        yield running, stream, store
    source.drop_slot(table.url, source.TEMPLATE_SLOT)


@contextmanager
def _explained(store: str) -> Iterator[None]:
    """Add to a failure inside the block what became of the backfill."""
    try:
        yield
    except ContenderError as error:
        try:
            with _connect(store) as connection:
                states = connection.execute(SQL["states"]).fetchall()
        except psycopg.Error:
            states = []
        raise ContenderError(f"{error}\nbackfills: {states}") from None


@contextmanager
def _database(url: str) -> Iterator[str]:
    name = f"bench_store_{time.monotonic_ns()}"
    with _connect(url) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        yield urlsplit(url)._replace(path=f"/{name}").geturl()
    finally:
        drop = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
        with _connect(url) as connection:
            connection.execute(drop)


def _ready(running: Running) -> bool:
    try:
        with urllib.request.urlopen(f"{running.url}/readyz", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _begin(running: Running, table: Table) -> datetime:
    """Have the command start the backfill; return when the command itself was started."""
    file = running.log.with_name(CONFIGURATION)
    command = [*PENSTOCK, "backfill", "start", "-c", str(file)]
    command += ["--sink", SINK, "--table", table.qualified]
    began = datetime.now(UTC)
    done = subprocess.run(
        command, cwd=file.parent, check=False, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise ContenderError(f"`penstock backfill start`: {(done.stderr or done.stdout)[-1000:]}")
    return began


def _copy(table: Table) -> tuple[float, int]:
    """Return how long COPY takes, the median of a few, and the number of rows."""
    times, rows = [], 0
    with _connect(table.url) as connection:
        for _ in range(_COPIES):
            start = time.monotonic()
            with connection.cursor() as cursor, cursor.copy(_query("copy", table)) as copy:
                rows = sum(1 for _ in copy)  # it comes row by row
            times.append(time.monotonic() - start)
    say(f"backfill: COPY {rows / statistics.median(times):,.0f} rows/s")
    return statistics.median(times), rows


def _wait_for_stream(running: Running, store: str, rows: int) -> tuple[datetime, datetime]:
    """Wait until the stream has all rows; return when the first and the last were committed."""
    deadline = time.monotonic() + _TIMEOUT_S
    size, since, count = 0, time.monotonic(), 0
    with _connect(store) as connection:
        while time.monotonic() < deadline:
            running.check()
            time.sleep(0.1)
            segments = connection.execute(SQL["segments"]).fetchall()
            now = sum(segment[1] for segment in segments)
            if now != size:
                size, since = now, time.monotonic()
            elif size and time.monotonic() - since > _QUIET_S:
                # Counting takes seconds of a core, so it waits until the stream has come to rest.
                count, distinct, reads, first, last = _tally(connection, segments)
                since = time.monotonic()
                if count < rows:
                    continue
                if not rows == count == distinct == reads:
                    raise ContenderError(
                        f"{count} messages for {rows} rows: {distinct} distinct, {reads} of them reads"
                    )
                return first, last
    raise ContenderError(
        f"{count} of {rows} messages after {_TIMEOUT_S} s; its last output:\n{running.tail()}"
    )


def _tally(connection: psycopg.Connection[Any], segments: Sequence[Any]) -> tuple[Any, ...]:
    messages = sql.SQL(" UNION ALL ").join(
        sql.SQL(SQL["messages"]).format(segment=segment_table(segment[0])) for segment in segments
    )
    row = connection.execute(sql.SQL(SQL["tally"]).format(messages=messages)).fetchone()
    assert row is not None
    return tuple(row)


def _wait_for(running: Running, probe: Probe, stream: str, subject: str, wanted: int) -> None:
    """Wait until at least so many messages of a subject are there, and no more come."""
    deadline = time.monotonic() + _TIMEOUT_S
    count, since = 0, time.monotonic()
    while time.monotonic() < deadline:
        running.check()
        time.sleep(0.2)
        now = probe.count_of(stream, subject)
        if now != count:
            count, since = now, time.monotonic()
        elif count >= wanted and time.monotonic() - since > 2 * _QUIET_S:
            return
    raise ContenderError(
        f"{count} of {wanted} messages of {subject} after {_TIMEOUT_S} s;"
        f" its last output:\n{running.tail()}"
    )


def _connect(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(url, autocommit=True)


def _query(name: str, table: Table) -> sql.Composed:
    return sql.SQL(SQL[name]).format(table=table.identifier)
