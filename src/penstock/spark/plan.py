"""The plan of a source's expressions: what is taken out of its messages, and what Spark makes of it.

A message stays in its block. What expressions need of it travels beside the block in an array, one
struct a message, and Spark maps that array to another: for each sink the results of its filter and its
route, and the values that a transform in SQL computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.config.sinks import Sink
from penstock.core.errors import Concern
from penstock.core.tables import matches_any
from penstock.expressions import (
    Columns,
    Expression,
    ExpressionError,
    Field,
    Reference,
    parse_condition,
    parse_select,
    parse_value,
)
from penstock.expressions.fields import place
from penstock.expressions.nodes import Typed
from penstock.expressions.planned import PlannedTables, Table
from penstock.expressions.route import marked
from penstock.expressions.spark import columns as compiler
from penstock.expressions.spark.columns import Compiled
from penstock.expressions.types import TEXT, Kind
from penstock.expressions.typing import typed
from penstock.spark.select import Item
from penstock.spark.sink_plan import BAD, DROP, KEEP, SinkPlan

Leaf = Callable[[Field], tuple[Column, Column]]
_Result = tuple[str, Concern, Callable[[Leaf], Column]]
"""Its name, the sink's setting that it is of, and what makes it."""


class PlanError(ExpressionError):
    """An expression of a sink that the tables' columns refuse."""

    def __init__(self, concerns: Concern, error: ExpressionError) -> None:
        super().__init__(error.position, error.reason)
        self.concerns = concerns

    def __str__(self) -> str:
        return f"sinks.{self.concerns.name}.{self.concerns.path}: {super().__str__()}"


@dataclass(frozen=True)
class Checked:
    """One expression of a sink, with its types.

    Attributes:
        sink: The sink's name.
        key: The path of its setting in the sink.
        typed: The expression.
        evaluated: Whether Spark evaluates it; what passes through as it is, it never sees.
    """

    sink: str
    key: str
    typed: Typed
    evaluated: bool = True


@dataclass(frozen=True)
class _Part:
    """The plan of one sink."""

    sink: SinkPlan
    checked: Sequence[Checked]
    results: Sequence[_Result]


class ExpressionPlan:
    """A source's expressions, ready for Spark.

    Attributes:
        fields: What the source takes out of each message.
        sinks: What the executors need to know of each sink that has a filter, transform or route.
        expressions: Each expression with its types.
        tables: The columns of each table that the plan was made for: see `Planned`.
        refused: The sinks whose expressions the tables' columns refuse by now, with why. What is used
            of them is the plan from before.
        lsn: Where the WAL ended before the tables were read.
    """

    def __init__(
        self, parts: Mapping[str, _Part], tables: PlannedTables, refused: Mapping[str, PlanError]
    ) -> None:
        self.parts = dict(parts)
        self.tables = dict(tables)
        self.refused = dict(refused)
        self.lsn = 0
        self.sinks = {name: part.sink for name, part in parts.items()}
        self.expressions = tuple(checked for part in parts.values() for checked in part.checked)
        expressions = self.expressions
        results = [result for part in parts.values() for result in part.results]
        self.fields: tuple[Field, ...] = tuple(
            dict.fromkeys(
                field for each in expressions if each.evaluated for field in each.typed.fields
            )
        )
        self._results = tuple(results)
        if self._results and not self.fields:
            # An expression of literals alone: still one struct a message is needed.
            self.fields = (Field(Reference("action", ""), TEXT),)

    def results(self, frame: DataFrame) -> DataFrame:
        """Return `frame` (columns `block`, `fields`) with `results` in the place of the fields.

        Raises `PlanError` for an expression that is too large for Spark.
        """
        if not self._results:
            return frame
        # These decide what expressions mean, so they are not the user's to set.
        frame.sparkSession.conf.set("spark.sql.ansi.enabled", "true")
        frame.sparkSession.conf.set("spark.sql.session.timeZone", "UTC")
        numbers = {field: number for number, field in enumerate(self.fields)}

        def of(message: Column) -> Column:
            def leaf(field: Field) -> tuple[Column, Column]:
                number = numbers[field]
                word, mask = place(number)
                bad = message[word].bitwiseAND(F.lit(mask).cast("bigint")) != 0
                return message[f"f{number}"], bad

            return F.struct(
                *[_made(of, make, leaf).alias(name) for name, of, make in self._results]
            )

        return frame.select("block", F.transform("fields", of).alias("results"))


