"""Reads what a reference leads to out of a stored message; `translate` says what `r` and `c` are."""

from __future__ import annotations

from typing import Final

from penstock.expressions.postgres.quoting import pg_type, quoted
from penstock.expressions.types import Reference, Type

_ROOTS: Final = {"record": "r", "changes": "c", "metadata": "md"}


def text_of(reference: Reference) -> str:
    """Return a value's text, as the message has it."""
    if reference.root == "action":
        return "act"
    *steps, last = [quoted(reference.column), *_path(reference)]
    return f"({' -> '.join([_ROOTS[reference.root], *steps])} ->> {last})"


def value_of(reference: Reference, type_: Type) -> str:
    """Return a value in its type."""
    return f"{text_of(reference)}::{pg_type(type_)}"


def document_of(reference: Reference) -> str:
    """Return a value as json: SQL's null where a column has none."""
    steps = " -> ".join([_ROOTS[reference.root], quoted(reference.column)])
    if not reference.path:
        return f"CASE WHEN {text_of(reference)} IS NOT NULL THEN {steps} END"
    return " -> ".join([steps, *_path(reference)])


def _path(reference: Reference) -> list[str]:
    return [str(part) if isinstance(part, int) else quoted(part) for part in reference.path]
