"""The desired state as a file that plans as empty; secrets are variables in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.config import STORE_VARIABLE
from penstock.config.models import SECTIONS, type_of
from penstock.config.secret_values import secrets
from penstock.config.yaml_lines import replaced, variables
from penstock.core.text import Path, dotted
from penstock.desired.entities import Snapshot
from penstock.desired.variables import stored_secrets
from penstock.desired.yaml_text import yaml_of

_SETTINGS: Final = ("store", "spark")
_FIRST: Final = ("type", "source", "stream", "url")
_MOST_NAMED: Final = 3

_Needed = dict[str, dict[str, None]]
"""What names each variable, in the order of the file."""


def exported(snapshot: Snapshot, settings: Mapping[str, Any]) -> str:
    """Return a file of the state; `settings` is the raw root of the file that names the store.

    Of that the file takes what is a process's own: `store`, `spark` and the sources of type outbox.
    Comments at its end list the variables that it names, and what names each.
    """
    needed: _Needed = {}
    by_entity: dict[tuple[str, str], dict[Path, str]] = {}
    for secret in stored_secrets(snapshot):
        by_entity.setdefault(secret.key, {})[secret.path] = f"${{{secret.variable}}}"
        _note(needed, secret.variable, f"{' '.join(secret.key)}: {dotted(secret.path)}")
    root: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS.values()}
    for key in sorted(snapshot.entities):
        entity, hidden = snapshot.entities[key], by_entity.get(key)
        spec = replaced(entity.spec, hidden) if hidden else entity.spec
        for name in _variables(spec):
            if hidden is None or f"${{{name}}}" not in hidden.values():
                _note(needed, name, " ".join(key))
        root[SECTIONS[entity.kind]][entity.name] = _typed_first(spec)
    own = _own(settings, needed)
    root["sources"] |= own.pop("sources", {})
    document = {section: part for section, part in root.items() if part} | own
    text = yaml_of(document)
    if needed:
        width = max(map(len, needed))
        lines = [f"#   {name:{width}}  {_listed(list(of))}" for name, of in needed.items()]
        text += "\n".join(["", "# Variables to set:", *lines, ""])
    return text


def _note(needed: _Needed, variable: str, what: str) -> None:
    needed.setdefault(variable, {})[what] = None


def _listed(names: Sequence[str]) -> str:
    """Return what names a variable: all of it, or the first and how many more there are."""
    if len(names) <= _MOST_NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:_MOST_NAMED])} and {len(names) - _MOST_NAMED} more"


def _own(settings: Mapping[str, Any], needed: _Needed) -> dict[str, Any]:
    own = {key: settings[key] for key in _SETTINGS if key in settings}
    if "store" in own:
        if isinstance(own["store"], str) and any(True for _ in secrets("", {"url": own["store"]})):
            own["store"] = f"${{{STORE_VARIABLE}}}"
        for name in _variables(own["store"]):
            _note(needed, name, "store")
    sources = settings.get("sources")
    for name, spec in sources.items() if isinstance(sources, dict) else ():
        if type_of("source", spec) != "outbox":
            continue
        words = f"SOURCE_{name}_URL".upper().replace("-", "_")
        hidden = {path: f"${{{words}}}" for path, _ in secrets("source", spec)}
        spec = replaced(spec, hidden)  # noqa: PLW2901 - the same without its secrets
        own.setdefault("sources", {})[name] = spec
        for variable in _variables(spec):
            _note(needed, variable, f"source {name}")
    return own


def _typed_first(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in an order to read: a `jsonb` has lost the user's."""
    return {key: spec[key] for key in _FIRST if key in spec} | dict(spec)


def _variables(value: Any) -> Sequence[str]:
    found: list[str] = []
    left = [value]
    while left:
        value = left.pop()
        kind = type(value)
        if kind is str:
            if "${" in value:
                found += variables(value)
        elif kind is dict:
            left += reversed(value.values())
        elif kind is list or kind is tuple:
            left += reversed(value)
    return found
