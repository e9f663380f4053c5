"""Table patterns, as `tables:` in the configuration has them: `schema.table` and `schema.*`.

Names follow SQL: unquoted ones fold to lower case, double-quoted ones are taken as they stand, so
`"Odd Name"."t.x"` is a schema with a space in it and a table with a dot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase
from typing import Self

_PART = re.compile(r'"((?:[^"]|"")+)"|(\*)|([^\s".*,]+)')
_PLAIN = re.compile(r"[a-z_][a-z0-9_$]*\Z")
_FOLD = str.maketrans(ascii_uppercase, ascii_lowercase)


def fold(name: str) -> str:
    """Return an unquoted name as Postgres takes it: in a UTF-8 database `É` stays as it is."""
    return name.translate(_FOLD)


def quote_name(name: str) -> str:
    """Return a name as SQL and a pattern take it, quoted only where that is needed."""
    return name if _PLAIN.match(name) else '"' + name.replace('"', '""') + '"'


def qualified_name(schema: str, table: str) -> str:
    """Return `schema.table`, each part quoted where that is needed."""
    return f"{quote_name(schema)}.{quote_name(table)}"


@dataclass(frozen=True, slots=True)
class TablePattern:
    """One table of a schema, or all of them where `table` is None."""

    schema: str
    table: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a pattern; raises `ValueError` with what was expected."""
        first = _PART.match(text)
        second = (
            _PART.fullmatch(text, first.end() + 1)
            if first and text[first.end() :][:1] == "."
            else None
        )
        if not first or not second or first[2]:
            plain = first is not None and first[3] and first.end() == len(text)
            hint = f"; did you mean public.{text}?" if plain else ""
            raise ValueError(
                f"{text!r} is not a table pattern: expected schema.table or schema.*, with "
                f"double quotes around names that have dots or blanks{hint}"
            )
        return cls(_name(first), None if second[2] else _name(second))

    def __str__(self) -> str:
        table = "*" if self.table is None else quote_name(self.table)
        return f"{quote_name(self.schema)}.{table}"

    def matches(self, schema: str, table: str) -> bool:
        """Return whether the table is one of the pattern's."""
        return self.schema == schema and self.table in (None, table)

    def covers(self, other: TablePattern) -> bool:
        """Return whether every table that `other` can match is one of this pattern's."""
        return self.schema == other.schema and self.table in (None, other.table)


def provider_of(table: str) -> str:
    """Return the provider of a sync's collection, by its id; empty for a table's name."""
    provider, colon, _ = table.partition(":")
    return provider if colon else ""


def matches_any(patterns: Iterable[TablePattern], schema: str, table: str) -> bool:
    """Return whether one of `patterns` has the table."""
    return any(pattern.matches(schema, table) for pattern in patterns)


def _name(part: re.Match[str]) -> str:
    if part[1] is not None:
        return part[1].replace('""', '"')
    return fold(part[3])
