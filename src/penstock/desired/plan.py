"""A plan: what a document would change in the desired state, field by field, and what follows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.config.document import ConfigDocument, Key, Spec
from penstock.config.models import SECTIONS
from penstock.config.secret_values import masked, secrets
from penstock.config.yaml_lines import Document, filled, replaced
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.text import Path, dotted
from penstock.desired.configured import Problem, text_of, validated
from penstock.desired.entities import Change, Door, Entity, Snapshot
from penstock.desired.variables import stored_variables

FORMAT: Final = 1
"""The version of a saved plan's form."""
_ORDER: Final = {kind: i for i, kind in enumerate(SECTIONS)}


class PlanFileError(PenstockError):
    """A saved plan can't be used."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__("invalid_plan", message, remedy=remedy)
        self._given = message, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A key of an entity that changes, its secrets masked; None is a key that is not there."""

    path: str
    before: Any
    after: Any
    secret: bool = False


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """A change of a plan; `version` is what the entity must have then, 0 if it must not be there.

    `taken_from` is who managed the entity until now, where that changes. `consequences` are in words,
    and `losses` those of them by which something is lost.
    """

    change: Change
    version: int
    fields: tuple[FieldChange, ...] = ()
    taken_from: Door | None = None
    consequences: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    @property
    def action(self) -> str:
        """`create`, `update`, `delete`, or `take over` where nothing but the manager changes."""
        if self.change.action == "update" and not self.fields:
            return "take over"
        return self.change.action

    def shown(self) -> dict[str, Any]:
        """Return the change as JSON, its secrets masked."""
        change = self.change
        result: dict[str, Any] = {"kind": change.kind, "name": change.name, "action": self.action}
        if change.action != "update":
            spec = change.after if change.before is None else change.before
            result["spec"] = masked(change.kind, spec or {})
        result["fields"] = [dataclasses.asdict(field) for field in self.fields]
        if self.taken_from is not None:
            result["taken_from"] = self.taken_from
        return result | {"consequences": list(self.consequences), "losses": list(self.losses)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be changed in the state of `version`.

    `kept` are the deletes that wait for `--prune`. `warnings` are what could not be checked, or what
    may not be meant.
    """

    version: int
    changes: tuple[PlannedChange, ...] = ()
    kept: tuple[PlannedChange, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do; deletes that wait for `--prune` are something."""
        return not self.changes and not self.kept

    @property
    def changes_nothing(self) -> bool:
        """Whether the entities stay as they are: at the most the file takes over some of them."""
        return not self.kept and all(of.action == "take over" for of in self.changes)

    @property
    def expected(self) -> dict[Key, int]:
        """The versions that the changed entities must have."""
        return {planned.change.key: planned.version for planned in self.changes}

    def applied_to(self, snapshot: Snapshot) -> dict[Key, Spec]:
        """Return the specs of all entities as they are once the plan is applied to a state."""
        return _applied(snapshot, [planned.change for planned in self.changes])

    def counts(self) -> dict[str, int]:
        """Return how many entities are created, updated, deleted and taken over."""
        actions = [planned.action for planned in self.changes]
        return {
            action: actions.count(action) for action in ("create", "update", "delete", "take over")
        }

    def shown(self) -> dict[str, Any]:
        """Return the plan as JSON for people and CI, its secrets masked."""
        return {
            "version": self.version,
            "changes": [planned.shown() for planned in self.changes],
            "kept": [planned.shown() for planned in self.kept],
            "warnings": list(self.warnings),
            "counts": self.counts(),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the plan as it is saved: with the secrets that the document has written out."""
        return {"penstock_plan": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> Plan:
        """Return a saved plan; raises `PlanFileError`."""
        if not isinstance(value, dict) or value.get("penstock_plan") != FORMAT:
            raise PlanFileError("This is no plan that this Penstock has saved.", "Plan anew.")
        try:
            return cls(
                int(value["version"]),
                tuple(map(_planned, value["changes"])),
                tuple(map(_planned, value["kept"])),
                tuple(map(str, value["warnings"])),
            )
        except (KeyError, TypeError, ValueError):
            raise PlanFileError("The saved plan is damaged.", "Plan anew.") from None


def _planned(value: Mapping[str, Any]) -> PlannedChange:
    return PlannedChange(
        Change(**value["change"]),
        int(value["version"]),
        tuple(FieldChange(**field) for field in value["fields"]),
        value["taken_from"],
        tuple(value["consequences"]),
        tuple(value.get("losses", ())),
    )


def plan_of(
    document: ConfigDocument,
    snapshot: Snapshot,
    *,
    prune: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Plan:
    """Return what a document changes in a state, without consequences.

    With `prune` the entities that the file manages and no longer names are deleted, otherwise they
    are in `kept`. Raises `ConfigError` where what comes out can't be used, by file, line and key.
    """
    changes = list(_changes(document, snapshot, environ))
    deletes = [
        PlannedChange(Change(*entity.key, entity.spec, None), entity.version)
        for entity in snapshot.entities.values()
        if entity.managed_by == "file" and entity.key not in document.entities
    ]
    done = sorted((*changes, *(deletes if prune else ())), key=_order)
    warnings = _check(document, snapshot, [planned.change for planned in done], environ)
    kept = () if prune else tuple(sorted(deletes, key=_order))
    return Plan(snapshot.version, tuple(done), kept, tuple(warnings))


def _order(planned: PlannedChange) -> tuple[int, int, str]:
    """Creates and updates by kind, then deletes the other way round."""
    kind = _ORDER.get(planned.change.kind, len(_ORDER))
    if planned.change.after is None:
        return 1, -kind, planned.change.name
    return 0, kind, planned.change.name


def _changes(
    document: ConfigDocument, snapshot: Snapshot, environ: Mapping[str, str]
) -> Iterator[PlannedChange]:
    known = {**stored_variables(snapshot, environ), **environ}
    for key, spec in document.entities.items():
        old = snapshot.entities.get(key)
        if old is None:
            yield PlannedChange(Change(*key, None, spec), 0)
            continue
        spec = _with_stored_secrets(old, spec, known)  # noqa: PLW2901 - the same but for these
        fields = tuple(field_changes(key[0], old.spec, spec))
        taken_from = old.managed_by if old.managed_by != "file" else None
        if fields or taken_from:
            yield PlannedChange(Change(*key, old.spec, spec), old.version, fields, taken_from)


def _with_stored_secrets(old: Entity, spec: Spec, environ: Mapping[str, str]) -> Spec:
    """Return `spec` with the secrets of the store where it names variables that hold just these."""
    if spec == old.spec:
        return spec
    same = {}
    for path, stored in secrets(old.kind, old.spec):
        given = _at(spec, path)
        if isinstance(given, str) and given != stored and "${" in given:
            value = _filled(given, environ)
            if value is not None and value == _filled(stored, environ):
                same[path] = stored
    return replaced(spec, same) if same else spec


def _filled(text: str, environ: Mapping[str, str]) -> str | None:
    document = Document()
    value = filled(text, environ, (), document)
    return None if document.problems else str(value)


def _at(value: Any, path: Path) -> Any:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def field_changes(kind: str, before: Spec, after: Spec) -> Iterator[FieldChange]:
    """Yield the keys in which two specs of an entity differ, secrets masked."""
    old, new = masked(kind, before), masked(kind, after)
    hidden = {path for spec in (before, after) for path, _ in secrets(kind, spec)}
    for path in _differing(before, after, ()):
        secret = any(path == h[: len(path)] or h == path[: len(h)] for h in hidden)
        yield FieldChange(dotted(path), _at(old, path), _at(new, path), secret)


def _differing(before: Any, after: Any, path: Path) -> Iterator[Path]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            if key not in before or key not in after:
                yield (*path, key)
            else:
                yield from _differing(before[key], after[key], (*path, key))
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        if list(before) != list(after):
            yield path
    elif before != after or isinstance(before, bool) != isinstance(after, bool):
        yield path


def _applied(snapshot: Snapshot, changes: Iterable[Change]) -> dict[Key, Spec]:
    specs = snapshot.specs
    for change in changes:
        if change.after is None:
            specs.pop(change.key, None)
        else:
            specs[change.key] = change.after
    return specs


def _api_remedy(key: Key, snapshot: Snapshot) -> str:
    """Return how to delete an entity that no file manages; nothing of one that a file does."""
    entity = snapshot.entities.get(key)
    if entity is None or entity.managed_by == "file":
        return ""
    kind, name = key
    return f". No file manages it: to delete it, DELETE /v1/{SECTIONS[kind]}/{name}"


def _check(
    document: ConfigDocument,
    snapshot: Snapshot,
    changes: Sequence[Change],
    environ: Mapping[str, str],
) -> list[str]:
    """Validate the state that comes out; return what is wrong of entities that nothing changes."""
    specs = _applied(snapshot, changes)
    changed = {change.key for change in changes}
    errors, warnings = [], []
    before: list[Problem] | None = None
    for problem in validated(specs, environ)[1]:
        key, path, message = problem
        if before is None:
            before = validated(snapshot.specs, environ)[1]
        if key in document.entities and key in changed:
            errors.append(document.problem(key, path, message))
        elif key in changed or problem not in before:
            errors.append(text_of(problem) + _api_remedy(key, snapshot))
        else:
            warnings.append(text_of(problem))
    if errors:
        raise ConfigError(errors)
    return warnings
