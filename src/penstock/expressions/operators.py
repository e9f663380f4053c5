"""Arithmetic, on numbers and times, with Postgres' rules for what it gives."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from penstock.expressions import decimals
from penstock.expressions.casts import convert
from penstock.expressions.errors import ExpressionError
from penstock.expressions.nodes import Node, Span
from penstock.expressions.syntax import Value
from penstock.expressions.types import (
    DATE,
    FLOAT,
    INT,
    INTERVAL,
    NUMBERS,
    NUMERIC,
    TIMES,
    TIMESTAMP,
    TIMESTAMPTZ,
    Kind,
)
from penstock.expressions.unify import as_numeric, common_type

_DECIMAL_TYPES: Final = {
    "+": decimals.sum_types,
    "-": decimals.sum_types,
    "/": decimals.quotient_types,
    "%": decimals.remainder_types,
}


def arithmetic(op: str, left: Node, right: Node, at: int, right_at: int) -> Node:
    """Return the node of a binary operator; raises `ExpressionError` for what it does not take."""
    if left.kind in TIMES or right.kind in TIMES or Kind.INTERVAL in (left.kind, right.kind):
        return _on_times(op, left, right, at, right_at)
    for node, position in ((left, at), (right, right_at)):
        if node.op != "unknown" and node.kind not in (*NUMBERS, Kind.JSON):
            raise ExpressionError(position, f"{op} takes numbers, and this is {node.type}")
    if not {left.kind, right.kind} & NUMBERS:
        raise ExpressionError(at, f"what {op} is to work on is not known; cast it by ::numeric")
    type_ = common_type((left, right), (at, right_at))
    if type_.kind is not Kind.NUMERIC:
        if op == "%" and type_.kind is Kind.FLOAT:
            raise ExpressionError(at, "% takes no floats; cast both by ::numeric")
        a, b = convert(left, type_, at), convert(right, type_, right_at)
        return Node(op, type_, (a, b), fails=True)
    return _on_numerics(op, _numeric(left, at), _numeric(right, right_at), at, right_at)


def _numeric(node: Node, position: int) -> Node:
    if node.kind is Kind.NUMERIC:
        if node.type.precision > 38:
            raise ExpressionError(position, "numbers have at most 38 digits here")
        return node
    if node.op == "unknown" or node.kind is Kind.JSON:
        return convert(node, NUMERIC, position)
    return convert(node, as_numeric(node), position)


def _on_numerics(op: str, left: Node, right: Node, at: int, right_at: int) -> Node:
    if op == "*":
        operand, other, result = decimals.product_types(
            left.type, right.type, keep_a=left.op == "literal", keep_b=right.op == "literal"
        )
    else:
        operand, other, result = _DECIMAL_TYPES[op](left.type, right.type)
    a, b = convert(left, operand, at), convert(right, other, right_at)
    return Node(op, result, (a, b), fails=True)


def negate(node: Node, position: int) -> Node:
    """Return `-node`."""
    if node.op == "literal" and node.value is not None:
        if isinstance(node.value, Span):
            return Node("literal", INTERVAL, value=Span(*[-part for part in node.value]))
        if isinstance(node.value, int | float | Decimal) and node.kind in NUMBERS:
            if node.kind is Kind.NUMERIC and node.value == 1 << 63:
                return Node("literal", INT, value=-(1 << 63))
            return Node("literal", node.type, value=-node.value)
    node = _sized("-", node, position, also=Kind.INTERVAL)
    return Node("neg", node.type, (node,), fails=node.kind in (Kind.INT, Kind.INTERVAL))


def absolute(node: Node, position: int) -> Node:
    """Return `abs(node)`."""
    node = _sized("abs", node, position)
    return Node("abs", node.type, (node,), fails=node.kind is Kind.INT)


def rounded(node: Node, places: int | None, position: int, *, op: str = "round") -> Node:
    """Return `round(node)`, `round(node, places)`, or what `trunc`, as `op`, gives in their place.

    Halves are rounded away from zero, a float's to even.
    """
    node = _sized(op, node, position)
    if places is None and node.kind is not Kind.NUMERIC:
        # Postgres rounds an integer as a double precision.
        return Node(op, FLOAT, (convert(node, FLOAT, position),))
    if node.kind is Kind.FLOAT:
        raise ExpressionError(position, f"{op} takes no places for a float; cast it by ::numeric")
    node = _numeric(node, position)
    places = min(max(places or 0, -38), 38)
    if places >= node.type.scale:
        wider = decimals.numeric(min(decimals.whole(node.type), 38 - places), places)
        return convert(node, wider, position)
    before = min(decimals.whole(node.type) + (op == "round"), 38 - max(places, 0))
    return Node(op, decimals.numeric(before, max(places, 0)), (node,), places, fails=True)


def whole(op: str, node: Node, position: int) -> Node:
    """Return `ceil(node)`, `floor(node)` or `sign(node)`, as `op` names it."""
    node = _sized(op, node, position)
    if node.kind is not Kind.NUMERIC:
        return Node(op, FLOAT, (convert(node, FLOAT, position),))
    node = _numeric(node, position)
    before = 1 if op == "sign" else min(decimals.whole(node.type) + 1, 38)
    return Node(op, decimals.numeric(before, 0), (node,), fails=op != "sign")


def _sized(op: str, node: Node, position: int, *, also: Kind | None = None) -> Node:
    if node.op == "unknown" or node.kind not in (*NUMBERS, also):
        hint = "; cast it by ::numeric" if node.kind in (Kind.JSON, Kind.TEXT) else ""
        raise ExpressionError(position, f"{op} takes a number, and this is {node.type}{hint}")
    return node


def _on_times(op: str, left: Node, right: Node, at: int, right_at: int) -> Node:
    kinds = left.kind, right.kind
    if "unknown" in (left.op, right.op):
        position = at if left.op == "unknown" else right_at
        raise ExpressionError(position, "write what this is: interval '…', date '…', timestamp '…'")
    if op == "+" and (right.kind in TIMES or kinds == (Kind.INTERVAL, Kind.INTERVAL)):
        left, right, at, right_at = right, left, right_at, at
        kinds = left.kind, right.kind
    match op, kinds:
        case (("+" | "-"), (Kind.DATE, Kind.INT)):
            return Node(
                "add days", DATE, (left, right if op == "+" else negate(right, at)), fails=True
            )
        case (("+" | "-"), ((Kind.DATE | Kind.TIMESTAMP | Kind.TIMESTAMPTZ), Kind.INTERVAL)):
            if not isinstance(right.value, Span):
                raise ExpressionError(right_at, "only interval '…' can be added to a time")
            by = right.value if op == "+" else Span(*[-part for part in right.value])
            time = convert(left, TIMESTAMP, at) if left.kind is Kind.DATE else left
            return Node("shift", time.type, (time,), by, fails=True)
        case (("+" | "-"), (Kind.INTERVAL, Kind.INTERVAL)):
            if isinstance(left.value, Span) and isinstance(right.value, Span):
                sign = 1 if op == "+" else -1
                parts = zip(left.value, right.value, strict=True)
                return Node("literal", INTERVAL, value=Span(*[a + sign * b for a, b in parts]))
            return Node(op, INTERVAL, (left, right), fails=True)
        case "-", (Kind.DATE, Kind.DATE):
            return Node("days", INT, (left, right), fails=True)
        case "-", _ if left.kind in TIMES and right.kind in TIMES:
            type_ = TIMESTAMPTZ if Kind.TIMESTAMPTZ in kinds else TIMESTAMP
            args = convert(left, type_, at), convert(right, type_, right_at)
            return Node("since", INTERVAL, args, fails=True)
    raise ExpressionError(at, f"{op} does not go with {left.type} and {right.type}")


def like_pattern(pattern: str, escape: Value, position: int) -> str:
    """Return a pattern with a backslash before each literal `%`, `_` and backslash, and no other.

    Raises `ExpressionError` for a pattern that ends with its escape character.
    """
    if escape is None:
        escape = "\\"
    if not isinstance(escape, str) or len(escape) > 1:
        raise ExpressionError(position, "`escape` takes one character, or none: ''")
    out: list[str] = []
    characters = iter(pattern)
    for character in characters:
        literal = character == escape
        if literal:
            following = next(characters, None)
            if following is None:
                raise ExpressionError(position, "the pattern ends with its escape character")
            character = following  # noqa: PLW2901 - the escaped one
        escaped = character == "\\" or (literal and character in "%_")
        out.append(f"\\{character}" if escaped else character)
    return "".join(out)
