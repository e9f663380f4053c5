"""The publication: what a source asks of it, what it lacks, and the statements that mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

from penstock.core.errors import SetupError
from penstock.core.tables import TablePattern
from penstock.core.text import nearest
from penstock.postgres.admin import Catalog, Publication, TableInfo


def missing_tables(
    catalog: Catalog,
    relations: Sequence[TableInfo],
    patterns: Sequence[TablePattern] | None = None,
) -> list[tuple[str, str]]:
    """Return a message and a hint for each table that `patterns` name and that is not there.

    Without `patterns` they are the source's.
    """
    faults = []
    known = [str(relation) for relation in relations if relation.can_be_published]
    by_name = {(relation.schema, relation.name): relation for relation in relations}
    for pattern in catalog.source.patterns if patterns is None else patterns:
        if pattern.table is None:
            continue
        relation = by_name.get((pattern.schema, pattern.table))
        if relation is None:
            faults.append((f"there is no table {pattern}", nearest(pattern, known)))
        elif not relation.can_be_published:
            kinds = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
            kind = kinds.get(relation.kind, "an unlogged table")
            faults.append((f"{pattern} is {kind}, whose changes are not in the WAL", ""))
    return faults


def create_publication(catalog: Catalog, tables: Sequence[TablePattern]) -> sql.Composed:
    """Return the statement that makes the source's publication."""
    options = ["publish_via_partition_root = true"]
    if catalog.server.major >= 18:
        options.append("publish_generated_columns = stored")
    return sql.SQL("CREATE PUBLICATION {} FOR {} WITH ({})").format(
        sql.Identifier(catalog.source.publication),
        _objects(catalog, _minimal(tables)),
        sql.SQL(", ".join(options)),
    )


def add_to_publication(catalog: Catalog, tables: Sequence[TablePattern]) -> sql.Composed:
    """Return the statement that adds tables and whole schemas to the publication."""
    return sql.SQL("ALTER PUBLICATION {} ADD {}").format(
        sql.Identifier(catalog.source.publication), _objects(catalog, tables)
    )


def publishes_generated(catalog: Catalog, publication: Publication | None) -> bool:
    """Return whether messages have stored generated columns.

    Before the first run there is no publication; it is then made to publish them where it can.
    """
    return catalog.server.major >= 18 and (publication is None or publication.generated == "s")


def publish_generated(catalog: Catalog) -> sql.Composed:
    """Return the statement that has the publication send stored generated columns."""
    return _set(catalog, sql.SQL("publish_generated_columns = stored"))


def set_via_root(catalog: Catalog) -> sql.Composed:
    """Return the statement that publishes partitions under the name of their table."""
    return _set(catalog, sql.SQL("publish_via_partition_root = true"))


def _set(catalog: Catalog, option: sql.SQL) -> sql.Composed:
    name = sql.Identifier(catalog.source.publication)
    return sql.SQL("ALTER PUBLICATION {} SET ({})").format(name, option)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What of the source's tables a publication lacks."""

    schemas: list[TablePattern]
    """Whole schemas that it does not have as such: new tables will not be in it."""
    tables: list[TablePattern]
    """Tables that are there and not in it."""
    limited: list[TablePattern]
    """Tables whose row filter or column list forbids to add schemas; none where none are lacking.

    With a table's schema Postgres would publish all of its rows, and refuses one beside a column list.
    """

    @property
    def addable(self) -> list[TablePattern]:
        """The schemas that can be added, or else the tables."""
        return [] if self.limited else self.schemas

    def open_end(self) -> str:
        """Return why tables that are made later will not be in it by themselves."""
        schemas, limited = ", ".join(map(str, self.schemas)), ", ".join(map(str, self.limited))
        if not limited:
            return (
                f"has the tables of {schemas} one by one: new tables are not captured by themselves"
            )
        return (
            f"has a row filter or a column list for {limited}, which would not hold with all of "
            f"{schemas} in it: it has the tables one by one, and new tables are not captured by "
            "themselves"
        )


def coverage(catalog: Catalog, publication: Publication, selected: Sequence[TableInfo]) -> Coverage:
    """Compare a publication with what the source asks for."""
    if publication.all_tables:
        return Coverage([], [], [])
    schemas = catalog.published_schemas()
    published = catalog.published_tables()
    whole = [p for p in catalog.source.patterns if p.table is None and p.schema not in schemas]
    return Coverage(
        whole,
        [
            TablePattern(table.schema, table.name)
            for table in selected
            # A partition's root stands for it; without `via_root` a root shows as its partitions.
            if (table.schema, table.name) not in published
            and table.schema not in schemas
            and not (table.kind == "p" and not publication.via_root)
        ],
        [table for table, _ in catalog.limited_tables()] if whole else [],
    )


def partition_fault(
    catalog: Catalog, publication: Publication, selected: Sequence[TableInfo]
) -> SetupError | None:
    """Return why partitioned tables can't be published under their own names.

    What then holds is the row filter and the column list of the table, not those of its partitions.
    """
    roots = {table.oid: table for table in selected if table.kind == "p"}
    if not roots:
        return None
    published = catalog.published_tables() if publication.via_root else {}
    for partition, oid in catalog.limited_tables():
        root = roots.get(oid or 0)
        if root is None or (root.schema, root.name) in published:
            continue
        name = catalog.source.publication
        return SetupError(
            "publication_limited",
            f"Publication {name} has a row filter or a column list for {partition}, a partition of "
            f"{root}, and captured as {root} all of its rows and columns would be published.",
            remedy=f"Give {root} its own: ALTER PUBLICATION {catalog.text(sql.Identifier(name))} DROP "
            f"TABLE {partition}, then ADD TABLE {root} WHERE (…); or name other tables in `tables`.",
        )
    return None


def _objects(catalog: Catalog, tables: Sequence[TablePattern]) -> sql.Composable:
    whole = [p for p in tables if p.table is None]
    if whole and catalog.server.major < 15:
        return sql.SQL("ALL TABLES")  # 14 knows no publication of a schema
    parts: list[sql.Composable] = []
    single = [p for p in tables if p.table is not None]
    if single:
        names = [sql.Identifier(p.schema, p.table or "") for p in single]
        parts.append(sql.SQL("TABLE ") + sql.SQL(", ").join(names))
    if whole:
        names = [sql.Identifier(p.schema) for p in whole]
        parts.append(sql.SQL("TABLES IN SCHEMA ") + sql.SQL(", ").join(names))
    return sql.SQL(", ").join(parts)


def _minimal(patterns: Sequence[TablePattern]) -> list[TablePattern]:
    """Drop what another pattern has too, which a publication would refuse or keep twice."""
    kept: list[TablePattern] = []
    for pattern in sorted(patterns, key=lambda p: p.table is not None):
        if not any(other.covers(pattern) for other in kept):
            kept.append(pattern)
    return kept
