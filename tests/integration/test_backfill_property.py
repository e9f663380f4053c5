"""Invariant 5: whatever is written while a backfill runs, folding what came gives the table.

Writers change rows at random, in transactions of several statements that are held open, partly
rolled back, or rolled back as a whole. The backfill goes in small chunks, is paused, and the capture
is killed and begun anew, as after a crash: the batch that was not confirmed comes once more.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson
import psycopg
import pytest
from tests.integration.backfilling import TEXTS, Backfilling, fold
from tests.integration.capturing import Message, prepare
from tests.waits import await_end

from penstock.backfill.chunks import sizing
from penstock.backfill.events import Done
from penstock.core.message import Position
from penstock.embedded.handles import Database


class Kind(NamedTuple):
    """A table's key: its columns, and all the values that rows may have."""

    columns: str
    names: tuple[str, ...]
    pool: Sequence[tuple[Any, ...]]


LONGER_TEXTS = sorted({t + end for t in TEXTS for end in ("", "x", "é", "Z", "\n")})
KINDS = {
    "int": Kind("id int", ("id",), [(n,) for n in range(-40, 40)]),
    "uuid": Kind("id uuid", ("id",), [(f"{n * 7919 % 80 << 120 | n:032x}",) for n in range(80)]),
    "text": Kind("id text", ("id",), [(t,) for t in LONGER_TEXTS]),
    "composite": Kind(
        "a int, b text, c mood", ("b", "a", "c"),
        [(t, n, m) for t in TEXTS[:8] for n in (-1, 0, 7) for m in ("sad", "ok", "Happy")],
    ),
}  # fmt: skip
CASTS = {"id": "", "a": "::int", "b": "::text", "c": "::mood"}


