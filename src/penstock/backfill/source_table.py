"""What a backfill needs to know of its table, and why some tables can't be read."""

from __future__ import annotations

import contextlib
from typing import Any

from penstock.backfill.session import SQL, Connection
from penstock.core.errors import BackfillError
from penstock.core.text import nearest
from penstock.postgres.capture import CaptureOptions
from penstock.postgres.catalog import CaptureCatalog
from penstock.postgres.pgoutput import Column, Relation
from penstock.postgres.reads import BackfillSpec, OrderColumn, SourceTable
from penstock.postgres.table import Table
from penstock.postgres.types import Types, load_types


def fingerprint(
    connection: Connection, options: CaptureOptions, spec: BackfillSpec
) -> tuple[Any, ...] | None:
    """Return what `inspect` depends on, to be compared alone; None where there is no table.

    Under a lock on the table only its publication and composite types can still change. Raises
    `psycopg.Error`.
    """
    return _row(
        connection, "fingerprint", schema=spec.schema, table=spec.table,
        publication=options.publication,
    )  # fmt: skip


def compare(
    connection: Connection,
    options: CaptureOptions,
    spec: BackfillSpec,
    before: tuple[Any, ...] | None,
) -> None:
    """Raise `BackfillError` where a table's fingerprint is not `before`; may raise `psycopg.Error`."""
    if fingerprint(connection, options, spec) != before:
        raise BackfillError(
            "table_changed",
            f"Table {spec.schema}.{spec.table}, or what its publication has of it, was altered.",
            remedy="The backfill inspects it again, and goes on.",
            transient=True,
        )


def table_of(source: SourceTable, moved: dict[int, int] | None = None) -> Table:
    """Return the table as the capture sees it, so that hashes of both are equal."""
    return Table(
        source.relation, shape=source.shape, converter=Types(source.types).converter,
        database=source.database, tag=source.tag, group_by=source.group_by,
        split_by=source.split_by, moved=moved,
    )  # fmt: skip


def inspect(
    connection: Connection, options: CaptureOptions, spec: BackfillSpec, database: str, tag: str
) -> SourceTable:
    """Return what reads of the table need; `database` and `tag` are the capture's.

    Raises `BackfillError` where the table can't be read as asked, and `psycopg.Error`.
    """
    name = f"{spec.schema}.{spec.table}"
    (standby, utf8) = _row(connection, "server") or (False, True)
    if standby:
        raise BackfillError(
            "standby",
            "The source is a standby, where nothing can be written; a backfill writes watermarks"
            " into the WAL.",
            remedy="Let the source's url name the primary.",
        )
    names = {"schema": spec.schema, "table": spec.table}
    found = _row(connection, "table", **names)
    if found is None:
        raise BackfillError("table_missing", f"There is no table {name}.")
    oid, kind, identity, policies = found
    if not options.includes(spec.schema, spec.table):
        raise BackfillError(
            "not_captured", f"The source does not capture {name}.",
            remedy="Add it to the source's `tables`.",
        )  # fmt: skip
    published = _row(connection, "published", publication=options.publication, **names)
    if published is None:
        raise BackfillError(
            "not_published",
            f"Publication {options.publication} does not have {name}"
            f"{' as a whole, but its partitions' if kind == 'p' else ''}.",
            remedy="ALTER PUBLICATION … SET (publish_via_partition_root = true)."
            if kind == "p"
            else f"ALTER PUBLICATION {options.publication} ADD TABLE {name}.",
        )
    if policies:
        raise BackfillError(
            "row_security",
            f"Policies of row-level security would hide rows of {name} from the source's role, which"
            " its WAL has.",
            remedy="ALTER ROLE <role> BYPASSRLS, or exempt the role from the policies.",
        )
    listed, row_filter = published
    rows = connection.execute(SQL["columns"], {"oid": oid, "names": listed}).fetchall()
    relation = Relation(
        oid, spec.schema, spec.table, identity, tuple(Column(*column) for column in rows)
    )
    catalog = CaptureCatalog(options.url)
    with contextlib.closing(catalog):
        shape = catalog.shape(relation)
    if not shape.primary_key:
        raise BackfillError(
            "no_primary_key",
            f"{name} has no primary key (or the publication leaves it out): a backfill needs it to"
            " know where it is, and which row a change is of.",
            remedy=f"ALTER TABLE {name} ADD PRIMARY KEY (…), and publish its columns.",
        )
    if shape.identity == ():
        raise BackfillError(
            "replica_identity",
            f"Some partitions of {name} have an index as replica identity, so a delete lacks"
            " the key of its row.",
            remedy="ALTER TABLE <partition> REPLICA IDENTITY DEFAULT (or FULL).",
        )
    unknown = {o for column in relation.columns for o in Types().unknown(column.type_oid)}
    group_by, split_by = options.grouping(spec.schema, spec.table)
    return SourceTable(
        relation, shape, tuple(load_types(connection, unknown)), database, tag,
        None if group_by is None else tuple(group_by),
        None if split_by is None else tuple(split_by),
        row_filter, kind == "p", _ordered(connection, oid, name, shape.primary_key),
        _sort(connection, relation, spec), utf8,
    )  # fmt: skip


def _ordered(
    connection: Connection, oid: int, table: str, names: tuple[str, ...]
) -> tuple[OrderColumn, ...]:
    rows = connection.execute(SQL["ordered"], {"oid": oid, "columns": list(names)}).fetchall()
    for column, kind, schema, *_ in rows:
        if schema is None:
            raise BackfillError(
                "not_ordered",
                f"Column {column} of {table} is of type {kind}, which has no order.",
                remedy="Sort by another column.",
            )
    return tuple(OrderColumn(*row) for row in rows)


def _sort(connection: Connection, relation: Relation, spec: BackfillSpec) -> OrderColumn | None:
    if spec.sort_by is None:
        if spec.start is not None:
            raise BackfillError("no_sort_by", "A value to start at needs a column to sort by.")
        return None
    table = f"{spec.schema}.{spec.table}"
    found = _ordered(connection, relation.oid, table, (spec.sort_by,))
    if not found:
        known = [c.name for c in relation.columns]
        raise BackfillError(
            "column_missing",
            f"{table} has no column {spec.sort_by} to sort by{nearest(spec.sort_by, known)}.",
            remedy="Correct the sink's `sort_by`.",
        )
    return found[0]


def _row(connection: Connection, query: str, **parameters: Any) -> tuple[Any, ...] | None:
    return connection.execute(SQL[query], parameters or None).fetchone()
