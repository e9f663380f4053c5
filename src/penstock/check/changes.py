"""Checks what a plan changes against the sources, as far as that needs no Spark."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.check import expressions
from penstock.core.errors import CaptureError, ConfigError, Mistake
from penstock.core.finding import Finding
from penstock.desired.configured import validated
from penstock.desired.entities import Snapshot
from penstock.desired.plan import Plan
from penstock.streams.bastions import reachable
from penstock.streams.store import Store


def inspect_plan(
    plan: Plan, snapshot: Snapshot, environ: Mapping[str, str], store: Store
) -> list[Finding]:
    """Check the filters, transforms and routes of the sinks that a plan makes or changes.

    Returns warnings, also one for each source that can't be reached. Raises `ConfigError` where an
    expression can't be planned: then nothing of the plan may be applied.
    """
    parts = validated(plan.applied_to(snapshot), environ)[0]
    changed = {
        planned.change.name
        for planned in plan.changes
        if planned.change.kind == "sink" and (planned.fields or planned.change.before is None)
    }
    found: list[Finding] = []
    for name, source in parts.sources.items():
        sinks = {n: s for n, s in parts.sinks.items() if n in changed and s.source == name}
        try:
            if sinks:
                found += expressions.findings(reachable(source, name, store), sinks)
        except CaptureError as error:
            message = f"its sinks' expressions are not checked: {error.message}"
            found.append(Finding("warning", f"source {name}", message, error.remedy))
    if errors := [finding for finding in found if finding.level == "error"]:
        raise ConfigError([_mistake(error) for error in errors])
    return [finding for finding in found if finding.level == "warning"]


def _mistake(error: Finding) -> Mistake:
    """Return what is wrong with a sink, and what to do."""
    assert error.mistake is not None  # noqa: S101 - each error in a sink's expressions has it
    concerns, reason = error.mistake
    return Mistake(concerns, f"{reason}: {error.fix}")
