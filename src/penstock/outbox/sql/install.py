"""Installs the schema `tide` in an application's database, upgrades it, or prints its SQL.

One script does both: it has the migrations that are due, and all functions, which are replaced as a
whole. `install` runs it; a migration tool can run the text that `script` returns.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from penstock.core import queries
from penstock.core.conflicts import again_after_conflict
from penstock.outbox.errors import InstallError, install_error
from penstock.outbox.sql.catalog import Schema, find_schema, server, version_of
from penstock.outbox.sql.rules import render

OLDEST_SERVER: Final = 14
_PACKAGE: Final = "penstock.outbox.sql"
_TABLES: Final = queries.load(_PACKAGE, "outbox.sql")
_SQL: Final = queries.load(_PACKAGE, "catalog.sql")
_FUNCTIONS: Final = tuple(
    render(text)
    for file in ("common", "expressions", "config", "outbox", "relay", "inbox", "status")
    for text in queries.load(_PACKAGE, f"functions_{file}.sql").values()
)
_PREFIX: Final = "migration_"
VERSION: Final = max(
    int(name.removeprefix(_PREFIX)) for name in _TABLES if name.startswith(_PREFIX)
)
"""The version of the schema that this Penstock works with."""
DIGEST: Final = hashlib.sha256("\n".join((*_FUNCTIONS, _TABLES["end"])).encode()).hexdigest()[:16]
"""Identifies the functions of this Penstock."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What an installation did.

    Attributes:
        before: The version that was installed before, None where there was none.
        changed: Whether anything was done.
        warnings: What will keep a relay from running.
    """

    before: int | None
    changed: bool
    warnings: tuple[str, ...] = ()


def version_fault(found: tuple[int, str] | None) -> tuple[str, str] | None:
    """Return why this Penstock can't work with the version `found`, and the remedy."""
    if found is None or found[0] < VERSION:
        there = "none" if found is None else found[0]
        return f"its version is {there}, and {VERSION} is needed", "penstock outbox install --url …"
    if found[0] > VERSION:
        message = f"its version is {found[0]}, and this Penstock knows {VERSION}"
        return message, "run the newer Penstock that made it"
    return None


def script(after: int = 0) -> str:
    """Return the SQL that brings a schema of version `after` (0: there is none) up to `VERSION`.

    Run it in one transaction, by the role that shall own the schema. It fails where the database has
    another version than `after`. Raises `InstallError` where `after` is no version.
    """
    if not 0 <= after <= VERSION:
        raise InstallError(
            "unknown_version",
            f"There is no version {after} of the schema tide.",
            remedy=f"Give one from 0 (nothing there) to {VERSION}.",
        )
    parts = [_TABLES["begin"].replace("{after}", str(after))]
    parts += [_TABLES[f"{_PREFIX}{number}"] for number in range(after + 1, VERSION + 1)]
    parts += _FUNCTIONS
    parts.append(_TABLES["end"].replace("{version}", str(VERSION)).replace("{digest}", DIGEST))
    return "\n\n".join(parts) + "\n"


def install(connection: psycopg.Connection[Any]) -> Installed:
    """Make the schema, or bring it up to date, in one transaction under a lock.

    `connection` is in autocommit mode. It begins again where a deadlock with the sessions that use the
    schema ended it. Raises `InstallError` where the server, the role or the content of the database does
    not allow it; then nothing was changed.
    """
    try:
        return again_after_conflict(lambda: _install(connection))
    except psycopg.Error as error:
        raise install_error(error) from None


def _install(connection: psycopg.Connection[Any]) -> Installed:
    found = server(connection)
    if found.version // 10000 < OLDEST_SERVER:
        raise InstallError(
            "server_too_old",
            f"The server is Postgres {found.version // 10000}.",
            remedy=f"Use {OLDEST_SERVER} or newer.",
        )
    if found.encoding != "UTF8":
        raise InstallError(
            "encoding",
            f"The database has the encoding {found.encoding}, and messages are UTF-8.",
            remedy="Create it with ENCODING 'UTF8'.",
        )
    warnings = () if found.wal_level == "logical" else (_wal_level(found.wal_level),)
    before = _version(connection, find_schema(connection))
    if before == (VERSION, DIGEST):
        return Installed(VERSION, changed=False, warnings=warnings)
    if found.standby:
        raise InstallError(
            "read_only",
            "The server is a standby, and cannot be written to.",
            remedy="Install on the primary server.",
        )
    with connection.transaction():
        connection.execute(_SQL["lock"])
        schema = find_schema(connection)
        before = _version(connection, schema)
        if before == (VERSION, DIGEST):  # by another session, meanwhile
            return Installed(VERSION, changed=False, warnings=warnings)
        _check_rights(schema)
        if schema.owner is not None and schema.owner != schema.role:
            connection.execute(_SQL["act_as"], [schema.owner])
        connection.execute(script(0 if before is None else before[0]).encode())
    return Installed(None if before is None else before[0], changed=True, warnings=warnings)


def _version(connection: psycopg.Connection[Any], schema: Schema) -> tuple[int, str] | None:
    """Return the installed version and digest; raises `InstallError` where they can't be read."""
    if not schema.installed:
        if schema.filled:
            raise InstallError(
                "schema_taken",
                "There is a schema tide in this database that is not Penstock's.",
                remedy="Rename it (ALTER SCHEMA tide RENAME TO …), or use another database.",
            )
        return None
    if not schema.readable:
        _check_rights(schema)
    found = version_of(connection)
    if found is not None and found[0] > VERSION:
        raise InstallError(
            "schema_newer",
            f"The schema tide has version {found[0]}, this Penstock knows {VERSION}.",
            remedy="Use the newer Penstock that made it.",
        )
    return found


def _check_rights(schema: Schema) -> None:
    if schema.there and not schema.owned:
        raise InstallError(
            "permission_denied",
            f"The schema tide belongs to the role {schema.owner}, and {schema.role} is no member.",
            remedy=f'Connect as "{schema.owner}", or GRANT "{schema.owner}" TO "{schema.role}".',
        )
    if not schema.installed and not schema.may_create:
        raise InstallError(
            "permission_denied",
            f"The role {schema.role} may not create a schema and a publication in the database "
            f"{schema.database}.",
            remedy=f'GRANT CREATE ON DATABASE "{schema.database}" TO "{schema.role}" — or have its '
            "owner run what `penstock outbox install --print` shows.",
        )


def _wal_level(level: str) -> str:
    return (
        f"wal_level is {level}, and a relay reads the WAL: "
        "ALTER SYSTEM SET wal_level = 'logical', and restart the server."
    )
