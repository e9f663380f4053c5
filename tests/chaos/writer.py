"""Commits numbered changes to many keys, and knows for certain which of them were committed.

A key's history is the list of what happened to it, in commit order: that is what must stand in the
stream. Each writer has keys of its own, so one thread decides the order of a key. A commit whose
outcome is unknown (the connection was lost) is resolved by the database: each transaction inserts
its number into `bookkeeping.marks`, and inserting it once more waits for the transaction, should it
live on, and then shows whether it had been committed.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import psycopg

TABLES: Final = ("even", "odd")
SCHEMA: Final = """
CREATE SCHEMA bookkeeping;
CREATE TABLE bookkeeping.marks (txn text PRIMARY KEY);
CREATE TABLE public.even (id bigint PRIMARY KEY, version bigint NOT NULL, note text NOT NULL);
CREATE TABLE public.odd (id bigint PRIMARY KEY, version bigint NOT NULL, note text NOT NULL);
ALTER TABLE public.odd REPLICA IDENTITY FULL;
"""
ROLLED_BACK: Final = "rolled back"
_DELETE_SHARE, _MOVE_SHARE = 0.12, 0.05
BIG_ROWS: Final = 2500  # more than goes into one Spark task


class Key(NamedTuple):
    """A row's identity."""

    table: str
    id: int


class Step(NamedTuple):
    """What happened to a key: its new version, or None where the action doesn't carry one."""

    action: str  # insert, update, delete, moved_in, moved_out
    version: int | None


@dataclass
class _Row:
    exists: bool = False
    version: int = 0


@dataclass
class Transaction:
    """What a transaction would change, kept apart until its commit is known."""

    steps: list[tuple[Key, Step]] = field(default_factory=list)
    rows: dict[Key, _Row] = field(default_factory=dict)
    messages: int = 0
    ids: set[int] = field(default_factory=set)  # of messages in an outbox


