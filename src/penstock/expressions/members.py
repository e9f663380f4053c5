"""The operators that look into JSON: `->`, `->>`, `#>`, `#>>`, `@>` and `?`."""

from __future__ import annotations

import re
from typing import Final

from penstock.expressions.errors import ExpressionError
from penstock.expressions.syntax import Expr
from penstock.expressions.types import Reference

_PATH: Final = re.compile(r'\{(?:[^{},"\\]+|"[^"\\]*")(?:,(?:[^{},"\\]+|"[^"\\]*"))*\}')
_ELEMENT: Final = re.compile(r'"([^"\\]*)"|([^{},"\\]+)')
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")


def member(op: str, left: Expr, right: Expr) -> Expr:
    """Return what an operator makes of a column's JSON; raises `ExpressionError`.

    `->` and `#>` give a `json`, `->>` and `#>>` a `json text`, each with the place that it leads to.
    """
    if not isinstance(left.value, Reference) or left.op == "json text":
        raise ExpressionError(
            left.position, f"{op} takes a column of JSON, or a part of one that -> gives"
        )
    if op in ("@>", "?"):
        if right.op != "string":
            what = "the JSON after @>" if op == "@>" else "the key after ?"
            raise ExpressionError(right.position, f"{what} must be a '…' literal")
        return Expr(op, left.position, (left, right))
    place = left.value
    path = (*place.path, *_steps(op, right))
    return Expr(
        "json text" if op in ("->>", "#>>") else "json",
        left.position,
        (),
        Reference(place.root, place.column, path),
    )


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
