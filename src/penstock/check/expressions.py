"""Checks the filters, transforms and routes of a source's sinks, against its tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from penstock import transforms
from penstock.check.tables import identity_sql, rule_columns
from penstock.config.sinks import NatsSinkSettings, Sink
from penstock.config.sources import PostgresSource
from penstock.core.errors import CaptureError, Concern, Mistake
from penstock.core.finding import Finding
from penstock.core.message import DELETE
from penstock.core.tables import matches_any
from penstock.core.text import nearest
from penstock.expressions import Columns, Reference
from penstock.postgres.admin import Catalog, ReplicaIdentity, TableInfo, open_catalog
from penstock.spark.plan import Checked, ExpressionPlan, PlanError, plan
from penstock.spark.planning import source_columns
from penstock.spark.routes import actions_of
from penstock.spark.select import Item
from penstock.streams.consumers import sql_filter
from penstock.streams.consumers.types import ConsumerError
from penstock.transforms.base import TransformError

_NEWEST: Final = 180_000
"""The version of Postgres that a filter is planned for: what the tables refuse is the same for all."""


def inspect(source: PostgresSource, sinks: Mapping[str, Sink]) -> list[Finding]:
    """Check what a source's sinks do with messages; return nothing of a source that can't be reached."""
    try:
        return findings(source, sinks)
    except CaptureError:
        return []  # the check of the source reports it


def findings(source: PostgresSource, sinks: Mapping[str, Sink]) -> list[Finding]:
    """Check the same; raises `CaptureError` where the source can't be reached."""
    planned = {name: sink for name, sink in sinks.items() if sink.has_expressions}
    if not planned:
        return []
    with open_catalog(source) as catalog:
        found = _Found(catalog, source_columns(catalog))
        return [
            finding for name, sink in planned.items() for finding in _of_sink(name, sink, found)
        ]


def inspect_filters(name: str, source: PostgresSource, filters: Mapping[str, str]) -> list[Finding]:
    """Check the conditions in SQL of consumers of the streams of the source `name`.

    They are given by the consumers' names. Returns nothing of a source that can't be reached.
    """
    try:
        with open_catalog(source) as catalog:
            columns = source_columns(catalog)
    except CaptureError:
        return []  # the check of the source reports it
    found = []
    for consumer, text in filters.items():
        what = f"consumer {consumer}"
        try:
            sql_filter.planned(text, columns, name, _NEWEST)
        except ConsumerError as error:
            fix = "correct `filters.sql`, or the source's `tables`"
            found.append(Finding("error", what, error.message.removesuffix("."), fix))
        else:
            found.append(Finding("ok", what, f"{sql_filter.FIELD}: valid, every column exists"))
    return found


class _Found:
    """What a source's catalog has for all of its sinks, read once."""

    def __init__(self, catalog: Catalog, columns: Columns) -> None:
        self.catalog = catalog
        self.columns = columns
        self.tables = catalog.selected(catalog.relations())
        self.identities = catalog.identities(self.tables)


def _of_sink(name: str, sink: Sink, of_source: _Found) -> Iterator[Finding]:
    what = f"sink {name}"
    found: list[Finding] = []
    if sink.transform is not None:
        try:
            transforms.inspect(sink.transform, transforms.isolated)
        except TransformError as error:
            found.append(_wrong(name, "transform", str(error), "correct the transform"))
    try:
        made = plan({name: sink}, of_source.columns)
    except PlanError as error:
        key, reason = error.concerns.path, f"position {error.position}: {error.reason}"
        found.append(_wrong(name, key, reason, f"correct `{key}`, or the sink's `tables`"))
    else:
        assert made is not None  # noqa: S101 - the sink is one that is planned
        found += _lacking(what, made)
        found += _missing(what, sink, made, of_source)
        found += _templates(name, sink, made.sinks[name].items)
    yield from found
    if not found:
        keys = [k for k in ("filter", "transform", "route") if getattr(sink, k) is not None]
        yield Finding("ok", what, f"{', '.join(keys)}: valid, every column exists")