def plan(
    sinks: Mapping[str, Sink], columns: Columns, before: ExpressionPlan | None = None
) -> ExpressionPlan | None:
    """Return the plan of a source's `sinks`, None where none of them has an expression or transform.

    `columns` are those of the source's tables. Where they refuse what a sink has, its plan in
    `before` goes on; without that `PlanError` is raised, with the sink and the key.
    """
    parts: dict[str, _Part] = {}
    refused: dict[str, PlanError] = {}
    for number, (name, sink) in enumerate(sinks.items()):
        if not sink.has_expressions:
            continue
        of_sink = _SinkPlanner(name, sink, number, columns)
        try:
            made = of_sink.plan()
        except PlanError as error:
            if before is None or name not in before.parts:
                raise
            parts[name], refused[name] = before.parts[name], error
        else:
            parts[name] = _Part(made, of_sink.checked, of_sink.results)
    if not parts:
        return None
    return ExpressionPlan(parts, _tables(sinks, parts, columns), refused)


def _tables(
    sinks: Mapping[str, Sink], parts: Mapping[str, _Part], columns: Columns
) -> PlannedTables:
    """Return the columns of each table that the sinks' expressions name."""
    tables: dict[Table, dict[str, tuple[int, int] | None]] = {table: {} for table in columns}
    for name, part in parts.items():
        patterns = sinks[name].patterns
        names = {
            reference.column
            for checked in part.checked
            for field in checked.typed.fields
            for reference in [field.reference]
            if reference.root in ("record", "changes")
        }
        for table, of_table in columns.items():
            if patterns is None or matches_any(patterns, *table):
                tables[table] |= {
                    column: None if found is None or found.withheld else (found.oid, found.modifier)
                    for column in names
                    for found in [of_table.get(column)]
                }
    return tables


