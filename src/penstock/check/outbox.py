"""Checks a database's outboxes: the schema tide, the role's rights, and each pipeline's settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping

from psycopg import sql

from penstock.check import streams
from penstock.check.nats import inspect_nats
from penstock.config.settings import Config
from penstock.config.sources import OutboxSource, PostgresSource
from penstock.core import queries
from penstock.core.connect import address
from penstock.core.errors import CaptureError, PipelineError, SinkError
from penstock.core.finding import Finding
from penstock.core.health import Failure
from penstock.outbox.inbox.settings import durable_name, read_settings
from penstock.outbox.pipelines import InboxPipeline, find, find_inboxes, source_name
from penstock.outbox.relay.desired_state import GroupPlanner
from penstock.outbox.settings import OutboxSinkSettings
from penstock.outbox.sql.catalog import find_schema, version_of
from penstock.outbox.sql.install import DIGEST, VERSION, version_fault
from penstock.postgres.admin import Catalog, open_catalog
from penstock.postgres.setup import server_fault
from penstock.sinks.nats.client import connect_first
from penstock.sinks.nats.shared import shared_streams_of_outboxes

_SQL = queries.load("penstock.check", "outbox.sql")


def inspect(
    name: str, source: OutboxSource, config: Config, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Check all that a relay of `source` needs; `environ` gives `${env:NAME}` of its pipelines."""
    what = f"source {name}"
    url = source.address
    database = PostgresSource(type="postgres", url=source.url, tables=("tide.*",))
    try:
        with open_catalog(database.behind(source.reached)) as catalog:
            yield from _server(what, catalog, url)
            schema = list(_schema(what, catalog))
            yield from schema
            if all(finding.level == "ok" for finding in schema):
                yield from _pipelines(what, source, catalog, config, environ)
    except CaptureError as error:
        yield Finding("error", what, error.message, error.remedy)
        return
    if config.store is None:
        for finding in streams.inspect(url, config):
            yield dataclasses.replace(finding, subject=f"{what}: {finding.subject}")


def _server(what: str, catalog: Catalog, url: str) -> Iterator[Finding]:
    server = catalog.server
    if fault := server_fault(catalog):
        yield Finding("error", what, fault.message, fault.remedy)
    else:
        message = f"Postgres {server.version} at {address(url)}, wal_level logical"
        yield Finding("ok", what, f"{message}, role {server.role} may replicate")


def _schema(what: str, catalog: Catalog) -> Iterator[Finding]:
    what = f"{what}: schema tide"
    schema = find_schema(catalog.connection)
    install = "penstock outbox install --url …"
    if not schema.installed:
        yield Finding("error", what, f"it is not in database {schema.database}", install)
        return
    if not schema.readable or not _may_relay(catalog):
        role = sql.Literal(schema.role).as_string(catalog.connection)
        message = f"role {schema.role} may not relay: it lacks rights in it"
        fix = f"as the role {schema.owner}: select tide.relay_grant({role})"
        yield Finding("error", what, message, fix)
        return
    found = version_of(catalog.connection)
    if (fault := version_fault(found)) is not None:
        yield Finding("error", what, *fault)
    elif found is not None and found[1] != DIGEST:
        message = f"it has version {VERSION}, with functions of another Penstock"
        yield Finding("error", what, message, install)
    else:
        yield Finding("ok", what, f"version {VERSION}, role {schema.role} may relay")


def _may_relay(catalog: Catalog) -> bool:
    row = catalog.connection.execute(_SQL["may_relay"]).fetchone()
    return bool(row and row[0])


def _pipelines(
    what: str,
    source: OutboxSource,
    catalog: Catalog,
    config: Config,
    environ: Mapping[str, str],
) -> Iterator[Finding]:
    only = source.relay_group
    rows = [p for p in find(catalog.connection) if only in (None, p.relay_group)]
    into = [p for p in find_inboxes(catalog.connection) if only in (None, p.relay_group)]
    if not (any(p.enabled for p in rows) or any(p.enabled for p in into)):
        message, fix = "no pipeline is enabled", "select tide.relay_enable('…')"
        yield Finding("warning", what, message, fix)
    url, database = source.address, catalog.server.database
    planner = GroupPlanner(url, database, url, config.spark, source_name)
    # Also one that is disabled: what is wrong with it is better known before it is enabled.
    planned = planner.plan([dataclasses.replace(p, enabled=True) for p in rows], environ)
    sinks: dict[str, OutboxSinkSettings] = {}
    for row in rows:
        group = planned[row.relay_group]
        failure = (group.paused | group.left_out).get(row.pipeline)
        title = f"{what}: pipeline {row.pipeline}"
        yield _settings(title, row.pipeline, row.enabled, failure)
        sink = group.sinks.get(row.pipeline)
        if failure is None and row.enabled and isinstance(sink, OutboxSinkSettings):
            sinks[row.pipeline] = sink
            for finding in inspect_nats(group.source, sink, [], row.pipeline):
                yield dataclasses.replace(finding, subject=f"{title}: {finding.subject}")
    for finding in shared_streams_of_outboxes(sinks):
        yield dataclasses.replace(finding, subject=f"{what}: {finding.subject}")
    for pipeline in into:
        yield from _inbox(f"{what}: pipeline {pipeline.pipeline}", pipeline, database, environ)


def _settings(title: str, name: str, enabled: bool, failure: Failure | None) -> Finding:
    """Return the finding of a pipeline's config, enabled or not."""
    if failure is not None:
        message = f"{failure.cause} ({failure.code})"
        return Finding("error" if enabled else "warning", title, message, failure.remedy)
    if not enabled:
        message = "its config is valid, and it is disabled: its outbox keeps the messages"
        return Finding("ok", title, message, f"select tide.relay_enable('{name}')")
    return Finding("ok", title, "its config is valid, and it is enabled")


def _inbox(
    title: str, pipeline: InboxPipeline, database: str, environ: Mapping[str, str]
) -> Iterator[Finding]:
    failure, settings = None, None
    try:
        durable = durable_name(pipeline.system, database, pipeline.pipeline)
        settings = read_settings(pipeline.config, durable, environ)
    except PipelineError as error:
        failure = Failure.by(error)
    yield _settings(title, pipeline.pipeline, pipeline.enabled, failure)
    if settings is not None and pipeline.enabled:
        subject = f"{title}: nats {settings.nats.safe_url}"
        try:
            connection = connect_first(settings.nats, "penstock check")
        except SinkError as error:
            yield Finding("error", subject, error.message, error.remedy)
        else:
            connection.close()
            yield Finding("ok", subject, f"reachable and logged in: {connection.server}")
