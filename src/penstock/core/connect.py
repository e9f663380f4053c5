"""The one way to connect to Postgres: a session's settings, and what a failed connection means.

`connect` and `connect_async` raise what psycopg does; `connection_error` turns that into a `SetupError`.
"""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from typing import Any, Final, LiteralString, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict

from penstock.core.errors import SetupError

_SHARED: Final[Mapping[str, Any]] = {
    "connect_timeout": 10,
    # A dead network ends a session within a minute.
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,  # milliseconds
}
"""Settings of every session, in seconds, unless its URL or its caller gives others."""
_LOOK_SECONDS: Final = 30.0

Connection = psycopg.Connection[tuple[Any, ...]]
AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]
_Row = TypeVar("_Row")
_Result = TypeVar("_Result")
Values = Sequence[Any] | Mapping[str, Any] | None


def connect(
    url: str, *, session: LiteralString | None = None, values: Values = None, **settings: Any
) -> Connection:
    """Return a connection in autocommit mode, its client encoding UTF-8; raises `psycopg.Error`.

    Args:
        url: A libpq connection string or URI. Its own settings win over the shared ones.
        session: A statement that prepares the session.
        values: The parameters of `session`.
        settings: libpq's parameters and psycopg's options; they win over the URL.
    """
    connection = psycopg.connect(url, autocommit=True, **_settings(url, settings))
    if session is not None:
        try:
            connection.execute(session, values, prepare=False)
        except BaseException:
            connection.close()
            raise
    return connection


class _AsyncConnection(psycopg.AsyncConnection[_Row]):
    """An `AsyncConnection` that wakes for what comes alone; psycopg's looks ten times a second."""

    async def wait(
        self, gen: PQGen[_Result], interval: float = 0.0, timeout: float | None = None
    ) -> _Result:
        """Wait as psycopg does, whatever the interval."""
        return await super().wait(gen, max(interval, _LOOK_SECONDS), timeout)


async def connect_async(
    url: str, *, session: LiteralString | None = None, values: Values = None, **settings: Any
) -> AsyncConnection:
    """Return the same as `connect`, for an event loop."""
    connection: AsyncConnection = await _AsyncConnection.connect(
        url, autocommit=True, **_settings(url, settings)
    )
    if session is not None:
        try:
            await connection.execute(session, values, prepare=False)
        except BaseException:
            await connection.close()
            raise
    return connection


def _settings(url: str, own: Mapping[str, Any]) -> dict[str, Any]:
    given = conninfo_to_dict(url)
    shared = {name: value for name, value in _SHARED.items() if name not in given}
    return {**shared, "client_encoding": "utf8", **own}


def is_lost(connection: psycopg.BaseConnection[Any]) -> bool:
    """Return whether the server has ended an idle connection, without asking it anything.

    Notifications that have come are read by that: psycopg's `notifies` waits for what comes behind them.
    """
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    try:
        while poll.poll(0):  # a notice, a notification, or a last message before the end
            connection.pgconn.consume_input()
    except psycopg.Error:
        return True
    return False


def address(url: str) -> str:
    """Return where a URL points to, without its login: `db:5432/shop`."""
    parts = conninfo_to_dict(url)
    host = parts.get("host") or parts.get("hostaddr") or "local socket"
    database = parts.get("dbname") or parts.get("user") or ""
    return f"{host}:{parts.get('port') or 5432}/{database}"


def reason_of(error: psycopg.Error) -> str:
    """Return the server's reason for an error, in its language.

    Not DETAIL or CONTEXT: they quote rows.
    """
    text = error.diag.message_primary or str(error).strip().partition("\n")[0]
    return (text or type(error).__name__).rstrip(".")


def first_line(error: psycopg.Error, url: str) -> str:
    """Return the first line of an error's text, without the URL's password."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else type(error).__name__).rpartition("failed: ")[2].rstrip(".")
    password = str(conninfo_to_dict(url).get("password") or "")
    return text.replace(password, "***") if password else text


def connection_error(error: psycopg.Error, url: str) -> SetupError:
    """Return what a failed connection means, and what to do about it.

    libpq gives no SQLSTATE before a session is there, so its text has to do.
    """
    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error:
        # libpq's own words would show the string, and with it the password.
        return SetupError(
            "url_invalid",
            "The url is no connection string that libpq understands (it is not shown, as it may"
            " hold a password).",
            remedy="Write it as postgresql://user:password@host:5432/database, with special"
            " characters of the password percent-encoded.",
        )
    reason, where = first_line(error, url), address(url)
    text = str(error).lower()
    user, database = parts.get("user") or "of this system", parts.get("dbname") or ""
    if "database" in text and "does not exist" in text:
        return SetupError(
            "database_missing",
            f"There is no database {database} at {where} ({reason}).",
            remedy="Correct the end of the url, or create it with CREATE DATABASE.",
        )
    if (
        "starting up" in text
        or "not yet accepting" in text
        or "recovery mode" in text
        or "shutting down" in text
        or "too many" in text
        or "slots are" in text
    ):
        return SetupError(
            "server_not_ready",
            f"Postgres at {where} takes no connections now ({reason}).",
            remedy="Wait until it has started, or raise max_connections.",
            transient=True,
        )
    if any(
        words in text
        for words in ("authentication", "password", "pg_hba", "role ", "permission denied")
    ):
        return SetupError(
            "authentication_failed",
            f"Postgres at {where} refused the login of user {user} ({reason}).",
            remedy="Check user and password in the url, and the server's pg_hba.conf.",
        )
    if "refused" in text or "no such file" in text:
        return SetupError(
            "connection_refused",
            f"Nothing answers at {where} ({reason}).",
            remedy="Start Postgres there, let it listen (listen_addresses), or correct the url.",
            transient=True,
        )
    if "ssl" in text or "certificate" in text:
        return SetupError(
            "tls_failed",
            f"No secure connection to {where} ({reason}).",
            remedy="Check sslmode and sslrootcert in the url.",
        )
    return SetupError(
        "unreachable",
        f"Postgres at {where} cannot be reached ({reason}).",
        remedy="Check host and port in the url, name resolution and firewalls.",
        transient=True,
    )
