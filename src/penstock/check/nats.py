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
    source: str, sink: NatsSinkSettings, tables: list[_TableName], name: str
) -> Iterator[Finding]:
    """Check a cluster, and the subjects of a sink's template and of the rules of its route.

    `name` is the sink's, the consumer's or the pipeline's.
    """
    for number, template in enumerate(sink.templates):
        target = sink.model_copy(update={"subject": template})
        samples = subjects(source, target, tables)
        for finding in nats_check.inspect(target, samples, source=source, sink=name):
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

    A token with a row's key is `*`. Empty if the template needs other values of a message, which are
    not known yet.
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
                    known = values.get(variable)
                    text += ("\0" if known is None else escape(known)) + literal
                found.append(".".join("*" if "\0" in t else t for t in text.split(".")))
    return list(dict.fromkeys(found))
