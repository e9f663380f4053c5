"""What the catalog says about types that are not built in: enums, domains, composites and more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.core.queries import load
from penstock.postgres.values import TypeInfo

_QUERIES = load("penstock.postgres", "types.sql")


def load_types(connection: psycopg.Connection[Any], oids: Iterable[int]) -> list[TypeInfo]:
    """Return these types and all that they are made of, in one round trip.

    A type that does not exist (any more) is left out. The connection is an ordinary one: a
    replication connection takes no parameters.
    """
    asked = list(oids)
    if not asked:
        return []
    with connection.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(_QUERIES["types"], {"oids": asked}).fetchall()
    return [
        TypeInfo._make([*scalars, tuple(zip(names or (), types or (), strict=True))])
        for *scalars, names, types in rows
    ]