class Writer(threading.Thread):
    """Writes to keys `first … first + count - 1` of both tables until it is stopped."""

    def __init__(
        self, url: str, number: int, keys: int, rate: float, seed: int,
        *, tables: Sequence[str] = TABLES,
    ) -> None:  # fmt: skip
        super().__init__(name=f"writer-{number}", daemon=True)
        self.histories: dict[Key, list[Step]] = defaultdict(list)
        self.committed = 0  # messages
        self.transactions = self.rolled_back = self.unknown = self.reconnects = 0
        self.error: BaseException | None = None
        self._url = url
        self._number = number
        self._keys = [Key(tables[i % len(tables)], number * 1_000_000 + i) for i in range(keys)]
        self.rows: dict[Key, _Row] = {key: _Row() for key in self._keys}
        self._rate = rate
        self._random = random.Random(seed * 1000 + number)
        self._stopping = threading.Event()
        self._connection: psycopg.Connection[Any] | None = None
        self._next = 0

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                # A big transaction must not be followed by a long silence.
                done = min(self._transaction(), 20)
                self._stopping.wait(done / self._rate * self._random.uniform(0.5, 1.5))
        except BaseException as error:
            self.error = error
        finally:
            if self._connection is not None:
                self._connection.close()

    # -- one transaction

    def _transaction(self) -> int:
        """Try one; returns how many messages it committed."""
        chance = self._random.random()
        name = f"{self._number}-{self._next}"
        self._next += 1
        rollback = 0.90 < chance <= 0.98
        big = chance > 0.997
        changes = 1 if chance < 0.5 else self._random.randint(2, 12)
        planned = Transaction()
        known = True
        try:
            connection = self._connected()
            connection.execute("INSERT INTO bookkeeping.marks VALUES (%s)", [name])
            if self._random.random() < 0.1:
                self._savepoint(connection)
            if big:
                self._sweep(connection, planned)
            for _ in range(changes):
                self._change(connection, planned, ROLLED_BACK if rollback else name)
            if rollback:
                connection.rollback()
                self.rolled_back += 1
                return 1
            known = False  # from here on the commit may take place without our hearing of it
            connection.commit()
        except psycopg.OperationalError:
            self._disconnect()
            if known or not self._was_committed(name):
                return 1
        self._take(planned)
        return planned.messages

    def _take(self, planned: Transaction) -> None:
        for key, step in planned.steps:
            self.histories[key].append(step)
        self.rows.update(planned.rows)
        self.transactions += 1
        self.committed += planned.messages

    def _row(self, planned: Transaction, key: Key) -> _Row:
        if key not in planned.rows:
            now = self.rows[key]
            planned.rows[key] = _Row(now.exists, now.version)
        return planned.rows[key]

    def _change(self, connection: psycopg.Connection[Any], planned: Transaction, note: str) -> None:
        key = self._random.choice(self._keys)
        row = self._row(planned, key)
        chance = self._random.random()
        if not row.exists:
            row.exists, row.version = True, row.version + 1
            connection.execute(
                f"INSERT INTO public.{key.table} VALUES (%s, %s, %s)", [key.id, row.version, note]
            )
            planned.steps.append((key, Step("insert", row.version)))
        elif chance < _DELETE_SHARE:
            row.exists = False
            connection.execute(f"DELETE FROM public.{key.table} WHERE id = %s", [key.id])
            planned.steps.append((key, Step("delete", None)))
        elif chance < _DELETE_SHARE + _MOVE_SHARE and (to := self._free(planned, key)) is not None:
            other = self._row(planned, to)
            row.exists, other.exists, other.version = False, True, other.version + 1
            connection.execute(
                f"UPDATE public.{key.table} SET id = %s, version = %s, note = %s WHERE id = %s",
                [to.id, other.version, note, key.id],
            )
            planned.steps.append((key, Step("moved_out", None)))
            planned.steps.append((to, Step("moved_in", other.version)))
        else:
            row.version += 1
            connection.execute(
                f"UPDATE public.{key.table} SET version = %s, note = %s WHERE id = %s",
                [row.version, note, key.id],
            )
            planned.steps.append((key, Step("update", row.version)))
        planned.messages += 1

    def _free(self, planned: Transaction, key: Key) -> Key | None:
        """Return a key of the same table whose row does not exist, if chance finds one."""
        for _ in range(10):
            other = self._random.choice(self._keys)
            if other.table == key.table and not self._row(planned, other).exists:
                return other
        return None

    def _savepoint(self, connection: psycopg.Connection[Any]) -> None:
        """Change rows behind a savepoint that is rolled back: nothing of it may ever arrive."""
        connection.execute("SAVEPOINT doubt")
        self._change(connection, Transaction(), ROLLED_BACK)
        connection.execute("ROLLBACK TO SAVEPOINT doubt")

    def _sweep(self, connection: psycopg.Connection[Any], planned: Transaction) -> None:
        """Update every row of ours again and again, until the transaction is a big one."""
        present = [key for key in self._keys if self._row(planned, key).exists]
        if not present:
            return
        for _ in range(BIG_ROWS // len(present) + 1):
            with connection.cursor() as cursor:
                for table in TABLES:
                    keys = [key for key in present if key.table == table]
                    cursor.execute(
                        f"UPDATE public.{table} SET version = version + 1 WHERE id = ANY(%s)",
                        [[key.id for key in keys]],
                    )
                    assert cursor.rowcount == len(keys)
            for key in present:
                row = self._row(planned, key)
                row.version += 1
                planned.steps.append((key, Step("update", row.version)))
                planned.messages += 1

    # -- connection

    def _connected(self) -> psycopg.Connection[Any]:
        while self._connection is None or self._connection.closed:
            try:
                self._connection = psycopg.connect(self._url, connect_timeout=5)
                self.reconnects += 1
            except psycopg.OperationalError:
                if self._stopping.wait(0.1):
                    raise
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _was_committed(self, name: str) -> bool:
        """Ask the database, for as long as it takes."""
        self.unknown += 1
        pause = threading.Event()
        while True:
            try:
                with psycopg.connect(self._url, connect_timeout=5, autocommit=True) as connection:
                    mark = "INSERT INTO bookkeeping.marks VALUES (%s) ON CONFLICT DO NOTHING"
                    return connection.execute(mark, [name]).rowcount == 0
            except psycopg.OperationalError:
                pause.wait(0.1)
