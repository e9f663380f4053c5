"""Connections to a source, and what its server's errors mean for a capture."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from penstock.bastion import tunnel_to
from penstock.config.sources import SourceUrl, servers_of
from penstock.core.connect import (
    AsyncConnection,
    Connection,
    connect,
    connect_async,
    connection_error,
    reason_of,
)
from penstock.core.errors import BastionError, CaptureError, SetupError


def connect_source(url: str, application: str, **settings: Any) -> Connection:
    """Return a connection in autocommit mode; `settings` as for `penstock.core.connect`.

    A URL that has an `application_name` keeps it: synchronous_standby_names may hold it.

    Raises:
        CaptureError: With no more of the URL in it than host, port, user and database.
    """
    try:
        return connect_through(url, fallback_application_name=application, **settings)
    except psycopg.Error as error:
        raise _connect_error(error, url) from None


def connect_through(url: str, **settings: Any) -> Connection:
    """Return a connection as `penstock.core.connect` does, through the bastion of a `SourceUrl`.

    libpq gets the server's own name beside the address, so that it verifies the certificate for that.
    Raises `psycopg.Error`, and `SetupError` for what is wrong with the bastion or seen from there.
    """
    with _explained(url):
        return connect(str(url), **_addresses(url), **settings)


async def connect_through_async(url: str, **settings: Any) -> AsyncConnection:
    """Return the same as `connect_through`, for an event loop."""
    with _explained(url):
        addresses = await asyncio.to_thread(_addresses, url)
        return await connect_async(str(url), **addresses, **settings)


def _addresses(url: str) -> dict[str, str]:
    """Return the settings that lead through a URL's bastion; none without one."""
    bastion = url.bastion if isinstance(url, SourceUrl) else None
    if bastion is None:
        return {}
    tunnel = tunnel_to(bastion)
    ports = [tunnel.port(host, port) for host, port in servers_of(url)]
    return {
        "hostaddr": ",".join("127.0.0.1" for _ in ports),
        "port": ",".join(map(str, ports)),
    }


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Raise a `SetupError` for what is wrong with the bastion of a URL, or seen from there."""
    try:
        yield
    except BastionError as error:
        raise _by_bastion(error) from None
    except psycopg.Error:
        if isinstance(url, SourceUrl) and url.bastion is not None:
            tunnel = tunnel_to(url.bastion)
            failures = [tunnel.failure(host, port) for host, port in servers_of(url)]
            if failures[0] is not None and all(failures):
                raise _by_bastion(failures[0]) from None
        raise


def _by_bastion(error: BastionError) -> SetupError:
    return SetupError(error.code, error.message, remedy=error.remedy, transient=error.transient)


def _connect_error(error: psycopg.Error, url: str) -> CaptureError:
    if not isinstance(error, psycopg.OperationalError):  # the URL is malformed
        return connection_error(error, url)
    text = str(error)
    # These names stand in the message in every language of the server.
    if "max_wal_senders" in text:
        return CaptureError(
            "walsenders_exhausted",
            "The server has no replication connection left (max_wal_senders).",
            remedy="Raise max_wal_senders, or end a connection of pg_stat_replication.",
            transient=True,
        )
    if "REPLICATION" in text or "walsender" in text:
        user = conninfo_to_dict(url).get("user") or "of this system"
        return _no_privilege(f"Role {user} may not replicate.")
    return connection_error(error, url)


def drop_slot(slot: str) -> str:
    """Return the statement that drops a slot, as a user would paste it."""
    literal = slot.replace("'", "''")
    return f"SELECT pg_drop_replication_slot('{literal}');"


def publication_missing(slot: str, publication: str) -> SetupError:
    """Return the error of a publication that is missing although its slot is there.

    Made anew it would cover only what is written from then on: Postgres 18 passes over the changes
    from before without a word, older versions refuse to go on.
    """
    return SetupError(
        "publication_missing",
        f"There is no publication {publication}, though slot {slot} is there: what is written without"
        " the publication can never be captured through that slot.",
        remedy=f"Drop the slot ({drop_slot(slot)}), delete the query's checkpoint folder and start"
        " again: both are made anew. Backfill what is missing.",
        is_gap=True,
    )


def slot_missing(slot: str) -> CaptureError:
    """Return the error of a slot that is not there."""
    return CaptureError(
        "slot_missing",
        f"Logical replication slot {slot} does not exist.",
        remedy="It was dropped, and what it had not delivered is gone with it. Delete the query's"
        " checkpoint folder, start again, which makes a new slot, and backfill what is missing.",
        is_gap=True,
    )


def slot_invalidated(slot: str, confirmed: str | None, reason: str | None = None) -> SetupError:
    """Return the error of a slot that the server gave up; it was `confirmed` up to an LSN."""
    because = f" ({reason})" if reason else ""
    return SetupError(
        "slot_invalidated",
        f"Slot {slot} is invalidated{because}: Postgres has removed WAL that it needed, and changes"
        f" after {confirmed} are lost to it.",
        remedy=f"{drop_slot(slot)} Delete the query's checkpoint folder and start again: a new slot is"
        " made, and goes on from that moment. Backfill what is missing.",
        is_gap=True,
    )


def _no_privilege(message: str) -> CaptureError:
    return CaptureError("no_privilege", message, remedy="ALTER ROLE <role> REPLICATION.")


def capture_error(error: psycopg.Error, what: str) -> CaptureError:
    """Return what a server's error means for a capture, and what to do about it.

    By SQLSTATE, as the text is in the server's language; an error without one is a lost connection.
    """
    state = error.sqlstate or ""
    reason = reason_of(error)
    if state.startswith("28"):
        return CaptureError("authentication_failed", f"Postgres refused the login ({reason}).")
    if state == "42501":
        return _no_privilege(f"The role may not replicate ({reason}).")
    if state == "3D000":
        return CaptureError("database_missing", f"The database does not exist ({reason}).")
    lost = not state or state[:2] in ("08", "57", "53", "58")
    return CaptureError(
        "connection_lost" if lost else "postgres",
        f"The {what} to Postgres failed ({reason})." if lost else f"Postgres reported: {reason}.",
        remedy="" if lost else f"SQLSTATE {state}; the server's log has the details.",
        transient=lost,
    )
