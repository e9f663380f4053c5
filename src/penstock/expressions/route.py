"""An expression that gives a route: what in it is the operator's word, and what a message's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.expressions.syntax import Expr, Expression

MARK: Final = "\0"
"""Stands around each part that no literal gave; no text in Postgres has this character."""


def marked(expression: Expression) -> Expression:
    """Return an expression of the same text, in which what is no literal stands between `MARK`s."""
    return Expression(expression.text, _marked(expression.root))


def literals(expression: Expression) -> Iterator[tuple[int, str]]:
    """Yield position and text of the literals that go into the route as they are."""
    waiting = [expression.root]
    while waiting:
        expr = waiting.pop()
        if expr.op == "string" and isinstance(expr.value, str):
            yield expr.position, expr.value
        waiting += [expr.args[at] for at in _parts(expr)]


def _parts(expr: Expr) -> list[int]:
    """Return which operands of an expression are its text, or parts of it."""
    count = len(expr.args)
    if expr.op in ("||", "coalesce"):
        return list(range(count))
    if expr.op == "case":  # condition, result, …, and the last one
        return [*range(1, count, 2), *([count - 1] if count % 2 else [])]
    return []


def _marked(expr: Expr) -> Expr:
    if expr.op in ("string", "null"):
        return expr
    parts = _parts(expr)
    if parts:
        args = [_marked(a) if at in parts else a for at, a in enumerate(expr.args)]
        return Expr(expr.op, expr.position, tuple(args), expr.value)
    mark = Expr("string", expr.position, (), MARK)
    return Expr("||", expr.position, (mark, expr, mark))
