"""The Postgres of these benchmarks: databases that hold a stream and a pgmq queue side by side."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import structlog
from psycopg import sql

from benchmarks.rig import say
from penstock.core import queries
from penstock.core.connect import connect
from penstock.core.message import Position, RoundPart
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.sinks.stream import StreamWriter
from penstock.streams.maintenance import run_once
from penstock.streams.names import consumer_table, segment_table
from penstock.streams.records import PLACES, StreamRecord
from penstock.streams.store import Store

SQL = queries.load("benchmarks.streams", "bench.sql")

SETTINGS = {
    "shared_buffers": "1GB",
    # A checkpoint in the middle of one side's run would be charged to it alone; there is one before
    # each fill. Autovacuum stays on, as pgmq needs it.
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
}
_CHUNK = 1_000_000
QUEUE = sql.Identifier("pgmq", "q_bench")
# What is out at 16 workers with batches of 1,000 is more than a consumer's default lets out.
CONSUMER = {"max_ack_pending": 100_000, "max_waiting": 100}


@dataclass(slots=True)
class Bed:
    """One database, with a store and the queue in it."""

    server: EmbeddedPostgres
    url: str
    folder: Path
    store: Store
    token: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def number(self) -> int:
        """Return a number that no other call returned, for names."""
        return next(self._numbers)

    def connect(self) -> psycopg.Connection[Any]:
        """Return a connection to the database, in autocommit mode."""
        return connect(self.url, application_name="penstock")

    def stream(self, messages: int, groups: int) -> StreamRecord:
        """Make a stream, filled with so many messages."""
        name = f"bench-{self.number()}"
        stream = self.store.register_stream(
            name, self.store.register_source(name, "bench"), "changes", None
        )
        self.fill(stream, messages, groups)
        return stream

    def fill(self, stream: StreamRecord, messages: int, groups: int) -> None:
        """Write so many messages to an empty stream."""
        start = time.monotonic()
        with self.connect() as connection, writer_of(self, stream) as writer:
            connection.execute("CHECKPOINT")
            for first in range(1, messages + 1, _CHUNK):
                last = min(first + _CHUNK - 1, messages)
                segment = add_to_stream(writer, stream, first, last, groups)
                vacuum = sql.SQL(SQL["vacuum"])
                connection.execute(vacuum.format(table=segment_table(segment)))
                run_once(self.store)  # closes the segment where it is large enough
        say(f"stream of {messages:,} messages in {time.monotonic() - start:.0f} s")

    def consumers(self, stream: StreamRecord, count: int = 1) -> list[str]:
        """Make consumers that have the whole stream before them."""
        names = [f"{stream.name}-{self.number()}" for _ in range(count)]
        for name in names:
            self.store.register_consumer(stream.name, name, "pull", CONSUMER)
        return names

    def fill_queue(self, messages: int, groups: int) -> None:
        """Have the queue hold so many messages, and nothing of before."""
        start = time.monotonic()
        with self.connect() as connection:
            connection.execute(SQL["empty_queue"])
            connection.execute("CHECKPOINT")
            add_to_queue(connection, 1, messages, groups)
            connection.execute(sql.SQL(SQL["vacuum"]).format(table=QUEUE))
        say(f"queue of {messages:,} messages in {time.monotonic() - start:.0f} s")

    def empty_queue(self) -> None:
        """Drop the queue's messages: no autovacuum of it works beside what follows."""
        with self.connect() as connection:
            connection.execute(SQL["empty_queue"])

    def kept_bytes(self, consumer: str | None) -> int:
        """Return how large a consumer's log is, or the queue, indexes included."""
        table = QUEUE
        if consumer is not None:
            found = next(c for c in self.store.consumers() if c.name == consumer)
            table = consumer_table(found.id)
        with self.connect() as connection:
            row = connection.execute(SQL["bytes"], [[table.as_string(connection)]]).fetchone()
        assert row is not None
        return int(row[0])

    def message_bytes(self) -> float:
        """Return the mean size of a message, in bytes."""
        with self.connect() as connection:
            row = connection.execute(SQL["message_bytes"]).fetchone()
        assert row is not None
        return float(row[0])


def position(number: int) -> Position:
    """Return the place of a message, counted from 1."""
    return Position(1_000_000 + (number - 1) // 100, (number - 1) % 100)


@contextmanager
def writer_of(bed: Bed, stream: StreamRecord) -> Iterator[StreamWriter]:
    """Give a writer for `add_to_stream`."""
    with closing(StreamWriter(bed.url, stream.source_id, 0, [])) as writer:
        yield writer


def add_to_stream(
    writer: StreamWriter, stream: StreamRecord, first: int, last: int, groups: int
) -> int:
    """Write messages as one micro-batch, as the sink does but for COPY; return their segment."""
    writer.begin()
    row = writer.connection.execute(SQL["open_segment"], [stream.id]).fetchone()
    assert row is not None
    insert = sql.SQL(SQL["add_to_segment"]).format(
        segment=segment_table(row[0]), places=sql.Literal(PLACES)
    )
    writer.connection.execute(insert, [first, last, groups])
    writer.commit(RoundPart(position(first - 1), position(last), 0, 1))
    return int(row[0])


def add_to_queue(connection: psycopg.Connection[Any], first: int, last: int, groups: int) -> None:
    """Write messages to the queue."""
    connection.execute(SQL["add_to_queue"], [first, last, groups])


@contextmanager
def server() -> Iterator[tuple[EmbeddedPostgres, Path]]:
    """Start Postgres in a temporary folder; ends it and removes the folder."""
    # Maintenance tells of what it could not do now; that is no result.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        with EmbeddedPostgres(folder / "postgres", settings=SETTINGS) as postgres:
            yield postgres, folder


@contextmanager
def bed(postgres: EmbeddedPostgres, folder: Path, peers_python: str) -> Iterator[Bed]:
    """Make a database with an empty queue and an empty store; drops it."""
    name = f"bench_{time.monotonic_ns()}"
    url = postgres.create_database(name)
    files = folder / name
    files.mkdir()
    try:
        install_pgmq(peers_python, url)
        with Store.open(url) as store:
            with store.connection() as connection:
                connection.execute(SQL["messages"])
                connection.execute(SQL["create_queue"])
            yield Bed(postgres, url, files, store, store.tokens.create("bench", "admin"))
    finally:
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            drop = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
            connection.execute(drop)


def install_pgmq(peers_python: str, url: str) -> None:
    """Run pgmq's SQL, which its client brings, in a database: the server needs no extension."""
    code = "import sys; from pgmq.install import install_pgmq_from_sql as f; f(dsn=sys.argv[1])"
    _peer(peers_python, ["-c", code, url])


def pgmq_version(peers_python: str) -> str:
    """Return the versions of pgmq's SQL and of the client that brings it."""
    code = (
        "from importlib.metadata import version; from pgmq.install import get_embedded_sql_version;"
        "print(get_embedded_sql_version(), '(from the client', version('pgmq') + ')')"
    )
    return _peer(peers_python, ["-c", code]).strip()


def _peer(python: str, arguments: Sequence[str]) -> str:
    done = subprocess.run(
        [python, *arguments], check=False, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise SystemExit(f"{python} can't use pgmq: {done.stderr.strip()[-500:]}")
    return done.stdout