def _wrong(name: str, key: str, reason: str, fix: str) -> Finding:
    """Return the error of a sink, or of its setting of that path."""
    mistake = Mistake(Concern("sink", name, key), reason)
    return Finding("error", f"sink {name}", f"{key}: {reason}" if key else reason, fix, mistake)


def _lacking(what: str, made: ExpressionPlan) -> Iterator[Finding]:
    reported: set[tuple[str, Reference]] = set()
    for each in made.expressions:
        for reference, tables in each.typed.lacking:
            if (each.key, reference) in reported:
                continue
            reported.add((each.key, reference))
            names = ", ".join(f"{schema}.{table}" for schema, table in tables)
            yield Finding(
                "warning",
                what,
                f"{each.key}: {reference} is null in messages of {names}, which lack the column",
                "name the tables that have it as the sink's `tables`",
            )


def _templates(name: str, sink: Sink, items: Sequence[Item] | None) -> Iterator[Finding]:
    """Find columns in templates that a transform in SQL does not make."""
    if items is None:
        return
    names = [item.name for item in items]
    subject = sink.template.record_columns if isinstance(sink, NatsSinkSettings) else ()
    for key, columns in (("subject", subject), ("route", rule_columns(sink))):
        for column in columns:
            if column not in names:
                reason = f"{key} names record.{column}, which the transform does not make"
                fix = f"correct `{key}`, or add the column to the transform"
                yield _wrong(name, "", reason + nearest(column, names), fix)


def _missing(what: str, sink: Sink, made: ExpressionPlan, of_source: _Found) -> Iterator[Finding]:
    """Find columns whose values the WAL lacks for deletes, or for what updates changed."""
    catalog, patterns = of_source.catalog, sink.patterns
    tables = [
        table
        for table in of_source.tables
        if patterns is None or matches_any(patterns, table.schema, table.name)
    ]
    by_key = {key: _references(expressions) for key, expressions in _by_key(made.expressions)}
    filtered = "action" in by_key.get("filter", {})
    for key, references in by_key.items():
        # An expression that names the action decides about deletes itself, as does the filter before it.
        deletes = DELETE in actions_of(sink) and not filtered and "action" not in references
        for table in tables:
            of_table = of_source.identities[table.oid]
            if deletes:
                columns = [c for c in references["record"] if c in table.columns]
                yield from _blind(what, key, table, of_table, columns, catalog, old=False)
            if "update" in sink.actions:
                columns = [c for c in references["changes"] if c in table.columns]
                yield from _blind(what, key, table, of_table, columns, catalog, old=True)


def _blind(
    what: str,
    key: str,
    table: TableInfo,
    identities: Sequence[ReplicaIdentity],
    columns: Sequence[str],
    catalog: Catalog,
    *,
    old: bool,
) -> Iterator[Finding]:
    blind = [i for i in identities if i.identity != "f" and set(columns) - set(i.columns)]
    if not blind:
        return
    names = ", ".join(c for c in columns if any(c not in i.columns for i in blind))
    statement = identity_sql(catalog, blind, "FULL")
    if old:
        message = f"the WAL has no old values of {names}: `changes` never holds them"
        yield Finding("warning", what, f"{key}, {table}: {message}", statement)
        return
    message = f"a DELETE lacks {names}: where that decides, it becomes a dead letter"
    yield Finding(
        "warning",
        what,
        f"{key}, {table}: {message}",
        f"{statement}\nor decide about deletes in the expression: action = 'delete' or …",
    )


def _by_key(expressions: Iterable[Checked]) -> Iterable[tuple[str, list[Checked]]]:
    found: dict[str, list[Checked]] = {}
    for each in expressions:
        # What passes through as it is needs no value: it is left out, and named.
        if each.evaluated:
            found.setdefault(each.key, []).append(each)
    return found.items()


def _references(expressions: Iterable[Checked]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"record": [], "changes": []}
    for each in expressions:
        for field in each.typed.fields:
            names = found.setdefault(field.reference.root, [])
            if field.reference.column not in names:
                names.append(field.reference.column)
    return found
