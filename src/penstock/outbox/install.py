"""The schema `tide` in an application's database: installed, brought up to date, or printed."""

from __future__ import annotations

import hashlib
from typing import Any, Final, LiteralString

import psycopg

from penstock import queries

_PACKAGE: Final = "penstock.outbox"
_TABLES: Final = queries.load(_PACKAGE, "outbox.sql")
_FUNCTIONS: Final = (
    "functions_common.sql",
    "functions_config.sql",
    "functions_outbox.sql",
    "functions_relay.sql",
    "functions_inbox.sql",
)
_PREFIX: Final = "migration_"
VERSION: Final = max(
    int(name.removeprefix(_PREFIX)) for name in _TABLES if name.startswith(_PREFIX)
)
"""The newest version of the schema, that this Penstock works with."""


def script(after: int = 0) -> LiteralString:
    """Return the SQL that brings a schema of version `after` (0: none) up to `VERSION`.

    It is to be run in one transaction, by the role that shall own the schema.
    """
    parts: list[LiteralString] = [_TABLES["begin"]]
    for number in range(after + 1, VERSION + 1):
        parts.append(_TABLES[f"{_PREFIX}{number}"])
    for file in _FUNCTIONS:
        parts.extend(queries.load(_PACKAGE, file).values())
    parts.append(_TABLES["end"])
    return "\n\n".join(parts) + "\n"


def install(connection: psycopg.Connection[Any]) -> None:
    """Make the schema, in one transaction."""
    with connection.transaction():
        connection.execute(script())
