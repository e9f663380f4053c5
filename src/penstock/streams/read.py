"""A stream's messages as the batches that its writers had: what a consumer of type nats publishes.

Positions are the stream's own (see records.py). A segment that the maintenance merges meanwhile is
found again in the one that has taken its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.config.consumers import Filters
from penstock.core import queries
from penstock.core.delivery import DeadLetter
from penstock.core.json_members import Members, text_of
from penstock.core.message import WIRE_SCHEMA, Position
from penstock.streams import nats_consumers_filter as sql_filter
from penstock.streams.consumers.selection import matches, superseded
from penstock.streams.consumers.sql_filter import passed
from penstock.streams.names import segment_table
from penstock.streams.records import START, commit_position, stream_idx

Connection = psycopg.Connection[Any]
END: Final = Position((1 << 63) - 1, (1 << 63) - 1)
"""Behind all positions."""
COUNTED: Final = 100_000
"""How many messages are counted at the most."""
_SQL: Final = queries.load("penstock.streams", "read.sql")
_ROWS: Final = 20_000
_BYTES: Final = 16 * 1024 * 1024
_FETCH: Final = 1_000
_TRIES: Final = 10
_MESSAGE: Final = 7  # of a row
_CHANGE: Final = Members(["record", "changes", "metadata", "event"])
_ROW: Final = Members(["record", "metadata"])
_KEY: Final = Members(["idempotency_key"])

T = TypeVar("T")


class Dead(NamedTuple):
    """A dead letter, with the commit position of its message."""

    at: Position
    letter: DeadLetter


class _Segment(NamedTuple):
    id: int
    after: Position
    through: Position


class Read(NamedTuple):
    """Messages, in order, at the commit positions of their stream.

    With them all up to `end`, such a position, are read; None: all that were asked for. Of those that
    are `dead` the consumer's filter can't be evaluated.
    """

    messages: pa.RecordBatch
    end: Position | None
    dead: Sequence[Dead] = ()


@dataclass(frozen=True)
class Selection:
    """What a consumer takes of a stream.

    `backlog` identifies its row in `penstock.backlogs` (source and name), where that has messages that
    are passed by; None where there are none. `function` is that of its filter in SQL.
    """

    stream_id: int
    kind: str
    filters: Filters = field(default_factory=Filters)
    backlog: tuple[int, str] | None = None
    function: str | None = None


def read(
    connection: Connection,
    of: Selection,
    after: Position,
    until: Position = END,
    *,
    rows: int = _ROWS,
) -> Read:
    """Return the first messages in (after, until], about `rows` of them.

    Of kind rows, those alone that nothing up to `until` supersedes.
    """
    return _whole(connection, of.stream_id, lambda s: _read(connection, s, of, after, until, rows))


def count(connection: Connection, of: Selection, after: Position, until: Position = END) -> int:
    """Return how many messages lie in (after, until]; no more than `COUNTED` are counted."""

    def work(segments: list[_Segment]) -> int:
        total = 0
        for segment in segments:
            if segment.through <= after or segment.after >= until or total >= COUNTED:
                continue
            query = _query("count", segment, segments, of)
            values = _values(of, after, until) | {"limit": COUNTED - total}
            ((found,),) = connection.execute(query, values)
            total += found
        return total

    return _whole(connection, of.stream_id, work)


def positions(connection: Connection, stream_id: int, after: Position) -> list[Position]:
    """Return the positions of all messages behind `after`."""

    def work(segments: list[_Segment]) -> list[Position]:
        found: list[Position] = []
        for segment in segments:
            if segment.through > after:
                query = sql.SQL(_SQL["positions"]).format(segment=segment_table(segment.id))
                found += [Position(*row) for row in connection.execute(query, [*after])]
        return found

    return _whole(connection, stream_id, work)


def last(connection: Connection, stream_id: int) -> Position:
    """Return the position of the newest message, `START` where there was none."""

    def work(segments: list[_Segment]) -> Position:
        for segment in reversed(segments):
            query = sql.SQL(_SQL["last_position"]).format(segment=segment_table(segment.id))
            if (row := connection.execute(query).fetchone()) is not None:
                return Position(*row)
        return segments[0].after if segments else START

    return _whole(connection, stream_id, work)


def at_time(connection: Connection, stream_id: int, time: datetime) -> Position:
    """Return the position before the first message that was committed at or after a time, in UTC."""
    text = time.replace(tzinfo=None).isoformat(timespec="microseconds")

    def work(segments: list[_Segment]) -> Position:
        for segment in segments:
            table = segment_table(segment.id)
            query = sql.SQL(_SQL["last_position"]).format(segment=table)
            if (row := connection.execute(query).fetchone()) is None:
                continue
            low, high = max(segment.after.lsn, 0), row[0] + 1
            query = sql.SQL(_SQL["at_time"]).format(segment=table)
            while low < high:  # the first LSN at or behind which all is late enough
                middle = (low + high) // 2
                probe = connection.execute(query, [middle]).fetchone()
                if probe is None or (probe[1] or "") >= text:
                    high = middle
                else:
                    low = probe[0] + 1
            if low <= row[0]:
                return Position(low, -1)
        return last(connection, stream_id)

    return _whole(connection, stream_id, work)


def begins(connection: Connection, stream_id: int) -> Position:
    """Return the position behind which a stream's first segment begins: what came before is dropped."""
    segments = _segments(connection, stream_id)
    return segments[0].after if segments else START


