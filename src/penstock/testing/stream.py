"""A stream in memory: its rows are those that Penstock writes to the store."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple

import orjson
import pyarrow as pa

from penstock.config.consumers import ANY, ConsumerSettings, Filters
from penstock.core.message import DELETE
from penstock.core.tables import TablePattern, provider_of
from penstock.streams import copy
from penstock.streams.consumers.decide import Row
from penstock.streams.consumers.entry import Parked
from penstock.streams.consumers.state import START


class StreamRow(NamedTuple):
    """A message as a stream's table has it; `key` distinguishes rows in kind `rows` alone."""

    lsn: int
    idx: int
    group: int
    old_group: int | None
    key: str | None
    table_schema: str
    table_name: str
    action: str
    message: bytes

    @property
    def committed_at(self) -> datetime:
        """When the message's transaction was committed."""
        at = orjson.loads(self.message)["metadata"]["commit_timestamp"]
        return datetime.fromisoformat(at).astimezone(UTC)


class InMemoryStream:
    """A stream's messages, in their order.

    Args:
        number: The stream's id.
        name: Its name.
        kind: `changes` or `rows`.
        source: The name of the source that it is written from.
        created_at: When it was made.
    """

    def __init__(
        self, number: int, name: str, kind: str, source: str, created_at: datetime
    ) -> None:
        self.id = number
        self.name = name
        self.kind = kind
        self.source = source
        self.created_at = created_at
        self.rows: list[StreamRow] = []
        self._newest: dict[str, tuple[int, int]] = {}
        self._at: dict[tuple[int, int], StreamRow] = {}
        self._groups: dict[int, list[StreamRow]] = {}

    @property
    def head(self) -> tuple[int, int]:
        """The position of the newest message."""
        return self.rows[-1][:2] if self.rows else START

    def write(self, batch: pa.RecordBatch) -> list[StreamRow]:
        """Add messages (`WIRE_SCHEMA`) as the stream sink does; return their rows."""
        placed = copy.placed(batch, self.kind, 0)
        rows = sorted(row for data in copy.rows(placed, self.kind) for row in _rows(bytes(data)))
        self.add(rows)
        return rows

    def add(self, rows: Iterable[StreamRow]) -> None:
        """Add rows behind the head.

        Raises:
            ValueError: A row does not stand behind the head.
        """
        for row in rows:
            if row[:2] <= self.head:
                raise ValueError(f"{row[:2]} does not stand behind the head {self.head}")
            self.rows.append(row)
            self._at[row[:2]] = row
            for group in {row.group, row.group if row.old_group is None else row.old_group}:
                self._groups.setdefault(group, []).append(row)
            if self.kind == "rows" and row.key is not None:
                self._newest[row.key] = row[:2]

    def at(self, position: tuple[int, int]) -> StreamRow | None:
        """Return the message at a position, None if there is none, or a newer one supersedes it."""
        row = self._at.get(position)
        return None if row is None or self.is_superseded(row) else row

    def stored(self, position: tuple[int, int]) -> StreamRow:
        """Return the message at a position, superseded or not; raises `KeyError`."""
        return self._at[position]

    def behind(self, position: tuple[int, int]) -> Iterator[StreamRow]:
        """Yield the messages behind a position."""
        return islice(self.rows, self.count(position), None)

    def count(self, position: tuple[int, int]) -> int:
        """Return how many messages stand at or before a position."""
        return bisect_right(self.rows, position, key=_position)

    def group(self, group: int, first: tuple[int, int], last: tuple[int, int]) -> list[StreamRow]:
        """Return the messages of a group from one position to another, both included."""
        rows = self._groups.get(group, [])
        start = bisect_left(rows, first, key=_position)
        return rows[start : bisect_right(rows, last, key=_position)]

    def is_superseded(self, row: StreamRow) -> bool:
        """Return whether a newer version of the row is in the stream."""
        return row.key is not None and self._newest.get(row.key, row[:2]) > row[:2]

    def before(self, time: datetime) -> tuple[int, int]:
        """Return the position before the first message committed at or after a time."""
        found = next((row for row in self.rows if row.committed_at >= time), None)
        return self.head if found is None else (found.lsn, -1)


