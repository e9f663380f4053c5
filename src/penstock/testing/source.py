"""A database in memory: changes of its tables become messages, by the capture's own encoders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from penstock.config.sources import PostgresSource
from penstock.core.message import Position, source_tag
from penstock.core.tables import TablePattern, matches_any, qualified_name
from penstock.postgres.chunk import ChunkBuilder
from penstock.postgres.pgoutput import (
    UNCHANGED,
    Column,
    Delete,
    Insert,
    Relation,
    Row,
    Unchanged,
    Update,
)
from penstock.postgres.table import Shape, Table, WireRow
from penstock.postgres.transaction import Transaction
from penstock.postgres.types import Types
from penstock.testing.clock import Clock
from penstock.testing.values import ColumnType

_IDENTITIES: Final = {"default": "d", "full": "f"}
_SINCE_1970: Final = 946_684_800_000_000  # µs from 1970 to 2000, where Postgres counts from
_FIRST_LSN: Final = 0x1000000
_LSN_STEP: Final = 0x100
_FIRST_XID: Final = 700

_Encode = Callable[[Transaction, int], WireRow]
_Key = tuple[bytes | None, ...]


class InMemorySource:
    """A captured database. Positions and idempotency keys are the same in every run of a test.

    Args:
        name: The source's name.
        settings: What penstock.yaml has of it.
        clock: The time of commits.
        emit: Takes the messages (`WIRE_SCHEMA`) of each transaction that has any.
    """

    def __init__(
        self,
        name: str,
        settings: PostgresSource,
        clock: Clock,
        emit: Callable[[pa.RecordBatch], None],
    ) -> None:
        self.name = name
        self.database = name
        self._settings = settings
        self._clock = clock
        self._emit = emit
        self._tag = source_tag("0", name, settings.slot)
        self._moved: dict[int, int] = {}
        self._tables: dict[tuple[str, str], InMemoryTable] = {}
        self._types = Types()
        self._transactions = 0
        self._open: list[_Encode] | None = None

    def table(
        self,
        name: str,
        columns: Mapping[str, str],
        *,
        key: str | Sequence[str] = "id",
        replica_identity: str = "default",
    ) -> InMemoryTable:
        """Create a table.

        Args:
            name: `schema.table`, as in penstock.yaml.
            columns: The type of each column, as SQL names it.
            key: The columns of the primary key.
            replica_identity: `default` or `full`: with `full`, updates have all old values in
                `changes`, and deletes have the whole row.

        Raises:
            ValueError: The source does not capture the table, it exists, or a column is wrong.
        """
        pattern = TablePattern.parse(name)
        if pattern.table is None:
            raise ValueError(f"{name!r} is a pattern: expected one table, schema.table")
        at = pattern.schema, pattern.table
        if not matches_any(self._settings.patterns, *at):
            captured = ", ".join(self._settings.tables)
            raise ValueError(f"source {self.name!r} does not capture {name}: it has {captured}")
        if at in self._tables:
            raise ValueError(f"there is a table {name} already")
        if replica_identity not in _IDENTITIES:
            raise ValueError(f"replica identity {replica_identity!r}: expected default or full")
        keys = (key,) if isinstance(key, str) else tuple(key)
        if not keys or (unknown := [name for name in keys if name not in columns]):
            raise ValueError(f"the key of {name} names no column: {', '.join(unknown or ['-'])}")
        types = {column: ColumnType(type_) for column, type_ in columns.items()}
        relation = Relation(
            len(self._tables) + 1,
            *at,
            _IDENTITIES[replica_identity],
            tuple(Column(c, t.oid, -1, c in keys) for c, t in types.items()),
        )
        encoder = Table(
            relation, shape=Shape(keys), converter=self._types.converter, database=self.database,
            tag=self._tag, moved=self._moved,
        )  # fmt: skip
        table = self._tables[at] = InMemoryTable(self, encoder, types, keys)
        return table

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the changes of this block together; an exception rolls all of them back.

        A change outside of such a block is a transaction of its own.
        """
        with self._clock.lock:
            if self._open is not None:
                raise RuntimeError("a transaction is open already")
            changes = self._open = []
            before = {at: dict(table.rows) for at, table in self._tables.items()}
            try:
                yield
            except BaseException:
                for at, table in self._tables.items():
                    table.rows = before.get(at, {})
                raise
            finally:
                self._open = None
            if changes:
                self._commit(changes)

    def change(self, encode: _Encode) -> None:
        """Add a change to the transaction that is open, or commit it alone."""
        with self._clock.lock:
            if self._open is None:
                self._commit([encode])
            else:
                self._open.append(encode)

    def _commit(self, changes: Sequence[_Encode]) -> None:
        lsn = _FIRST_LSN + self._transactions * _LSN_STEP
        xid = _FIRST_XID + self._transactions
        self._transactions += 1
        at = self._clock.microseconds - _SINCE_1970
        transaction = Transaction(lsn, at, xid, self._tag.encode())
        builder = ChunkBuilder(Position(lsn, -1), 1)
        for idx, encode in enumerate(changes):
            builder.add(encode(transaction, idx), 0)
        ((_, batch, _),) = builder.take(Position(lsn, len(changes) - 1)).pieces
        self._emit(batch)
        self._clock.notify()


