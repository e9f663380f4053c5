"""Renders what Python knows into the SQL functions that check a config: its keys, a condition's words.

A `.sql` file has a place-holder, `{config_keys}`, where such a list stands. The result is the same on
each machine: the printed SQL can be compared, and its digest identifies the functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, LiteralString

from penstock.core.subject import OUTBOX_VARIABLES
from penstock.expressions.functions import FUNCTIONS
from penstock.expressions.names import Names
from penstock.expressions.syntax import MAX_CHARACTERS
from penstock.expressions.types import INT, TEXT, TIMESTAMPTZ, Reference
from penstock.expressions.vocabulary import (
    KEYWORDS,
    METADATA,
    OPERATORS,
    OTHER_OPERATORS,
    QUANTIFIERS,
    ROOTS,
    SEPARATORS,
    SIDES,
    TYPES,
)
from penstock.outbox.config_keys import BATCH_SIZE, CONTENT, KEYS, SECRETS, Key, keys

_OTHER_WORDS: Final = ("cast", "as", "similar", "to", "array")
_BRACKETS: Final = frozenset("[]")
_SQL_TYPES: Final = {TEXT: "text", INT: "bigint", TIMESTAMPTZ: "timestamptz"}


def render(text: LiteralString) -> LiteralString:
    """Return a file's SQL with its place-holders filled."""
    for name, value in _VALUES.items():
        text = text.replace(name, value)
    return text


def literal(value: str | bool | None) -> str:
    """Return a value as SQL writes it, inside of a function's body too."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).lower()
    return "'" + value.replace("'", "''") + "'"


def _list(words: Iterable[str]) -> str:
    return ", ".join(map(literal, words))


def _array(words: Iterable[str]) -> str:
    return f"ARRAY[{_list(words)}]::text[]"


def _row(key: Key) -> str:
    values = (key.direction, key.name, key.kind, key.expected, key.pattern)
    flags = (key.required, key.references)
    shown = [*map(literal, values), _array(key.choices), *map(literal, flags)]
    return f"({', '.join(shown)})"


def _metadata() -> str:
    """Return for each column of `metadata` its name and a null of its type."""
    names = Names({})
    types = {name: names.type(Reference("metadata", name), 1) for name in METADATA}
    rows = (f"('metadata', '{name}', 'NULL::{_SQL_TYPES[of]}')" for name, of in types.items())
    return ",\n        ".join(rows)


def _operators() -> str:
    """Return a pattern that finds an operator; of two the longer one."""
    known = OPERATORS | OTHER_OPERATORS | _BRACKETS
    ordered = sorted(known, key=lambda operator: (-len(operator), operator))
    return literal(f"^(?:{'|'.join(map(re.escape, ordered))})")


_VALUES: Final = {
    "{config_keys}": ",\n        ".join(map(_row, KEYS)),
    "{batch_size}": " AND ".join(map(str, BATCH_SIZE)),
    "{secrets}": _list(sorted(SECRETS)),
    "{paths}": _list(key.name for key in KEYS if key.is_path),
    "{file_content}": literal(CONTENT),
    "{subject_expected}": literal(keys("out")["subject"].expected),
    "{subject_variables}": literal(OUTBOX_VARIABLES),
    "{condition_characters}": str(MAX_CHARACTERS),
    "{condition_words}": _array(
        sorted(KEYWORDS.union(_OTHER_WORDS, QUANTIFIERS, SIDES, *SEPARATORS.values()))
    ),
    "{condition_quantifiers}": _array(QUANTIFIERS),
    "{condition_functions}": _array(FUNCTIONS),
    "{condition_types}": _array(sorted({word for name in TYPES for word in name.split()})),
    "{condition_roots}": _array(ROOTS),
    "{condition_operators}": _operators(),
    "{metadata_names}": _array(METADATA),
    "{metadata_columns}": _metadata(),
}
