"""The desired state as a file that plans as empty; secrets are variables in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml

from penstock.config import STORE_VARIABLE
from penstock.config.models import SECTIONS, type_of
from penstock.config.secret_values import secrets
from penstock.config.yaml_lines import replaced, variables
from penstock.core.text import Path, dotted
from penstock.desired.entities import Snapshot
from penstock.desired.variables import stored_secrets

_SETTINGS: Final = ("store", "spark")


def exported(snapshot: Snapshot, settings: Mapping[str, Any]) -> str:
    """Return a file of the state; `settings` is the raw root of the file that names the store.

    Of that the file takes what is a process's own: `store`, `spark` and the sources of type outbox.
    Comments at its end list the variables that it names.
    """
    needed: dict[str, str] = {}
    by_entity: dict[tuple[str, str], dict[Path, str]] = {}
    for secret in stored_secrets(snapshot):
        by_entity.setdefault(secret.key, {})[secret.path] = f"${{{secret.variable}}}"
        needed[secret.variable] = f"{' '.join(secret.key)}: {dotted(secret.path)}"
    root: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS.values()}
    for key in sorted(snapshot.entities):
        entity = snapshot.entities[key]
        spec = replaced(entity.spec, by_entity.get(key, {}))
        for name in _variables(spec):
            needed.setdefault(name, f"{' '.join(key)}")
        root[SECTIONS[entity.kind]][entity.name] = _typed_first(spec)
    own = _own(settings, needed)
    root["sources"] |= own.pop("sources", {})
    document = {section: part for section, part in root.items() if part} | own
    text = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000
    )  # fmt: skip
    if needed:
        width = max(map(len, needed))
        lines = [f"#   {name:{width}}  {of}" for name, of in needed.items()]
        text += "\n".join(["", "# Variables to set:", *lines, ""])
    return text


def _own(settings: Mapping[str, Any], needed: dict[str, str]) -> dict[str, Any]:
    own = {key: settings[key] for key in _SETTINGS if key in settings}
    if "store" in own:
        if isinstance(own["store"], str) and any(True for _ in secrets("", {"url": own["store"]})):
            own["store"] = f"${{{STORE_VARIABLE}}}"
        for name in _variables(own["store"]):
            needed.setdefault(name, "store")
    sources = settings.get("sources")
    for name, spec in sources.items() if isinstance(sources, dict) else ():
        if type_of("source", spec) != "outbox":
            continue
        words = f"SOURCE_{name}_URL".upper().replace("-", "_")
        hidden = {path: f"${{{words}}}" for path, _ in secrets("source", spec)}
        spec = replaced(spec, hidden)  # noqa: PLW2901 - the same without its secrets
        own.setdefault("sources", {})[name] = spec
        for variable in _variables(spec):
            needed.setdefault(variable, f"source {name}")
    return own


def _typed_first(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in an order to read: a `jsonb` has lost the user's."""
    first = [key for key in ("type", "source", "stream", "url") if key in spec]
    return {key: spec[key] for key in (*first, *(key for key in spec if key not in first))}


def _variables(value: Any) -> list[str]:
    if isinstance(value, str):
        return variables(value)
    parts = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple):
        return []
    return [name for part in parts for name in _variables(part)]


_Base: Final = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where PyYAML has it: thousands of entities take it a quarter of the time."""


class _Dumper(_Base):  # type: ignore[misc,valid-type]  # one of two, as installed
    """Writes texts of several lines as blocks, and repeats what is alike: no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - as in the base
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)
