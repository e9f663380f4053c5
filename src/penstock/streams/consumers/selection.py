"""Which messages a consumer gets, as conditions on a segment `m`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psycopg import sql

from penstock.config.consumers import ANY, Filters
from penstock.core.tables import TablePattern
from penstock.streams.names import segment_table

ALL: Final = sql.SQL("true")
PROVIDER: Final = sql.SQL(
    "CASE WHEN strpos(m.table_name, ':') > 0 THEN split_part(m.table_name, ':', 1) ELSE '' END"
)


def matches(filters: Filters, *, deletes: bool = True) -> sql.Composable:
    """Return the condition that a message is one of those that `filters` name.

    Without `deletes` it is none of a row that is gone.
    """
    conditions: list[sql.Composable] = [] if deletes else [sql.SQL("m.action <> 'delete'")]
    for tables in (filters.table, filters.collection_id):
        if ANY not in tables:
            found = sql.SQL(" OR ").join(_table(table) for table in tables)
            conditions.append(sql.SQL("({})").format(found))
    for value, names in (
        (sql.SQL("m.table_schema"), filters.resource_id),
        (sql.SQL("m.table_schema"), filters.sync_id),
        (PROVIDER, filters.provider),
        (sql.SQL("m.action"), filters.action),
    ):
        if ANY not in names:
            listed = sql.SQL(", ").join(map(_literal, names))
            conditions.append(sql.SQL("{} IN ({})").format(value, listed))
    return sql.SQL(" AND ").join(conditions) if conditions else ALL


def _table(name: str) -> sql.Composable:
    if "." not in name or ":" in name:
        return sql.SQL("m.table_name = {}").format(_literal(name))
    pattern = TablePattern.parse(name)
    schema = sql.SQL("m.table_schema = {}").format(_literal(pattern.schema))
    if pattern.table is None:
        return schema
    table = sql.SQL(" AND m.table_name = {}").format(_literal(pattern.table))
    return sql.Composed([sql.SQL("("), schema, table, sql.SQL(")")])


def _literal(text: str) -> sql.Composable:
    # psycopg takes a % in a query that has parameters for one of them.
    escaped = sql.Literal(text).as_string().replace("%", "%%")
    return sql.SQL(escaped)


def superseded(newer: Sequence[int]) -> sql.Composable:
    """Return the condition that one of the segments `newer` has a newer version of the message.

    Its parameters are `head_lsn` and `head_idx`: what lies behind is not there yet.
    """
    found = [
        sql.SQL(
            "EXISTS (SELECT FROM {} n WHERE n.key = m.key AND (n.lsn, n.idx) > (m.lsn, m.idx)"
            " AND (n.lsn, n.idx) <= (%(head_lsn)s, %(head_idx)s))"
        ).format(segment_table(segment))
        for segment in newer
    ]
    return sql.SQL("({})").format(sql.SQL(" OR ").join(found))
