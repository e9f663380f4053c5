"""Typed expressions into Spark columns.

A row on which an expression can't be evaluated is bad; nothing throws, whatever the session's ANSI
setting. So each node becomes a value, null where there is none, and a word on whether that null is
bad, which is only asked where the value is null. Both are made of each other as Postgres would
evaluate: `false and <bad>` is false, `<bad> is null` is bad, `coalesce(1, <bad>)` is 1.

The session's time zone must be UTC: `timestamp` columns are truncated and shifted in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

from penstock.expressions.errors import ExpressionError
from penstock.expressions.nodes import Node, Typed
from penstock.expressions.spark.casts import cast_value
from penstock.expressions.spark.functions import FUNCTION_CALLS, SKIPPING_NULLS, called
from penstock.expressions.spark.values import CALLS, STRICT, literal
from penstock.expressions.types import Field

MAX_SIZE: Final = 4_500
"""How many nodes an expression may have once compiled; far larger ones exhaust the JVM's heap."""

Leaf = Callable[[Field], tuple[Column, Column]]


@dataclass(frozen=True)
class Compiled:
    """An expression's columns.

    Attributes:
        value: What it gives; null where it is null, and where it is bad.
        bad: Where `value` is null: whether it could not be evaluated. Never null; of no meaning
            where there is a value.
        size: How many nodes both have together.
    """

    value: Column
    bad: Column
    size: int


@dataclass(frozen=True)
class _Part:
    """A column, and how many nodes it has."""

    column: Column
    size: int


_ALWAYS: Final = "always"
_NEVER: Final = "never"
_Bad = _Part | str
"""Whether a null is bad: where this column is true, always, or never."""


def compile(typed: Typed, leaf: Leaf) -> Compiled:  # noqa: A001 - the word for it
    """Return the columns of an expression.

    Args:
        typed: The expression.
        leaf: Gives a field's value, of the Spark type `field.type.spark`, and whether it is bad: a
            boolean that is never null, and true only where the value is null.

    Raises `ExpressionError` where the columns would have more than `MAX_SIZE` nodes.
    """
    compiler = _Compiler(leaf)
    value = compiler.value(typed.root)
    bad = compiler.bad(typed.root)
    if bad == _ALWAYS:
        bad = _Part(F.lit(True), 1)
    elif bad == _NEVER:
        bad = _Part(F.lit(False), 1)
    assert isinstance(bad, _Part)  # noqa: S101 - for the type checker
    return Compiled(value.column, bad.column, _checked(value.size + bad.size))


def _checked(size: int) -> int:
    if size > MAX_SIZE:
        raise ExpressionError(1, "it is too complicated: split it, or use a transform in Python")
    return size


