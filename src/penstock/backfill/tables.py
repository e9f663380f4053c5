"""Selects the tables that a backfill is asked for, and refuses before it starts what can't be done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from penstock.backfill.ranges import trusted
from penstock.config.sinks import SinkSettings
from penstock.config.sources import PostgresSource
from penstock.core import queries
from penstock.core.errors import SetupError
from penstock.core.tables import TablePattern, matches_any
from penstock.core.text import nearest
from penstock.postgres.admin import Catalog, TableInfo, open_catalog

_SQL: Final = queries.load("penstock.backfill", "tables.sql")
_EVERYTHING: Final = sql.SQL("true")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is asked for: a sink's tables except those of `skip`, or one `table`; which of its rows."""

    source: PostgresSource
    sink_name: str
    sink: SinkSettings
    table: str | None = None
    where: str | None = None
    start: str | None = None
    skip: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class TableRead:
    """A table that can be backfilled: which rows, in which order, and about how many."""

    schema: str
    table: str
    sort_by: str | None
    start: str | None
    rows: int


class SelectedTables(NamedTuple):
    """The tables to read, warnings, and whether a table that is left out may be read later."""

    reads: list[TableRead]
    warnings: list[str]
    is_partial: bool


def select(selection: Selection) -> SelectedTables:
    """Return the tables to read and warnings; a table that is locked is left out.

    Raises `SetupError` where the one named table can't be backfilled, where none can, or where Postgres
    refuses the condition or the value.
    """
    with open_catalog(selection.source) as catalog:
        catalog.connection.execute(_SQL["session"])
        tables = _of_sink(selection, catalog)
        named = tables if selection.table is None else [_named(selection, catalog, tables)]
        named = [table for table in named if (table.schema, table.name) not in selection.skip]
        filters = catalog.published_tables()
        reads: list[TableRead] = []
        warnings = [*_partial(selection)]
        is_partial = False
        for relation in named:
            try:
                read, warned = _read(selection, catalog, relation, filters)
                reads.append(read)
                warnings += warned
            except _TableError as error:
                if selection.table is not None:
                    raise
                is_partial |= error.transient
                warnings.append(f"{relation} is left out: {error.message} {error.remedy}".strip())
        if not reads and not selection.skip:
            raise SetupError(
                "no_table", f"Sink {selection.sink_name} has no table that can be backfilled.",
                remedy=" ".join(warnings) or "Make one, or correct the sink's `tables`.",
                transient=is_partial,
            )  # fmt: skip
        return SelectedTables(reads, warnings, is_partial)


def _partial(selection: Selection) -> Iterator[str]:
    if missed := [
        action for action in ("insert", "update") if action not in selection.sink.actions
    ]:
        yield (
            f"sink {selection.sink_name} takes no {' and no '.join(missed)}: a row that changes while it"
            " is read comes as that change alone, and so not at all"
        )


class _TableError(SetupError):
    """One table can't be backfilled, and others may."""


def _of_sink(selection: Selection, catalog: Catalog) -> list[TableInfo]:
    patterns = selection.sink.patterns
    return [
        table
        for table in catalog.selected(catalog.relations())
        if patterns is None or matches_any(patterns, table.schema, table.name)
    ]


def _named(selection: Selection, catalog: Catalog, tables: Iterable[TableInfo]) -> TableInfo:
    """Return the table of a name, `schema.table` or the table's alone where that is enough."""
    text = selection.table or ""
    tables = list(tables)
    found = [table for table in tables if text in (str(table), table.name)]
    with contextlib.suppress(ValueError):
        pattern = TablePattern.parse(text)
        found += [t for t in tables if pattern.table and pattern.matches(t.schema, t.name)]
    unique = {table.oid: table for table in found}
    if len(unique) == 1:
        return next(iter(unique.values()))
    names = [str(table) for table in tables]
    if unique:
        message = f"Table {text!r} may be {' or '.join(map(str, unique.values()))}."
        raise SetupError("unknown_table", message, remedy="Name one, with its schema.")
    others = [t for t in catalog.relations() if text in (str(t), t.name)]
    if others and not others[0].can_be_published:
        message = f"{others[0]} is no table whose changes Postgres publishes."
        raise SetupError("unknown_table", message, remedy="Name an ordinary table.")
    known = f"it has {', '.join(names)}" if names else "it has none"
    bare = [n for table in tables for n in (str(table), table.name)]
    raise SetupError(
        "unknown_table",
        f"Sink {selection.sink_name} has no table {text!r}: {known}{nearest(text, bare) or '.'}",
        remedy="A backfill goes to a sink that takes the table's changes.",
    )


