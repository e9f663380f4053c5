"""What a parsed expression is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from penstock.expressions.types import Reference

MAX_CHARACTERS: Final = 4_000
MAX_DEPTH: Final = 30
"""How deep parentheses, functions, `case`, `not` and signs may be nested in one another."""


class TypeName(NamedTuple):
    """A type as a cast or a typed literal names it: its canonical name, and what is in brackets.

    `is_array`: it is an array of such values; never in a tree.
    """

    name: str
    parameters: tuple[int, ...] = ()
    is_array: bool = False

    def __str__(self) -> str:
        if not self.parameters:
            return self.name
        return f"{self.name}({','.join(map(str, self.parameters))})"


class TypedLiteral(NamedTuple):
    """`date '2024-10-28'` and the like."""

    type: TypeName
    text: str


Value = str | bool | int | Reference | TypeName | TypedLiteral | None


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """One node.

    `op` is one of these:

    reference (value: Reference), string, number (value: text), bool, null, typed (TypedLiteral);
    and, or, || (two arguments or more), not, =, <>, <, <=, >, >=, +, -, *, /, %, neg;
    is null, is true, is false, is distinct; in (the value, then the list), between (value, low,
    high), like, ilike, similar to (value: the escape character, or None for the backslash), ~, ~*;
    json, json text (value: the Reference that `->` and `->>` lead to), ?;
    @>, <@, && (a column, then a string or array), array (its elements);
    = any, <> any, = all, <> all (a literal, then a reference; in the making any and all of an array);
    case (condition, result, …, and the last one for else); cast (value: TypeName);
    a function by its name. `is not`, `not in` and the like are `not` around these.

    `position` is where it begins in the text, in characters from 1.
    """

    op: str
    position: int
    args: tuple[Expr, ...] = ()
    value: Value = None


@dataclass(frozen=True, eq=False)
class Expression:
    """A parsed expression, its names not yet looked up; `condition`: it must be a boolean."""

    text: str
    root: Expr
    condition: bool = False

    @cached_property
    def references(self) -> tuple[Reference, ...]:
        """The places in a message that it names, each once, in their order."""
        return tuple(dict.fromkeys(_references(self.root)))


def _references(root: Expr) -> Iterator[Reference]:
    waiting = [root]
    while waiting:
        expr = waiting.pop()
        if isinstance(expr.value, Reference):
            yield expr.value
        waiting += reversed(expr.args)