class _Compiler:
    """Compiles one expression; each node's parts are made once."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._values: dict[Node, _Part] = {}
        self._bads: dict[Node, _Bad] = {}
        self._leaves: dict[Field, tuple[Column, Column]] = {}

    def value(self, node: Node) -> _Part:
        """Return what a node gives."""
        part = self._values.get(node)
        if part is None:
            part = self._values[node] = self._value(node)
            _checked(part.size)
        return part

    def bad(self, node: Node) -> _Bad:
        """Return whether a node's null is bad."""
        bad = self._bads.get(node)
        if bad is None:
            bad = self._bads[node] = self._bad(node)
            if isinstance(bad, _Part):
                _checked(bad.size)
        return bad

    def _field(self, field: Field) -> tuple[Column, Column]:
        found = self._leaves.get(field)
        if found is None:
            found = self._leaves[field] = self._leaf(field)
        return found

    # Values

    def _value(self, node: Node) -> _Part:
        match node.op:
            case "field":
                return _Part(self._field(node.value)[0], 2)
            case "literal":
                return _Part(literal(node.value, node.type), 1)
            case "and" | "or":
                parts = [self.value(a) for a in node.args]
                return _balanced(parts, Column.__and__ if node.op == "and" else Column.__or__)
            case "is null" | "is true" | "is false":
                return self._is(node)
            case "is distinct":
                return self._distinct(node)
            case "coalesce":
                return self._coalesce(node)
            case "case":
                return self._case(node)
            case "in":
                value, *items = [self.value(a) for a in node.args]
                column = value.column.isin(*[i.column for i in items])
                return _Part(column, 1 + value.size + sum(i.size for i in items))
            case "cast":
                operand = self.value(node.args[0])
                column, size = cast_value(node, operand.column, operand.size)
                return _Part(column, size)
            case "call":
                parts = [self.value(a) for a in node.args]
                column, size = called(node, [p.column for p in parts], [p.size for p in parts])
                return _Part(column, size)
            case "greatest" | "least" | "concat all" | "concat_ws":
                return self._skipping_nulls(node)
        parts = [self.value(a) for a in node.args]
        size = sum(p.size for p in parts)
        make = STRICT.get(node.op)
        if make is not None:
            return _Part(make(*[p.column for p in parts]), size + 1)
        call = CALLS.get(node.op) or FUNCTION_CALLS[node.op]
        column, copies, own = call(node, [p.column for p in parts], [p.size for p in parts])
        return _Part(column, copies * size + own)

    def _skipping_nulls(self, node: Node) -> _Part:
        """Return what has a value though an operand is null, unless that null is bad."""
        parts = [self.value(a) for a in node.args]
        column = SKIPPING_NULLS[node.op](*[p.column for p in parts])
        size = sum(p.size for p in parts) + 1
        nulls = self._bad_nulls(node.args)
        if nulls is None:
            return _Part(column, size)
        return _Part(F.when(~nulls.column, column), size + nulls.size + 2)

    def _is(self, node: Node) -> _Part:
        operand = node.args[0]
        value, bad = self.value(operand), self.bad(operand)
        if node.op == "is null":
            truth, null = F.lit(False), F.lit(True)
        else:
            truth, null = value.column, F.lit(False)
            if node.op == "is false":
                truth = ~truth
        if bad == _NEVER:
            if node.op == "is null":
                return _Part(value.column.isNull(), value.size + 1)
            return _Part(F.coalesce(truth, null), value.size + 3)
        column = F.when(value.column.isNotNull(), truth)
        size = 2 * value.size + 4
        if isinstance(bad, _Part):
            column = column.when(~bad.column, null)
            size += bad.size + 2
        return _Part(column, size)

    def _distinct(self, node: Node) -> _Part:
        left, right = (self.value(a) for a in node.args)
        column, size = ~left.column.eqNullSafe(right.column), left.size + right.size + 2
        nulls = self._bad_nulls(node.args)
        if nulls is None:
            return _Part(column, size)
        return _Part(F.when(~nulls.column, column), size + nulls.size + 2)

    def _coalesce(self, node: Node) -> _Part:
        *before, last = node.args
        rest = self.value(last)
        for operand in reversed(before):
            value, bad = self.value(operand), self.bad(operand)
            if bad == _NEVER:
                rest = _Part(F.coalesce(value.column, rest.column), value.size + rest.size + 1)
            elif isinstance(bad, _Part):
                then = F.when(~bad.column, rest.column)
                size = value.size + bad.size + rest.size + 3
                rest = _Part(F.coalesce(value.column, then), size)
            else:
                rest = value
        return rest

    def _case(self, node: Node) -> _Part:
        *branches, last = node.args
        column, size = self._branches(
            [(c, self.value(r)) for c, r in zip(branches[::2], branches[1::2], strict=True)],
            literal(None, node.type),
        )
        otherwise = self.value(last)
        return _Part(column.otherwise(otherwise.column), size + otherwise.size)

    def _branches(
        self, branches: Sequence[tuple[Node, _Part]], if_bad: Column
    ) -> tuple[Column, int]:
        """Return a `case` whose condition that can't be evaluated ends it with `if_bad`."""
        column: Column | None = None
        size = 1
        for condition, result in branches:
            value = self.value(condition)
            column = (
                F.when(value.column, result.column)
                if column is None
                else column.when(value.column, result.column)
            )
            size += value.size + result.size
            nulls = self._bad_nulls([condition])
            if nulls is not None:
                column = column.when(nulls.column, if_bad)
                size += nulls.size + 1
        assert column is not None  # noqa: S101 - a case has a branch
        return column, size

    # Bad ones

    def _bad(self, node: Node) -> _Bad:
        match node.op:
            case "field":
                return _Part(self._field(node.value)[1], 2)
            case "literal" | "now":
                return _NEVER
            case "is null" | "is true" | "is false":
                # Null is what they make of a bad operand alone.
                return _NEVER if self.bad(node.args[0]) == _NEVER else _ALWAYS
            case "is distinct":
                return _NEVER if self._bad_nulls(node.args) is None else _ALWAYS
            case "coalesce":
                bads = [self.bad(a) for a in node.args]
                if _ALWAYS in bads:
                    return _ALWAYS
                return _any([b for b in bads if isinstance(b, _Part)])
            case "case":
                return self._bad_case(node)
        nulls = self._bad_nulls(node.args)
        if not node.fails:
            return nulls or _NEVER
        present = [self.value(a) for a in node.args if not _never_null(a)]
        if not present:
            return _ALWAYS
        own = _balanced([_Part(p.column.isNotNull(), p.size + 1) for p in present], Column.__and__)
        return own if nulls is None else _balanced([nulls, own], Column.__or__)

    def _bad_nulls(self, operands: Sequence[Node]) -> _Part | None:
        """Return where an operand is null and bad; None where that can't be."""
        parts: list[_Part] = []
        for operand in operands:
            bad = self.bad(operand)
            if bad == _NEVER:
                continue
            if operand.op == "field":
                assert isinstance(bad, _Part)  # noqa: S101 - said by the leaf itself
                parts.append(bad)
                continue
            value = self.value(operand)
            null = _Part(value.column.isNull(), value.size + 1)
            parts.append(null if bad == _ALWAYS else _balanced([null, bad], Column.__and__))  # type: ignore[list-item]  # a lazy Column
        return _balanced(parts, Column.__or__) if parts else None

    def _bad_case(self, node: Node) -> _Bad:
        *branches, last = node.args
        results = [self._as_part(self.bad(r)) for r in (*branches[1::2], last)]
        conditions = branches[::2]
        if all(r is None for r in results) and self._bad_nulls(conditions) is None:
            return _NEVER
        never = _Part(F.lit(False), 1)
        column, size = self._branches(
            [(c, r or never) for c, r in zip(conditions, results[:-1], strict=True)], F.lit(True)
        )
        otherwise = results[-1] or never
        return _Part(column.otherwise(otherwise.column), size + otherwise.size)

    def _as_part(self, bad: _Bad) -> _Part | None:
        if isinstance(bad, _Part):
            return bad
        return _Part(F.lit(True), 1) if bad == _ALWAYS else None


def _never_null(node: Node) -> bool:
    return node.op == "now" or (node.op == "literal" and node.value is not None)


def _any(parts: list[_Part]) -> _Bad:
    return _balanced(parts, Column.__or__) if parts else _NEVER


def _balanced(parts: Sequence[_Part], join: Callable[[Column, Column], Column]) -> _Part:
    """Return parts joined as a tree of little depth, for the JVM's stack has an end."""
    columns = [p.column for p in parts]
    while len(columns) > 2:
        columns = [reduce(join, columns[at : at + 2]) for at in range(0, len(columns), 2)]
    return _Part(reduce(join, columns), sum(p.size for p in parts) + len(parts) - 1)


__all__ = ["MAX_SIZE", "Compiled", "Leaf", "compile"]
