"""`--where` of a backfill: the same language over bare column names, written out for Postgres.

What comes out holds nothing of the text that went in but numbers, quoted strings and quoted names,
each put there by this module, with everything in parentheses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.expressions.catalog import ColumnType
from penstock.expressions.functions import FUNCTIONS, Arg
from penstock.expressions.names import Names
from penstock.expressions.parse import parse_bare
from penstock.expressions.syntax import Expr, TypedLiteral, TypeName
from penstock.expressions.types import Kind, Reference, Type
from penstock.expressions.typing import Typer, typed

_INFIX: Final = frozenset({"=", "<>", "<", "<=", ">", ">=", "+", "-", "*", "/", "%"})
_KEYWORDS: Final = frozenset({"coalesce", "nullif", "greatest", "least"})
"""Functions that have no entry in Postgres' catalog."""
_OF_JSON: Final = frozenset(
    {"jsonb_typeof", "json_typeof", "jsonb_array_length", "json_array_length"}
)
_NAMES: Final = {
    "boolean": "bool",
    "smallint": "int2",
    "integer": "int4",
    "bigint": "int8",
    "real": "float4",
    "double precision": "float8",
    "numeric": "numeric",
    "text": "text",
    "varchar": "varchar",
    "char": "bpchar",
    "uuid": "uuid",
    "date": "date",
    "timestamp": "timestamp",
    "timestamptz": "timestamptz",
    "time": "time",
    "interval": "interval",
}
_CASTS: Final = {
    Kind.BOOL: "::pg_catalog.bool",
    Kind.INT: "::pg_catalog.int8",
    Kind.FLOAT: "::pg_catalog.float8",
    Kind.NUMERIC: "::pg_catalog.numeric",
    Kind.DATE: "::pg_catalog.date",
    Kind.TIMESTAMP: "::pg_catalog.timestamp",
    Kind.TIMESTAMPTZ: "::pg_catalog.timestamptz",
    Kind.TIME: "::pg_catalog.time",
    Kind.INTERVAL: "::pg_catalog.interval",
}


def parse_where(
    text: str, columns: Mapping[str, ColumnType], table: tuple[str, str] = ("", "")
) -> str:
    """Return a condition over a table's columns as SQL for Postgres.

    Args:
        text: The condition, names without `record.` before them.
        columns: The table's columns, one value of `Columns`.
        table: The table's schema and name, which errors then name.

    Raises `ExpressionError` for what filters refuse too, and for a column that the table lacks.
    """
    expression = parse_bare(text, columns)
    found = {table: columns}
    typed(expression, found)
    return _Writer(Names(found)).condition(expression.root)


