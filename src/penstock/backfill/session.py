"""Connections that read tables, and what their errors mean for a backfill."""

from __future__ import annotations

from typing import Final

import psycopg

from penstock.core import connect as postgres
from penstock.core.errors import BackfillError, CaptureError
from penstock.core.queries import load
from penstock.postgres.connect import capture_error, connect_source

Connection = postgres.Connection

SQL: Final = load("penstock.backfill", "backfill.sql")
_SETTINGS: Final = load("penstock.postgres", "catalog.sql")["settings"]

# By SQLSTATE: code, whether trying again may help, remedy.
_KNOWN: Final[dict[str, tuple[str, bool, str]]] = {
    "42P01": ("table_missing", False, "It was dropped or renamed; cancel the backfill."),
    "42703": ("column_missing", False, "Correct `sort_by`, or the condition."),
    "42883": ("function_missing", False, "Correct the condition."),
    "42501": ("permission_denied", False, "GRANT SELECT on the table to the source's role."),
    "22021": (
        "not_utf8", False,
        "In a database whose encoding is SQL_ASCII, write the keys of its rows in UTF-8. In another one,"
        " correct the condition.",
    ),
    "57014": (
        "timeout", False,
        "It took too long to find the next rows: an index on the `sort_by` column helps.",
    ),
    "55P03": ("locked", True, "Something holds a lock on the table."),
    "40001": ("conflict", True, ""),
    "40P01": ("conflict", True, ""),
}  # fmt: skip

FEW_TIMES: Final = {"timeout": 3, "column_missing": 1, "function_missing": 1}
"""By code: how often a backfill tries again before such an error ends it."""


def open_session(url: str, *, statement: str) -> Connection:
    """Return a connection that prints values as a capture's does.

    `statement` is how long a statement may take (`120s`). Raises `BackfillError`.
    """
    try:
        connection = connect_source(url, "penstock backfill")
    except CaptureError as error:
        raise known(error) from None
    try:
        connection.execute(_SETTINGS)
        connection.execute(SQL["session"], {"statement": statement})
    except psycopg.Error as error:
        connection.close()
        raise backfill_error(error) from None
    return connection


def known(error: CaptureError) -> BackfillError:
    """Return an error of the capture's as one of a backfill."""
    return BackfillError(error.code, error.message, remedy=error.remedy, transient=error.transient)


def backfill_error(error: psycopg.Error) -> BackfillError:
    """Return what a server's error means, and what to do about it."""
    found = capture_error(error, "connection of a backfill")
    special = _KNOWN.get(error.sqlstate or "")
    if special is None:
        return known(found)
    code, transient, remedy = special
    return BackfillError(
        code, f"Postgres reported: {postgres.reason_of(error)}.", remedy=remedy, transient=transient
    )


def internal_error(error: Exception) -> BackfillError:
    """Return a defect of Penstock as a `BackfillError`."""
    return BackfillError(
        "internal",
        f"The backfill failed: {type(error).__name__}: {error}.",
        remedy="This is a defect of penstock; the log has its trace.",
    )