def _read(
    selection: Selection,
    catalog: Catalog,
    relation: TableInfo,
    filters: Mapping[tuple[str, str], str | None],
) -> tuple[TableRead, list[str]]:
    if not relation.has_key:
        raise _TableError(
            "no_primary_key",
            f"{relation} has no primary key: a backfill needs one to know where it is, and"
            " which row a change is of.",
            remedy=f"Give it one: ALTER TABLE {relation} ADD PRIMARY KEY (…);",
        )
    name = sql.Identifier(relation.schema, relation.name)
    if not relation.readable:
        role = sql.Identifier(catalog.server.role)
        grant = sql.SQL("GRANT SELECT ON {} TO {}").format(name, role)
        message = f"Role {catalog.server.role} may not read {relation}."
        raise _TableError("permission_denied", message, remedy=catalog.text(grant))
    conditions: list[sql.Composable] = []
    warnings: list[str] = []
    if selection.where is not None:
        from penstock.backfill import condition  # noqa: PLC0415 - sqlglot takes a while to import

        with _refusals(relation, f"--where: Postgres refuses it for {relation}"):
            condition.check(catalog.connection, name, selection.where)
        conditions.append(sql.SQL("({})").format(trusted(selection.where)))
    sort_by = getattr(selection.sink, "sort_by", None)
    start = None
    if sort_by is not None:
        kind, warned = _sorted_by(catalog, relation, sort_by)
        warnings += warned
        if kind is None:
            sort_by = None
        elif selection.start is not None:
            start = _start(catalog, relation, sort_by, kind, selection.start)
            conditions.append(
                sql.SQL("{} >= CAST({} AS {})").format(
                    sql.Identifier(sort_by), sql.Literal(start), trusted(kind)
                )
            )
    if selection.start is not None and start is None:
        raise _TableError(
            "no_sort_by",
            f"--from {selection.start}: sink {selection.sink_name} has no `sort_by` for {relation},"
            " so there is no column to start at.",
            remedy="Add `sort_by: <column>` to the sink (of kind rows), or use --where.",
        )
    if filtered := filters.get((relation.schema, relation.name)):
        conditions.append(sql.SQL("({})").format(trusted(filtered)))
    rows = _estimate(catalog, relation, conditions, selection.where)
    return TableRead(relation.schema, relation.name, sort_by, start, rows), warnings


def _sorted_by(catalog: Catalog, relation: TableInfo, column: str) -> tuple[str | None, list[str]]:
    values = {"oid": relation.oid, "column": column}
    row = catalog.connection.execute(_SQL["column"], values).fetchone()
    if row is None:
        hint = nearest(column, relation.columns)
        return None, [
            f"{relation} has no column {column}{hint}: it is read in the order of its key"
        ]
    kind, indexed = row
    order = sql.SQL(_SQL["order"]).format(
        table=sql.Identifier(relation.schema, relation.name), column=sql.Identifier(column)
    )
    with _refusals(
        relation, f"{relation} can't be read in the order of {column} ({kind})", _TableError
    ):
        catalog.connection.execute(order)
    if indexed:
        return kind, []
    statement = sql.SQL("CREATE INDEX CONCURRENTLY ON {} ({})").format(
        sql.Identifier(relation.schema, relation.name), sql.Identifier(column)
    )
    warning = f"{relation} has no index on {column}: each chunk sorts all of the table; "
    return kind, [warning + catalog.text(statement)]


def _start(catalog: Catalog, relation: TableInfo, column: str, kind: str, value: str) -> str:
    query = sql.SQL(_SQL["value"]).format(type=trusted(kind))
    with _refusals(relation, f"--from {value}: Postgres refuses it for {column} ({kind})"):
        row = catalog.connection.execute(query, [value]).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM
    return str(row[0])


def _estimate(
    catalog: Catalog, relation: TableInfo, conditions: list[sql.Composable], where: str | None
) -> int:
    """Return about how many rows there are; Postgres checks the condition as it plans."""
    query = sql.SQL(_SQL["estimate"]).format(
        table=sql.Identifier(relation.schema, relation.name),
        condition=sql.SQL(" AND ").join(conditions) if conditions else _EVERYTHING,
    )
    kind: type[SetupError] = SetupError
    if where is None:
        what, kind = f"{relation} can't be read", _TableError
    else:
        what = f"--where {where}: Postgres refuses it for {relation}"
    with _refusals(relation, what, kind):
        row = catalog.connection.execute(query).fetchone()
    assert row is not None  # noqa: S101 - a plan is always given
    return int(row[0][0]["Plan"]["Plan Rows"])


@contextlib.contextmanager
def _refusals(
    relation: TableInfo, what: str, kind: type[SetupError] = SetupError
) -> Iterator[None]:
    """Raise what Postgres refuses as `kind`, and a lock of the table as a transient error."""
    try:
        yield
    except psycopg.errors.LockNotAvailable:
        raise _TableError(
            "table_locked", f"{relation} is locked by another session.",
            remedy="Try again when that has ended: a VACUUM FULL or an ALTER TABLE, perhaps.",
            transient=True,
        ) from None  # fmt: skip
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        message = error.diag.message_primary or type(error).__name__
        raise kind("refused", f"{what}: {message}.") from None
