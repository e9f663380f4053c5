"""A source's plan, by its tables as they are now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock import transforms
from penstock.expressions import Columns, load_columns
from penstock.postgres.admin import Catalog, open_catalog
from penstock.postgres.errors import SetupError
from penstock.settings import PostgresSource, Sink
from penstock.spark.plan import Plan, PlanError, plan
from penstock.transforms.base import TransformError


def is_planned(sink: Sink) -> bool:
    """Tell whether a sink has a filter, a transform or a route."""
    return any(key is not None for key in (sink.filter, sink.transform, sink.route))


def of_source(source: PostgresSource, sinks: Mapping[str, Sink]) -> Plan | None:
    """Return the plan of a source, by its tables as they are now; None where it needs none.

    Raises `SetupError` where the tables can't be asked for, and, with the code `expression`, where
    they refuse what a sink has; the message names sink and key.
    """
    if not any(map(is_planned, sinks.values())):
        return None
    columns = wanted_columns(source, sinks.values())
    try:
        return plan(sinks, columns)
    except PlanError as error:
        raise SetupError("expression", f"{error}.") from None


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
    """Return the columns of a source's tables."""
    tables = [(table.schema, table.name) for table in catalog.wanted(catalog.relations())]
    return load_columns(catalog.connection, tables)