class _Writer:
    """Writes an expression for Postgres."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def write(self, expr: Expr, other: Expr | None = None) -> str:
        """Return an expression's SQL; `other` is what it is compared or combined with."""
        value = expr.value
        match expr.op:
            case "reference":
                assert isinstance(value, Reference)  # noqa: S101
                return self._reference(expr, value, other)
            case "string":
                return _string(str(value))
            case "number":
                return f"{value}"
            case "null":
                return "NULL"
            case "bool":
                return "true" if value else "false"
            case "typed":
                assert isinstance(value, TypedLiteral)  # noqa: S101
                return f"{_string(value.text)}::{_type(value.type)}"
            case "and" | "or":
                return _joined(f" {expr.op.upper()} ", [self.condition(a) for a in expr.args])
            case "||":
                return _joined(" || ", [self.write(a) for a in expr.args])
            case "not":
                return f"(NOT {self.condition(expr.args[0])})"
            case "neg":
                return f"(- {self.write(expr.args[0])})"
            case "is null":
                return f"({self.write(expr.args[0])} IS NULL)"
            case "is true" | "is false":
                return f"({self.condition(expr.args[0])} {expr.op.upper()})"
            case "is distinct":
                left, right = self._pair(expr)
                return f"({left} IS DISTINCT FROM {right})"
            case "in":
                first, *items = expr.args
                written = ", ".join(self.write(i, first) for i in items)
                return f"({self.write(first, _with_type(items))} IN ({written}))"
            case "between":
                first, low, high = expr.args
                bounds = f"{self.write(low, first)} AND {self.write(high, first)}"
                return f"({self.write(first, _with_type([low, high]))} BETWEEN {bounds})"
            case "~" | "~*":
                return f"({self.write(expr.args[0])} {expr.op} {self.write(expr.args[1])})"
            case "like" | "ilike" | "similar to":
                escape = "" if value is None else f" ESCAPE {_string(str(value))}"
                left, right = (self.write(a) for a in expr.args)
                return f"({left} {expr.op.upper()} {right}{escape})"
            case "case":
                return self._case(expr)
            case "cast":
                assert isinstance(value, TypeName)  # noqa: S101
                return f"({self.write(expr.args[0])}::{_type(value)})"
            case "json" | "json text":
                assert isinstance(value, Reference)  # noqa: S101
                return self._member(value, text=expr.op == "json text")
            case "@>" | "?":
                document, what = expr.args
                assert isinstance(document.value, Reference)  # noqa: S101
                return f"({self._member(document.value)} {expr.op} {self.write(what)})"
        if expr.op in _INFIX:
            left, right = self._pair(expr)
            return f"({left} {expr.op} {right})"
        return self._call(expr)

    def _call(self, expr: Expr) -> str:
        function = FUNCTIONS[expr.op]
        if function.spark is not None:
            written = ", ".join(map(self._argument, expr.args, function.args))
        elif expr.op in _OF_JSON:
            documents = [a.value for a in expr.args]
            written = ", ".join(self._member(d) for d in documents if isinstance(d, Reference))
        else:
            of_type = None if expr.op in ("concat", "concat_ws") else _with_type(expr.args)
            written = ", ".join(self.write(a, of_type) for a in expr.args)
        if expr.op in _KEYWORDS:
            return f"{expr.op.upper()}({written})"
        return f"pg_catalog.{expr.op}({written})"

    def _argument(self, expr: Expr, expected: Arg) -> str:
        cast = "::pg_catalog.int4" if expected is Arg.INTEGER else ""
        return f"{self.write(expr)}{cast}"

    def _member(self, reference: Reference, *, text: bool = False) -> str:
        """Return a part of a column's JSON, as JSON or as its text."""
        written = _name(reference.column)
        for at, part in enumerate(reference.path):
            arrow = "->>" if text and at == len(reference.path) - 1 else "->"
            step = str(part) if isinstance(part, int) else _string(part)
            written = f"({written} {arrow} {step})"
        return written

    def _pair(self, expr: Expr) -> tuple[str, str]:
        left, right = expr.args
        return self.write(left, right), self.write(right, left)

    def _case(self, expr: Expr) -> str:
        *branches, last = expr.args
        of_type = _with_type([*branches[1::2], last])
        parts = [
            f"WHEN {self.condition(c)} THEN {self.write(r, of_type)}"
            for c, r in zip(branches[::2], branches[1::2], strict=True)
        ]
        return f"(CASE {' '.join(parts)} ELSE {self.write(last, of_type)} END)"

    def condition(self, expr: Expr) -> str:
        """Return the SQL of a condition."""
        written = self.write(expr)
        if expr.op == "reference" and self._type(expr).kind is Kind.JSON:
            return f"({written}::pg_catalog.bool)"
        return written

    def _type(self, expr: Expr) -> Type:
        return Typer(self._names).node(expr).type

    def _reference(self, expr: Expr, reference: Reference, other: Expr | None) -> str:
        column = _name(reference.column)
        if not reference.path:
            return column
        keys = ", ".join(_string(str(part)) for part in reference.path)
        # As JSON an array's elements count from 0, whatever its lower bound.
        written = f"(pg_catalog.to_jsonb({column}) #>> ARRAY[{keys}]::pg_catalog.text[])"
        kind = self._type(expr).kind
        if kind is Kind.JSON:
            kind = self._kind_beside(other)
        return f"{written}{_CASTS.get(kind, '')}"

    def _kind_beside(self, other: Expr | None) -> Kind:
        """Return the kind that JSON takes beside another operand."""
        if other is None or other.op in ("string", "null"):
            return Kind.TEXT
        kind = self._type(other).kind
        return Kind.NUMERIC if kind is Kind.INT else kind


def _joined(by: str, parts: list[str]) -> str:
    return f"({by.join(parts)})"


def _with_type(exprs: Sequence[Expr]) -> Expr | None:
    """Return the first of some operands whose type does not hang on the others."""
    return next((e for e in exprs if e.op not in ("string", "null", "reference")), None) or next(
        (e for e in exprs if e.op == "reference"), None
    )


def _string(text: str) -> str:
    quoted = text.replace("'", "''")
    if "\\" not in quoted:
        return f"'{quoted}'"
    # Means the same whatever standard_conforming_strings says.
    return "E'" + quoted.replace("\\", "\\\\") + "'"


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _type(type_: TypeName) -> str:
    parameters = f"({', '.join(map(str, type_.parameters))})" if type_.parameters else ""
    if type_.name == "char":
        parameters = parameters or "(1)"
    return f"pg_catalog.{_NAMES[type_.name]}{parameters}"
