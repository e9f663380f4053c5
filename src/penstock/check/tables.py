"""Checks one captured table: what its replica identity and its columns mean for the sinks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import LiteralString

from psycopg import sql

from penstock.config.sinks import NatsSinkSettings, SinkSettings, StreamSinkSettings
from penstock.core.finding import Finding
from penstock.core.route_path import PathTemplate
from penstock.core.subject import SubjectTemplate
from penstock.core.text import nearest
from penstock.postgres.admin import Catalog, Publication, ReplicaIdentity, TableInfo
from penstock.postgres.publication import publish_generated, publishes_generated


def inspect_table(
    what: str,
    catalog: Catalog,
    publication: Publication | None,
    table: TableInfo,
    *,
    identities: Sequence[ReplicaIdentity],
    sinks: Mapping[str, SinkSettings],
) -> Iterator[Finding]:
    """Return what a table's replica identity, columns and rights mean for `sinks`, which take it."""
    yield from _identity(what, catalog, table, identities)
    yield from _generated(what, catalog, publication, table, identities)
    if not table.readable:
        role, grant = sql.Identifier(catalog.server.role), sql.SQL("GRANT SELECT ON {} TO {}")
        message = "the role may not SELECT from it; capturing changes works, reading rows will not"
        fix = catalog.text(grant.format(sql.Identifier(table.schema, table.name), role))
        yield Finding("warning", what, message, fix)
    stored = publishes_generated(catalog, publication)
    lost = {name for name, kind in table.generated.items() if kind == "v" or not stored}
    yield from _columns(what, catalog, table, identities, sinks, lost)


def _generated(
    what: str,
    catalog: Catalog,
    publication: Publication | None,
    table: TableInfo,
    identities: Sequence[ReplicaIdentity],
) -> Iterator[Finding]:
    full = any(identity.identity == "f" for identity in identities)
    if full and "v" in table.generated.values():
        yield Finding(
            "error",
            what,
            "Postgres refuses its UPDATE and DELETE once it is published: its replica identity is "
            "full and it has virtual generated columns",
            identity_sql(catalog, identities, "DEFAULT"),
        )
    elif (
        full
        and "s" in table.generated.values()
        and catalog.server.major >= 18
        and not publishes_generated(catalog, publication)
    ):
        message = "Postgres refuses its UPDATE and DELETE: its replica identity is full, and "
        yield Finding(
            "error",
            what,
            f"{message}its generated columns are not published",
            catalog.text(publish_generated(catalog)),
        )


def _columns(
    what: str,
    catalog: Catalog,
    table: TableInfo,
    identities: Sequence[ReplicaIdentity],
    sinks: Mapping[str, SinkSettings],
    lost: Container[str],
) -> Iterator[Finding]:
    """Look for the columns that sinks name, in the table, in the WAL and in its old values.

    `lost` has the generated columns that no message has.
    """
    for name, sink in sinks.items():
        keyed = table.has_key or any(i.identity == "i" and i.columns for i in identities)
        if isinstance(sink, StreamSinkSettings) and sink.kind == "rows" and not keyed:
            message = (
                f"has no primary key: every version of its rows stays in stream {name} for ever"
            )
            fix = f"give it one, leave {table} out of the sink's `tables`, or use kind changes"
            yield Finding("warning", what, message, fix)
        if isinstance(sink, NatsSinkSettings) and not keyed and _has_key(sink):
            message = (
                f"has no primary key: {{key}} in the subject of sink {name} is another for each of its"
                " messages, so all of them stay"
            )
            fix = f"give it one, or leave {table} out of the sink's `tables`"
            yield Finding("warning", what, message, fix)
        grouped = sink.group_by or []
        subject = sink.template.record_columns if isinstance(sink, NatsSinkSettings) else ()
        rules = rule_columns(sink)
        if sink.transform is not None:  # then templates name columns of what it makes
            subject, rules = (), []
        for key, columns in (("group_by", grouped), ("subject", subject), ("route", rules)):
            for column in columns:
                if column not in table.columns:
                    message = f"has no column {column}, which `{key}` of sink {name} names"
                    fix = f"correct `{key}`, or leave {table} out of the sink's `tables`"
                    yield Finding("error", what, message + nearest(column, table.columns), fix)
                elif column in lost:
                    message = f"{column}, which `{key}` of sink {name} names, is a generated column"
                    fix = f"name the columns that it is made of in `{key}`"
                    yield Finding("error", what, f"{message} that is not in the WAL", fix)
        for columns, verb, harm in (
            (grouped, "groups by", "cannot be put in its old group"),
            (subject, "puts into its subject", "has no value there, and its subject gets %null"),
            (rules, "puts into its route", "has no value there, and its route gets %null"),
        ):
            blind = [i for i in identities if i.identity != "f" and set(columns) - set(i.columns)]
            if blind and set(columns) <= set(table.columns):
                moves = ", and an UPDATE that moves a row," if columns is grouped else ""
                message = (
                    f"sink {name} {verb} {', '.join(columns)}, whose old values are not in "
                    f"the WAL: a DELETE{moves} {harm}"
                )
                yield Finding("warning", what, message, identity_sql(catalog, blind, "FULL"))


