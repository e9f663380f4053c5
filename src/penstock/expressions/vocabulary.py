"""The words of the language, and hints for words that it lacks."""

from __future__ import annotations

import re
from typing import Final

METADATA: Final = (
    "table_schema", "table_name", "commit_timestamp", "commit_lsn", "commit_idx",
    "transaction_id", "database", "idempotency_key",
)  # fmt: skip
ROOTS: Final = ("record", "changes", "metadata")

KEYWORDS: Final = frozenset(
    [
        "and",
        "or",
        "not",
        "in",
        "between",
        "like",
        "ilike",
        "escape",
        "is",
        "null",
        "true",
        "false",
        "distinct",
        "from",
        "case",
        "when",
        "then",
        "else",
        "end",
    ]
)
OPERATORS: Final = frozenset(
    ["=", "<>", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "||", "::", "(", ")", ","]
)
OTHER_OPERATORS: Final = frozenset(
    ["->", "->>", "#>", "#>>", "@>", "<@", "&&", "?", "~", "~*", "!~", "!~*"]
)
"""Operators that bind as tightly as `||`, from left to right."""
SEPARATORS: Final = {
    "position": ("in",),
    "substring": ("from", "for"),
    "trim": ("from",),
}
"""Functions with words of SQL between their arguments, where others have commas."""
SIDES: Final = {"both": "btrim", "leading": "ltrim", "trailing": "rtrim"}
"""What `trim` may begin with, and the function that it is then."""
TYPES: Final = {
    "boolean": "boolean",
    "bool": "boolean",
    "smallint": "smallint",
    "int2": "smallint",
    "integer": "integer",
    "int": "integer",
    "int4": "integer",
    "bigint": "bigint",
    "int8": "bigint",
    "real": "real",
    "float4": "real",
    "double precision": "double precision",
    "float8": "double precision",
    "float": "double precision",
    "numeric": "numeric",
    "decimal": "numeric",
    "text": "text",
    "varchar": "varchar",
    "character varying": "varchar",
    "char": "char",
    "character": "char",
    "uuid": "uuid",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp without time zone": "timestamp",
    "timestamptz": "timestamptz",
    "timestamp with time zone": "timestamptz",
    "time": "time",
    "time without time zone": "time",
    "interval": "interval",
}
PARAMETERS: Final = {"numeric": 2, "varchar": 1, "char": 1}
WORD: Final = re.compile(r"[^\W\d][\w$]*\Z")
NUMBER: Final = re.compile(r"(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\Z", re.ASCII)


SUBQUERY: Final = frozenset({
    "select", "exists", "with", "values", "table", "union",
})  # fmt: skip
"""Words that begin what no expression may have."""
QUANTIFIERS: Final = {"any": "any", "some": "any", "all": "all"}
"""What may stand before an array in brackets, and which of two it is."""
ROOTS_HINT: Final = "; values are record.…, changes.…, metadata.… and action"
HINTS: Final = {
    ";": ": one expression alone",
    "==": "; write =",
    "<=>": "; write is not distinct from",
    "?|": "; write two conditions with ?, and `or`",
    "?&": "; write two conditions with ?, and `and`",
    "[": " here",
    "^": "",
}
WORD_HINTS: Final = {
    "isnull": "; write is null",
    "notnull": "; write is not null",
    "unknown": "; write is null",
    "current_timestamp": "; write now()",
    "current_date": "; write now()::date",
    "localtimestamp": "; write now()",
    "collate": ": text is compared by code point",
    "symmetric": "; put the smaller value first",
    "over": ": no window functions",
    "as": " here",
    "at": ": times are UTC",
    "overlaps": "",
    "any": "; write = any(record.…)",
    "some": "; write = any(record.…)",
    "all": "; write <> all(record.…)",
    "array": "; write array['…', '…']",
}
