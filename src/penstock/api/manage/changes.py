"""Changes of entities in the desired state, as the endpoints ask for them; all of it blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from penstock.api.manage import etags
from penstock.api.manage.context import Context
from penstock.api.manage.secrets import restored
from penstock.api.problems import Problem
from penstock.config.document import Spec, not_storable
from penstock.config.strict import NAME_RULE, is_name
from penstock.core.errors import ConfigError, Mistake
from penstock.core.text import dotted
from penstock.desired.configured import text_of, validated
from penstock.desired.consequences import with_consequences
from penstock.desired.entities import Change, Door, Entity, Snapshot
from penstock.desired.plan import Plan, PlannedChange, field_changes
from penstock.desired.state import StateMoved

_TRIES: Final = 5


class Changed(NamedTuple):
    """What came of a change; `planned` is None where nothing differs."""

    before: Entity | None
    after: Entity | None
    planned: PlannedChange | None
    warnings: tuple[str, ...] = ()


class Asked(NamedTuple):
    """A change that a request asks for.

    Attributes:
        kind: The entity's kind.
        name: Its name.
        headers: The request's, for `If-Match` and `If-None-Match`.
        by: The token's name.
        door: Whether it came by the API or by the console.
        dry_run: Whether nothing is written.
    """

    kind: str
    name: str
    headers: Mapping[str, str]
    by: str
    door: Door
    dry_run: bool


def planned_with(context: Context, plan: Plan, snapshot: Snapshot) -> Plan:
    """Return a plan with its consequences and with what its check against the sources warns of.

    Raises `ConfigError`, and nothing of it may be applied then.
    """
    plan = with_consequences(context.store, plan, os.environ)
    sinks = any(p.change.kind == "sink" and p.change.after is not None for p in plan.changes)
    if not sinks:
        return plan
    return replace(plan, warnings=(*plan.warnings, *context.inspect(plan, snapshot)))


def put(
    context: Context, asked: Asked, spec_of: Callable[[Spec | None], Mapping[str, Any]]
) -> Changed:
    """Create or replace an entity; `spec_of` gives its spec from the one that it has.

    Masks in it stand for the secrets that the entity has. Raises `Problem`.
    """
    key = asked.kind, asked.name

    def change(snapshot: Snapshot, old: Entity | None) -> PlannedChange | None:
        if old is None and not is_name(asked.name):
            raise _invalid([("name", f"{asked.name!r} is not a name: expected {NAME_RULE}")])
        before = None if old is None else old.spec
        spec = restored(asked.kind, spec_of(before), before)
        if wrong := [dotted(path) for path in not_storable(spec, ())]:
            raise _invalid([(each, "a NUL character: remove it") for each in wrong])
        if spec == before:
            return None
        _check(snapshot, Change(*key, before, spec))
        fields = () if before is None else tuple(field_changes(asked.kind, before, spec))
        taken_from = old.managed_by if old is not None and old.managed_by == "file" else None
        version = 0 if old is None else old.version
        return PlannedChange(Change(*key, before, spec), version, fields, taken_from)

    return _write(context, asked, change)


def delete(context: Context, asked: Asked) -> Changed:
    """Delete an entity; raises `Problem`, of what others refer to also."""

    def change(snapshot: Snapshot, old: Entity | None) -> PlannedChange:
        if old is None:
            raise _missing(asked)
        gone = Change(*old.key, old.spec, None)
        _check(snapshot, gone)
        return PlannedChange(gone, old.version)

    return _write(context, asked, change)


def _write(
    context: Context,
    asked: Asked,
    change: Callable[[Snapshot, Entity | None], PlannedChange | None],
) -> Changed:
    """Read the state, change it where it is still as it was read, or begin anew."""
    key = asked.kind, asked.name
    what = f"{asked.kind} {asked.name!r}"
    for _ in range(_TRIES):
        snapshot = context.state.read()
        old = snapshot.entities.get(key)
        etags.check(asked.headers, None if old is None else old.version, what)
        planned = change(snapshot, old)
        if planned is None:
            return Changed(old, old, None)
        try:
            plan = planned_with(context, Plan(snapshot.version, (planned,)), snapshot)
        except ConfigError as error:
            raise _invalid([_placed(asked, each) for each in error.mistakes]) from None
        (planned,) = plan.changes
        if asked.dry_run:
            return Changed(old, old, planned, plan.warnings)
        try:
            after = context.state.write(
                [planned.change],
                by=asked.by,
                door=asked.door,
                expected={key: planned.version},
            )
        except StateMoved:
            continue
        return Changed(old, after.entities.get(key), planned, plan.warnings)
    raise Problem(
        409, f"Others change {what} all the time: try again.", headers={"Retry-After": "1"}
    )


def _placed(asked: Asked, mistake: str | Mistake) -> tuple[str, str]:
    """Return the key of the entity that a mistake concerns, and the mistake."""
    if isinstance(mistake, Mistake):
        (kind, name, path), reason = mistake
        if path and (kind, name) == (asked.kind, asked.name):
            return path, reason
    return "body", str(mistake)


def _missing(asked: Asked) -> Problem:
    return Problem(404, f"There is no {asked.kind} {asked.name!r}.")


def _check(snapshot: Snapshot, change: Change) -> None:
    """Raise `Problem` where a change makes an entity unusable that was not so before."""
    known = {
        key: spec
        for key, spec in snapshot.specs.items()
        # Of very many consumers only those that the change concerns.
        if key[0] != "consumer" or change.name in (key[1], spec.get("stream"), spec.get("target"))
    }
    specs = {key: spec for key, spec in known.items() if key != change.key}
    if change.after is not None:
        specs[change.key] = change.after
    found = validated(specs, os.environ)[1]
    own = [(dotted(path) or "body", message) for key, path, message in found if key == change.key]
    if own:
        raise _invalid(own)
    if not found:
        return
    before = validated(known, os.environ)[1]
    others = [problem for problem in found if problem not in before]
    if others:
        texts = list(map(text_of, others))
        detail = f"is needed as it is: {'; '.join(texts)}."
        if change.after is None:
            users = dict.fromkeys(" ".join(key) for key, _, _ in others)
            detail = (
                f"is needed by {', '.join(users)}: delete these first, or have them name another."
            )
        raise Problem(409, f"{change.kind} {change.name!r} {detail}", more={"conflicts": texts})


def _invalid(errors: Sequence[tuple[str, str]]) -> Problem:
    texts = [text if field == "body" else f"{field}: {text}" for field, text in errors]
    return Problem(422, f"{'; '.join(texts).rstrip('.')}.", errors)