def _segments(connection: Connection, stream_id: int) -> list[_Segment]:
    return [
        _Segment(id_, Position(lsn, idx), END if None in through else Position(*through))
        for id_, lsn, idx, *through in connection.execute(_SQL["segments"], [stream_id])
    ]


def _whole(connection: Connection, stream_id: int, work: Callable[[list[_Segment]], T]) -> T:
    """Run `work` on a stream's segments, and again where one of them was merged away meanwhile."""
    for _ in range(_TRIES):
        try:
            with connection.transaction():
                return work(_segments(connection, stream_id))
        except psycopg.errors.UndefinedTable:
            continue
    return work(_segments(connection, stream_id))


def _query(name: str, segment: _Segment, segments: list[_Segment], of: Selection) -> sql.Composed:
    conditions = [matches(of.filters)]
    if of.kind == "rows":
        newer = superseded([s.id for s in segments if s.after >= segment.after])
        conditions.append(sql.SQL("NOT {}").format(newer))
    if of.backlog is not None:
        conditions.append(sql.SQL(_SQL["not_ahead"]))
    asked: sql.Composable = sql.SQL("")
    verdict = sql.SQL("''")
    if of.function is not None:
        asked = sql.SQL(_SQL["asked"]).format(passed=passed(of.function))
        verdict = sql.SQL(_SQL["verdict"])
        conditions.append(sql.SQL("f.passed IS NOT NULL"))
    return sql.SQL(_SQL[name]).format(
        segment=segment_table(segment.id), condition=sql.SQL(" AND ").join(conditions),
        asked=asked, verdict=verdict,
    )  # fmt: skip


def _values(of: Selection, after: Position, until: Position) -> dict[str, Any]:
    source, sink = of.backlog or (None, None)
    return {
        "lsn": after.lsn, "idx": after.idx, "last_lsn": until.lsn, "last_idx": until.idx,
        "head_lsn": until.lsn, "head_idx": until.idx, "source": source, "sink": sink,
    }  # fmt: skip


def _read(
    connection: Connection,
    segments: list[_Segment],
    of: Selection,
    after: Position,
    until: Position,
    rows: int,
) -> Read:
    found: list[tuple[Any, ...]] = []
    size = 0
    for segment in segments:
        if segment.through <= after or segment.after >= until:
            continue
        # By a cursor, as the server would send a whole stream otherwise.
        with connection.cursor(name="penstock") as cursor:
            cursor.execute(_query("messages", segment, segments, of), _values(of, after, until))
            while page := cursor.fetchmany(_FETCH):
                found += page
                size += sum(len(row[_MESSAGE]) for row in page)
                first, last_ = (commit_position(*found[at][:2]) for at in (0, -1))
                if first < last_ and (len(found) >= rows or size >= _BYTES):
                    return _cut(found, of.kind)
        if not found and segment.through < until:
            # Filters may let little through: what was read need not be read again.
            return _made(found, of.kind, commit_position(*segment.through))
    return _made(found, of.kind, None)


def _cut(found: list[tuple[Any, ...]], kind: str) -> Read:
    """Return what was read, without the last captured message: more may have been made of it."""
    commits = [commit_position(*row[:2]) for row in found]
    end = len(found)
    while commits[end - 1] == commits[-1]:
        end -= 1
    return _made(found[:end], kind, commits[end - 1])


def _made(rows: list[tuple[Any, ...]], kind: str, end: Position | None) -> Read:
    messages = _batch([row[: _MESSAGE + 1] for row in rows], kind)
    verdicts = pa.array([row[-1] for row in rows], pa.string())
    passing, wrong = sql_filter.split(messages, verdicts)
    letters = sql_filter.letters(messages, verdicts, wrong)
    at = [commit_position(*rows[row][:2]) for row in wrong]
    return Read(passing, end, [Dead(*of) for of in zip(at, letters, strict=True)])


def _batch(rows: list[tuple[Any, ...]], kind: str) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [()] * (_MESSAGE + 1)
    lsn, idx, group, old_group, schema, table, action, texts = columns
    if kind == "rows":
        read = _ROW.rows(texts)
        records, metadata = _texts(read, 0), _texts(read, 1)
        changes: list[str | None] = [None] * len(rows)
    else:
        read = _CHANGE.rows(texts)
        records, changes, metadata = _texts(read, 0), _texts(read, 1), _texts(read, 2)
        # What a sync's event has is in its own member.
        events = _texts(read, 3)
        records = [r if e is None else e for r, e in zip(records, events, strict=True)]
    keys = [text_of(_bytes(row[0])) for row in _KEY.rows(metadata)]
    commits = [commit_position(0, at).idx for at in idx]
    parts = [at - stream_idx(commit) for at, commit in zip(idx, commits, strict=True)]
    values: dict[str, Any] = {
        "record": records, "changes": changes, "action": action, "table_schema": schema,
        "table_name": table, "metadata": metadata, "idempotency_key": keys, "commit_lsn": lsn,
        "commit_idx": commits, "group_hash": group, "old_group_hash": old_group,
        "old_key": [None] * len(rows), "part": parts,
    }  # fmt: skip
    arrays = [pa.array(values[field.name], field.type) for field in WIRE_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=WIRE_SCHEMA)


def _texts(rows: list[Any], at: int) -> list[str | None]:
    """Return a member of each message; the null of JSON is none."""
    found = (_bytes(row[at]) for row in rows)
    return [None if text is None or text == b"null" else text.decode() for text in found]


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)
