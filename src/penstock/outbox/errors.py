"""What keeps the schema `tide` from being installed or asked, and what to do about it."""

from __future__ import annotations

import psycopg

from penstock.core.connect import address, reason_of
from penstock.core.errors import SetupError


class InstallError(SetupError):
    """The schema can't be made, brought up to date or asked; nothing was changed."""


def not_installed(database: str, url: str) -> InstallError:
    """Return the error of a database without the schema."""
    return InstallError(
        "not_installed",
        f"Database {database} at {address(url)} has no schema tide, so there is no outbox in it.",
        remedy="Make it by `penstock outbox install --url …`; with `--print` that shows the SQL for "
        "a migration tool.",
    )


def install_error(error: psycopg.Error) -> InstallError:
    """Return what an error of psycopg in a session means."""
    said, hint = reason_of(error), error.diag.message_hint
    if error.sqlstate == "42501":
        return InstallError(
            "permission_denied",
            f"The role lacks a right: {said}.",
            remedy=hint or "Connect as the role that owns the schema tide.",
        )
    if error.sqlstate in ("3F000", "42P01", "42883"):
        return InstallError(
            "not_installed",
            f"The schema tide is not there or not whole: {said}.",
            remedy="penstock outbox install --url …",
        )
    transient = isinstance(error, psycopg.OperationalError)
    return InstallError("postgres", f"{said}.", remedy=hint or "", transient=transient)
