"""What a typed expression is made of: what is left to a compiler is free of choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, NamedTuple

from penstock.expressions.types import DAY, Field, Kind, Reference, Type


class Span(NamedTuple):
    """An interval literal as Postgres keeps it."""

    months: int
    days: int
    microseconds: int

    @property
    def comparable(self) -> int:
        """The microseconds that it counts for in comparisons: a month is 30 days of 24 hours."""
        return (self.months * 30 + self.days) * DAY + self.microseconds


Constant = bool | int | float | Decimal | str | Span | None
"""A literal's value: dates in days, timestamps in microseconds since 1970."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One node. All operands of an operator have the very type that it works on.

    Attributes:
        op: field (value: Field), literal (value: Constant), unknown (a string literal whose type is
            still open; never in a finished tree);
            and, or, not, =, <>, <, <=, >, >=, is distinct, is null, is true, is false, in, coalesce,
            case (as in `Expr`), like, ilike (value: the pattern, escaped by backslashes alone),
            concat (of `||`), lower, upper, length, +, -, *, /, %, neg, now, shift (a time, value: Span),
            since (two times), days (two dates), add days (a date and an int), cast (value: `Cast`'s
            details), matches (value: `patterns.Pattern`), call (value: the `Function`);
            of functions that `calls.py` types: abs, ceil, floor, sign, sqrt, power, round and trunc
            (value: digits), date_trunc, extract and date_part (value: the unit), greatest, least,
            concat all, concat_ws.
        type: What it gives.
        args: The operands.
        value: As said above.
        fails: Whether it may have no value though each operand has one; then the row is bad.
    """

    op: str
    type: Type
    args: tuple[Node, ...] = ()
    value: Any = None
    fails: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of what it gives."""
        return self.type.kind


@dataclass(frozen=True, eq=False)
class Typed:
    """An expression whose names and types are settled.

    Attributes:
        root: Its tree.
    """

    root: Node

    @property
    def type(self) -> Type:
        """What it gives."""
        return self.root.type

    @property
    def kind(self) -> Kind:
        """The kind of what it gives."""
        return self.root.type.kind

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields that it needs, each once, in their order."""
        return tuple(dict.fromkeys(_fields(self.root)))

    @property
    def lacking(self) -> tuple[tuple[Reference, tuple[tuple[str, str], ...]], ...]:
        """The columns that some of the tables lack, and those tables: see `Field`."""
        return tuple({f.reference: f.lacking for f in self.fields if f.lacking}.items())


def _fields(root: Node) -> Iterator[Field]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.op == "field":
            yield node.value
        waiting += reversed(node.args)
