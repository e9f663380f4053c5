"""Makes what a capture needs and lacks, the publication and the slot, and returns where a slot stands.

`penstock.check` only looks; both judge the server by `server_fault` and a slot by `slot_fault`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import psycopg
import structlog
from psycopg import sql

from penstock.config.sources import PostgresSource
from penstock.core.errors import SetupError
from penstock.postgres.admin import OLDEST_VERSION, Catalog, Slot, open_catalog
from penstock.postgres.connect import drop_slot, publication_missing, slot_invalidated
from penstock.postgres.publication import (
    Coverage,
    add_to_publication,
    coverage,
    create_publication,
    missing_tables,
    partition_fault,
    set_via_root,
)

_SLOT_TIMEOUT: Final = "60s"

log = structlog.get_logger("penstock")


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """Where a slot stands: what is confirmed, and how far that is behind the server."""

    slot: str
    confirmed_flush_lsn: str | None
    restart_lsn: str | None
    current_lsn: str | None
    lag_bytes: int | None
    retained_bytes: int | None
    lag_seconds: float | None
    active: bool
    active_pid: int | None
    wal_status: str | None


def ensure(source: PostgresSource, *, is_read: bool = False) -> None:
    """Make the publication and the slot where they are missing, and complete the publication.

    With `is_read` this process reads the slot meanwhile, as it may.

    Raises:
        SetupError: What is missing and cannot be made, with the statement that makes it.
    """
    with open_catalog(source) as catalog:
        if fault := server_fault(catalog):
            raise fault
        slot = catalog.slot()
        fault = None if slot is None else slot_fault(catalog, slot)
        if fault is not None and not (is_read and fault.code == "slot_in_use"):
            raise fault
        # First the publication: the slot's changes from before it would have none to go by.
        _ensure_publication(catalog, slot)
        if slot is None:
            _create_slot(catalog)


def end_reader(source: PostgresSource) -> bool:
    """End the session that reads the slot, if it is this role's; return whether there was one.

    Raises `SetupError` where the role may not.
    """
    with open_catalog(source) as catalog:
        return catalog.end_reader()


def renew(source: PostgresSource) -> str:
    """Make the publication where it is missing, and the slot anew; return where that begins.

    What the old slot had not delivered is given up. Raises `SetupError` before anything is dropped
    where the publication can't be made.
    """
    with open_catalog(source) as catalog:
        _ensure_publication(catalog, None)
        if catalog.slot() is not None:
            catalog.drop_slot()
        _create_slot(catalog)
        slot = catalog.slot()
        return "" if slot is None else slot.confirmed_flush_lsn or ""


def slot_status(source: PostgresSource) -> SlotStatus:
    """Return where the source's slot stands; raises `SetupError` (`slot_missing`, …)."""
    with open_catalog(source) as catalog:
        slot = catalog.slot()
        if slot is None:
            raise _slot_missing(catalog)
        return SlotStatus(
            slot=source.slot,
            confirmed_flush_lsn=slot.confirmed_flush_lsn,
            restart_lsn=slot.restart_lsn,
            current_lsn=slot.current_lsn,
            lag_bytes=slot.lag_bytes,
            retained_bytes=slot.retained_bytes,
            # Nothing left to confirm is no lag, whatever was measured last.
            lag_seconds=0.0 if slot.lag_bytes == 0 else slot.lag_seconds,
            active=slot.active,
            active_pid=slot.active_pid,
            wal_status=slot.wal_status,
        )


def server_fault(catalog: Catalog) -> SetupError | None:
    """Return what in the server's settings or the role's rights rules a capture out."""
    server = catalog.server
    if server.major < OLDEST_VERSION:
        return SetupError(
            "version",
            f"Postgres {server.version} is too old: {OLDEST_VERSION} or later is needed.",
            remedy="Upgrade the server.",
        )
    if server.wal_level != "logical":
        return SetupError(
            "wal_level",
            f"wal_level is {server.wal_level}, and must be logical.",
            remedy="ALTER SYSTEM SET wal_level = 'logical'; then restart Postgres "
            "(on Amazon RDS: set rds.logical_replication to 1 in the parameter group).",
        )
    if not server.may_replicate:
        return SetupError(
            "no_privilege",
            f"Role {server.role} may not replicate.",
            remedy=catalog.text(
                sql.SQL("ALTER ROLE {} REPLICATION").format(sql.Identifier(server.role))
            ),
        )
    return None