def _has_key(sink: NatsSinkSettings) -> bool:
    return any("key" in sink.subject_template(text).variables for text in sink.templates)


def rule_columns(sink: SinkSettings) -> list[str]:
    """Return the columns that the templates of a route's rules name."""
    parse: Callable[[str], SubjectTemplate | PathTemplate] = PathTemplate.parse
    if isinstance(sink, NatsSinkSettings):
        parse = sink.subject_template
    texts = [rule.to for rule in sink.route or () if not isinstance(rule, str)]
    return list(dict.fromkeys(name for text in texts for name in parse(text).record_columns))


def _identity(
    what: str, catalog: Catalog, table: TableInfo, identities: Sequence[ReplicaIdentity]
) -> Iterator[Finding]:
    if not identities:
        yield Finding("ok", what, "is partitioned, and has no partition yet")
        return
    none = [i for i in identities if i.identity != "f" and not i.columns]
    keyed = [i for i in identities if i.identity != "f" and i.columns]
    if none:
        why = "its replica identity is nothing" if none[0].identity == "n" else "it has no key"
        if none[0].identity == "i":
            why = "the index of its replica identity is gone"
        message = f"{why}: once it is published, Postgres refuses UPDATE and DELETE on it"
        names = _partitions(table, none)
        yield Finding("error", what, message + names, identity_sql(catalog, none, "FULL"))
    if keyed:
        columns = ", ".join(keyed[0].columns)
        message = (
            f"replica identity {'default' if keyed[0].identity == 'd' else 'using index'}: the WAL "
            f"has old values of {columns} alone, so `changes` holds no others, and nor does the "
            "`record` of a DELETE"
        )
        fix = identity_sql(catalog, keyed, "FULL")
        yield Finding("warning", what, message + _partitions(table, keyed), fix)
    if not none and not keyed:
        yield Finding("ok", what, "replica identity full: `changes` has every old value")


def _partitions(table: TableInfo, identities: Sequence[ReplicaIdentity]) -> str:
    return f" ({len(identities)} of its partitions)" if table.kind == "p" else ""


def identity_sql(
    catalog: Catalog, identities: Iterable[ReplicaIdentity], identity: LiteralString
) -> str:
    """Return the statements that give tables, or partitions, a replica identity."""
    # Partitions do not inherit it, so each has a statement of its own.
    return "\n".join(
        catalog.text(
            sql.SQL("ALTER TABLE {} REPLICA IDENTITY {}").format(
                sql.Identifier(i.schema, i.name), sql.SQL(identity)
            )
        )
        for i in identities
    )
