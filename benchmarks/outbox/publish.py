"""Publishing: `tide.outbox_publish` beside a plain INSERT into a table of the same shape.

pgbench makes the calls, with prepared statements; so neither side waits for Python.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import sql

from benchmarks.contenders import ContenderError
from benchmarks.outbox.relay import SQL, payload
from benchmarks.rig import Rig, say

CONNECTIONS = (1, 8)
SECONDS = 2.0
BULK_ROWS = 100_000
_TPS = re.compile(r"^tps = ([\d.]+)", re.MULTILINE)
_FAILED = re.compile(r"^number of failed transactions: (\d+)", re.MULTILINE)

_ID = "\\set id random(1, 1000000000000000)\n"
_PAYLOAD = SQL["payload"].format(i=":id::bigint")
_HEADERS = """'{"trace": "4bf92f3577b34da6", "source": "shop"}'"""


@dataclass(frozen=True, slots=True)
class Call:
    """What is published, and the INSERT that does the same work."""

    name: str
    publish: str
    insert: str


CALLS = (
    Call(
        "payload",
        f"SELECT tide.outbox_publish('published', {_PAYLOAD})",
        f"INSERT INTO public.published (payload, headers) VALUES ({_PAYLOAD}, '{{}}') RETURNING id",
    ),
    Call(
        "payload and dedup_key",
        f"SELECT tide.outbox_publish('published', {_PAYLOAD}, 'order-' || :id)",
        "INSERT INTO public.published (dedup_key, payload, headers)"
        f" VALUES ('order-' || :id, {_PAYLOAD}, '{{}}') ON CONFLICT DO NOTHING RETURNING id",
    ),
    Call(
        "payload, dedup_key, headers",
        f"SELECT tide.outbox_publish('published', {_PAYLOAD}, 'order-' || :id, {_HEADERS})",
        "INSERT INTO public.published (dedup_key, payload, headers)"
        f" VALUES ('order-' || :id, {_PAYLOAD}, {_HEADERS}) ON CONFLICT DO NOTHING RETURNING id",
    ),
)
BULK = {
    "bulk_publish": "`outbox_publish`, a call each",
    "bulk_loop": "`INSERT`, a statement each, in PL/pgSQL",
    "bulk_insert": "`INSERT … SELECT`, one statement",
}


@dataclass(frozen=True, slots=True)
class Published:
    """One call from so many connections, a transaction each, in one round."""

    call: str
    connections: int
    publish: float  # transactions a second
    insert: float

    def __str__(self) -> str:
        return (
            f"{self.call}, {self.connections} connections: {self.publish:,.0f} publishes/s,"
            f" {self.insert:,.0f} INSERTs/s"
        )


@dataclass(frozen=True, slots=True)
class Bulk:
    """Many rows in one transaction."""

    way: str
    rate: float  # rows a second, the COMMIT with them

    def __str__(self) -> str:
        return f"{self.way} {self.rate:,.0f} rows/s"


def measure(rig: Rig, rounds: int, seconds: float) -> tuple[list[Published], list[Bulk]]:
    """Publish and insert in turn, row by row for `seconds` each, and then in bulk."""
    rates: list[Published] = []
    bulks: list[Bulk] = []
    with _tables(rig):
        for turn in range(rounds):
            with rig.tolerate(f"publish, round {turn + 1}"):
                for call in CALLS:
                    for connections in CONNECTIONS:
                        found = [
                            _pgbench(rig, statement, connections, seconds)
                            for statement in (call.publish, call.insert)
                        ]
                        rates.append(Published(call.name, connections, *found))
                        say(f"publish, round {turn + 1}: {rates[-1]}")
                for way in BULK:
                    bulks.append(Bulk(way, _bulk(rig, way)))
                    say(f"publish, round {turn + 1}: {bulks[-1]}")
    return rates, bulks


@contextmanager
def _tables(rig: Rig) -> Iterator[None]:
    with psycopg.connect(rig.postgres_url, autocommit=True) as connection:
        outbox = sql.Literal("published")
        connection.execute(sql.SQL(SQL["create"]).format(outbox=outbox))
        connection.execute(SQL["peer"])
        yield
        connection.execute(SQL["drop_peer"])
        connection.execute(sql.SQL(SQL["drop"]).format(outbox=outbox))


def _pgbench(rig: Rig, statement: str, connections: int, seconds: float) -> float:
    rig.folder.mkdir(parents=True, exist_ok=True)
    script = rig.folder / "pgbench.sql"
    script.write_text(f"{_ID}{statement};\n")
    command = [str(rig.pgbench), "--no-vacuum", "--protocol=prepared", f"--file={script}"]
    command += [f"--client={connections}", f"--jobs={min(connections, 2)}", f"--time={seconds:.0f}"]
    done = subprocess.run(
        [*command, rig.postgres_url], check=False, capture_output=True, text=True,
        timeout=4 * seconds + 30,
    )  # fmt: skip
    rate, failed = _TPS.search(done.stdout), _FAILED.search(done.stdout)
    if done.returncode or rate is None or failed is None or int(failed[1]):
        raise ContenderError(f"pgbench: {(done.stderr or done.stdout)[-1000:]}")
    return float(rate[1])


def _bulk(rig: Rig, way: str) -> float:
    statement = sql.SQL(SQL[way]).format(payload=payload(), rows=BULK_ROWS)
    with psycopg.connect(rig.postgres_url, autocommit=True) as connection:
        start = time.monotonic()
        connection.execute(statement)
        return BULK_ROWS / (time.monotonic() - start)
