"""Sessions of a relay in the outboxes' database, and what an error in one means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import psycopg

from penstock.core import connect as postgres
from penstock.core import queries
from penstock.core.errors import SetupError
from penstock.postgres.connect import connect_through, connect_through_async

_SESSION: Final = queries.load("penstock.outbox.relay", "relay.sql")["short"]
_CONNECT: Final[Mapping[str, Any]] = {
    "application_name": "penstock relay", "connect_timeout": 5,
    # Both ends notice within seconds that the other one is gone, and the relay's lock is free.
    "keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3,
    "tcp_user_timeout": 5_000,
}  # fmt: skip
_LOCK_TIMEOUT: Final = "1s"


def connect(url: str) -> postgres.Connection:
    """Return a connection in autocommit mode, through the bastion of a `SourceUrl`.

    Raises `psycopg.Error`, and `SetupError` for the bastion's trouble.
    """
    return connect_through(url, session=_SESSION, values=[_LOCK_TIMEOUT], **_CONNECT)


async def connect_async(url: str) -> postgres.AsyncConnection:
    """Return the same for an event loop, where waiting for a lock blocks no other session."""
    return await connect_through_async(url, session=_SESSION, values=["0"], **_CONNECT)


def postgres_error(error: psycopg.Error, url: str) -> SetupError:
    """Return what an error of psycopg means, from connecting to `url` or in a session there."""
    where = postgres.address(url)
    if isinstance(error, psycopg.errors.LockNotAvailable):
        said = error.diag.context or error.diag.message_primary or ""
        return SetupError(
            "locked",
            f"{where}: an open transaction has locked a table that the relay uses ({said}).",
            remedy="End that transaction: select * from pg_stat_activity where xact_start is not null.",
            transient=True,
        )
    if error.sqlstate is None or isinstance(error, psycopg.OperationalError):
        return postgres.connection_error(error, url)
    said = postgres.reason_of(error)
    return SetupError("postgres", f"{where}: {said}.", remedy=error.diag.message_hint or "")