def slot_fault(catalog: Catalog, slot: Slot) -> SetupError | None:
    """Return why a slot that is there cannot be read from."""
    name = catalog.source.slot
    own = "Give this source a slot of its own (`slot` in the configuration)"
    drop = drop_slot(name)
    if slot.slot_type != "logical" or slot.plugin != "pgoutput":
        kind = f"plugin {slot.plugin}" if slot.plugin else f"type {slot.slot_type}"
        return SetupError(
            "slot_wrong_plugin",
            f"Slot {name} is of {kind}, not pgoutput.",
            remedy=f"{own}, or drop it if nothing else needs it: {drop}",
        )
    if slot.database != catalog.server.database:
        return SetupError(
            "slot_wrong_database",
            f"Slot {name} belongs to database {slot.database}, not {catalog.server.database}.",
            remedy=f"{own}, or drop it if nothing else needs it: {drop}",
        )
    if slot.wal_status == "lost" or slot.invalidation_reason:
        return slot_invalidated(name, slot.confirmed_flush_lsn, slot.invalidation_reason)
    if slot.active:
        return SetupError(
            "slot_in_use",
            f"Slot {name} is in use by the server process {slot.active_pid}.",
            remedy="Stop the other reader, or, if it is gone and its connection lingers: "
            f"SELECT pg_terminate_backend({slot.active_pid});",
            transient=True,
        )
    return None


def _slot_missing(catalog: Catalog) -> SetupError:
    """Return the error for a slot that is not there."""
    return SetupError(
        "slot_missing",
        f"There is no slot {catalog.source.slot}.",
        remedy="`penstock run` makes it. If it was there before, what it had not delivered is gone "
        "with it.",
    )


def lost_slot(name: str, slot: str) -> SetupError:
    """Return the error of a source that has run before and has no slot any more."""
    return SetupError(
        "slot_missing",
        f"Source {name} has run before, but its slot {slot} is gone: what was committed since then"
        " can't be read.",
        is_gap=True,
    )


def _ensure_publication(catalog: Catalog, slot: Slot | None) -> None:
    relations = catalog.relations()
    if faults := missing_tables(catalog, relations):
        raise SetupError(
            "table_missing",
            f"In database {catalog.server.database} "
            + "; ".join(message + hint for message, hint in faults),
            remedy="Correct `tables` of the source.",
        )
    selected = catalog.selected(relations)
    publication = catalog.publication()
    if publication is None:
        if slot is not None:
            raise publication_missing(catalog.source.slot, catalog.source.publication)
        try:
            _execute(catalog, create_publication(catalog, catalog.source.patterns))
        except psycopg.errors.DuplicateObject:
            _ensure_publication(catalog, slot)  # another process was first
        return
    if fault := partition_fault(catalog, publication, selected):
        raise fault
    if not publication.via_root and any(table.kind == "p" for table in selected):
        _execute(catalog, set_via_root(catalog))
        publication = dataclasses.replace(publication, via_root=True)
    lacking = coverage(catalog, publication, selected)
    if lacking.limited:
        log.warning(f"publication {catalog.source.publication} {lacking.open_end()}")
    elif lacking.schemas and catalog.server.major >= 15:
        try:
            _execute(catalog, add_to_publication(catalog, lacking.schemas))
        except SetupError:
            # Its tables one by one will do, if that is allowed; `check` reports what it means.
            if lacking.tables:
                _execute(catalog, add_to_publication(catalog, lacking.tables))
            return
        else:
            schemas = {p.schema for p in lacking.schemas}
            lacking = Coverage([], [p for p in lacking.tables if p.schema not in schemas], [])
    if lacking.tables:
        _execute(catalog, add_to_publication(catalog, lacking.tables))


def _execute(catalog: Catalog, statement: sql.Composed) -> None:
    try:
        catalog.connection.execute(statement)
    except psycopg.errors.DuplicateObject:
        raise
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction) as error:
        reason = str(error).splitlines()[0]
        raise SetupError(
            "no_privilege" if catalog.publication() else "publication_missing",
            f"Role {catalog.server.role} may not publish the source's `tables` in publication"
            f" {catalog.source.publication} ({reason}).",
            remedy="Run as a superuser, or name tables that the role owns in `tables`: "
            + catalog.text(statement),
        ) from None


def _create_slot(catalog: Catalog) -> None:
    server = catalog.server
    if server.slots >= server.max_slots:
        raise slots_exhausted(catalog)
    catalog.connection.execute(
        sql.SQL("SET statement_timeout = {}").format(sql.Literal(_SLOT_TIMEOUT))
    )
    try:
        catalog.create_slot()
    except psycopg.errors.DuplicateObject:
        pass  # another process was first
    except psycopg.errors.QueryCanceled:
        raise SetupError(
            "slot_missing",
            f"Slot {catalog.source.slot} could not be made in {_SLOT_TIMEOUT}: "
            "Postgres waits for transactions that were open before.",
            remedy="End the oldest: SELECT pid, xact_start, query FROM pg_stat_activity "
            "WHERE backend_xid IS NOT NULL ORDER BY xact_start;",
            transient=True,
        ) from None


def slots_exhausted(catalog: Catalog) -> SetupError:
    """Return the error for a server whose slots are all taken."""
    server = catalog.server
    return SetupError(
        "slots_exhausted",
        f"All {server.max_slots} replication slots are taken.",
        remedy="Drop one that nothing reads (they are in pg_replication_slots), or "
        f"ALTER SYSTEM SET max_replication_slots = {server.max_slots + 5}; then restart Postgres.",
    )
