"""One type for several operands: of a comparison, of `in`, of `case` and `coalesce`."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from penstock.expressions import decimals
from penstock.expressions.casts import convert, literal
from penstock.expressions.errors import ExpressionError
from penstock.expressions.keys import keyed
from penstock.expressions.literals import numeric_type
from penstock.expressions.nodes import Node
from penstock.expressions.types import (
    BOOL,
    DATE,
    FLOAT,
    INT,
    NUMBERS,
    NUMERIC,
    TEXT,
    TIMES,
    TIMESTAMP,
    TIMESTAMPTZ,
    Kind,
    Type,
)

_WIDEST_FIRST: Final = (TIMESTAMPTZ, TIMESTAMP, DATE)


def unify(nodes: Sequence[Node], positions: Sequence[int]) -> tuple[Node, ...]:
    """Return operands brought to one type; raises `ExpressionError` where they have none."""
    type_ = common_type(nodes, positions)
    if type_.kind is Kind.NUMERIC:
        # A literal's own digits count too.
        nodes = [
            literal(n.value, NUMERIC, p) if n.op == "unknown" and n.value is not None else n
            for n, p in zip(nodes, positions, strict=True)
        ]
        type_ = common_type(nodes, positions)
    return tuple(convert(n, type_, p) for n, p in zip(nodes, positions, strict=True))


def comparable(op: str, nodes: Sequence[Node], positions: Sequence[int]) -> tuple[Node, ...]:
    """Return operands brought to a type that `op` compares; raises `ExpressionError`."""
    for node, position in zip(nodes, positions, strict=True):
        if node.op == "field" and node.kind is Kind.JSON and not node.value.reference.path:
            name = node.value.reference
            raise ExpressionError(
                position,
                f"{name} is JSON as a whole; compare a part of it ({name}.key, {name}[0]) or "
                f"its text ({name}::text)",
            )
    args = keyed(nodes, positions) or unify(nodes, positions)
    type_ = args[0].type
    if op not in ("=", "<>", "is distinct") and not type_.ordered:
        raise ExpressionError(
            positions[0], f"this is {type_}, of which = and <> alone are known, not {op}"
        )
    if type_.kind is Kind.TEXT and all(n.type.folded or n.op == "literal" for n in args):
        args = tuple(Node("lower", TEXT, (n,)) for n in args) if _folded(args) else args
    return args


def _folded(nodes: Sequence[Node]) -> bool:
    return any(n.type.folded for n in nodes)


def common_type(nodes: Sequence[Node], positions: Sequence[int]) -> Type:
    """Return the type that all of some operands can be brought to; raises `ExpressionError`."""
    known = [(n, p) for n, p in zip(nodes, positions, strict=True) if n.op != "unknown"]
    if not known:
        return TEXT
    kinds = {n.kind for n, _ in known}
    if kinds == {Kind.JSON}:
        return TEXT
    not_json = [(n, p) for n, p in known if n.kind is not Kind.JSON]
    kinds.discard(Kind.JSON)
    with_json = len(not_json) < len(known)
    if kinds <= NUMBERS:
        return _number([n for n, _ in not_json], json=with_json)
    if kinds == {Kind.BOOL}:
        return BOOL
    if kinds == {Kind.TEXT}:
        return _text(not_json, json=with_json)
    first, position = not_json[0]
    if not with_json:
        if kinds <= TIMES:
            return next(t for t in _WIDEST_FIRST if t.kind in kinds)
        if len(kinds) == 1:
            return first.type
        position = next(p for n, p in not_json if n.kind is not first.kind)
        other = next(n for n, _ in not_json if n.kind is not first.kind).type
    else:
        other = next(n for n, _ in known if n.kind is Kind.JSON).type
    raise ExpressionError(position, f"{first.type} and {other} don't go together; cast one of them")


def _number(nodes: Sequence[Node], *, json: bool) -> Type:
    kinds = {n.kind for n in nodes}
    if Kind.FLOAT in kinds:
        single = kinds == {Kind.FLOAT} and all(n.type.single for n in nodes) and not json
        return Type(Kind.FLOAT, single=True) if single else FLOAT
    if kinds == {Kind.INT} and not json:
        return INT
    types = [as_numeric(n) for n in nodes]
    return decimals.common([*types, NUMERIC] if json else types)


def as_numeric(node: Node) -> Type:
    """Return the numeric that an integer or numeric operand is."""
    if node.kind is Kind.NUMERIC:
        return node.type
    if node.op == "literal" and node.value is not None:
        return numeric_type(Decimal(node.value))
    return decimals.numeric(19, 0)


def _text(not_json: Sequence[tuple[Node, int]], *, json: bool) -> Type:
    first = not_json[0][0].type
    for node, position in not_json:
        if node.type.form != first.form or (json and node.type.form):
            other = node.type if node.type.form != first.form else "a JSON value"
            raise ExpressionError(
                position, f"{first} and {other} don't go together; cast both by ::text"
            )
    if first.form:
        return first
    width = first.width if all(n.type.width == first.width for n, _ in not_json) else 0
    folded = all(n.type.folded for n, _ in not_json)
    return Type(Kind.TEXT, width=width, folded=folded)
