"""The operators that look into JSON, `->`, `->>`, `#>`, `#>>`, `@>` and `?`, and those of arrays."""

from __future__ import annotations

import re
from typing import Final

from penstock.expressions.array_literals import items
from penstock.expressions.errors import ExpressionError
from penstock.expressions.syntax import Expr
from penstock.expressions.types import Reference

_PATH: Final = re.compile(r'\{(?:[^{},"\\]+|"[^"\\]*")(?:,(?:[^{},"\\]+|"[^"\\]*"))*\}')
_ELEMENT: Final = re.compile(r'"([^"\\]*)"|([^{},"\\]+)')
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")
CONTAINING: Final = {"@>": "<@", "<@": "@>", "&&": "&&"}
"""Operators between a column and an array, and what each is with its operands changed round."""
_LITERALS: Final = ("string", "array")


def member(op: str, left: Expr, right: Expr) -> Expr:
    """Return what an operator makes of a column's JSON; raises `ExpressionError`.

    `->` and `#>` give a `json`, `->>` and `#>>` a `json text`, each with the place that it leads to.
    """
    if op in CONTAINING:
        return _containing(op, left, right)
    if not isinstance(left.value, Reference) or left.op == "json text":
        raise ExpressionError(
            left.position, f"{op} takes a column of JSON, or a part of one that -> gives"
        )
    if op == "?":
        if right.op != "string":
            raise ExpressionError(right.position, "the key after ? must be a '…' literal")
        return Expr(op, left.position, (left, right))
    place = left.value
    path = (*place.path, *_steps(op, right))
    return Expr(
        "json text" if op in ("->>", "#>>") else "json",
        left.position,
        (),
        Reference(place.root, place.column, path),
    )


def _containing(op: str, left: Expr, right: Expr) -> Expr:
    column, literal = left, right
    if left.op in _LITERALS and right.op not in _LITERALS:
        op, column, literal = CONTAINING[op], right, left
    if column.op not in ("reference", "json"):
        raise ExpressionError(column.position, f"{op} takes a column that is an array or JSON")
    if literal.op not in _LITERALS:
        json = "the JSON after @> must be a '…' literal, " if op == "@>" else ""
        raise ExpressionError(literal.position, f"{json}an array is '{{…}}' or array[…] here")
    return Expr(op, left.position, (column, literal))


def quantified(op: str, left: Expr, right: Expr) -> Expr:
    """Return what a comparison with `any(…)` or `all(…)` is; raises `ExpressionError`.

    With a column it is an `Expr` of its own, as `= any`; with an array's literal it is `in` or `not in`,
    or comparisons with each element, joined by `or` or `and`.
    """
    word, (of,) = right.op, right.args
    if op not in ("=", "<>"):
        raise ExpressionError(right.position, f"{word}(…) stands behind = and <> alone, not {op}")
    if of.op == "reference":
        return Expr(f"{op} {word}", left.position, (left, of))
    if of.op not in _LITERALS:
        raise ExpressionError(of.position, f"{word} takes a column, array[…] or '{{…}}'")
    listed = items(of)
    if not listed:
        raise ExpressionError(of.position, f"the array in {word}(…) is empty")
    if (op, word) == ("=", "any"):
        return Expr("in", left.position, (left, *listed))
    if (op, word) == ("<>", "all"):
        return Expr("not", left.position, (Expr("in", left.position, (left, *listed)),))
    first, *others = [Expr(op, left.position, (left, item)) for item in listed]
    joined = Expr("or" if word == "any" else "and", left.position, (first, *others))
    return joined if others else first


def _steps(op: str, right: Expr) -> tuple[str | int, ...]:
    text = right.value
    if op in ("->", "->>"):
        if right.op == "number" and isinstance(text, str) and _INDEX.fullmatch(text):
            return (int(text),)
        if right.op == "string" and isinstance(text, str):
            return (text,)
        raise ExpressionError(
            right.position, f"after {op} a literal is expected: a key '…', or an index from 0"
        )
    if right.op != "string" or not isinstance(text, str) or not _PATH.fullmatch(text):
        raise ExpressionError(right.position, f"after {op} a path like '{{key,0}}' is expected")
    parts = [quoted or plain.strip() for quoted, plain in _ELEMENT.findall(text)]
    return tuple(int(part) if _INDEX.fullmatch(part) else part for part in parts)
