"""Writers of a table beside its backfill, and what a consumer makes of all that it got.

Every write of a row takes the next `version`, and each row is one writer's, so a consumer can see
whether what it got is older than what it had.
"""

from __future__ import annotations

import contextlib
import random
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson
import psycopg
from psycopg import sql
from tests.pipeline import Penstock
from tests.streams_help import read

from penstock.core.message import parse_lsn
from penstock.embedded.handles import Database, JetStream
from penstock.streams.store import Store

Key = tuple[Any, ...]


@dataclass(frozen=True)
class TableKind:
    """A table with a kind of key: its columns, and how a writer makes a new one."""

    name: str
    columns: str
    key: tuple[str, ...]
    fill: str
    make: Callable[[random.Random, int], Key]

    def create(self, url: str, rows: int) -> None:
        """Make the table, with rows that nobody of the writers owns until they take them."""
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE SEQUENCE IF NOT EXISTS versions")
            names = ", ".join(self.key)
            connection.execute(
                f"CREATE TABLE {self.name} ({self.columns}, owner int NOT NULL,"
                f" version bigint NOT NULL, pad text, PRIMARY KEY ({names}))"
            )
            connection.execute(
                f"INSERT INTO {self.name} SELECT {self.fill}, n % 3, nextval('versions'),"
                f" repeat('x', n % 50) FROM generate_series(1, {rows}) n"
            )

    def rows(self, url: str) -> dict[Key, int]:
        """Return what the table has: versions by key, in the text that JSON has of a key."""
        names = ", ".join(f"{name}::text" for name in self.key)
        with psycopg.connect(url) as connection:
            query = f"SELECT {names}, version FROM {self.name}"
            return {tuple(row[:-1]): row[-1] for row in connection.execute(query)}


_LETTERS: Final = "aAbBzZ0é-_ ñ'ß中😀\"\\"


def _text(rng: random.Random, owner: int) -> Key:
    return ("".join(rng.choice(_LETTERS) for _ in range(rng.randint(0, 12))) + f"~{owner}",)


KINDS: Final = (
    TableKind("numbers", "id bigint", ("id",), "n * 37 - 100000",
              lambda rng, owner: (rng.randint(-(10**9), 10**9) * 3 + owner,)),
    TableKind("uuids", "id uuid", ("id",), "md5(n::text)::uuid",
              lambda rng, owner: (uuid.UUID(int=rng.getrandbits(120) << 8 | owner),)),
    TableKind("texts", "name text COLLATE \"pg_c_utf8\"", ("name",),
              "chr(65 + n % 26) || chr(97 + n % 7) || md5(n::text) || '~' || n % 3", _text),
    TableKind("pairs", "a int, \"B b\" text COLLATE \"C\"", ("a", "\"B b\""), "n % 50 - 25, 'k' || n",
              lambda rng, owner: (rng.randint(-30, 30), f"{rng.getrandbits(40):x}~{owner}")),
)  # fmt: skip


class Writer(threading.Thread):
    """Inserts, updates (of keys, too) and deletes rows of its own, until it is stopped."""

    def __init__(self, url: str, kinds: Iterable[TableKind], owner: int, pause: float) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.error: BaseException | None = None
        self._url = url
        self._kinds = list(kinds)
        self._owner = owner
        self._pause = pause
        self._rng = random.Random(owner)
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            with psycopg.connect(self._url) as connection:
                while not self._stopping.wait(self._pause):
                    for _ in range(self._rng.choice((1, 1, 5))):
                        self._write(connection, self._rng.choice(self._kinds))
                        self.count += 1
                    connection.commit()
        except BaseException as error:
            self.error = error

    def _write(self, connection: psycopg.Connection[Any], kind: TableKind) -> None:
        rng, table = self._rng, sql.Identifier(kind.name)
        names = [sql.Identifier(name.strip('"')) for name in kind.key]
        columns = sql.SQL(", ").join(names)
        marks = sql.SQL(", ").join([sql.Placeholder()] * len(names))
        step = rng.choice(("insert", "update", "update", "move", "delete"))
        fresh = kind.make(rng, self._owner)
        if step == "insert":
            connection.execute(
                sql.SQL(
                    "INSERT INTO {} ({}, owner, version) VALUES ({}, %s, nextval('versions'))"
                    " ON CONFLICT DO NOTHING"
                ).format(table, columns, marks),
                [*fresh, self._owner],
            )
            return
        found = connection.execute(
            sql.SQL("SELECT {} FROM {} WHERE owner = %s ORDER BY {} OFFSET %s LIMIT 1").format(
                columns, table, sql.SQL("version" if rng.random() < 0.5 else "version DESC")
            ),
            [self._owner, rng.randint(0, 300)],
        ).fetchone()
        if found is None:
            return
        this = sql.SQL("({}) = ({})").format(columns, marks)
        if step == "delete":
            connection.execute(sql.SQL("DELETE FROM {} WHERE {}").format(table, this), found)
        elif step == "update":
            connection.execute(
                sql.SQL("UPDATE {} SET version = nextval('versions') WHERE {}").format(table, this),
                found,
            )
        else:
            taken = sql.SQL("NOT EXISTS (SELECT FROM {} WHERE ({}) = ({}))").format(
                table, columns, marks
            )
            connection.execute(
                sql.SQL(
                    "UPDATE {} SET ({}) = ROW ({}), version = nextval('versions') WHERE {} AND {}"
                ).format(table, columns, marks, this, taken),
                [*fresh, *found, *fresh],
            )

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def writing(
    url: str, kinds: Iterable[TableKind], *, writers: int = 3, pause: float = 0.01
) -> Iterator[list[Writer]]:
    kinds = list(kinds)
    started = [Writer(url, kinds, owner, pause) for owner in range(writers)]
    for writer in started:
        writer.start()
    try:
        yield started
    finally:
        for writer in started:
            writer.stop()


