"""From one type to another: what a context asks for by itself, and what `::` asks for."""

from __future__ import annotations

from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any, Final

from penstock.expressions import decimals
from penstock.expressions.errors import ExpressionError
from penstock.expressions.keys import exact_source, with_results
from penstock.expressions.literals import numeric_type, read
from penstock.expressions.nodes import Node
from penstock.expressions.syntax import TypeName
from penstock.expressions.times import LAST_MOMENT
from penstock.expressions.types import (
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    DAY,
    FLOAT,
    INT,
    NAMED,
    NUMBERS,
    TEXT,
    TIMES,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
    Kind,
    Type,
)

_BITS: Final = {"smallint": 16, "integer": 32, "bigint": 64}


def settled(node: Node) -> Node:
    """Return a node whose type is no longer open: what nothing asks of is a text."""
    return Node("literal", TEXT, value=node.value) if node.op == "unknown" else node


def convert(node: Node, to: Type, position: int) -> Node:
    """Return a node as a value of another type, as a context asks for it.

    A literal is read now; raises `ExpressionError` where it is no value of that type.
    """
    if node.op == "unknown":
        return literal(node.value, to, position)
    if node.type == to:
        return node
    if node.op == "literal":
        return _literal(node, to, position)
    if node.type.spark == to.spark and node.kind is to.kind and node.kind is not Kind.FLOAT:
        return node
    if node.kind is Kind.JSON and to.kind is Kind.TEXT:
        return Node("cast", to, (node,))
    if node.kind is Kind.FLOAT and to.kind is Kind.FLOAT and not to.single:
        return node
    if to.kind is Kind.FLOAT and node.kind is Kind.NUMERIC and (wide := _wide(node, to, position)):
        return wide
    return Node("cast", to, (node,), fails=_may_fail(node.type, to))


def _wide(node: Node, to: Type, position: int) -> Node | None:
    """Return the float of a numeric that may have more digits than Spark's, made of its own text."""
    source = exact_source(node)
    if source.op == "field":
        return Node("field", to, value=replace(source.value, type=to))
    if source.op in ("coalesce", "case"):
        return with_results(source, to, lambda result: convert(result, to, position))
    return None


def _may_fail(have: Type, to: Type) -> bool:
    if have.kind is Kind.INT and to.kind is Kind.NUMERIC:
        return decimals.whole(to) < 19
    if have.kind is Kind.NUMERIC and to.kind is Kind.NUMERIC:
        return decimals.whole(to) < decimals.whole(have) or to.scale < have.scale
    if have.kind in (Kind.INT, Kind.BOOL) and to.kind in (Kind.FLOAT, Kind.TEXT):
        return False
    if have.kind is Kind.NUMERIC and to.kind is Kind.FLOAT:
        return to.single
    if have.kind in TIMES and to.kind in TIMES:
        # There are days after the last timestamp.
        return have.kind is Kind.DATE and to.kind is not Kind.DATE
    return True


def literal(text: str | None, to: Type, position: int) -> Node:
    """Return a string literal read as a value of a type; raises `ExpressionError`."""
    if text is None:
        return Node("literal", to, value=None)
    if to.kind is Kind.JSON:
        return Node("literal", TEXT, value=text)
    try:
        value = read(text, to)
    except ValueError as error:
        raise ExpressionError(position, f"{text[:50]!r} is not {to}: {error}") from None
    node = Node("literal", to, value=value)
    if to.kind is Kind.NUMERIC:
        assert isinstance(value, Decimal)  # noqa: S101 - for the type checker
        return Node("literal", numeric_type(value), value=value)
    return node


def _literal(node: Node, to: Type, position: int) -> Node:
    """Return a literal that has a type already, brought to another one."""
    value: Any = node.value
    if value is None:
        return Node("literal", to, value=None)
    match node.kind, to.kind:
        case ((Kind.INT | Kind.NUMERIC), Kind.NUMERIC):
            have = numeric_type(Decimal(value))
            if decimals.whole(have) > decimals.whole(to) or have.scale > to.scale:
                raise ExpressionError(
                    position,
                    f"{value} has more digits than the values that it meets can have here "
                    f"({decimals.whole(to)} before the point, {to.scale} after it)",
                )
            return Node("literal", to, value=Decimal(value))
        case ((Kind.INT | Kind.NUMERIC), Kind.FLOAT):
            return literal(str(value), FLOAT, position)
        case Kind.DATE, (Kind.TIMESTAMP | Kind.TIMESTAMPTZ):
            return Node("literal", to, value=_midnight(value, position))
        case Kind.TIMESTAMP, Kind.TIMESTAMPTZ:
            return Node("literal", to, value=value)
        case Kind.FLOAT, Kind.FLOAT:
            return node
        case Kind.TEXT, Kind.TEXT:
            return Node("literal", to, value=value)
    return Node("cast", to, (node,), fails=True)


def _midnight(day: int, position: int) -> int:
    if day == DATE_INFINITY:
        return TIMESTAMP_INFINITY
    if day == DATE_MINUS_INFINITY:
        return TIMESTAMP_MINUS_INFINITY
    if day * DAY > LAST_MOMENT:
        raise ExpressionError(position, "this day is after the last timestamp that there is here")
    return day * DAY


