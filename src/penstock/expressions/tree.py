"""sqlglot's tree of an expression, walked by a table of the nodes that are allowed.

sqlglot decides what belongs to what. Its precedence is that of many dialects at once, so each node is
compared with Postgres' own table: a tree of the same tokens that keeps to it is the tree that Postgres
would make, and any other is refused with the advice to put parentheses.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, ClassVar, Final

from sqlglot import exp

from penstock.expressions.errors import ExpressionError
from penstock.expressions.members import CONTAINING, member, quantified
from penstock.expressions.syntax import MAX_DEPTH, Expr

Node = Any
"""A node of sqlglot's tree, whose classes have no common name in all versions."""


class Leaf(exp.Expression):
    """An operand: `expr` is its `Expr`, `start` where it begins in the text."""

    arg_types: ClassVar = {"expr": True, "start": True}


class Operator(exp.Expression):
    """An operator that binds as `||` does: `op`."""

    arg_types: ClassVar = {"this": True, "expression": True, "op": True}


class Predicate(exp.Expression):
    """`is`, `in`, `between`, `like` and their kind: the `op` of `Expr`, its operands, and its value."""

    arg_types: ClassVar = {"op": True, "expressions": True, "value": False, "negated": False}


_MAX_CHAIN: Final = 4 * MAX_DEPTH
"""How deep the tree may be: `1 + 1 + 1 …` makes it deep without nesting."""
_OR, _AND, _NOT, _IS, _COMPARISON, _LIKE, _OTHER, _ADD, _MULTIPLY, _SIGN = range(10)
_CHAINS: Final[dict[Any, tuple[str, int]]] = {exp.And: ("and", _AND), exp.Or: ("or", _OR)}
_BINARY: Final[dict[Any, tuple[str, int]]] = {
    exp.EQ: ("=", _COMPARISON),
    exp.NEQ: ("<>", _COMPARISON),
    exp.LT: ("<", _COMPARISON),
    exp.LTE: ("<=", _COMPARISON),
    exp.GT: (">", _COMPARISON),
    exp.GTE: (">=", _COMPARISON),
    exp.Add: ("+", _ADD),
    exp.Sub: ("-", _ADD),
    exp.Mul: ("*", _MULTIPLY),
    exp.Div: ("/", _MULTIPLY),
    exp.Mod: ("%", _MULTIPLY),
}
_UNARY: Final[dict[Any, tuple[str, int]]] = {exp.Not: ("not", _NOT), exp.Neg: ("neg", _SIGN)}
_LEVELS: Final[dict[Any, int]] = {
    **{node: level for table in (_CHAINS, _BINARY, _UNARY) for node, (_, level) in table.items()},
    Predicate: _LIKE,
    Operator: _OTHER,
}
"""All nodes that are allowed, but for the operands."""
_QUANTIFIED: Final = ("any", "all")
ARRAYS: Final = {
    "any": "any(…) stands behind = and <> alone",
    "all": "all(…) stands behind = and <> alone",
    "array": "array[…] stands beside @>, <@ and &&, and in any(…) and all(…), alone",
}
"""Operands that few operators take, and why another one is refused."""
_UNCLEAR: Final = (
    "what belongs to what is not clear; put parentheses around the part that begins here"
)


def build(node: Node, level: int = _OR, depth: int = 0, takes: Container[str] = ()) -> Expr:
    """Return what a node is, which must bind at least as tightly as `level`.

    `takes` names the `ARRAYS` that may stand there.
    """
    kind = type(node)
    if kind is Leaf:
        expr: Expr = node.args["expr"]
        if expr.op in ARRAYS and expr.op not in takes:
            raise ExpressionError(expr.position, ARRAYS[expr.op])
        return expr
    own = _IS if kind is Predicate and node.args["op"].startswith("is") else _LEVELS.get(kind)
    if own is None and kind is not exp.Paren:
        raise ExpressionError(_start(node), "this is not allowed here")
    if own is None or own < level:
        raise ExpressionError(_start(node), _UNCLEAR)
    if depth > _MAX_CHAIN:
        raise ExpressionError(_start(node), "it is nested too deep")
    depth += 1
    if kind in _CHAINS:
        nodes = _spine(node)
        args = tuple(build(each, own + 1, depth) for each in nodes)
        return Expr(_CHAINS[kind][0], args[0].position, args)
    if kind in _UNARY:
        operand = build(node.this, own, depth)
        return Expr(_UNARY[kind][0], operand.position, (operand,))
    if kind is Predicate:
        return _test(node, own, depth)
    if kind is Operator:
        return _other(_spine(node), depth)
    # Comparisons don't chain.
    left = build(node.this, own + (own == _COMPARISON), depth)
    right = build(node.expression, own + 1, depth, _QUANTIFIED)
    op = _BINARY[kind][0]
    if right.op in _QUANTIFIED:
        return quantified(op, left, right)
    return Expr(op, left.position, (left, right))


def _spine(node: Node) -> list[Node]:
    """Return the operands of one operator, written without parentheses between them."""
    nodes: list[Node] = []
    kind = type(node)
    while type(node) is kind:
        nodes.append(node if kind is Operator else node.expression)
        node = node.this
    return [node, *reversed(nodes)]


def _other(nodes: list[Node], depth: int) -> Expr:
    """Return operators that bind as `||` does, from left to right: `a || b -> c` is `(a || b) -> c`."""
    left = build(nodes[0], _OTHER + 1, depth, _taken(nodes[1]))
    joined = False
    for node in nodes[1:]:
        op = node.args["op"]
        right = build(node.expression, _OTHER + 1, depth, _taken(node))
        if op == "||":
            args = left.args if joined else (left,)
            left = Expr(op, left.position, (*args, right))
        else:
            left = _combined(op, left, right)
        joined = op == "||"
    return left


def _taken(node: Node) -> Container[str]:
    return ("array",) if node.args["op"] in CONTAINING else ()


def _combined(op: str, left: Expr, right: Expr) -> Expr:
    if op.startswith("!"):
        return Expr("not", left.position, (_combined(op[1:], left, right),))
    if op in ("~", "~*"):
        return Expr(op, left.position, (left, right))
    return member(op, left, right)


def _test(node: Node, own: int, depth: int) -> Expr:
    op = node.args["op"]
    first, *others = node.expressions
    # `a = 1 is null` is clear to Postgres alone.
    args = [build(first, _LIKE + (own == _LIKE), depth)]
    args += [build(other, _LIKE + 1, depth) for other in others]
    start = args[0].position
    if op == "in" and not others:
        raise ExpressionError(start, "the list after `in` is empty")
    if op == "is":
        reason = "`is` takes null, true, false or distinct from, each with `not` or without"
        raise ExpressionError(start, reason)
    expr = Expr(op, start, tuple(args), node.args.get("value"))
    return Expr("not", start, (expr,)) if node.args.get("negated") else expr


def _start(node: Node) -> int:
    """Return where a node begins: where the first of its operands stands."""
    while type(node) is not Leaf:
        node = node.expressions[0] if type(node) is Predicate else node.this
    start: int = node.args["start"]
    return start