class Writer(threading.Thread):
    """Changes a table at random until it is stopped."""

    def __init__(self, database: Database, kind: Kind, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._connection = database.connect(autocommit=True)
        self._kind = kind
        self._random = random.Random(seed)
        self._stopped = stop
        self._changes = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._transaction()
                self._stopped.wait(self._random.uniform(0, 0.01))
        except BaseException as error:
            self.error = error
        finally:
            self._connection.close()

    def _transaction(self) -> None:
        chance = self._random.random
        try:
            with self._connection.transaction() as whole:
                for _ in range(self._random.randint(1, 4)):
                    self._part(chance)
                if chance() < 0.2:
                    self._stopped.wait(chance() * 0.08)  # the snapshots meanwhile see none of it
                if chance() < 0.15:
                    raise psycopg.Rollback(whole)
        except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
            pass

    def _part(self, chance: Callable[[], float]) -> None:
        if chance() < 0.6:
            self._change()
            return
        with self._connection.transaction() as part:
            self._change()
            if chance() < 0.3:
                with self._connection.transaction():
                    self._change()
            if chance() < 0.3:
                raise psycopg.Rollback(part)

    def _change(self) -> None:
        kind, chance = self._kind, self._random.random()
        self._changes += 1
        key, other = self._random.choice(kind.pool), self._random.choice(kind.pool)
        at = " AND ".join(f"{n} = %s{CASTS[n]}" for n in kind.names)
        if kind.names == ("id",):
            at = "id = (%s::text)::" + kind.columns.split()[1]
        to = ", ".join(f"{n} = %s" for n in kind.names)
        names, marks = ", ".join(kind.names), ", ".join(["%s"] * len(kind.names))
        if chance < 0.3:
            self._execute(
                f"INSERT INTO t ({names}, v, big) VALUES ({marks}, 1, repeat('i', 3000))"
                " ON CONFLICT DO NOTHING",
                key,
            )
        elif chance < 0.6:
            self._execute(f"UPDATE t SET v = v + 1, ver = nextval('vers') WHERE {at}", key)
        elif chance < 0.75:
            # All of it, as a killed backfill does not know which moved rows lack their large values.
            self._execute(
                f"UPDATE t SET {to}, big = big || 'm', ver = nextval('vers') WHERE {at} AND NOT"
                f" EXISTS (SELECT FROM t AS o WHERE {at.replace('id =', 'o.id =')})",
                (*other, *key, *other),
            )
        elif chance < 0.995 or self._changes < 100:
            self._execute(f"DELETE FROM t WHERE {at}", key)
        else:
            self._connection.execute("TRUNCATE t")

    def _execute(self, statement: str, values: Sequence[Any]) -> None:
        self._connection.execute(statement.encode(), values)


def set_up(database: Database, kind: Kind, seed: int) -> None:
    """Make the table with about half of the rows that it may have, and the slot."""
    prepare(
        database,
        "CREATE TYPE mood AS ENUM ('sad', 'ok', 'Happy')",
        "CREATE SEQUENCE vers",
        f"CREATE TABLE t ({kind.columns}, v int, ver bigint DEFAULT nextval('vers'), big text,"
        f" PRIMARY KEY ({', '.join(kind.names)}))",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
    )
    database.execute("SELECT pg_drop_replication_slot('s')")
    chosen = random.Random(seed).sample(kind.pool, len(kind.pool) * 2 // 3)
    names, marks = ", ".join(kind.names), ", ".join(["%s"] * len(kind.names))
    with database.connect() as connection:
        for key in chosen:
            connection.execute(
                f"INSERT INTO t ({names}, v, big) VALUES ({marks}, 0, repeat('o', 3000))".encode(),
                key,
            )
    database.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")


class Session:
    """Backfills through kills and pauses, and collects what a consumer would get."""

    def __init__(self, database: Database, seed: int) -> None:
        self._url = database.url
        self._random = random.Random(seed)
        self.received: list[Message] = []
        self.kills = self.pauses = 0
        self.driver = Backfilling(self._url)

    def run(self) -> None:
        """Run until the backfill is done."""
        chance = self._random.random
        self.driver.start()
        for _ in range(20_000):
            due = not self.kills and self.driver.reads()
            if due or (chance() < 0.06 and self.kills < 6):
                self._kill()
            elif chance() < 0.06:
                self._pause()
            self.driver.batch(0.05)
            if any(isinstance(event, Done) for event in self.driver.new_events()):
                return
        raise AssertionError("the backfill does not end")

    def _kill(self) -> None:
        """End everything, with the next batch delivered, planned in the checkpoint, not confirmed."""
        self.kills += 1
        driver, before = self.driver, self.driver.reader.position
        after = driver.reader.capture.available(before, 10_000, 0.05)
        if after > before:
            driver.take(before, after)
        self.received += driver.received
        driver.new_events()
        cursor = driver.cursor
        driver.close()
        self.driver = Backfilling(self._url, before)
        if after > before:
            self.driver.take(before, after)
            self.driver.reader.position = after
        self.driver.start(cursor=cursor)

    def _pause(self) -> None:
        self.pauses += 1
        self.driver.backfiller.pause()
        for _ in range(5):
            self.driver.batch(0.02)
        self.driver.backfiller.resume()

    def end(self) -> list[Message]:
        """Deliver what is left, and return all messages, each once, as they came."""
        self.driver.drain()
        self.driver.close()
        self.received += self.driver.received
        known: dict[Position, Message] = {}
        newest = Position(0, 0)
        for message in self.received:
            twin = known.setdefault(message.position, message)
            assert (twin.key, twin.raw) == (message.key, message.raw), "a replay differs"
            if twin is message:
                assert message.position > newest, "a message came after a later one"
                newest = message.position
        return list(known.values())


def assert_fresh(received: Sequence[Message], names: Sequence[str]) -> None:
    """Check that each read shows its row as the changes before it left it, if there were any."""
    newest: dict[tuple[Any, ...], int | None] = {}
    emptied = False
    for message in received:
        at = tuple(message.record.get(n) for n in names)
        version = message.record.get("ver")
        if message.action == "truncate":
            newest, emptied = {}, True
        elif message.action == "delete":
            newest[at] = None
        elif message.action == "read":
            known = newest.get(at, None if emptied else version)
            assert known == version, ("a read after a newer change", message, known)
        else:
            old = tuple({**message.record, **(message.changes or {})}.get(n) for n in names)
            if old != at:
                newest[old] = None
            newest[at] = version


def table(database: Database, names: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the table as it is."""
    rows = [orjson.loads(row[0]) for row in database.execute("SELECT to_json(t)::text FROM t")]
    return {tuple(row[n] for n in names): row for row in rows}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_folding_gives_the_table(
    database: Database, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    monkeypatch.setattr(sizing, "FEWEST", 3)
    monkeypatch.setattr(sizing, "MOST", 9)
    kind = KINDS[name]
    set_up(database, kind, seed)
    stop = threading.Event()
    writers = [Writer(database, kind, seed * 10 + n, stop) for n in range(4)]
    session = Session(database, seed)
    try:
        for writer in writers:
            writer.start()
        session.run()
        stop.set()
        await_end(*writers)
        received = session.end()
    finally:
        stop.set()
        session.driver.close()
    assert [writer.error for writer in writers] == [None] * len(writers)
    assert session.kills > 0
    assert any(message.action == "read" for message in received)
    assert_fresh(received, kind.names)
    assert fold(received, kind.names) == table(database, kind.names)