class InMemoryTable:
    """A table; `InMemorySource.table` creates it. Values are Python's, or text as Postgres prints it.

    Attributes:
        rows: The rows by primary key, each value as the text that Postgres prints.
    """

    def __init__(
        self,
        source: InMemorySource,
        encoder: Table,
        types: Mapping[str, ColumnType],
        key: Sequence[str],
    ) -> None:
        self.name = qualified_name(encoder.schema, encoder.name)
        self.rows: dict[_Key, Row] = {}
        self._source = source
        self._encoder = encoder
        self._oid = encoder.relation.oid
        self._types = types
        self._columns = list(types)
        self._key = [self._columns.index(name) for name in key]
        self._is_full = encoder.relation.replica_identity == "f"

    def insert(self, **values: Any) -> None:
        """Insert a row; a column that is not given is null.

        Raises:
            ValueError: The table has no such column, the key is null, or a row has it.
        """
        row: Row = [None] * len(self._columns)
        for at, value in self._texts(values):
            if value is UNCHANGED:
                raise ValueError(f"{self.name}.{self._columns[at]}: an insert has no value before")
            row[at] = value
        self._put(row)
        self._source.change(lambda *at: self._encoder.insert(Insert(self._oid, row), *at))

    def update(self, *key: Any, **values: Any) -> None:
        """Update the row with this primary key; columns that are not given stay as they are.

        A value `UNCHANGED` stands for a large value that the update left as it was: the WAL lacks it.

        Raises:
            KeyError: There is no such row.
            ValueError: The table has no such column, or another row has the new key.
        """
        before = self._row(key)
        logged = list(before)
        for at, value in self._texts(values):
            logged[at] = value
        after: Row = [b if v is UNCHANGED else v for b, v in zip(before, logged, strict=True)]
        del self.rows[self._key_of(before)]
        try:
            self._put(after)
        except ValueError:
            self.rows[self._key_of(before)] = before
            raise
        moved = self._key_of(before) != self._key_of(after)
        old = before if self._is_full else None
        key_row = self._key_row(before) if moved and not self._is_full else None
        event = Update(self._oid, key_row, old, logged)
        self._source.change(lambda *at: self._encoder.update(event, *at))

    def delete(self, *key: Any) -> None:
        """Delete the row with this primary key.

        Raises:
            KeyError: There is no such row.
        """
        row = self._row(key)
        del self.rows[self._key_of(row)]
        key_row, old = (None, row) if self._is_full else (self._key_row(row), None)
        event = Delete(self._oid, key_row, old)
        self._source.change(lambda *at: self._encoder.delete(event, *at))

    def truncate(self) -> None:
        """Delete all rows at once; only sinks that list the action `truncate` get a message."""
        self.rows.clear()
        self._source.change(self._encoder.truncate)

    def _texts(self, values: Mapping[str, Any]) -> Iterator[tuple[int, bytes | Unchanged | None]]:
        for name, value in values.items():
            if name not in self._types:
                columns = ", ".join(self._columns)
                raise ValueError(f"{self.name} lacks the column {name!r}: it has {columns}")
            try:
                text = UNCHANGED if value is UNCHANGED else self._types[name].text(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self.name}.{name}: {error}") from None
            yield self._columns.index(name), text

    def _put(self, row: Row) -> None:
        key = self._key_of(row)
        names = ", ".join(self._columns[at] for at in self._key)
        if any(value is None for value in key):
            raise ValueError(f"{self.name}: the key ({names}) has no value")
        if key in self.rows:
            shown = ", ".join((value or b"").decode() for value in key)
            raise ValueError(f"{self.name} has a row with {names} = {shown} already")
        self.rows[key] = row

    def _row(self, key: Sequence[Any]) -> Row:
        names = [self._columns[at] for at in self._key]
        if len(key) != len(names):
            raise TypeError(
                f"the key of {self.name} is ({', '.join(names)}): got {len(key)} values"
            )
        texts = tuple(self._types[n].text(value) for n, value in zip(names, key, strict=True))
        try:
            return self.rows[texts]
        except KeyError:
            shown = ", ".join(map(repr, key))
            raise KeyError(f"{self.name} has no row with {', '.join(names)} = {shown}") from None

    def _key_of(self, row: Row) -> _Key:
        return tuple(row[at] for at in self._key)  # type: ignore[misc]  # a key has no null

    def _key_row(self, row: Row) -> Row:
        return [value if at in self._key else None for at, value in enumerate(row)]