class _SinkPlanner:
    def __init__(self, name: str, sink: Sink, number: int, columns: Columns) -> None:
        self._name = name
        self._sink = sink
        self._names = SinkPlan(number)
        patterns = sink.patterns
        self._columns = {
            table: of
            for table, of in columns.items()
            if patterns is None or matches_any(patterns, *table)
        }
        self.checked: list[Checked] = []
        self.results: list[_Result] = []

    def plan(self) -> SinkPlan:
        sink, names = self._sink, self._names
        filter_ = items = route = templates = None
        used: dict[str, tuple[Field, ...]] = {}
        always = False
        if sink.filter is not None:
            condition = self._typed("filter", parse_condition(sink.filter))
            filter_ = condition.fields
            self._result(names.keep, "filter", partial(_keep, condition))
        if sink.transform is not None and sink.transform.sql is not None:
            items, used = self._select(sink.transform.sql)
        if isinstance(sink.route, str):
            route = self._route(sink.route)
        elif sink.route is not None:
            templates = tuple(rule.to for rule in sink.route)
            always = sink.route[0].when is None
            route = () if always else self._rules([rule.when for rule in sink.route])
        return SinkPlan(
            names.number, filter_, route, templates, always=always, items=items, used=used
        )

    def _result(self, name: str, key: str, make: Callable[[Leaf], Column]) -> None:
        self.results.append((name, Concern("sink", self._name, key), make))

    def _typed(self, key: str, expression: Expression, *, evaluated: bool = True) -> Typed:
        try:
            found = typed(expression, self._columns)
        except ExpressionError as error:
            raise PlanError(Concern("sink", self._name, key), error) from None
        self.checked.append(Checked(self._name, key, found, evaluated))
        return found

    def _select(self, text: str) -> tuple[tuple[Item, ...], dict[str, tuple[Field, ...]]]:
        items: list[Item] = []
        computed: dict[str, Typed] = {}
        for at, (name, expression) in enumerate(parse_select(text)):
            reference = expression.root.value
            if isinstance(reference, Reference) and expression.root.op != "json text":
                self._typed("transform.sql", expression, evaluated=False)
                items.append(Item(name, reference))
                continue
            value = computed[name] = self._typed("transform.sql", expression)
            column = f"value{self._names.number}_{at}"
            items.append(Item(name, type=value.type, column=column))
            self._result(column, "transform.sql", partial(_value, value))
        if computed:
            values = list(computed.values())
            self._result(self._names.failed, "transform.sql", partial(_failed, values))
        return tuple(items), {name: value.fields for name, value in computed.items()}

    def _route(self, text: str) -> tuple[Field, ...]:
        expression = parse_value(text)
        found = self._typed("route", expression, evaluated=False)
        if found.kind not in (Kind.TEXT, Kind.JSON):
            position = expression.root.position
            reason = f"a route is a text, and this is {found.type}; cast it by ::text"
            of = Concern("sink", self._name, "route")
            raise PlanError(of, ExpressionError(position, reason))
        route = self._typed("route", marked(expression))
        self._result(self._names.to, "route", partial(_value, route))
        self._result(self._names.unrouted, "route", partial(_unrouted, route))
        return route.fields

    def _rules(self, conditions: Sequence[str | None]) -> tuple[Field, ...]:
        rules: list[Typed | None] = [
            None if when is None else self._typed(f"route[{at}].when", parse_condition(when))
            for at, when in enumerate(conditions)
        ]
        self._result(self._names.to, "route", partial(_matching, rules))
        return tuple(dict.fromkeys(f for rule in rules if rule is not None for f in rule.fields))


def _made(concerns: Concern, make: Callable[[Leaf], Column], leaf: Leaf) -> Column:
    try:
        return make(leaf)
    except ExpressionError as error:
        raise PlanError(concerns, error) from None


def _keep(condition: Typed, leaf: Leaf) -> Column:
    return _decided(compiler.compile(condition, leaf), F.lit(KEEP), F.lit(DROP))


def _decided(condition: Compiled, yes: Column, no: Column) -> Column:
    """Return `yes` where a condition holds, `BAD` where it can't be evaluated, and `no` elsewhere."""
    value = condition.value
    return F.when(value, yes).when(value.isNull() & condition.bad, F.lit(BAD)).otherwise(no)


def _value(expression: Typed, leaf: Leaf) -> Column:
    return compiler.compile(expression, leaf).value


def _failed(expressions: Sequence[Typed], leaf: Leaf) -> Column:
    """Return the number of the first expression that has no value, or null."""
    first = F.lit(None).cast("int")
    for number, expression in reversed(list(enumerate(expressions))):
        compiled = compiler.compile(expression, leaf)
        first = F.when(compiled.value.isNull() & compiled.bad, F.lit(number)).otherwise(first)
    return first


def _unrouted(route: Typed, leaf: Leaf) -> Column:
    compiled = compiler.compile(route, leaf)
    return F.coalesce(compiled.value.isNull() & compiled.bad, F.lit(False))


def _matching(rules: Sequence[Typed | None], leaf: Leaf) -> Column:
    """Return the number of the first rule that matches, `BAD` if one before can't be evaluated."""
    found = F.lit(None).cast("int")
    for number, rule in reversed(list(enumerate(rules))):
        yes = F.lit(number)
        found = yes if rule is None else _decided(compiler.compile(rule, leaf), yes, found)
    return found
