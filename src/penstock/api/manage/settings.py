"""The configuration that the API works with: the desired state of its store."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from penstock.api.manage.context import Context
from penstock.api.problems import Problem
from penstock.core import queries

_SQL: Final = queries.load("penstock.api.manage", "manage.sql")


async def name_of(context: Context, kind: str, text: str) -> str:
    """Return the name of the entity that a path has by its name or its UUID.

    What is no entity's UUID is a name, of one that may not be there.
    """
    if "\0" in text:
        raise Problem(404, f"There is no {kind} {text!r}.")
    try:
        wanted = UUID(text)
    except ValueError:
        return text

    def look() -> str:
        with context.store.connection() as connection:
            row = connection.execute(_SQL["name_of"], [kind, wanted]).fetchone()
        return text if row is None else str(row[0])

    return await context.run(look)
