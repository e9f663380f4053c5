"""Failures of the store: what an error of psycopg means, and what to do about it."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from penstock.core.connect import address, connection_error, reason_of
from penstock.core.errors import StoreError

EMBEDDED: Final = "the log of the embedded store: "
"""Before the path of its log, `fallback_application_name` in the URL of a store that Penstock runs.

No session ever bears that name, as each gives its own.
"""
EMBEDDED_DOWN: Final = "embedded_store_down"
_AWAY: Final = frozenset(
    {"connection_refused", "unreachable", "connection_lost", "server_not_ready"}
)
_GRANT: Final = (
    "Let the store's role own the schema: ALTER SCHEMA penstock OWNER TO …, and its tables alike; "
    "or GRANT CREATE ON DATABASE … before the first start."
)
OLD_STREAMS: Final = (
    "The store has streams that an earlier build of Penstock made",
    "Let their consumers, and the sinks that are behind, finish under that build. Then name another"
    " database in `store`, or DROP SCHEMA penstock CASCADE: sources go on where they were.",
)
"""What is wrong, and what to do, where a migration finds streams that it cannot take over."""
_BY_STATE: Final[dict[str, tuple[str, str, str, bool]]] = {
    "42501": ("permission_denied", "The store's role may not do this", _GRANT, False),
    "3F000": ("no_schema", "The store has no schema", "Start penstock run, which makes it.", False),
    "42P01": (
        "no_table",
        "A table of the store is missing",
        "It was dropped by hand: restore it, or drop the schema penstock and start anew.",
        False,
    ),
    "PS003": ("old_streams", *OLD_STREAMS, False),  # see schema.sql
    "53100": (
        "disk_full",
        "The store's disk is full",
        "Free space on it, or shorten `retention`.",
        True,
    ),
    "53200": ("out_of_memory", "The store is out of memory", "Give Postgres more memory.", True),
    "53300": ("server_not_ready", "The store is busy", "Raise max_connections there.", True),
    "25006": (
        "read_only",
        "The store is read-only",
        "Point `store` at the primary server; a standby cannot be written to.",
        True,
    ),
    "55P03": ("locked", "Another session holds a lock in the store", "", True),
    "40P01": ("deadlock", "Two sessions waited for each other in the store", "", True),
    "57014": ("cancelled", "The store cancelled a statement", "Raise statement_timeout.", True),
}


def store_error(error: psycopg.Error, url: str) -> StoreError:
    """Return what an error of psycopg means, from connecting to `url` or in a session there."""
    found = _store_error(error, url)
    name = conninfo_to_dict(url).get("fallback_application_name")
    if not str(name or "").startswith(EMBEDDED):
        return found
    full = any(words in found.message for words in ("too many", "slots are"))
    if found.code not in _AWAY or full:
        return found
    return StoreError(
        EMBEDDED_DOWN,
        f"The embedded store does not answer, and is started again where it has ended:"
        f" {reason_of(error)} ({address(url)}).",
        remedy=f"Where that takes more than some seconds, see {str(name).removeprefix(EMBEDDED)}.",
        transient=True,
    )


def _store_error(error: psycopg.Error, url: str) -> StoreError:
    where = address(url)
    if error.sqlstate in _BY_STATE:
        code, what, remedy, transient = _BY_STATE[error.sqlstate]
        return StoreError(
            code, f"{what}: {reason_of(error)} ({where}).", remedy=remedy, transient=transient
        )
    # Without a SQLSTATE no session was there; class 08 and 57P: it is there no more.
    state = error.sqlstate or ""
    if isinstance(error, psycopg.OperationalError):
        if "connection to server" in str(error) or "resolve" in str(error):
            found = connection_error(error, url)
            return StoreError(
                found.code,
                f"Store: {found.message}",
                remedy=found.remedy,
                transient=found.transient,
            )
        if not state or state.startswith(("08", "57P", "25P")):
            return StoreError(
                "connection_lost", f"The store at {where}: {reason_of(error)}.", transient=True
            )
    return StoreError("postgres", f"The store at {where}: {reason_of(error)}.")


def embedded_log(url: str) -> str | None:
    """Return the log of the embedded store at `url`, in the store's folder; None of another store."""
    name = str(conninfo_to_dict(url).get("fallback_application_name") or "")
    return name.removeprefix(EMBEDDED) if name.startswith(EMBEDDED) else None
