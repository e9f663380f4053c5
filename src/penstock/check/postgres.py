"""Checks all that a source needs: changes nothing, and names the remedy of each fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from psycopg import sql

from penstock.check.tables import inspect_table
from penstock.config.sinks import SinkSettings
from penstock.config.sources import PostgresSource
from penstock.core.connect import address
from penstock.core.errors import CaptureError, SetupError
from penstock.core.finding import Finding
from penstock.core.tables import TablePattern, matches_any
from penstock.core.text import nearest
from penstock.postgres.admin import Catalog, Publication, TableInfo, open_catalog
from penstock.postgres.connect import publication_missing
from penstock.postgres.publication import (
    add_to_publication,
    coverage,
    create_publication,
    missing_tables,
    partition_fault,
    set_via_root,
)
from penstock.postgres.setup import (
    lost_slot,
    server_fault,
    slot_fault,
    slots_exhausted,
)

_MUCH_WAL = 1 << 30


def inspect(
    source_name: str,
    source: PostgresSource,
    sinks: Mapping[str, SinkSettings],
    *,
    recover: str | None = None,
    has_run: bool = False,
) -> list[Finding]:
    """Look at a source's server, role, publication, slot and tables; `sinks` are the source's.

    `recover` is the command that recovers the source; a slot that is missing needs it if the source
    `has_run`.
    """
    what = f"source {source_name}"
    try:
        with open_catalog(source) as catalog:
            lost = lost_slot(source_name, source.slot) if has_run else None
            return list(_findings(what, catalog, sinks, recover, lost))
    except CaptureError as error:
        return [Finding("error", what, error.message, error.remedy)]


def table_names(source: PostgresSource) -> list[tuple[str, str]]:
    """Return schema and name of each table that a source has now; none if it can't be reached."""
    try:
        with open_catalog(source) as catalog:
            return [(table.schema, table.name) for table in catalog.selected(catalog.relations())]
    except CaptureError:
        return []


def _findings(
    what: str,
    catalog: Catalog,
    sinks: Mapping[str, SinkSettings],
    recover: str | None,
    lost: SetupError | None,
) -> Iterator[Finding]:
    server = catalog.server
    where = address(catalog.source.url.get_secret_value())
    if fault := server_fault(catalog):
        yield _error(what, fault)
    else:
        message = f"Postgres {server.version} at {where}, wal_level logical, role {server.role}"
        yield Finding("ok", what, f"{message} may replicate")
    if server.is_standby:
        yield Finding(
            "warning",
            what,
            "this server is a standby: publication and slot settings are the primary's to make",
            "point the url at the primary",
        )
    relations = catalog.relations()
    selected = catalog.selected(relations)
    publication = catalog.publication()
    yield from _publication(what, catalog, publication, selected, recover)
    yield from _actions(what, catalog, publication, sinks)
    yield from _slot(what, catalog, recover, lost)
    yield from _tables(what, catalog, relations, selected)
    yield from _tables_of_sinks(catalog, relations, selected, sinks)
    identities = catalog.identities(selected)
    patterns = {name: sink.patterns for name, sink in sinks.items()}
    for table in selected:
        of_table = {
            name: sinks[name]
            for name, taken in patterns.items()
            if taken is None or matches_any(taken, table.schema, table.name)
        }
        yield from inspect_table(
            f"{what}: table {table}",
            catalog,
            publication,
            table,
            identities=identities[table.oid],
            sinks=of_table,
        )


def _error(what: str, error: CaptureError) -> Finding:
    return Finding("error", what, error.message, error.remedy)


def _publication(
    what: str,
    catalog: Catalog,
    publication: Publication | None,
    selected: Sequence[TableInfo],
    recover: str | None,
) -> Iterator[Finding]:
    server, source = catalog.server, catalog.source
    what = f"{what}: publication {source.publication}"
    if publication is None:
        yield _missing_publication(what, catalog, selected, recover)
        return
    if fault := partition_fault(catalog, publication, selected):
        yield _error(what, fault)
        return
    lacking = coverage(catalog, publication, selected)
    if lacking.tables:
        names = ", ".join(map(str, lacking.tables))
        fix = catalog.text(add_to_publication(catalog, lacking.addable or lacking.tables))
        mine = all(t.owned for t in selected if TablePattern(t.schema, t.name) in lacking.tables)
        if server.is_superuser or (mine and server.may_create):
            message = f"lacks {names}; `penstock run` adds them"
            if lacking.limited:
                message += f". It {lacking.open_end()}"
            yield Finding("warning", what, message, fix)
        else:
            message = f"lacks {names}, and role {server.role} may not add them"
            yield Finding("error", what, message, fix)
    elif lacking.schemas:
        if lacking.limited:
            fix = "start `penstock run` again after making a table: it adds what is there then"
        else:
            fix = catalog.text(add_to_publication(catalog, lacking.schemas))
        yield Finding("warning", what, lacking.open_end(), fix)
    else:
        yield Finding("ok", what, f"covers {', '.join(source.tables)}")
    if not publication.via_root and (roots := [str(t) for t in selected if t.kind == "p"]):
        yield Finding(
            "error",
            what,
            f"publishes partitions under their own names, not as {', '.join(roots)}",
            catalog.text(set_via_root(catalog)),
        )
    published = catalog.published_tables()
    for table in selected:
        if filtered := published.get((table.schema, table.name)):
            message = f"leaves out rows of {table}: only those {filtered} are captured"
            yield Finding("warning", what, message)


