"""What a consumer's filters would make of messages, by the same SQL that its messages are chosen by."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import orjson
from psycopg import sql

from penstock.config.consumers import Filters
from penstock.streams.catalogs import read_catalog
from penstock.streams.consumers import sql_filter
from penstock.streams.consumers.browse import evaluating
from penstock.streams.consumers.search import StreamSearch
from penstock.streams.consumers.selection import matches
from penstock.streams.consumers.sessions import Connection, composed

_PASSES: Final = sql.SQL("''")
_NOT_NAMED: Final = "The filters don't name its table, collection or action."
_NOT_HELD: Final = "The condition in SQL does not hold."


class Verdict(NamedTuple):
    """What would become of a message, and why it is not handed out."""

    result: Literal["sent", "dropped", "failed"]
    why: str | None


async def try_filters(
    search: StreamSearch, filters: Filters, messages: Sequence[Mapping[str, Any]]
) -> list[Verdict]:
    """Return a verdict for each of `messages`, which are as the consumers of a stream get them.

    Raises `WrongSetting` for a condition that the source's tables refuse, and `Refused` where these are
    not known yet.
    """
    if filters.sql is None:
        async with search.sessions.session() as connection:
            return await _verdicts(connection, filters, _PASSES, messages)
    rows = await search.sessions.rows(sql_filter.FILTER_SQL["catalog"], (search.stream.id,))
    tables, source, version = rows[0]
    columns = None if tables is None else read_catalog(tables)
    # In a thread, as the parser takes a while to import.
    made = await asyncio.to_thread(sql_filter.planned, filters.sql, columns, source, version)
    async with evaluating(search, made, sql_filter.FIELD) as (connection, passed):
        return await _verdicts(connection, filters, passed, messages)


async def _verdicts(
    connection: Connection,
    filters: Filters,
    passed: sql.Composable,
    messages: Sequence[Mapping[str, Any]],
) -> list[Verdict]:
    tables = [_table(message) for message in messages]
    params = {
        "schemas": [schema for schema, _ in tables],
        "tables": [table for _, table in tables],
        "actions": [str(message.get("action") or "insert") for message in messages],
        "messages": [orjson.dumps(message).decode() for message in messages],
    }
    query = composed("tried", matches=matches(filters), passed=passed)
    rows = await (await connection.execute(query, params)).fetchall()
    return [_verdict(text, named=named) for text, named in rows]


def _table(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the schema and the table of a message; those of a record are its sync and collection."""
    metadata, record = (
        each if isinstance(each, dict) else {}
        for each in (message.get("metadata"), message.get("event", message.get("record")))
    )
    schema = metadata.get("table_schema") or metadata.get("sync_id") or record.get("sync_id")
    table = (
        metadata.get("table_name") or metadata.get("collection_id") or record.get("collection_id")
    )
    return str(schema or ""), str(table or "")


def _verdict(text: str | None, *, named: bool) -> Verdict:
    if text is None:
        return Verdict("dropped", _NOT_HELD if named else _NOT_NAMED)
    failed = sql_filter.FAILED.decode()
    return Verdict("failed", text.removeprefix(failed)) if text else Verdict("sent", None)
