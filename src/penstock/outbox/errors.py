"""Errors of the schema `tide`: what keeps it from being installed or read, and the remedy."""

from __future__ import annotations

import psycopg

from penstock.core.errors import SetupError
from penstock.postgres.admin import address


class InstallError(SetupError):
    """The schema can't be made, upgraded or read; nothing was changed."""


def not_installed(database: str, url: str) -> InstallError:
    """Return the error for a database without the schema."""
    return InstallError(
        "not_installed",
        f"Database {database} at {address(url)} has no schema tide, so there is no outbox in it.",
        remedy="Make it by `penstock outbox install --url …`; with `--print` that shows the SQL for "
        "a migration tool.",
    )


def install_error(error: psycopg.Error) -> InstallError:
    """Return the error that an error of psycopg means; DETAIL, which may quote rows, is left out."""
    diag = error.diag
    text = diag.message_primary or str(error).strip().partition("\n")[0] or type(error).__name__
    if error.sqlstate == "42501":
        return InstallError(
            "permission_denied",
            f"The role lacks a right: {text}.",
            remedy=diag.message_hint or "Connect as the role that owns the schema tide.",
        )
    if error.sqlstate in ("3F000", "42P01", "42883"):
        return InstallError(
            "not_installed",
            f"The schema tide is not there or not whole: {text}.",
            remedy="penstock outbox install --url …",
        )
    transient = isinstance(error, psycopg.OperationalError)
    return InstallError("postgres", f"{text}.", remedy=diag.message_hint or "", transient=transient)
