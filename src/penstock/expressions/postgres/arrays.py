"""What is asked of an array, in Postgres' own operators: the JSON of a message becomes an array."""

from __future__ import annotations

from typing import Final

from penstock.expressions.arrays import texts
from penstock.expressions.postgres.quoting import BYTES, pg_type, quoted
from penstock.expressions.syntax import Expr
from penstock.expressions.types import TEXT, Kind, Type

_OVER: Final = "(SELECT {} FROM (SELECT ({})::jsonb) AS g (d))"
"""What is made of a document, `d`, and the document."""
_ELEMENTS: Final = "ARRAY(SELECT {} FROM jsonb_path_query(d, '{}') AS x)"
_LEAVES: Final = """strict $.** ? (@.type() <> "array")"""
"""The elements of all dimensions."""


def compared(op: str, literal: str, document: str, type_: Type, casing: str) -> str:
    """Return a question such as `= any`; `literal` is SQL, `document` the array's JSON."""
    comparison, word = op.split()
    if type_.kind is Kind.TEXT:
        literal = _element(literal, type_, casing)
    return f"({literal} {comparison} {word.upper()} ({_array(document, type_, casing)}))"


def containing(op: str, literal: Expr, document: str, type_: Type, casing: str) -> str:
    """Return a question such as `@>` of an array and an array's literal."""
    items = [
        "NULL" if text is None else _element(quoted(text), type_, casing)
        for text, _ in texts(literal, type_)
    ]
    array = f"ARRAY[{', '.join(items)}]::{pg_type(type_)}[]"
    return f"({_array(document, type_, casing)} {op} {array})"


def measured(expr: Expr, document: str) -> str:
    """Return `cardinality` or `array_length` of an array."""
    if expr.op == "cardinality":
        return f"cardinality({_array(document, TEXT, '')})"
    zeros = ["0"] * (int(str(expr.args[1].value)) - 1)
    inner = f"d #> '{{{','.join(zeros)}}}'"
    found = (
        f"CASE WHEN jsonb_array_length(d) >= 0 AND jsonb_typeof({inner}) = 'array'"
        f" THEN nullif(jsonb_array_length({inner}), 0) END"
    )
    return _OVER.format(found, document)


def _array(document: str, type_: Type, casing: str) -> str:
    """Return an array: null for SQL's null, an error for JSON that is no array."""
    elements = _ELEMENTS.format(_element("x #>> '{}'", type_, casing), _LEAVES)
    made = f"CASE WHEN jsonb_array_length(d) >= 0 THEN {elements} END"
    # Without the cast behind it `any` would take this for a subquery.
    return f"{_OVER.format(made, document)}::{pg_type(type_)}[]"


def _element(value: str, type_: Type, casing: str) -> str:
    """Return an element; texts are compared byte by byte."""
    one = f"({value})::{pg_type(type_)}"
    if type_.folded:
        one = f"lower({one}{casing})"
    return f"({one}{BYTES})" if pg_type(type_) in ("text", "bpchar") else one