class View:
    """A stream as one consumer reads it; it knows all that is next in each group (`GroupRows`)."""

    def __init__(self, stream: InMemoryStream, settings: ConsumerSettings) -> None:
        self.stream = stream
        self._filters = settings.filters
        self._deletes = settings.deletes or stream.kind != "rows"
        self._takes_all = self._filters == Filters() and self._deletes

    def behind(self, cursor: tuple[int, int]) -> Iterator[Row]:
        """Yield what stands behind a position, as a `Step` takes it."""
        return map(self._row, self.stream.behind(cursor))

    def number(self, cursor: tuple[int, int]) -> int:
        """Return how many of the consumer's messages stand behind a position."""
        if self._takes_all:
            return len(self.stream.rows) - self.stream.count(cursor)
        return sum(row[4] is not None for row in self.behind(cursor))

    def knows(self, group: int, parked: Parked) -> bool:  # noqa: ARG002 - of `GroupRows`
        """Return true: a stream in memory needs no look-up."""
        return True

    def next(self, group: int, parked: Parked) -> Row | None:
        """Return the next message of a parked group, None if there is none."""
        return next(iter(self.parked(group, parked)), None)

    def parked(self, group: int, parked: Parked) -> Iterator[Row]:
        """Yield the messages of a parked group, in their order."""
        rows = self.stream.group(group, parked[1:3], parked[3:5])
        return (row for row in map(self._row, rows) if row[4])

    def _row(self, row: StreamRow) -> Row:
        text: bytes | None = row.message
        if not self._takes_all and not self._takes(row):
            text = None
        elif self.stream.is_superseded(row):
            text = b""
        return row.lsn, row.idx, row.group, row.old_group, text

    def _takes(self, row: StreamRow) -> bool:
        return (self._deletes or row.action != DELETE) and matches(self._filters, row)


def matches(filters: Filters, row: StreamRow) -> bool:
    """Return whether a consumer's filters take a message."""
    return (
        _is_one(row, filters.table)
        and _is_one(row, filters.collection_id)
        and _is_in(row.table_schema, filters.resource_id)
        and _is_in(row.table_schema, filters.sync_id)
        and _is_in(provider_of(row.table_name), filters.provider)
        and _is_in(row.action, filters.action)
    )


def _position(row: StreamRow) -> tuple[int, int]:
    return row[:2]


def _is_in(value: str, names: Sequence[str]) -> bool:
    return ANY in names or value in names


def _is_one(row: StreamRow, names: Sequence[str]) -> bool:
    for name in names:
        plain = "." not in name or ":" in name
        if name == ANY or (plain and name == row.table_name):
            return True
        if not plain and TablePattern.parse(name).matches(row.table_schema, row.table_name):
            return True
    return False


def _rows(data: bytes) -> Iterator[StreamRow]:
    """Yield the rows of COPY's binary form (`penstock.streams.copy`)."""
    at = 0
    while at < len(data):
        at += 2  # the number of columns
        values: list[bytes | None] = []
        for _ in copy.COLUMNS:
            size = int.from_bytes(data[at : at + 4], "big", signed=True)
            at += 4
            values.append(None if size < 0 else data[at : at + size])
            at += max(size, 0)
        yield _row(values)


def _row(values: Sequence[bytes | None]) -> StreamRow:
    numbers = [None if v is None else int.from_bytes(v, "big", signed=True) for v in values[:4]]
    texts = [None if v is None else v.decode() for v in values[4:8]]
    return StreamRow(*numbers, *texts, values[8] or b"")  # type: ignore[arg-type,call-arg]  # as many as the fields
