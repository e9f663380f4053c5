"""Sessions of a relay in the outboxes' database, and their errors."""

from __future__ import annotations

from typing import Any, Final

import psycopg

from penstock.core import queries
from penstock.core.errors import SetupError
from penstock.postgres.admin import address, connection_error

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")
_CONNECT: Final = {
    "application_name": "penstock relay", "connect_timeout": 5, "client_encoding": "utf8",
    "keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3,
    "tcp_user_timeout": 5_000,
}  # fmt: skip

_LOCK_TIMEOUT: Final = "1s"


def connect(url: str) -> psycopg.Connection[Any]:
    """Return a connection in autocommit mode; both ends notice within seconds that the other is gone."""
    connection = psycopg.connect(url, autocommit=True, **_CONNECT)  # type: ignore[arg-type]
    try:
        connection.execute(_SQL["short"], [_LOCK_TIMEOUT])
    except BaseException:
        connection.close()
        raise
    return connection


async def connect_async(url: str) -> psycopg.AsyncConnection[Any]:
    """Return the same for an event loop, where waiting for a lock blocks no other work."""
    connection = await psycopg.AsyncConnection.connect(
        url, autocommit=True, **_CONNECT  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        await connection.execute(_SQL["short"], ["0"])
    except BaseException:
        await connection.close()
        raise
    return connection


def postgres_error(error: psycopg.Error, url: str) -> SetupError:
    """Return the error that an error of psycopg means, from connecting to `url` or in a session."""
    if isinstance(error, psycopg.errors.LockNotAvailable):
        text = error.diag.context or error.diag.message_primary or ""
        return SetupError(
            "locked",
            f"{address(url)}: an open transaction has locked a table that the relay uses ({text}).",
            remedy="End that transaction: select * from pg_stat_activity where xact_start is not null.",
            transient=True,
        )
    if error.sqlstate is None or isinstance(error, psycopg.OperationalError):
        return connection_error(error, url)
    text = error.diag.message_primary or type(error).__name__
    return SetupError("postgres", f"{address(url)}: {text}.", remedy=error.diag.message_hint or "")