def text_form(node: Node, position: int) -> Node:
    """Return a value's text, as the message has it; raises `ExpressionError` where none is known."""
    node = settled(node)
    if node.kind is Kind.TEXT:
        return node
    if node.op == "field" and node.kind is not Kind.JSON:
        return Node("field", TEXT, value=replace(node.value, type=TEXT))
    if node.kind in (Kind.FLOAT, Kind.INTERVAL):
        raise ExpressionError(
            position, f"this is {node.type} that was computed; its text is not known exactly"
        )
    if node.kind is Kind.NUMERIC and not node.type.fixed:
        raise ExpressionError(
            position,
            "how many digits this has after the point is not known; write round(…, 2) around it",
        )
    # A time that was computed may have a year that has no text here.
    return Node("cast", TEXT, (node,), fails=node.kind in TIMES)


def cast(node: Node, to: TypeName, position: int) -> Node:
    """Return what `node::to` gives; raises `ExpressionError`."""
    target = _target(to, position)
    if node.op == "unknown" and to.name not in ("varchar", "char", "numeric"):
        node = literal(node.value, target, position)
        if to.name in ("smallint", "integer"):
            return _cast(node, to, target, position)
        return node
    return _cast(settled(node), to, target, position)


def _target(to: TypeName, position: int) -> Type:
    if to.name == "numeric" and to.parameters:
        precision, scale = (*to.parameters, 0)[:2]
        if not 0 < precision <= 38 or scale > precision:
            raise ExpressionError(position, f"{to}: at most 38 digits, the scale within them")
        return Type(Kind.NUMERIC, precision, scale, fixed=True)
    if to.name in ("varchar", "char"):
        length = to.parameters[0] if to.parameters else 0
        if to.parameters and not 0 < length <= 10_485_760:
            raise ExpressionError(position, f"{to}: there is no such length")
        if to.name == "char":
            return Type(Kind.TEXT, width=length or 1)
        return TEXT
    return NAMED[to.name]


def _cast(node: Node, to: TypeName, target: Type, position: int) -> Node:
    have = node.type
    if target.kind is Kind.TEXT:
        return _to_text(node, to, target, position)
    if node.value is None and node.op == "literal":
        return Node("literal", target, value=None)
    if not _allowed(have, to, target):
        raise ExpressionError(position, f"this is {have}, which can't be cast to {to}")
    if node.op == "literal" and have.kind is Kind.TEXT and target.kind is not Kind.INTERVAL:
        node = literal(node.value, target, position)
        have = node.type
    if target.kind is Kind.INT:
        bits = _BITS[to.name]
        if have.kind is Kind.INT and bits == 64:
            return node
        if node.op == "literal" and have.kind is Kind.INT:
            if not -(1 << (bits - 1)) <= node.value < 1 << (bits - 1):
                raise ExpressionError(position, f"{node.value} is out of {to.name}'s range")
            return node
        return Node("cast", INT, (node,), bits, fails=True)
    if target.kind is Kind.NUMERIC:
        return _to_numeric(node, to, target, position)
    if have.kind is target.kind and have.kind is not Kind.FLOAT:
        return Node(node.op, target, node.args, node.value, node.fails)
    if (
        have.kind is Kind.FLOAT
        and target.kind is Kind.FLOAT
        and not (target.single and not have.single)
    ):
        return node
    if target.kind is Kind.FLOAT and have.kind is Kind.NUMERIC:
        return convert(node, target, position)
    return Node("cast", target, (node,), fails=_may_fail(have, target))


def _to_numeric(node: Node, to: TypeName, target: Type, position: int) -> Node:
    have = node.type
    if not to.parameters:
        if have.kind is Kind.NUMERIC:
            return node
        if have.kind is Kind.INT:
            return Node("cast", decimals.numeric(19, 0), (node,))
        return Node("cast", target, (node,), "exact", fails=True)
    if node.op == "literal" and have.kind in (Kind.INT, Kind.NUMERIC):
        with localcontext(prec=100):
            value = Decimal(node.value).quantize(Decimal(1).scaleb(-target.scale), ROUND_HALF_UP)
        if decimals.whole(numeric_type(value)) > decimals.whole(target):
            raise ExpressionError(position, f"{node.value} does not fit into {to}")
        return Node("literal", target, value=value)
    # Unlike what a context asks for, a cast rounds.
    return Node("cast", target, (node,), "round", fails=True)


def _to_text(node: Node, to: TypeName, target: Type, position: int) -> Node:
    if target.form == "uuid":
        if node.type.form == "uuid":
            return node
        if node.kind not in (Kind.TEXT, Kind.JSON) or node.type.form:
            raise ExpressionError(position, f"this is {node.type}, which can't be cast to uuid")
        return Node("cast", target, (node,), "uuid", fails=True)
    node = text_form(node, position)
    if node.op == "field" and node.type.width and to.name == "text":
        return Node("field", TEXT, value=node.value)
    if to.parameters or to.name == "char":
        return Node("cast", target, (node,), to.parameters[0] if to.parameters else 1)
    return Node(node.op, TEXT, node.args, node.value, node.fails)


def _allowed(have: Type, to: TypeName, target: Type) -> bool:
    if have.kind in (Kind.TEXT, Kind.JSON):
        return not have.form and target.kind not in (Kind.TIME, Kind.INTERVAL)
    if have.kind is target.kind:
        return True
    if have.kind in NUMBERS and target.kind in NUMBERS:
        return True
    if {have.kind, target.kind} == {Kind.INT, Kind.BOOL}:
        return to.name in ("integer", "boolean")
    return have.kind in TIMES and target.kind in TIMES
