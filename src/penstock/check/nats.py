"""Checks what a NATS sink needs: its cluster, and the subjects that it publishes to."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.sinks import NatsSinkSettings
from penstock.core.finding import Finding
from penstock.core.subject_token import escape
from penstock.core.tables import matches_any
from penstock.sinks.nats import check as nats_check

_TableName = tuple[str, str]


def inspect_nats(
    source: str, sink: NatsSinkSettings, tables: list[_TableName]
) -> Iterator[Finding]:
    """Check a cluster, and the subjects of a sink's template and of the rules of its route."""
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


def subjects(source: str, sink: NatsSinkSettings, tables: list[_TableName]) -> list[str]:
    """Return the subjects of a sink for the tables that are there now.

    Empty if the template needs a message's values, which are not known yet.
    """
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
