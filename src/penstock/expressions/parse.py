"""From text to `Expression`: sqlglot's tree, walked by a table of the nodes that are allowed.

sqlglot decides what belongs to what. Its precedence is that of many dialects at once, so each node is
compared with Postgres' own table: a tree of the same tokens that keeps to it is the tree that Postgres
would make, and any other is refused with the advice to put parentheses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from sqlglot import Token, TokenType, exp
from sqlglot.errors import ParseError

from penstock.expressions.errors import ExpressionError
from penstock.expressions.grammar import Grammar, Operator, Predicate
from penstock.expressions.members import member
from penstock.expressions.operands import Leaf, Node
from penstock.expressions.syntax import MAX_DEPTH, Expr, Expression
from penstock.expressions.tokens import Dialect, fold, tokenize
from penstock.expressions.types import Reference

_MAX_CHAIN: Final = 4 * MAX_DEPTH
"""How deep the tree may be: `1 + 1 + 1 …` makes it deep without nesting."""
_KEPT: Final = 256
"""How many texts' expressions are kept: a filter is checked when the file is read, and planned later."""

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
_UNCLEAR: Final = (
    "what belongs to what is not clear; put parentheses around the part that begins here"
)


@lru_cache(_KEPT)
def parse_condition(text: str) -> Expression:
    """Parse a condition; that it is a boolean is found when it is typed.

    Raises `ExpressionError` for whatever is not of the language, with the position in the text.
    """
    return replace(_parse(text, tokenize(text)), condition=True)


@lru_cache(_KEPT)
def parse_value(text: str) -> Expression:
    """Parse an expression of any kind; raises `ExpressionError` as `parse_condition` does."""
    return _parse(text, tokenize(text))


@lru_cache(_KEPT)
def parse_select(text: str) -> tuple[tuple[str, Expression], ...]:
    """Parse `record.id as id, upper(record.name) as name, …` into names and expressions.

    A bare reference may stand without `as`: its last part is the name then. Raises `ExpressionError`
    as `parse_condition` does, and for a name that is missing or there twice.
    """
    tokens = tokenize(text)
    items: list[tuple[str, Expression]] = []
    depth, start = 0, 0
    for at in range(len(tokens) + 1):
        source = text[tokens[at].start : tokens[at].end + 1] if at < len(tokens) else ","
        depth += {"(": 1, ")": -1}.get(source, 0)
        if source != "," or (depth > 0 and at < len(tokens)):
            continue
        if start == at:
            where = tokens[at].start + 1 if at < len(tokens) else len(text) + 1
            raise ExpressionError(where, "an expression is expected here")
        name, expression = _item(text, tokens[start:at])
        if name in dict(items):
            raise ExpressionError(tokens[start].start + 1, f"the name {name} is there twice")
        items.append((name, expression))
        start = at + 1
    return tuple(items)


def _item(text: str, tokens: list[Token]) -> tuple[str, Expression]:
    if text[tokens[0].start : tokens[0].end + 1] == "*":
        raise ExpressionError(tokens[0].start + 1, "`*` is not allowed; name the columns")
    if len(tokens) > 2 and fold(text[tokens[-2].start : tokens[-2].end + 1]) == "as":
        last = tokens[-1]
        source = text[last.start : last.end + 1]
        if last.token_type is TokenType.IDENTIFIER and last.text:
            return last.text, _parse(text, tokens[:-2])
        if source[0].isalpha() or source[0] == "_":
            return fold(source), _parse(text, tokens[:-2])
        raise ExpressionError(last.start + 1, f"{source[:20]!r} is no name")
    expression = _parse(text, tokens)
    reference = expression.root.value
    if expression.root.op != "reference" or not isinstance(reference, Reference):
        raise ExpressionError(tokens[0].start + 1, "a name is missing; write `… as name`")
    name = reference.path[-1] if reference.path else reference.column or reference.root
    if not isinstance(name, str):
        raise ExpressionError(tokens[0].start + 1, "a name is missing; write `… as name`")
    return name, expression


def _parse(text: str, tokens: list[Token]) -> Expression:
    start = tokens[0].start + 1
    try:
        return Expression(text, Grammar(dialect=Dialect).read(text, tokens, _build))
    except RecursionError:
        raise ExpressionError(start, "it is nested too deep") from None
    except ParseError:
        raise ExpressionError(start, "it can't be read") from None


def _build(node: Node, level: int = _OR, depth: int = 0) -> Expr:
    """Return what a node is, which must bind at least as tightly as `level`."""
    kind = type(node)
    if kind is Leaf:
        expr: Expr = node.args["expr"]
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
        args = tuple(_build(each, own + 1, depth) for each in nodes)
        return Expr(_CHAINS[kind][0], args[0].position, args)
    if kind in _UNARY:
        operand = _build(node.this, own, depth)
        return Expr(_UNARY[kind][0], operand.position, (operand,))
    if kind is Predicate:
        return _test(node, own, depth)
    if kind is Operator:
        return _other(_spine(node), depth)
    # Comparisons don't chain.
    left = _build(node.this, own + (own == _COMPARISON), depth)
    return Expr(_BINARY[kind][0], left.position, (left, _build(node.expression, own + 1, depth)))


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
    left = _build(nodes[0], _OTHER + 1, depth)
    joined = False
    for node in nodes[1:]:
        op = node.args["op"]
        right = _build(node.expression, _OTHER + 1, depth)
        if op == "||":
            args = left.args if joined else (left,)
            left = Expr(op, left.position, (*args, right))
        else:
            left = _combined(op, left, right)
        joined = op == "||"
    return left


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
    args = [_build(first, _LIKE + (own == _LIKE), depth)]
    args += [_build(other, _LIKE + 1, depth) for other in others]
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
