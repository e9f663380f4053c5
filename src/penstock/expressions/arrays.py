"""Types what is asked of a column that is an array: `'a' = any(record.tags)`, `record.tags && '{a,b}'`.

The literals are read as the array's elements are; what is asked is a probe: see `array_probes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.expressions.array_literals import asked as text_of
from penstock.expressions.array_literals import form_of, items, literal_form
from penstock.expressions.casts import convert
from penstock.expressions.errors import ExpressionError
from penstock.expressions.members import CONTAINING
from penstock.expressions.nodes import Node
from penstock.expressions.syntax import Expr, TypedLiteral, TypeName
from penstock.expressions.types import FLOAT, NAMED, NUMBERS, NUMERIC, TIMES, Kind, Type

if TYPE_CHECKING:
    from penstock.expressions.typing import Typer

QUANTIFIED: Final = frozenset({"= any", "<> any", "= all", "<> all"})
OPERATORS: Final = QUANTIFIED | CONTAINING.keys()
"""The operators of arrays; `@>` is one of JSON, too."""


def asked(typer: Typer, expr: Expr) -> Node:
    """Return what an operator asks of an array; raises `ExpressionError`."""
    if expr.op in QUANTIFIED:
        literal, column = expr.args
        type_, item = _scalar(typer, expr.op, literal, element_type(typer, column))
        return typer.ask(column, expr.op, text_of(type_, [item]))
    column, array = expr.args
    type_ = element_type(typer, column)
    found = [_item(text, type_, position) for text, position in texts(array, type_)]
    return typer.ask(column, f"array {expr.op}", text_of(type_, found))


def element_type(typer: Typer, column: Expr) -> Type:
    """Return the type of an array's elements; raises `ExpressionError` where they have no `=` here."""
    type_ = typer.element(column)
    if type_.form == "opaque":
        raise ExpressionError(column.position, f"the elements of {column.value} are {type_}")
    return type_


def texts(array: Expr, type_: Type) -> list[tuple[str | None, int]]:
    """Return the elements of an array's literal as texts, None for null, and where each is.

    Raises `ExpressionError` for one that is no literal of the array's type.
    """
    return [(_text(item, type_), item.position) for item in items(array)]


def _text(item: Expr, type_: Type) -> str | None:
    match item.op:
        case "null":
            return None
        case "string":
            return str(item.value)
        case "bool" if type_.kind is Kind.BOOL:
            return str(item.value)
        case "number" if type_.kind in NUMBERS:
            return str(item.value)
        case "neg" if item.args[0].op == "number" and type_.kind in NUMBERS:
            return f"-{item.args[0].value}"
        case "typed" | "cast":
            name, text = _named(item)
            own = NAMED.get(name)
            if own is not None and (own.kind, own.form) == (type_.kind, type_.form):
                return text
    raise ExpressionError(
        item.position, f"a literal is expected here that is {type_}, as the column's elements are"
    )


def _named(item: Expr) -> tuple[str, str]:
    """Return the type and the text of `date '…'` and `'…'::date`; without a type where it is neither."""
    if isinstance(item.value, TypedLiteral):
        return item.value.type.name, item.value.text
    assert isinstance(item.value, TypeName)  # noqa: S101 - for the type checker
    (of,) = item.args
    sign = ""
    if of.op == "neg":
        sign, (of,) = "-", of.args
    plain = of.op in ("string", "number", "bool") and not item.value.parameters
    return item.value.name if plain else "", f"{sign}{of.value}"


def _item(text: str | None, type_: Type, position: int) -> Any:
    if text is None:
        return None
    try:
        return literal_form(text, type_)
    except ValueError as error:
        raise ExpressionError(position, f"{text[:50]!r} is not {type_}: {error}") from None


def _scalar(typer: Typer, op: str, literal: Expr, type_: Type) -> tuple[Type, Any]:
    """Return what is compared with each element, and the type that the elements are compared in."""
    given = node = typer.node(literal)
    position = literal.position
    if node.op not in ("literal", "unknown"):
        raise ExpressionError(position, f"a literal is expected here: '…' {op}(record.…)")
    if node.op == "unknown" or node.value is None:
        return type_, _item(node.value, type_, position)
    if node.kind in (Kind.INT, Kind.NUMERIC) and type_.kind in NUMBERS:
        if type_.kind is Kind.FLOAT:
            return type_, _item(str(node.value), FLOAT, position)
        to = type_ if type_.kind is node.kind else NUMERIC
        return to, _item(str(node.value), to, position)
    if node.kind in TIMES and type_.kind in TIMES:
        node = convert(node, type_, position)
    if node.op == "literal" and _same(node.type, type_):
        return type_, form_of(node.value, type_)
    raise ExpressionError(
        position,
        f"{given.type} does not go with the elements of the array, of which each is {type_}; write '…'",
    )


def _same(a: Type, b: Type) -> bool:
    return (a.kind, a.form, a.folded, a.width) == (b.kind, b.form, b.folded, b.width)
