"""From text to `Expression`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

from sqlglot import Token, TokenType
from sqlglot.errors import ParseError

from penstock.core.tables import fold
from penstock.expressions.errors import ExpressionError
from penstock.expressions.grammar import Grammar
from penstock.expressions.syntax import Expression
from penstock.expressions.tokens import Dialect, tokenize
from penstock.expressions.types import Reference

_KEPT: Final = 256
"""How many texts' expressions are kept: a filter is checked when the file is read, and planned later."""


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
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(source, 0)
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
        return Expression(text, Grammar(dialect=Dialect).read(text, tokens))
    except RecursionError:
        raise ExpressionError(start, "it is nested too deep") from None
    except ParseError:
        raise ExpressionError(start, "it can't be read") from None
