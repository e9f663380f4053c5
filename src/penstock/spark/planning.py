"""A source's plan, by its tables as they are now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import structlog

from penstock import transforms
from penstock.config.sinks import Sink
from penstock.config.sources import PostgresSource
from penstock.core.errors import Concern, SetupError
from penstock.core.health import Failure
from penstock.core.message import Position
from penstock.core.tables import qualified_name
from penstock.core.text import sentence
from penstock.expressions import Columns, ColumnType, load_columns
from penstock.expressions.planned import Table
from penstock.postgres.admin import Catalog, open_catalog
from penstock.postgres.publication import publish_generated, publishes_generated
from penstock.spark.plan import ExpressionPlan, PlanError, plan
from penstock.transforms.base import TransformError

_PAUSES: Final = (0.1, 0.3, 0.6)
"""How long a change is waited for that the catalog does not show yet."""

_MOST_IN_VAIN: Final = 3
"""How many times in a row a table causes a new plan that is then the same."""

log = structlog.get_logger("penstock")


class Planner:
    """Plans a source's query, again whenever rows come that the last plan was not made for."""

    def __init__(self, source: PostgresSource, sinks: Mapping[str, Sink]) -> None:
        self._source = source
        self._sinks = sinks
        self._plan: ExpressionPlan | None = None
        self.refused: dict[str, Failure] = {}
        """Why the altered tables refuse sinks' expressions; these sinks keep their plan from before."""
        self.altered: Table | None = None
        """The table that the capture has found altered, until `plan` is called."""
        self.after = Position(0, -1)
        """Up to where all is delivered; this may be in the middle of a transaction."""
        self._in_vain: Counter[Table] = Counter()

    def plan(self) -> ExpressionPlan | None:
        """Return the plan by the tables as they are now; raises as `of_source` does.

        Once a sink was planned, its plan stays where the tables refuse a new one: messages that it
        can't evaluate become dead letters, and other sinks are not affected.
        """
        before, altered, self.altered = self._plan, self.altered, None
        made = of_source(self._source, self._sinks, before)
        if made is not None and before is not None and altered is not None:
            made = self._seen(altered, made, before)
        if made is not None:
            self._log(made, before)
        self._plan = made
        return made

    def _seen(self, altered: Table, made: ExpressionPlan, before: ExpressionPlan) -> ExpressionPlan:
        """Return a plan for the altered table's new columns, once the catalog shows them."""
        for pause in (*_PAUSES, None):
            if made.tables.get(altered) != before.tables.get(altered):
                self._in_vain[altered] = 0
                return made
            if pause is not None:
                # Rows may come before their transaction can be seen: a synchronous standby is awaited.
                time.sleep(pause)
                made = of_source(self._source, self._sinks, before) or made
        self._in_vain[altered] += 1
        if self._in_vain[altered] > _MOST_IN_VAIN:
            # Whatever the reason, the query must not be started again for ever.
            log.warning("rows have columns that the catalog lacks", table=".".join(altered))
            made.tables[altered] = {}
        return made

    def _log(self, made: ExpressionPlan, before: ExpressionPlan | None) -> None:
        known_nulls = _nulls(made if before is None else before)
        for (sink, column), tables in _nulls(made).items():
            if new := tables - known_nulls.get((sink, column), set()):
                log.warning("a column is null in tables that lack it", sink=sink, column=column,
                            tables=sorted(qualified_name(*table) for table in new))  # fmt: skip
        refused, self.refused = self.refused, {}
        for name, error in made.refused.items():
            failure = Failure(
                "expression",
                f"{error}. Messages for which it can't be evaluated become dead letters.",
                "Correct the sink, restart penstock run, and replay the dead letters.",
                time.time(),
            )
            known = refused.get(name)
            self.refused[name] = failure.lasting(known, time.time())
            if known is None or known.cause != failure.cause:
                log.error(
                    "altered tables refuse a sink's expressions", sink=name, code=failure.code,
                    error=failure.cause, remedy=failure.remedy,
                )  # fmt: skip


def _nulls(made: ExpressionPlan) -> dict[tuple[str, str], set[Table]]:
    """Return the tables that lack a column, by sink and column."""
    found: dict[tuple[str, str], set[Table]] = {}
    for checked in made.expressions:
        for reference, tables in checked.typed.lacking:
            found.setdefault((checked.sink, str(reference)), set()).update(tables)
    return found


def of_source(
    source: PostgresSource, sinks: Mapping[str, Sink], before: ExpressionPlan | None = None
) -> ExpressionPlan | None:
    """Return the plan of a source, by its tables as they are now; None where it needs none.

    Raises `SetupError` where the tables can't be read, and, with the code `expression`, where
    they refuse what a sink has; the message names sink and key. `before` is as `plan` takes it.
    """
    columns, lsn = needed_columns(source, sinks.values())
    try:
        made = plan(sinks, columns, before)
    except PlanError as error:
        text = sentence(str(error))
        raise SetupError("expression", text, concerns=error.concerns) from None
    if made is not None:
        made.lsn = lsn
    return made


def refuse(source: PostgresSource, sinks: Mapping[str, Sink]) -> None:
    """Raise `SetupError` for what is wrong with a source's sinks, before Spark is started."""
    for name, sink in sinks.items():
        if sink.transform is not None:
            try:
                transforms.inspect(sink.transform)
            except TransformError as error:
                of = Concern("sink", name, "transform")
                text = f"sinks.{name}.transform: {error}"
                raise SetupError("transform", text, concerns=of) from None
    of_source(source, sinks)


def needed_columns(source: PostgresSource, sinks: Iterable[Sink]) -> tuple[Columns, int]:
    """Return the columns of a source's tables, and where the WAL ended before they were read.

    No columns and 0 where no expression of its sinks needs them.
    """
    if not any(map(_has_expressions, sinks)):
        return {}, 0
    with open_catalog(source) as catalog:
        lsn = catalog.written_lsn()
        return source_columns(catalog), lsn


def _has_expressions(sink: Sink) -> bool:
    route = sink.route
    return (
        sink.filter is not None
        or (sink.transform is not None and sink.transform.sql is not None)
        or isinstance(route, str)
        or any(rule.when is not None for rule in route or ())
    )


def source_columns(catalog: Catalog) -> Columns:
    """Return the columns of a source's tables, with why messages never have some of them."""
    tables = [(table.schema, table.name) for table in catalog.selected(catalog.relations())]
    published = catalog.published_columns()
    stored = publishes_generated(catalog, catalog.publication())
    return {
        table: {
            name: replace(column, withheld=_withheld(catalog, name, column, stored, of_table))
            for name, column in columns.items()
        }
        for table, columns in load_columns(catalog.connection, tables).items()
        for of_table in [published.get(table)]
    }


def _withheld(
    catalog: Catalog, name: str, column: ColumnType, stored: bool, published: list[str] | None
) -> str:
    """Return why no message has a column; `published` are the table's columns that are sent."""
    if not column.generated:
        if published is None or name in published:
            return ""
        return (
            f"it is not in the list of columns of publication {catalog.source.publication}; add it"
            " there (ALTER PUBLICATION … SET TABLE …)"
        )
    version = catalog.server.major
    instead = f"write what it is made of instead: {column.definition}"
    if column.generated == "v":
        return f"it is a virtual generated column, which is not in the WAL; {instead}"
    if version < 18:
        return f"it is a generated column, which Postgres {version} does not put into the WAL; {instead}"
    if name in published if published is not None else stored:
        return ""
    return (
        f"it is a generated column, and its publication does not have these; {instead}, or"
        f" {catalog.text(publish_generated(catalog))}"
    )
