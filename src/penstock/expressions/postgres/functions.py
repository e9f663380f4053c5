"""Calls of functions of texts and whole numbers, which Postgres writes as they are but for a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.expressions.builders import LONGEST


def call(name: str, args: Sequence[str]) -> str:
    """Return a call with arguments that are SQL already."""
    special = _SPECIAL.get(name)
    return f"{name}({', '.join(args)})" if special is None else special(*args)


def _short(length: str) -> str:
    """Return a length, or what overflows where it is too long."""
    beyond = f"({length}::bigint * 2147483648)::integer"
    return f"(CASE WHEN {length} > {LONGEST} THEN {beyond} ELSE {length} END)"


_SPECIAL: Final[dict[str, Callable[..., str]]] = {
    "trim": lambda *args: f"btrim({', '.join(args)})",
    "position": lambda text, part: f"strpos({text}, {part})",
    "repeat": lambda text, count: (
        f"repeat({text}, CASE WHEN length({text})::bigint * {count} > {LONGEST}"
        # What is constant is computed before the row is looked at.
        f" THEN ({count}::bigint * (2147483648 + length({text})))::integer ELSE {count} END)"
    ),
    "lpad": lambda text, length, *by: f"lpad({', '.join([text, _short(length), *by])})",
    "rpad": lambda text, length, *by: f"rpad({', '.join([text, _short(length), *by])})",
}
"""Functions that are written in another way than their name and arguments."""
