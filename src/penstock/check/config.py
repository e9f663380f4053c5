"""`penstock check`: Java, the file, each source and sink, the store, before anything starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.check import expressions, postgres, records, streams, syncs
from penstock.check import outbox as outboxes
from penstock.check.nats import inspect_nats
from penstock.check.targets import inspect_target
from penstock.config.document import Key
from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.core.errors import ConfigError, EmbeddedError, StoreError
from penstock.core.finding import Finding
from penstock.core.record_forms import SYNCS
from penstock.desired.with_file import configured
from penstock.embedded.bastions import completed_bastions
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.store import FOLDER
from penstock.sinks.nats.shared import shared_streams
from penstock.spark.java import inspect_java


@dataclass(slots=True)
class Report:
    """What was found; `config` is None if the file cannot be used."""

    findings: list[Finding] = field(default_factory=list)
    config: Config | None = None

    def count(self, level: str) -> int:
        """Return how many findings are of a level."""
        return sum(finding.level == level for finding in self.findings)


def inspect(
    path: Path, environ: Mapping[str, str] = os.environ, store: str | None = None
) -> Report:
    """Check all that a run with the file `path` would have, over the file's store or another one."""
    report = Report([inspect_java(environ)])
    try:
        found = configured(path, store, environ)
    except ConfigError as error:
        report.findings += [Finding("error", "configuration", line) for line in error.problems]
        return report
    report.config = found.config
    what = f"{path} is valid" if path.exists() else "no file, the desired state of the store"
    report.findings.append(Finding("ok", "configuration", what))
    report.findings += refusals(found.refused)
    if isinstance(found.failure, EmbeddedError):
        report.findings.append(Finding("error", "store", str(found.failure)))
    report.findings += inspect_config(found.config, environ)
    return report


def refusals(refused: Mapping[Key, str]) -> list[Finding]:
    """Return the findings of entities that can't be used in this environment."""
    fix = "correct it, or set what it needs in this environment"
    return [
        Finding("error", f"{kind} {name}", f"it can't be used here: {reason}", fix)
        for (kind, name), reason in refused.items()
    ]


def inspect_config(config: Config, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check each source and its sinks, the targets, then the store."""
    bastions = config.bastions()
    with contextlib.suppress(StoreError, EmbeddedError):  # `inspect_store` reports them
        bastions = completed_bastions(config)
        config = config.reached_by(bastions)
    for name, source in config.sources.items():
        sinks = config.sinks_of(name)
        found = records.inspect(source) if name == SYNCS else None
        if found is not None:
            yield found
        else:
            yield from postgres.inspect(
                name, source, sinks,
                recover=config.recover_command(name),
                has_run=config.checkpoint_folder(name).is_dir(),
            )  # fmt: skip
        if not sinks:
            message = "no sink takes from it, so `penstock run` leaves it alone"
            yield Finding("warning", f"source {name}", message, "name it as a sink's `source`")
        tables = postgres.table_names(source) if found is None else records.TABLES
        for sink_name, sink in sinks.items():
            if not isinstance(sink, NatsSinkSettings):
                continue
            if sink.kind == "rows" and sink.actions == ("delete",) and not sink.deletes:
                message = (
                    "it takes deletes alone, which kind rows leaves out: it sends backfills alone"
                )
                fix = "set `deletes: true`, or name more in `actions`"
                yield Finding("warning", f"sink {sink_name}", message, fix)
            for finding in inspect_nats(name, sink, tables, sink_name):
                what = f"sink {sink_name}: {finding.subject}"
                yield Finding(finding.level, what, finding.message, finding.fix)
        consumers = config.nats_consumers_of(name)
        for consumer_name, sink in consumers.items():
            for finding in inspect_nats(name, sink, tables, consumer_name):
                what = f"consumer {consumer_name}: {finding.subject}"
                yield Finding(finding.level, what, finding.message, finding.fix)
        yield from shared_streams(name, sinks, consumers)
        expressed = any(sink.filter or sink.transform or sink.route for sink in sinks.values())
        if found is None and expressed:
            yield from expressions.inspect(source, sinks)
        filters = {
            consumer_name: consumer.filters.sql
            for consumer_name, consumer in (config.consumers | config.nats_consumers).items()
            if consumer.stream in sinks and consumer.filters.sql is not None
        }
        if filters:
            yield from expressions.inspect_filters(name, source, filters)
    for name, target in config.targets.items():
        yield from inspect_target(name, target, config, bastions.get(name))
    yield from syncs.inspect(config)
    for name, outbox in config.outboxes.items():
        yield from outboxes.inspect(name, outbox, config, environ)
    if config.sources or config.store is not None:
        yield from inspect_store(config)


def inspect_store(config: Config) -> list[Finding]:
    """Check the store; the embedded one is not started for that."""
    if config.store is not None:
        return streams.inspect(config.store.get_secret_value(), config)
    data = FOLDER / "store"
    try:
        EmbeddedPostgres(data).bin_dir  # noqa: B018 - raises where there is none
    except EmbeddedError as error:
        return [Finding("error", "store", str(error))]
    return [Finding("ok", "store", f"the embedded Postgres, in {data}")]
