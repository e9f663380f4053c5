"""`penstock check`: Java, the file, each source and sink, the store, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config.file import Config, NatsSinkSettings, load
from penstock.core.errors import ConfigError
from penstock.core.finding import Finding
from penstock.core.tables import matches_any
from penstock.sinks.nats.shared import shared_streams
from penstock.spark.java import inspect_java

_TableName = tuple[str, str]


@dataclass(slots=True)
class Report:
    """What was found; `config` is None if the file cannot be used."""

    findings: list[Finding] = field(default_factory=list)
    config: Config | None = None

    def count(self, level: str) -> int:
        """Return how many findings are of a level."""
        return sum(finding.level == level for finding in self.findings)


def inspect(path: Path, environ: Mapping[str, str] = os.environ) -> Report:
    """Look at everything that `path` configures."""
    report = Report([inspect_java(environ)])
    try:
        config = load(path, environ)
    except ConfigError as error:
        report.findings += [Finding("error", "configuration", line) for line in error.problems]
        return report
    report.config = config
    report.findings.append(Finding("ok", "configuration", f"{path} is understood"))
    report.findings += inspect_config(config, environ)
    return report


def inspect_config(config: Config, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Look at each source and its sinks, then at the store."""
    from penstock.check import postgres as inspection  # noqa: PLC0415 - its imports take a while

    for name, source in config.sources.items():
        sinks = config.sinks_of(name)
        yield from inspection.inspect(
            name, source, sinks,
            recover=config.recover_command(name), has_run=config.checkpoint_folder(name).is_dir(),
        )  # fmt: skip
        if not sinks:
            message = "no sink takes from it, so `penstock run` leaves it alone"
            yield Finding("warning", f"source {name}", message, "name it as a sink's `source`")
        tables = inspection.table_names(source)
        for sink_name, sink in sinks.items():
            if not isinstance(sink, NatsSinkSettings):
                continue
            for finding in inspect_nats(name, sink, tables):
                what = f"sink {sink_name}: {finding.subject}"
                yield Finding(finding.level, what, finding.message, finding.fix)
        yield from shared_streams(name, sinks)
        if any(sink.filter or sink.transform or sink.route for sink in sinks.values()):
            from penstock.check import expressions as check_expressions  # noqa: PLC0415 - with Spark's modules

            yield from check_expressions.inspect(source, sinks)
    for name, outbox in config.outboxes.items():
        from penstock.check import outbox as check_outbox  # noqa: PLC0415 - with Spark's modules

        yield from check_outbox.inspect(name, outbox, config, environ)
    if config.sources or config.store is not None:
        yield from inspect_store(config)


def inspect_nats(
    source: str, sink: NatsSinkSettings, tables: list[_TableName]
) -> Iterator[Finding]:
    """Look at a cluster, and at the subjects that a sink's template and the rules of its route give."""
    from penstock.sinks.nats import check as nats_check  # noqa: PLC0415

    rules = [] if sink.route is None or isinstance(sink.route, str) else list(sink.route)
    always = any(rule.when is None for rule in rules)
    templates = [rule.to for rule in rules] + ([] if always else [sink.subject])
    for number, template in enumerate(dict.fromkeys(templates)):
        target = sink.model_copy(update={"subject": template})
        samples = subjects(source, target, tables)
        for finding in nats_check.inspect(target, samples, source=source):
            of_subject = finding.subject.startswith("subject ")
            if number and not of_subject:
                continue  # reported already
            if of_subject and finding.level == "error" and isinstance(sink.route, str):
                message = f"{finding.message} (it is used where `route` gives nothing)"
                yield Finding("warning", finding.subject, message, finding.fix)
            else:
                yield finding


def inspect_store(config: Config) -> list[Finding]:
    """Look at the store; the embedded one is not started for that."""
    if config.store is not None:
        from penstock.check import streams as inspection  # noqa: PLC0415

        return inspection.inspect(config.store.get_secret_value(), config)
    from penstock.core.errors import EmbeddedError  # noqa: PLC0415
    from penstock.embedded.postgres import EmbeddedPostgres  # noqa: PLC0415
    from penstock.embedded.store import FOLDER  # noqa: PLC0415

    data = FOLDER / "store"
    try:
        EmbeddedPostgres(data).bin_dir  # noqa: B018 - raises where there is none
    except EmbeddedError as error:
        return [Finding("error", "store", str(error))]
    return [Finding("ok", "store", f"the embedded Postgres, in {data}")]


def subjects(source: str, sink: NatsSinkSettings, tables: list[_TableName]) -> list[str]:
    """Return the subjects of a sink for the tables that are there now.

    Empty if the template needs a message's values, which are not known yet.
    """
    from penstock.core.subject import escape  # noqa: PLC0415

    template = sink.template
    if any(v == "database" or v.startswith("record.") for v in template.variables):
        return []
    found = []
    for schema, table in tables:
        if sink.patterns is None or matches_any(sink.patterns, schema, table):
            for action in sink.actions:
                values = {"source": source, "schema": schema, "table": table, "action": action}
                text = template.literals[0]
                for variable, literal in zip(
                    template.variables, template.literals[1:], strict=True
                ):
                    text += escape(values[variable]) + literal
                found.append(text)
    return list(dict.fromkeys(found))
