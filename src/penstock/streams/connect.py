"""Sessions in the store: each begins with the settings of `session` in store.sql."""

from __future__ import annotations

from typing import Final

from penstock.core import connect as postgres
from penstock.core import queries

_SESSION: Final = queries.load("penstock.streams", "store.sql")["session"]


def connect(url: str) -> postgres.Connection:
    """Return a connection in autocommit mode; raises `psycopg.Error`."""
    return postgres.connect(url, session=_SESSION, application_name="penstock")


async def connect_async(url: str, application: str) -> postgres.AsyncConnection:
    """Return the same for an event loop; the server prepares a statement that runs a second time."""
    return await postgres.connect_async(
        url, session=_SESSION, application_name=application, prepare_threshold=1
    )
