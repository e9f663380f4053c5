"""A source's plan, by its tables as they are now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import structlog
from psycopg import sql

from penstock import transforms
from penstock.expressions import Columns, ColumnType, load_columns
from penstock.expressions.shapes import Table
from penstock.health import Failure
from penstock.message import Position
from penstock.postgres.admin import Catalog, open_catalog
from penstock.postgres.errors import SetupError
from penstock.settings import PostgresSource, Sink
from penstock.spark.plan import Plan, PlanError, plan
from penstock.transforms.base import TransformError

_PAUSES: Final = (0.1, 0.3, 0.6)
"""How long a change is waited for that the catalog does not show yet."""

_MOST_IN_VAIN: Final = 3
"""How many times in a row a table asks for another plan that is then the same."""

log = structlog.get_logger("penstock")


def is_planned(sink: Sink) -> bool:
    """Tell whether a sink has a filter, a transform or a route."""
    return any(key is not None for key in (sink.filter, sink.transform, sink.route))


class Planner:
    """Plans a source's query, again whenever rows come that the last plan was not made for."""

    def __init__(self, source: PostgresSource, sinks: Mapping[str, Sink]) -> None:
        self._source = source
        self._sinks = sinks
        self._plan: Plan | None = None
        self.refused: dict[str, Failure] = {}
        """Why the tables refuse what sinks have, of those whose plan from before goes on."""
        self.altered: Table | None = None
        """The table that the capture has found altered, until `plan` is called."""
        self.after = Position(0, -1)
        """Up to where all was delivered then, in the middle of a transaction perhaps."""
        self._in_vain: Counter[Table] = Counter()

    def plan(self) -> Plan | None:
        """Return the plan by the tables as they are now; raises as `of_source` does.

        Once a sink was planned, its plan goes on where the tables refuse a new one: what it can't
        evaluate becomes dead letters, and the other sinks are none the worse.
        """
        before, altered, self.altered = self._plan, self.altered, None
        made = of_source(self._source, self._sinks, before)
        for pause in _PAUSES if altered is not None else ():
            if made is None or before is None or made.shapes != before.shapes:
                break
            # Rows may come before their transaction can be seen: a synchronous standby is awaited.
            time.sleep(pause)
            made = of_source(self._source, self._sinks, before)
        if made is not None:
            self._log(made)
            if altered is not None:
                same = before is not None and made.shapes.get(altered) == before.shapes.get(altered)
                self._in_vain[altered] = self._in_vain[altered] + 1 if same else 0
                if self._in_vain[altered] > _MOST_IN_VAIN:
                    # Whatever the reason, the query must not be begun anew for ever.
                    log.warning("rows have columns that the catalog lacks",
                                table=".".join(altered))  # fmt: skip
                    made.shapes[altered] = {}
        self._plan = made
        return made

    def _log(self, made: Plan) -> None:
        before, self.refused = self.refused, {}
        for name, error in made.refused.items():
            failure = Failure(
                "expression",
                f"{error}. Messages for which it can't be evaluated any more become dead letters.",
                "Correct the sink, restart penstock run, and replay the dead letters.",
                time.time(),
            )
            known = before.get(name)
            self.refused[name] = failure.lasting(known, time.time())
            if known is None or known.cause != failure.cause:
                log.error(
                    "sink has expressions that its tables refuse by now", sink=name, code=failure.code,
                    error=failure.cause, remedy=failure.remedy,
                )  # fmt: skip


def of_source(
    source: PostgresSource, sinks: Mapping[str, Sink], before: Plan | None = None
) -> Plan | None:
    """Return the plan of a source, by its tables as they are now; None where it needs none.

    Raises `SetupError` where the tables can't be asked for, and, with the code `expression`, where
    they refuse what a sink has; the message names sink and key. `before` is as `plan` takes it.
    """
    if not any(map(is_planned, sinks.values())):
        return None
    columns: Columns = {}
    lsn = 0
    if any(map(_has_expressions, sinks.values())):
        with open_catalog(source) as catalog:
            lsn = catalog.written_lsn()
            columns = source_columns(catalog)
    try:
        made = plan(sinks, columns, before)
    except PlanError as error:
        raise SetupError("expression", f"{error}.") from None
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
                raise SetupError("transform", f"sinks.{name}.transform: {error}") from None
    of_source(source, sinks)


def wanted_columns(source: PostgresSource, sinks: Iterable[Sink]) -> Columns:
    """Return the columns of a source's tables; none where no expression of its sinks asks for them."""
    if not any(map(_has_expressions, sinks)):
        return {}
    with open_catalog(source) as catalog:
        return source_columns(catalog)


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
    tables = [(table.schema, table.name) for table in catalog.wanted(catalog.relations())]
    published = catalog.published_columns()
    # Before the first run there is none; it is then made to publish what can be.
    publication = catalog.publication()
    stored = catalog.server.major >= 18 and (publication is None or publication.generated == "s")
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
    publication = catalog.text(
        sql.SQL("ALTER PUBLICATION {} SET (publish_generated_columns = stored)").format(
            sql.Identifier(catalog.source.publication)
        )
    )
    return (
        f"it is a generated column, and its publication does not have these; {instead}, or"
        f" {publication}"
    )
