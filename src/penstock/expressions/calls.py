"""Types calls: by the table in `functions.py`, or by rules of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.expressions import operators
from penstock.expressions.casts import convert, literal, settled, text_form
from penstock.expressions.errors import ExpressionError
from penstock.expressions.functions import FUNCTIONS, Arg, Function
from penstock.expressions.nodes import Node
from penstock.expressions.syntax import Expr
from penstock.expressions.types import (
    DATE,
    FLOAT,
    INT,
    NUMBERS,
    TEXT,
    TIMES,
    TIMESTAMP,
    TIMESTAMPTZ,
    Kind,
    Type,
)
from penstock.expressions.unify import comparable, unify

if TYPE_CHECKING:
    from penstock.expressions.typing import Typer

TRUNCATED: Final = (
    "microseconds", "milliseconds", "second", "minute", "hour", "day", "week", "month", "quarter",
    "year",
)  # fmt: skip
"""The units of `date_trunc`."""
PARTS: Final[dict[str, tuple[int, int]]] = {
    "microseconds": (8, 0), "milliseconds": (8, 3), "second": (8, 6), "minute": (2, 0),
    "hour": (2, 0), "day": (2, 0), "dow": (1, 0), "isodow": (1, 0), "doy": (3, 0), "week": (2, 0),
    "month": (2, 0), "quarter": (1, 0), "year": (7, 0), "isoyear": (7, 0), "epoch": (19, 6),
}  # fmt: skip
"""The fields of `extract` and `date_part`: how many digits each has, and how many after the point."""
_CLOCK: Final = frozenset({"microseconds", "milliseconds", "second", "minute", "hour"})
ENDLESS: Final = frozenset({"year", "isoyear", "epoch"})
"""The fields that are infinite of an infinite time; the others are null."""
_INTEGER: Final = 1 << 31
DIMENSIONS: Final = tuple("123456")
"""The dimensions that an array of Postgres can have."""


def call(typer: Typer, expr: Expr) -> Node:
    """Return the node of a call; raises `ExpressionError` for arguments that it does not take."""
    function = FUNCTIONS[expr.op]
    if function.spark is not None:
        return _plain(typer, expr, function)
    return _BY_NAME[function.same_as or expr.op](typer, expr)


def _plain(typer: Typer, expr: Expr, function: Function) -> Node:
    nodes = [
        _argument(typer, expr.op, arg, expected)
        for arg, expected in zip(expr.args, function.args, strict=False)
    ]
    # What is computed may be no integer of 4 bytes.
    fails = function.fails or any(n.kind is Kind.INT and n.op != "literal" for n in nodes)
    return Node("call", function.result, tuple(nodes), function, fails)


def _argument(typer: Typer, name: str, expr: Expr, expected: Arg) -> Node:
    if expected is Arg.INTEGER:
        return _integer(typer, name, expr)
    node = typer.text(expr, name)
    if expected is Arg.CASED and node.type.folded:
        raise ExpressionError(
            expr.position, f"{name} ignores the case of a citext in Postgres; cast it by ::text"
        )
    return node


def _integer(typer: Typer, name: str, expr: Expr) -> Node:
    node = typer.node(expr)
    if node.op == "unknown":
        node = literal(node.value, INT, expr.position)
    if node.kind is not Kind.INT:
        raise ExpressionError(
            expr.position, f"{name} takes an integer here, not {node.type}; cast it by ::integer"
        )
    if node.op == "literal" and node.value is not None and not -_INTEGER <= node.value < _INTEGER:
        raise ExpressionError(expr.position, f"{node.value} is out of integer's range")
    return node


def _nodes(typer: Typer, expr: Expr) -> tuple[list[Node], list[int]]:
    return [typer.node(arg) for arg in expr.args], [arg.position for arg in expr.args]


# Null


def _coalesce(typer: Typer, expr: Expr) -> Node:
    args = unify(*_nodes(typer, expr))
    return Node("coalesce", args[0].type, args)


def _nullif(typer: Typer, expr: Expr) -> Node:
    nodes, positions = _nodes(typer, expr)
    value = settled(nodes[0])
    if value.kind is Kind.JSON:
        value = convert(value, TEXT, positions[0])
    equal = Node("=", Type(Kind.BOOL), comparable("=", [value, nodes[1]], positions))
    null = Node("literal", value.type, value=None)
    return Node("case", value.type, (equal, null, value))


def _extreme(typer: Typer, expr: Expr) -> Node:
    args = unify(*_nodes(typer, expr))
    type_ = args[0].type
    if not type_.ordered or any(arg.type.folded for arg in args):
        what = "a citext" if type_.ordered else type_
        raise ExpressionError(expr.position, f"{expr.op} does not compare {what} here")
    if any(map(padded, args)):
        raise ExpressionError(
            expr.position, f"{expr.op} keeps the blanks of a char(n); cast it by ::text"
        )
    return Node(expr.op, type_, args)


# Text


def _cased(typer: Typer, expr: Expr) -> Node:
    node = typer.text(expr.args[0], expr.op)
    return Node(expr.op, Type(Kind.TEXT, folded=node.type.folded), (node,))


def _length(typer: Typer, expr: Expr) -> Node:
    return Node("length", INT, (typer.text(expr.args[0], expr.op),))


def _concat(typer: Typer, expr: Expr) -> Node:
    return Node("concat all", TEXT, tuple(_printed(typer, arg, expr.op) for arg in expr.args))


def _concat_ws(typer: Typer, expr: Expr) -> Node:
    separator = typer.text(expr.args[0], expr.op)
    others = (_printed(typer, arg, expr.op) for arg in expr.args[1:])
    return Node(expr.op, TEXT, (separator, *others))


def _printed(typer: Typer, expr: Expr, name: str) -> Node:
    """Return a value's text as `concat` has it: of a boolean a letter."""
    node = typer.node(expr)
    if node.kind is Kind.BOOL and node.op != "unknown":
        yes, no = (Node("literal", TEXT, value=text) for text in ("t", "f"))
        null = Node("literal", TEXT, value=None)
        return Node("case", TEXT, (node, yes, Node("not", node.type, (node,)), no, null))
    if padded(node):
        raise ExpressionError(
            expr.position, f"{name} sees the blanks of a char(n) in this; cast it by ::text"
        )
    return text_form(node, expr.position)