class Got(NamedTuple):
    """A message as a consumer got it; `changes` is None where there are none."""

    action: str
    record: dict[str, Any]
    changes: dict[str, Any] | None
    metadata: dict[str, Any]


@dataclass
class Fold:
    """What a consumer has, after all messages of a table in the order in which they came.

    `faults` are messages that are older than what it had. With `whole` every change of a row came, so
    that a read can't be newer than the change before it.
    """

    kind: TableKind
    whole: bool = True
    rows: dict[Key, int] = field(default_factory=dict)
    seen: dict[Key, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    reads: int = 0

    def take(self, got: Got) -> None:
        names = [name.strip('"') for name in self.kind.key]
        key = tuple(str(got.record[name]) for name in names)
        if got.action == "delete":
            self.rows.pop(key, None)
            return
        if got.action == "update" and got.changes:
            old = {**got.record, **got.changes}
            self.rows.pop(tuple(str(old[name]) for name in names), None)
        version, last = got.record["version"], self.seen.get(key, 0)
        if got.action == "read":
            self.reads += 1
            newer = last and version > last and self.whole and key in self.rows
            if version < last or newer or (last and key not in self.rows and version == last):
                self.faults.append(f"read of {key} at {version} behind {last}: {got.metadata}")
        elif version <= last and not (version == last and self.rows.get(key) == last):
            self.faults.append(f"{got.action} of {key} to {version} behind {last}: {got.metadata}")
        self.rows[key] = version
        self.seen[key] = max(last, version)


def fold(kind: TableKind, messages: Iterable[Got], *, whole: bool = True) -> Fold:
    folded = Fold(kind, whole)
    for message in messages:
        if message.metadata["table_name"] == kind.name:
            folded.take(message)
    return folded


def from_nats(streams: JetStream, stream: str) -> list[Got]:
    """Return all that a JetStream stream has."""
    return [_got(orjson.loads(message.data)) for message in streams.messages(stream)]


def _got(body: dict[str, Any], action: str | None = None) -> Got:
    action = action or body["action"]
    return Got(action, body["record"], body.get("changes"), body["metadata"])


def from_stream(url: str, name: str) -> list[Got]:
    """Return all that a stream of the store has, up to its head."""
    with Store.open(url) as store:
        stream = store.stream(name)
        assert stream is not None
        return [_got(stored.message, stored.action) for stored in read(store, stream)]


def await_steady(pipeline: Penstock, source: Database) -> None:
    """Wait until all that is committed now is durable in every sink."""
    ((written,),) = source.execute("SELECT pg_current_wal_insert_lsn()::text")
    # Something must follow: what is confirmed is the end of a transaction.
    source.execute("SELECT pg_logical_emit_message(true, 'tests', '')")
    pipeline.wait_for(
        lambda: all(
            parse_lsn(found["confirmed_lsn"]) >= parse_lsn(written)
            for found in pipeline.status()
            .get("sources", {"none": {"confirmed_lsn": "0/0"}})
            .values()
        ),
        180,
        "settled",
    )
