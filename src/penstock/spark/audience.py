"""Which sinks a block of messages concerns, found out once for all of them.

A source may have a hundred sinks, and a round a few messages, each for one or two of these. So what a
round costs must follow from the sinks that get something of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

Kind = tuple[str, str, str]
"""A message's schema, table and action."""
Takes = Callable[[str, str, str], bool]

_FEW: Final = 64
_COLUMNS: Final = ("table_schema", "table_name", "action")
_NONE: Final[Set[str]] = frozenset()


def kinds_of(messages: pa.RecordBatch) -> set[Kind]:
    """Return the kinds of messages (`WIRE_SCHEMA`); what a message lacks is empty."""
    columns = [messages.column(name) for name in _COLUMNS]
    if messages.num_rows <= _FEW:  # the calls of kernels would cost more
        values = ([text or "" for text in column.to_pylist()] for column in columns)
        return set(zip(*values, strict=True))
    joined = pc.binary_join_element_wise(
        *columns, "\0", null_handling="replace", null_replacement=""
    )
    return {_kind(text) for text in joined.unique().to_pylist()}


class Audience:
    """The names of those that take a message, given what each one takes."""

    def __init__(self, takers: Mapping[str, Takes]) -> None:
        self._takers = dict(takers)
        self._of: dict[Kind, Set[str]] = {}

    def __call__(self, messages: pa.RecordBatch) -> Set[str]:
        """Return the names of those that take at least one of the messages."""
        found = _NONE
        for kind in kinds_of(messages) if self._takers else ():
            names = self._of.get(kind)
            if names is None:
                names = {name for name, takes in self._takers.items() if takes(*kind)}
                self._of[kind] = names
            found = found | names if found else names
        return found


def _kind(text: str) -> Kind:
    schema, table, action = text.split("\0")
    return schema, table, action
