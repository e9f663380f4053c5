"""Connections to a source, and what its server's errors mean for a capture."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from penstock.core.connect import Connection, connect, connection_error, reason_of
from penstock.core.errors import CaptureError


def connect_source(url: str, application: str, **settings: Any) -> Connection:
    """Return a connection in autocommit mode; `settings` as for `penstock.core.connect`.

    A URL that has an `application_name` keeps it: synchronous_standby_names may hold it.

    Raises:
        CaptureError: With no more of the URL in it than host, port, user and database.
    """
    try:
        return connect(url, fallback_application_name=application, **settings)
    except psycopg.Error as error:
        raise _connect_error(error, url) from None


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


def publication_missing(slot: str, publication: str) -> CaptureError:
    """Return the error of a publication that is not there."""
    literal = slot.replace("'", "''")
    return CaptureError(
        "publication_missing",
        f"Publication {publication} does not exist, so slot {slot} gives no changes.",
        remedy="What was committed without it can't be read. Drop the slot (SELECT"
        f" pg_drop_replication_slot('{literal}')), delete the query's checkpoint folder, start"
        " again, which makes both anew, and backfill what is missing.",
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


def slot_invalidated(slot: str) -> CaptureError:
    """Return the error of a slot that the server gave up."""
    literal = slot.replace("'", "''")
    return CaptureError(
        "slot_invalidated",
        f"Replication slot {slot} was invalidated: the server has dropped WAL that it still needed"
        " (max_slot_wal_keep_size, idle_replication_slot_timeout).",
        remedy=f"Drop it (SELECT pg_drop_replication_slot('{literal}')), delete the query's"
        " checkpoint folder, start again, which makes a new slot, and backfill what is missing.",
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
