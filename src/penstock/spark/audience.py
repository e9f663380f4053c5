"""Which sinks a block of messages concerns, found out once for all of them.

A source may have a hundred sinks, and a round a few messages, each for one or two of these. So what a
round costs must follow from the sinks that get something of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

Kind = tuple[str, str, str]
"""A message's schema, table and action."""
Takes = Callable[[str, str, str], bool]

_FEW: Final = 64
_MOST_KNOWN: Final = 10_000
_COLUMNS: Final = ("table_schema", "table_name", "action")
_NONE: Final[Set[str]] = frozenset()


def kinds_of(messages: pa.RecordBatch) -> set[Kind]:
    """Return the kinds of messages (`WIRE_SCHEMA`); what a message lacks is empty."""
    if messages.num_rows <= _FEW:  # the calls of kernels would cost more
        return set(_kinds(messages))
    columns = [messages.column(name) for name in _COLUMNS]
    joined = pc.binary_join_element_wise(
        *columns, "\0", null_handling="replace", null_replacement=""
    )
    return {_kind(text) for text in joined.unique().to_pylist()}


def rows_by_kind(messages: pa.RecordBatch) -> dict[Kind, list[int]]:
    """Return the rows that messages of each kind are in, where these are few."""
    found: dict[Kind, list[int]] = {}
    for row, kind in enumerate(_kinds(messages)):
        found.setdefault(kind, []).append(row)
    return found


class Audience:
    """The names of those that take a message, given what each one takes."""

    def __init__(self, takers: Mapping[str, Takes]) -> None:
        self._takers = dict(takers)
        self._of: dict[Kind, Set[str]] = {}

    def __call__(self, messages: pa.RecordBatch) -> Set[str]:
        """Return the names of those that take at least one of the messages."""
        found = _NONE
        for kind in kinds_of(messages) if self._takers else ():
            names = self.of(kind)
            found = found | names if found else names
        return found

    def of(self, kind: Kind) -> Set[str]:
        """Return the names of those that take messages of a kind."""
        names = self._of.get(kind)
        if names is None:
            if len(self._of) >= _MOST_KNOWN:
                self._of.clear()
            names = {name for name, takes in self._takers.items() if takes(*kind)}
            self._of[kind] = names
        return names


def _kinds(messages: pa.RecordBatch) -> Iterator[Kind]:
    columns = (messages.column(name).to_pylist() for name in _COLUMNS)
    return zip(*([text or "" for text in column] for column in columns), strict=True)


def _kind(text: str) -> Kind:
    schema, table, action = text.split("\0")
    return schema, table, action
