"""The SQL of key ranges: which rows, in which order, behind which key. No I/O.

Keys travel as the text that Postgres prints and are cast back, so that any type and collation works;
operators are named with their schema, as an extension's type (citext) may have its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psycopg import sql

from penstock.backfill.session import SQL
from penstock.postgres.reads import BackfillSpec, Cursor, OrderColumn, Range, SourceTable

_AND: Final = sql.SQL(" AND ")
_COMMA: Final = sql.SQL(", ")
_TRUE: Final = sql.SQL("true")
_BUILT_IN: Final = "pg_catalog"


def table(source: SourceTable) -> sql.Composable:
    """Return the table as SQL names it: a parent in an inheritance without its children's rows."""
    name = sql.Identifier(source.relation.schema, source.relation.name)
    return name if source.partitioned else sql.SQL("ONLY ") + name


def columns(source: SourceTable) -> sql.Composable:
    """Return the columns of the publication, in the order of the WAL."""
    return _COMMA.join(sql.Identifier(c.name) for c in source.relation.columns)


def weight(source: SourceTable) -> sql.Composable:
    """Return how many bytes a row's columns have as text."""
    # `concat` prints a value as COPY does, whatever casts its type has.
    one = sql.SQL("pg_catalog.octet_length(pg_catalog.concat({}))")
    names = [sql.Identifier(c.name) for c in source.relation.columns]
    return sql.SQL(" + ").join(one.format(name) for name in names)


def ordering(source: SourceTable, *, nulls: bool) -> list[OrderColumn]:
    """Return the columns that rows are ordered by; among `nulls` it is the key alone."""
    return [*([source.sort] if source.sort is not None and not nulls else ()), *source.key]


def key(source: SourceTable, *, nulls: bool) -> sql.Composable:
    """Return those columns, as a SELECT or ORDER BY list."""
    return _COMMA.join(sql.Identifier(c.name) for c in ordering(source, nulls=nulls))


def condition(source: SourceTable, spec: BackfillSpec, rows: Range) -> sql.Composable:
    """Return the condition that holds for the rows of a range, before the filters."""
    if rows.keys:
        return sql.SQL("({})").format(_any_of(source.key, rows.keys))
    order = ordering(source, nulls=rows.nulls)
    parts: list[sql.Composable] = []
    if source.sort is not None:
        name = sql.Identifier(source.sort.name)
        parts.append(
            sql.SQL("{} IS {}").format(name, sql.SQL("NULL" if rows.nulls else "NOT NULL"))
        )
        if spec.start is not None:
            parts.append(_compared([source.sort], ">=", [spec.start]))
    if rows.after is not None:
        parts.append(_compared(order, ">", _values(order, rows.after)))
    if rows.until is not None:
        parts.append(_compared(order, "<=", _values(order, rows.until)))
    return _AND.join(parts) if parts else _TRUE


def filters(source: SourceTable, spec: BackfillSpec) -> sql.Composable | None:
    """Return the publication's and the backfill's filter as one condition; None for all rows."""
    parts = [trusted(text) for text in (source.row_filter, spec.where) if text is not None]
    return _AND.join(sql.SQL("({})").format(part) for part in parts) if parts else None


def copy(source: SourceTable, spec: BackfillSpec, rows: Range) -> sql.Composed:
    """Return the statement that reads a range."""
    passed = filters(source, spec)
    where = condition(source, spec, rows)
    return sql.SQL(SQL["copy"]).format(
        columns=columns(source), table=table(source),
        condition=where if passed is None else where + _AND + passed,
        order=key(source, nulls=rows.nulls or bool(rows.keys)),
        # A SQL_ASCII database would refuse rows with bytes that are no UTF-8 otherwise.
        encoding=sql.Literal("UTF8" if source.utf8 else "SQL_ASCII"),
    )  # fmt: skip


def _values(order: Sequence[OrderColumn], cursor: Cursor) -> Sequence[str | None]:
    # A cursor of a sorted backfill has the value to sort by first, null where there is none.
    return (cursor or ())[-len(order) :]


def _any_of(order: Sequence[OrderColumn], keys: Sequence[Sequence[str]]) -> sql.Composable:
    rows = [_AND.join(_one(c, "=", v) for c, v in zip(order, k, strict=True)) for k in keys]
    return sql.SQL(" OR ").join(sql.SQL("({})").format(row) for row in rows)


def _compared(
    order: Sequence[OrderColumn], operator: str, values: Sequence[str | None]
) -> sql.Composable:
    """Compare columns with values, as rows are compared: by the first that differs."""
    if len(order) == 1:
        return _one(order[0], operator, values[0])
    if all(column.operators == _BUILT_IN for column in order):
        return sql.SQL("ROW({}) {} ROW({})").format(
            _COMMA.join(_value(c) for c in order),
            _operator(_BUILT_IN, operator),
            _COMMA.join(_literal(c, v) for c, v in zip(order, values, strict=True)),
        )
    first, value = order[0], values[0]
    # One operator can't be in two schemas. What may equal comes first: an index can start there.
    return sql.SQL("({} AND ({} OR ({} AND {})))").format(
        _one(first, operator[0] + "=", value),
        _one(first, operator[0], value),
        _one(first, "=", value),
        _compared(order[1:], operator, values[1:]),
    )


def _one(column: OrderColumn, operator: str, value: str | None) -> sql.Composable:
    return sql.SQL("{} {} {}").format(
        _value(column),
        _operator(column.operators, operator),
        _literal(column, value),
    )


def _value(column: OrderColumn) -> sql.Composable:
    # A domain over an enum is no enum to the operators.
    name = sql.Identifier(column.name)
    return sql.SQL("CAST({} AS {})").format(name, trusted(column.type)) if column.domain else name


def _operator(schema: str, operator: str) -> sql.Composable:
    return sql.SQL("OPERATOR({}.{})").format(sql.Identifier(schema), trusted(operator))


def _literal(column: OrderColumn, value: str | None) -> sql.Composable:
    return sql.SQL("CAST({} AS {})").format(sql.Literal(value), trusted(column.type))


def trusted(text: str) -> sql.SQL:
    """Return SQL that Postgres has printed, or `penstock.backfill.condition` has checked."""
    return sql.SQL(text)