def _missing_publication(
    what: str, catalog: Catalog, selected: Sequence[TableInfo], recover: str | None
) -> Finding:
    server, source = catalog.server, catalog.source
    if catalog.slot() is not None:
        missing = publication_missing(source.slot, source.publication)
        return _error(what, missing.recovered_by(recover))
    fix = catalog.text(create_publication(catalog, source.patterns))
    if server.is_superuser:
        return Finding("ok", what, "not there yet; `penstock run` makes it")
    if any(pattern.table is None for pattern in source.patterns):
        reason = f"needs a superuser for a whole schema, which role {server.role} is not"
    elif not server.may_create:
        reason = f"needs the right to CREATE in database {server.database}"
    elif others := [str(table) for table in selected if not table.owned]:
        reason = f"needs the owner of {', '.join(others)}, which role {server.role} is not"
    else:
        return Finding("ok", what, "not there yet; `penstock run` makes it")
    return Finding("error", what, f"not there, and making it {reason}", fix)


def _actions(
    what: str,
    catalog: Catalog,
    publication: Publication | None,
    sinks: Mapping[str, SinkSettings],
) -> Iterator[Finding]:
    if publication is None:
        return
    published = {
        "insert": publication.inserts,
        "update": publication.updates,
        "delete": publication.deletes,
        "truncate": publication.truncates,
    }
    name = catalog.source.publication
    for sink_name, sink in sinks.items():
        if missed := [action for action in sink.actions if not published[action]]:
            actions = ", ".join(a for a, on in published.items() if on or a in missed)
            statement = sql.SQL("ALTER PUBLICATION {} SET (publish = {})").format(
                sql.Identifier(name), sql.Literal(actions)
            )
            message = f"does not publish {', '.join(missed)}, which sink {sink_name} needs"
            yield Finding("error", f"{what}: publication {name}", message, catalog.text(statement))


def _slot(
    what: str, catalog: Catalog, recover: str | None, lost: SetupError | None
) -> Iterator[Finding]:
    server, slot = catalog.server, catalog.slot()
    what = f"{what}: slot {catalog.source.slot}"
    if slot is None and server.slots >= server.max_slots:
        yield _error(what, slots_exhausted(catalog))
    elif slot is None and lost is not None:
        yield _error(what, lost.recovered_by(recover))
    elif slot is None:
        yield Finding("ok", what, "not there yet; `penstock run` makes it")
    elif (fault := slot_fault(catalog, slot)) is not None:
        # A pipeline that is running is the likeliest reader, and no fault.
        level: Literal["warning", "error"] = "warning" if fault.code == "slot_in_use" else "error"
        fix = fault.recovered_by(recover).remedy
        if fault.code == "slot_in_use":
            fix = f"None, if that is your `penstock run`. Otherwise: {fix}"
        yield Finding(level, what, fault.message, fix)
    else:
        held = slot.retained_bytes or 0
        message = f"confirmed up to {slot.confirmed_flush_lsn}, holds {held:,} bytes of WAL"
        if slot.wal_status == "unreserved":
            fix = "start `penstock run`, or raise max_slot_wal_keep_size"
            yield Finding("warning", what, f"{message}, and is about to be invalidated", fix)
        elif held > _MUCH_WAL:
            fix = "start `penstock run`, or drop the slot if nothing needs it any more"
            yield Finding("warning", what, message, fix)
        else:
            yield Finding("ok", what, message)
    if (slot is None or not slot.active) and server.senders >= server.max_senders:
        fix = f"ALTER SYSTEM SET max_wal_senders = {server.max_senders + 5}; then restart Postgres"
        yield Finding("error", what, f"all {server.max_senders} WAL senders are taken", fix)


def _tables(
    what: str, catalog: Catalog, relations: Sequence[TableInfo], selected: Sequence[TableInfo]
) -> Iterator[Finding]:
    for message, hint in missing_tables(catalog, relations):
        yield Finding("error", what, message + hint, "correct `tables` of the source")
    schemas = catalog.schemas()
    for pattern in catalog.source.patterns:
        if pattern.table is not None:
            continue
        if pattern.schema not in schemas:
            message = f"there is no schema {pattern.schema}{nearest(pattern.schema, schemas)}"
            yield Finding("error", what, message, "correct `tables` of the source")
        elif not any(pattern.matches(table.schema, table.name) for table in selected):
            yield Finding("warning", what, f"{pattern} matches no table yet")
    for table in selected:
        if table.is_partition:
            message = f"{table} is a partition, whose changes come under the name {table.root}"
            yield Finding("warning", what, message, f"put {table.root} into `tables` instead")


def _tables_of_sinks(
    catalog: Catalog,
    relations: Sequence[TableInfo],
    selected: Sequence[TableInfo],
    sinks: Mapping[str, SinkSettings],
) -> Iterator[Finding]:
    """Look for tables that a sink names itself and that are not there: it would get nothing of them."""
    partitions = {(r.schema, r.name): r.root for r in relations if r.is_partition}
    for name, sink in sinks.items():
        what, fix = f"sink {name}", "correct `tables` of the sink"
        # What the source names as well, the source has reported.
        own = [p for p in sink.patterns or () if p not in catalog.source.patterns]
        for message, hint in missing_tables(catalog, relations, own):
            yield Finding("error", what, message + hint, fix)
        for pattern in own:
            if any(pattern.matches(table.schema, table.name) for table in selected):
                continue
            if pattern.table is None:
                yield Finding("warning", what, f"{pattern} matches no table yet")
            elif root := partitions.get((pattern.schema, pattern.table)):
                message = f"{pattern} is a partition, whose changes come under the name {root}"
                yield Finding("error", what, message, f"put {root} into `tables` instead")
