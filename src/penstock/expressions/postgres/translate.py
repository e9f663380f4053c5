"""Translates a checked condition to SQL over a stored message.

The language is Postgres', so each node becomes the very SQL that it stands for, over values of the
types that the source's columns have. Nothing of the user's text goes in but literals, quoted anew, and
names of columns as literals. What a message lacks is null, and bad: as in Spark, `false and <bad>` is
false, `<bad> is null` is bad, `coalesce(1, <bad>)` is 1.

In the SQL stand for: `r` the record, `c` the changes, `md` the metadata, each as json, and `act` the
action. `tests/integration/test_consumer_filters.py` compares it with Postgres over the table itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from penstock.expressions.catalog import Columns
from penstock.expressions.errors import ExpressionError
from penstock.expressions.functions import FUNCTIONS, Arg
from penstock.expressions.names import Names
from penstock.expressions.nodes import Node
from penstock.expressions.postgres import arrays
from penstock.expressions.postgres.functions import call
from penstock.expressions.postgres.quoting import BYTES, pg_type, quoted
from penstock.expressions.postgres.references import document_of, text_of, value_of
from penstock.expressions.syntax import Expr, Expression, TypedLiteral, TypeName
from penstock.expressions.types import NUMBERS, TIMES, Kind, Reference
from penstock.expressions.typing import Typer, typed
from penstock.expressions.unify import common_type

_MOST: Final = 200_000  # characters of SQL
_COMPARISONS: Final = frozenset({"=", "<>", "<", "<=", ">", ">="})


class Translated(NamedTuple):
    """A condition in SQL; `bad` is, where it is null, whether it could not be evaluated.

    `missing` has, by the names of references, the SQL of whether a message lacks them.
    """

    sql: str
    bad: str
    missing: dict[str, str]


def translate(expression: Expression, columns: Columns, *, casing: str) -> Translated:
    """Return a condition in SQL; `casing` is the collation that lower and upper case go by.

    Raises `ExpressionError` for what `typed` refuses, and for what has no SQL.
    """
    typed(expression, columns)
    made = _Translator(columns, casing)
    sql = made.condition(expression.root)
    return Translated(sql, made.bad(expression.root) or "false", made.missing)


class _Translator:
    def __init__(self, columns: Columns, casing: str) -> None:
        self._names = Names(columns)
        self._typer = Typer(self._names)
        self._casing = f' COLLATE "{casing}"'
        self._nodes: dict[Expr, Node] = {}
        self._made: dict[tuple[str, Expr], str] = {}
        self.missing: dict[str, str] = {}

    def _node(self, expr: Expr) -> Node:
        if expr not in self._nodes:
            self._nodes[expr] = self._typer.node(expr)
        return self._nodes[expr]

    def _kind(self, expr: Expr) -> Kind:
        return Kind.JSON if expr.op == "json" else self._node(expr).kind

    # Whether a null is bad

    def bad(self, expr: Expr) -> str:
        """Return the SQL of whether an expression's null is bad; empty where it never is."""
        return self._once("bad", expr, self._bad)

    def _once(self, what: str, expr: Expr, make: Callable[[Expr], str]) -> str:
        made = self._made.get((what, expr))
        if made is None:
            made = self._made[what, expr] = make(expr)
            if len(made) > _MOST:
                raise ExpressionError(
                    expr.position, "this is too complicated for a consumer's filter"
                )
        return made

    def _bad(self, expr: Expr) -> str:
        match expr.op:
            case "reference" | "json" | "json text":
                assert isinstance(expr.value, Reference)  # noqa: S101 - for the type checker
                return self._lacks(expr.value)
            case "case":
                return self._bad_case(expr)
        return " OR ".join(found for arg in expr.args if (found := self._is_bad(arg)))

    def _is_bad(self, expr: Expr) -> str:
        bad = self.bad(expr)
        if not bad:
            return ""
        value = self._document(expr) if expr.op == "json" else self.sql(expr)
        return f"(({value}) IS NULL AND ({bad}))"

    def _bad_case(self, expr: Expr) -> str:
        parts, some = [], False
        for at in range(0, len(expr.args) - 1, 2):
            condition, result = expr.args[at], expr.args[at + 1]
            if bad := self._is_bad(condition):
                parts.append(f"WHEN {bad} THEN true")
            of_result = self.bad(result)
            some = some or bool(bad or of_result)
            parts.append(f"WHEN {self.condition(condition)} THEN ({of_result or 'false'})")
        rest = self.bad(expr.args[-1])
        return f"CASE {' '.join(parts)} ELSE ({rest or 'false'}) END" if some or rest else ""

    def _lacks(self, reference: Reference) -> str:
        if reference.root != "record":
            return ""
        column = quoted(reference.column)
        sql = f"(r -> {column}) IS NULL"
        if tables := self._names.lacking(reference):
            listed = ", ".join(f"({quoted(schema)}, {quoted(table)})" for schema, table in tables)
            sql += f" AND (md ->> 'table_schema', md ->> 'table_name') NOT IN ({listed})"
        self.missing[str(Reference("record", reference.column))] = sql
        return f"({sql})"

    def _unless_bad(self, exprs: Sequence[Expr], sql: str) -> str:
        bad = " OR ".join(found for expr in exprs if (found := self._is_bad(expr)))
        return f"(CASE WHEN {bad} THEN NULL ELSE {sql} END)" if bad else sql

    # Values

    def condition(self, expr: Expr) -> str:
        """Return a boolean."""
        sql = self.sql(expr)
        return f"({sql})::boolean" if self._kind(expr) is Kind.JSON else f"({sql})"

    def sql(self, expr: Expr) -> str:
        """Return the SQL of an expression."""
        return self._once("sql", expr, self._sql)

    def _sql(self, expr: Expr) -> str:
        op, args = expr.op, expr.args
        match op:
            case "reference" | "json text":
                assert isinstance(expr.value, Reference)  # noqa: S101 - for the type checker
                return value_of(expr.value, self._node(expr).type)
            case "string":
                return quoted(str(expr.value))
            case "null":
                return "NULL"
            case "bool":
                return "true" if expr.value else "false"
            case "number":
                text = str(expr.value)
                return f"{text}::bigint" if text.isdigit() and len(text) < 19 else text
            case "typed":
                assert isinstance(expr.value, TypedLiteral)  # noqa: S101 - for the type checker
                return f"CAST({quoted(expr.value.text)} AS {expr.value.type})"
            case "and" | "or":
                return "(" + f" {op.upper()} ".join(self.condition(arg) for arg in args) + ")"
            case "not":
                return f"(NOT {self.condition(args[0])})"
            case "is null":
                (arg,) = args
                value = self._document(arg) if arg.op == "json" else self._present(arg)
                return self._unless_bad(args, f"(({value}) IS NULL)")
            case "is true" | "is false":
                return self._unless_bad(args, f"({self.condition(args[0])} {op.upper()})")
            case "is distinct":
                a, b = self._operands(args)
                return self._unless_bad(args, f"({a} IS DISTINCT FROM {b})")
            case "between":
                value, low, high = self._operands(args)
                return f"({value} BETWEEN {low} AND {high})"
            case "in":
                value, *others = self._operands(args)
                return f"({value} IN ({', '.join(others)}))"
            case "like" | "ilike" | "similar to" | "~" | "~*":
                return self._like(expr)
            case "case":
                return self._case(expr)
            case "cast":
                return self._cast(expr)
            case "||":
                return "(" + " || ".join(self._text_form(arg) for arg in args) + ")"
            case "neg":
                return f"(- ({self.sql(args[0])}))"
            case "@>" | "<@" | "&&" if self._typer.asks_array(expr):
                of = self._typer.element(args[0])
                return arrays.containing(op, args[1], self._document(args[0]), of, self._casing)
            case "@>":
                return f"(({self._document(args[0])})::jsonb @> {self.sql(args[1])}::jsonb)"
            case "?":
                return f"jsonb_exists(({self._document(args[0])})::jsonb, {self.sql(args[1])})"
            case "= any" | "<> any" | "= all" | "<> all":
                of = self._typer.element(args[1])
                literal, document = self.sql(args[0]), self._document(args[1])
                return arrays.compared(op, literal, document, of, self._casing)
        if op in _COMPARISONS:
            a, b = self._operands(args)
            return f"({a} {op} {b})"
        if op in FUNCTIONS:
            return self._call(expr)
        return self._arithmetic(expr)

    def _document(self, expr: Expr) -> str:
        assert isinstance(expr.value, Reference)  # noqa: S101 - for the type checker
        return document_of(expr.value)

    def _present(self, expr: Expr) -> str:
        """Return what is null where a value is: it need not fit into its type to be there."""
        if expr.op in ("reference", "json text") and isinstance(expr.value, Reference):
            return text_of(expr.value)
        return self.sql(expr)

    def _operands(self, exprs: Sequence[Expr], *, compared: bool = True) -> list[str]:
        """Return operands as values of the type that they have in common."""
        nodes = [self._node(expr) for expr in exprs]
        type_ = common_type(nodes, [expr.position for expr in exprs])
        found = [
            f"({self.sql(expr)})::{pg_type(type_)}" if node.kind is Kind.JSON else self.sql(expr)
            for expr, node in zip(exprs, nodes, strict=True)
        ]
        if not compared or type_.kind is not Kind.TEXT or type_.form not in ("", "enum", "opaque"):
            return found
        of_text = "bpchar" if type_.width else "text"
        known = [n for n in nodes if n.op not in ("unknown", "literal")]
        if known and all(n.type.folded for n in known):
            return [f"(lower(({one})::text{self._casing}){BYTES})" for one in found]
        return [f"(({one})::{of_text}{BYTES})" for one in found]

    def _like(self, expr: Expr) -> str:
        value, pattern = expr.args
        folded = self._node(value).type.folded
        op = {"like": "ilike", "~": "~*"}.get(expr.op, expr.op) if folded else expr.op
        if folded and op == "similar to":
            raise ExpressionError(
                value.position, "similar to can't be used on a citext here; cast it by ::text"
            )
        escape = "" if expr.value is None else f" ESCAPE {quoted(str(expr.value))}"
        kept = "bpchar" if self._node(value).type.width else "text"
        return (
            f"(({self.sql(value)})::{kept}{self._casing} {op.upper()} {self.sql(pattern)}{escape})"
        )

    def _case(self, expr: Expr) -> str:
        conditions = expr.args[:-1:2]
        results = self._operands([*expr.args[1::2], expr.args[-1]], compared=False)
        parts = []
        for condition, result in zip(conditions, results, strict=False):
            if bad := self._is_bad(condition):
                parts.append(f"WHEN {bad} THEN NULL")
            parts.append(f"WHEN {self.condition(condition)} THEN {result}")
        return f"(CASE {' '.join(parts)} ELSE {results[-1]} END)"

    def _cast(self, expr: Expr) -> str:
        (arg,), to = expr.args, expr.value
        assert isinstance(to, TypeName)  # noqa: S101 - for the type checker
        if to.name in ("text", "varchar", "char"):
            text = self._text_form(arg)
            return f"({text})::{to}" if to.name != "text" else f"({text})"
        return f"({self.sql(arg)})::{to}"

    def _text_form(self, expr: Expr) -> str:
        """Return a value's text; of a column that which messages have."""
        node = self._node(expr)
        if expr.op == "reference" and isinstance(expr.value, Reference):
            if node.kind is not Kind.TEXT or node.type.form:
                return text_of(expr.value)
        elif node.kind in TIMES or node.kind is Kind.TIME:
            raise ExpressionError(
                expr.position, "the text of a time that is computed is not known in this filter"
            )
        return f"({self.sql(expr)})::text"

    def _arithmetic(self, expr: Expr) -> str:
        left, right = expr.args
        kinds = self._kind(left), self._kind(right)
        if set(kinds) <= {*NUMBERS, Kind.JSON, Kind.TEXT}:
            a, b = self._operands(expr.args, compared=False)
            return f"(({a}) {expr.op} ({b}))"
        a, b = (
            f"({self.sql(arg)})::integer" if kind is Kind.INT else f"({self.sql(arg)})"
            for arg, kind in zip(expr.args, kinds, strict=True)
        )
        return f"({a} {expr.op} {b})"

    # Calls

    def _call(self, expr: Expr) -> str:
        function = FUNCTIONS[expr.op]
        name = function.same_as or expr.op
        if function.spark is not None:
            args = [
                f"({self.sql(arg)})::{'integer' if expected is Arg.INTEGER else 'text'}"
                for arg, expected in zip(expr.args, function.args, strict=False)
            ]
            return call(name, args)
        match name:
            case "lower" | "upper":
                return f"{name}(({self.sql(expr.args[0])})::text{self._casing})"
            case "length":
                return f"length(({self.sql(expr.args[0])})::text)"
            case "coalesce":
                return self._coalesce(expr.args)
            case "nullif":
                return f"nullif({', '.join(self._operands(expr.args))})"
            case "greatest" | "least":
                listed = ", ".join(self._operands(expr.args))
                return self._unless_bad(expr.args, f"{name}({listed})")
            case "concat" | "concat_ws":
                listed = ", ".join(self._printed(arg) for arg in expr.args)
                return self._unless_bad(expr.args, f"{name}({listed})")
            case "round" | "trunc" if len(expr.args) == 2:
                value, places = (self.sql(arg) for arg in expr.args)
                return f"{name}(({value})::numeric, ({places})::integer)"
            case "mod":
                a, b = self._operands(expr.args, compared=False)
                return f"(({a}) % ({b}))"
            case "power" | "sqrt":
                listed = ", ".join(f"({self.sql(arg)})::float8" for arg in expr.args)
                return f"{name}({listed})"
            case "now":
                return "now()"
            case "extract":
                return f"extract({self.sql(expr.args[0])} FROM {self.sql(expr.args[1])})"
            case "jsonb_typeof" | "json_typeof" | "jsonb_array_length" | "json_array_length":
                return f"{name}(({self._document(expr.args[0])})::{name.partition('_')[0]})"
            case "cardinality" | "array_length":
                return arrays.measured(expr, self._document(expr.args[0]))
        return f"{name}({', '.join(self.sql(arg) for arg in expr.args)})"

    def _printed(self, expr: Expr) -> str:
        node = self._node(expr)
        is_bool = node.kind is Kind.BOOL and node.op != "unknown"
        return self.sql(expr) if is_bool else self._text_form(expr)

    def _coalesce(self, exprs: Sequence[Expr]) -> str:
        values = self._operands(exprs, compared=False)
        found = values[-1]
        for expr, value in reversed(list(zip(exprs[:-1], values[:-1], strict=True))):
            bad = self._is_bad(expr)
            otherwise = f"CASE WHEN {bad} THEN NULL ELSE {found} END" if bad else found
            found = f"coalesce({value}, {otherwise})"
        return found