def padded(node: Node) -> bool:
    """Return whether a text may be a char(n), as part of a `case` or `coalesce` too."""
    parts = node.args if node.op in ("case", "coalesce") else ()
    return node.type.width > 0 or any(map(padded, parts))


# Numbers


def _abs(typer: Typer, expr: Expr) -> Node:
    return operators.absolute(typer.node(expr.args[0]), expr.position)


def _round(typer: Typer, expr: Expr) -> Node:
    places = None if len(expr.args) == 1 else _places(typer, expr)
    return operators.rounded(typer.node(expr.args[0]), places, expr.position, op=expr.op)


def _places(typer: Typer, expr: Expr) -> int:
    places = expr.args[1]
    node = typer.node(places)
    if (
        node.op != "literal"
        or node.kind is not Kind.INT
        or node.value is None
        or abs(node.value) > 1000
    ):
        what = "round" if expr.op == "round" else "cut"
        raise ExpressionError(places.position, f"the places to {what} to must be a number")
    return int(node.value)


def _whole(typer: Typer, expr: Expr) -> Node:
    op = "ceil" if expr.op == "ceiling" else expr.op
    return operators.whole(op, typer.node(expr.args[0]), expr.position)


def _mod(typer: Typer, expr: Expr) -> Node:
    (left, right), (at, right_at) = _nodes(typer, expr)
    return operators.arithmetic("%", left, right, at, right_at)


def _floats(typer: Typer, expr: Expr) -> Node:
    nodes, positions = _nodes(typer, expr)
    has_float = any(node.kind is Kind.FLOAT for node in nodes)
    for node, position in zip(nodes, positions, strict=True):
        if node.op == "unknown":
            continue
        if node.kind not in NUMBERS or (node.kind is Kind.NUMERIC and not has_float):
            raise ExpressionError(
                position, f"{expr.op} takes a float here, not {node.type}; cast it by ::float8"
            )
    op = "power" if expr.op == "pow" else expr.op
    pairs = zip(nodes, positions, strict=True)
    return Node(op, FLOAT, tuple(convert(n, FLOAT, p) for n, p in pairs), fails=True)


