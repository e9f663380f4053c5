"""A capture under test: made over a database, read to the end of the WAL, confirmed at will."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import orjson
import psycopg

from penstock.core.message import Position, parse_lsn
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.postgres.capture import Capture, CaptureOptions, CaptureStats
from penstock.postgres.catalog import CaptureCatalog
from penstock.postgres.chunk import Chunk, partition

PUBLICATION = (
    "CREATE PUBLICATION p FOR TABLES IN SCHEMA public"
    " WITH (publish_via_partition_root, publish_generated_columns = stored)"
)
PATIENCE = 240.0


class Message(NamedTuple):
    """A wire row, its JSON parsed; `raw` is the record as text."""

    action: str
    table: str
    record: dict[str, Any]
    changes: dict[str, Any] | None
    metadata: dict[str, Any]
    key: str
    position: Position
    group: int
    old_group: int | None
    raw: str

    @property
    def groups(self) -> set[int]:
        return {self.group} if self.old_group is None else {self.group, self.old_group}


def messages(batches: Sequence[Any]) -> list[Message]:
    """Return the messages of wire batches, in commit order."""
    found = [
        Message(
            row["action"],
            f"{row['table_schema']}.{row['table_name']}",
            orjson.loads(row["record"]),
            None if row["changes"] is None else orjson.loads(row["changes"]),
            orjson.loads(row["metadata"]),
            row["idempotency_key"],
            Position(row["commit_lsn"], row["commit_idx"]),
            row["group_hash"],
            row["old_group_hash"],
            row["record"],
        )
        for batch in batches
        for row in batch.to_pylist()
    ]
    return sorted(found, key=lambda message: message.position)


def of(chunks: Sequence[Chunk]) -> list[Message]:
    """Return the messages of chunks."""
    return messages(partition(chunks, 1))


@contextmanager
def database_in(postgres: EmbeddedPostgres, encoding: str) -> Iterator[Database]:
    """Make a database in an encoding; it is dropped at the end."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0".encode()
        )
    database = Database(name, postgres.database_url(name))
    try:
        yield database
    finally:
        database.drop(postgres.url)


class Reader:
    """Drives one `Capture` as Spark would, and remembers where it stands."""

    def __init__(
        self, url: str, start: Position | None = None, *, slot: str = "s", **options: Any
    ) -> None:
        self.url = url
        catalog = CaptureCatalog(url)
        self.position = start or Position(catalog.slot(slot)[0], -1)
        catalog.close()
        self.states: list[tuple[str, str | None]] = []
        self._changed = threading.Condition()
        group = {"grouping": lambda *_: (None, None), "includes": lambda *_: True, "splits": 2}
        self.capture = Capture(
            CaptureOptions(
                url=options.pop("capture_url", url), slot=slot, publication="p",
                **{**group, **options},
            ),
            self.position,
            self._on_change,
        )  # fmt: skip

    def _on_change(self, stats: CaptureStats) -> None:
        with self._changed:
            self.states.append((stats.state, stats.error.code if stats.error else None))
            self._changed.notify_all()

    def await_state(self, state: str, code: str | None = None, after: int = 0) -> int:
        """Wait for a state behind `after` known ones, and return how many there are then."""

        def reached() -> bool:
            return (state, code) in self.states[after:]

        with self._changed:
            assert self._changed.wait_for(reached, PATIENCE), (self.states, state, code)
            return len(self.states)

    def batch(self, max_rows: int = 100_000) -> list[Chunk]:
        """Return the next batch's chunks; none if all that is written now has been read."""
        until = self.written()
        end = self.capture.available(self.position, max_rows, PATIENCE, until)
        if end == self.position:
            return []
        chunks = self.capture.take(self.position, end)
        self.position = end
        return chunks

    def read(self) -> list[Message]:
        """Return all messages up to the end of the WAL, without confirming them."""
        found: list[Message] = []
        while chunks := self.batch():
            found += of(chunks)
        return found

    def confirm(self) -> None:
        """Confirm all that was read, and wait until that is sent to the server."""
        self.capture.confirm(self.position)
        assert self.capture.flush(PATIENCE)

    def written(self) -> int:
        """Return where the WAL ends now, on disk."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            # Flushes what background writers left, so that the walsender can reach it.
            row = connection.execute(
                "SELECT pg_logical_emit_message(true, 'test', ''), pg_current_wal_insert_lsn()::text"
            ).fetchone()
        assert row is not None
        return parse_lsn(row[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.capture.close()


def prepare(database: Database, *statements: str, slot: str = "s") -> None:
    """Run statements, and make the publication and the slot after them."""
    for statement in statements:
        database.execute(statement)
    database.execute(PUBLICATION)
    database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")


def confirmed(database: Database, slot: str = "s") -> int:
    """Return the slot's confirmed_flush_lsn, as the server has it."""
    query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return parse_lsn(database.execute(query, [slot])[0][0])


def walsender(database: Database, slot: str = "s") -> int | None:
    """Return the process that serves the slot now."""
    query = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"
    pid: int | None = database.execute(query, [slot])[0][0]
    return pid


@contextmanager
def capturing(database: Database, *statements: str, **options: Any) -> Iterator[Reader]:
    """Prepare a database and yield a reader of it."""
    prepare(database, *statements)
    with Reader(database.url, **options) as reader:
        yield reader
