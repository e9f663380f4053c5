"""The filters in SQL of consumers of type nats: functions of the store, as other consumers have them.

A function is known by its stream and its condition, so that a changed filter is another function, and
two consumers with the same condition share one. `evaluated` asks it about messages that a task or a
block has; messages in the stream are filtered where they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from penstock.core import queries
from penstock.core.delivery import DeadLetter, as_captured
from penstock.core.errors import Concern, StoreError
from penstock.streams import copy
from penstock.streams.consumers import sql_filter
from penstock.streams.consumers.sql_filter import FILTER_FAILED
from penstock.streams.consumers.types import ConsumerError

if TYPE_CHECKING:
    from penstock.expressions.postgres.translate import Translated

_SQL: Final = queries.load("penstock.streams", "nats_consumers_filter.sql")
PREFIX: Final = "nats_"
_PASSES: Final = pa.scalar("")

Connection = psycopg.Connection[Any]


def function_of(stream: str, text: str | None) -> str | None:
    """Return by what the function of a condition on a stream is known, None without a condition."""
    if text is None:
        return None
    return PREFIX + hashlib.sha256(f"{stream}\0{text}".encode()).hexdigest()[:16]


def planned(connection: Connection, stream_id: int, consumer: str, text: str) -> Translated:
    """Return a consumer's condition in SQL; raises `StoreError` for what the stream's tables refuse."""
    try:
        return sql_filter.plan(connection, stream_id, text)
    except ConsumerError as error:
        of = Concern("consumer", consumer, error.field)
        text = f"consumers.{consumer}.{error.message}"
        raise StoreError("expression", text, concerns=of) from None


def install(
    connection: Connection, stream: tuple[int, str], consumer: str, text: str | None
) -> None:
    """Make the function of a consumer's condition, or renew it; raises `StoreError` as `planned` does.

    `stream` is the id and the name of its stream.
    """
    id_, name = stream
    function = function_of(name, text)
    if text is not None and function is not None:
        made = planned(connection, id_, consumer, text)
        connection.execute(sql_filter.create(function, made))


def drop_unused(connection: Connection, conditions: Collection[tuple[str, str]]) -> None:
    """Drop the functions of all but these conditions, each with its stream."""
    used = {function_of(*condition) for condition in conditions}
    names = [name for (name,) in connection.execute(_SQL["functions"], [PREFIX])]
    for name in names:
        if name not in used:
            connection.execute(sql_filter.drop(name))


def evaluated(
    connection: Connection, function: str, kind: str, messages: pa.RecordBatch
) -> pa.StringArray:
    """Return of each message what a function makes of it.

    That is null where it is left out, empty where it passes, and otherwise why that can't be evaluated.
    """
    if not messages.num_rows:
        return pa.array([], pa.string())
    query = sql.SQL(_SQL["evaluated"]).format(passed=sql_filter.passed(function))
    values = [copy.texts(messages, kind), messages.column("action").to_pylist()]
    found = connection.execute(query, values).fetchall()
    return pa.array([verdict for (verdict,) in found], pa.string())


def split(messages: pa.RecordBatch, verdicts: pa.StringArray) -> tuple[pa.RecordBatch, list[int]]:
    """Return the messages that pass, and the rows for which that can't be evaluated."""
    passing = pc.fill_null(pc.equal(verdicts, _PASSES), False)
    wrong = pc.fill_null(pc.not_equal(verdicts, _PASSES), False)
    return messages.filter(passing), pc.indices_nonzero(wrong).to_pylist()


def letters(
    messages: pa.RecordBatch, verdicts: pa.StringArray, rows: Iterable[int]
) -> list[DeadLetter]:
    """Return the dead letters of rows of which a filter can't be evaluated."""
    return [
        as_captured(messages, row, FILTER_FAILED, verdicts[row].as_py().removeprefix("!"))
        for row in rows
    ]