# Time


def _now(_: Typer, __: Expr) -> Node:
    return Node("now", TIMESTAMPTZ)


def _date_trunc(typer: Typer, expr: Expr) -> Node:
    name = _unit(expr.args[0], TRUNCATED)
    node, time = typer.node(expr.args[1]), expr.args[1]
    if node.kind is Kind.DATE:
        node = convert(node, TIMESTAMPTZ, time.position)
    if node.kind not in (Kind.TIMESTAMP, Kind.TIMESTAMPTZ) or node.op == "unknown":
        raise ExpressionError(
            time.position, f"date_trunc takes a date or timestamp, not {node.type}"
        )
    return Node("date_trunc", node.type, (node,), name)


def _part(typer: Typer, expr: Expr) -> Node:
    name = _unit(expr.args[0], tuple(PARTS))
    node, time = typer.node(expr.args[1]), expr.args[1]
    if node.kind not in TIMES or node.op == "unknown":
        raise ExpressionError(
            time.position, f"{expr.op} takes a date or timestamp, not {node.type}"
        )
    if expr.op == "date_part":
        if node.kind is Kind.DATE and (name in _CLOCK or name == "epoch"):
            node = convert(node, TIMESTAMP, time.position)
        return Node("date_part", FLOAT, (node,), name)
    if node.kind is Kind.DATE and name in _CLOCK:
        raise ExpressionError(expr.args[0].position, f"a date has no {name}")
    precision, scale = PARTS[name]
    if name == "epoch" and node.type == DATE:
        precision, scale = 14, 0
    type_ = Type(Kind.NUMERIC, precision, scale, fixed=True)
    # No numeric of Spark's is infinite.
    return Node("extract", type_, (node,), name, fails=name in ENDLESS)


def _unit(unit: Expr, known: Sequence[str]) -> str:
    if unit.op != "string" or not isinstance(unit.value, str):
        raise ExpressionError(unit.position, "the unit must be a literal, like 'day'")
    name = unit.value.lower()
    if name not in known:
        name = next((u for u in known if u in (f"{name}s", name.removesuffix("s"))), "")
    if not name:
        raise ExpressionError(
            unit.position, f"unknown unit {unit.value[:20]!r}; there are {', '.join(known)}"
        )
    return name


# JSON


def _json(typer: Typer, expr: Expr) -> Node:
    return typer.probe(expr.args[0], expr.op.partition("_")[2], expr.op.partition("_")[0])


# Arrays


def _cardinality(typer: Typer, expr: Expr) -> Node:
    (column,) = expr.args
    typer.element(column)
    return typer.ask(column, "cardinality", "")


def _array_length(typer: Typer, expr: Expr) -> Node:
    column, dimension = expr.args
    typer.element(column)
    if dimension.op != "number" or dimension.value not in DIMENSIONS:
        raise ExpressionError(dimension.position, "the dimension must be a number from 1 to 6")
    return typer.ask(column, "dimension", str(dimension.value))


_BY_NAME: Final[dict[str, Callable[[Typer, Expr], Node]]] = {
    "coalesce": _coalesce,
    "nullif": _nullif,
    "greatest": _extreme,
    "least": _extreme,
    "lower": _cased,
    "upper": _cased,
    "length": _length,
    "concat": _concat,
    "concat_ws": _concat_ws,
    "abs": _abs,
    "round": _round,
    "trunc": _round,
    "ceil": _whole,
    "floor": _whole,
    "sign": _whole,
    "mod": _mod,
    "power": _floats,
    "sqrt": _floats,
    "now": _now,
    "date_trunc": _date_trunc,
    "date_part": _part,
    "extract": _part,
    "jsonb_typeof": _json,
    "json_typeof": _json,
    "jsonb_array_length": _json,
    "json_array_length": _json,
    "cardinality": _cardinality,
    "array_length": _array_length,
}
