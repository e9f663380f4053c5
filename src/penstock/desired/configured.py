"""The configuration that the desired state comes to, in one process's environment.

Entities are validated as the file's are, by the same models and rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from penstock.config.document import Key, Spec
from penstock.config.models import SECTIONS
from penstock.config.reader import Parts, Reader
from penstock.config.settings import Config
from penstock.config.yaml_lines import Document, filled
from penstock.core.errors import ConfigError
from penstock.core.text import Path, dotted
from penstock.desired.entities import Snapshot

_KINDS: Final = {section: kind for kind, section in SECTIONS.items()}

Problem = tuple[Key, Path, str]
"""An entity, the path of the key below it, and what is wrong there."""


def config_of(snapshot: Snapshot, environ: Mapping[str, str], base: Config) -> Config:
    """Return the configuration of a snapshot; `base` gives the store, Spark and the outboxes.

    Raises `ConfigError`, a line for each mistake with the entity and the key.
    """
    parts, problems = validated(snapshot.specs, environ)
    if problems:
        raise ConfigError([text_of(problem) for problem in problems])
    return _config(parts, base).read_at(snapshot.version).identified(_ids(snapshot))


def usable_config(
    snapshot: Snapshot, environ: Mapping[str, str], base: Config
) -> tuple[Config, dict[Key, str]]:
    """Return the configuration of those entities that can be used, and why others can't.

    What refers to an entity that can't be used can't be either.
    """
    config, refused = usable(snapshot.specs, environ, base)
    return config.read_at(snapshot.version).identified(_ids(snapshot)), refused


def usable(
    specs: Mapping[Key, Spec], environ: Mapping[str, str], base: Config
) -> tuple[Config, dict[Key, str]]:
    """Return the same of entities by their specs."""
    refused: dict[Key, str] = {}
    while True:
        parts, problems = validated(specs, environ)
        if not problems:
            return _config(parts, base), refused
        for key, path, message in problems:
            text = f"{dotted(path)}: {message}" if path else message
            refused[key] = f"{refused[key]}; {text}" if key in refused else text
        specs = {key: spec for key, spec in specs.items() if key not in refused}


def validated(specs: Mapping[Key, Spec], environ: Mapping[str, str]) -> tuple[Parts, list[Problem]]:
    """Validate entities, each by itself and all beside each other; nothing is raised."""
    document = Document()
    root: dict[str, dict[str, Any]] = {}
    for (kind, name), spec in specs.items():
        section = SECTIONS[kind]
        root.setdefault(section, {})[name] = filled(spec, environ, (section, name), document)
    document.value = root
    reader = Reader(document)
    parts = reader.entities()
    assert parts is not None  # noqa: S101 - the root is a mapping
    reader.references(parts)
    found: list[Problem] = []
    for _, path, message in document.problems:
        found.append(((_KINDS[str(path[0])], str(path[1])), path[2:], message))
    return parts, found


def text_of(problem: Problem) -> str:
    """Return a mistake as a line: `sink orders: tables[0]: …`."""
    (kind, name), path, message = problem
    return f"{kind} {name}: {dotted(path)}: {message}" if path else f"{kind} {name}: {message}"


def _ids(snapshot: Snapshot) -> dict[str, UUID]:
    return {name: entity.id for name, entity in snapshot.of_kind("sync").items()}


def _config(parts: Parts, base: Config) -> Config:
    config = base.model_copy(
        update={
            "sources": parts.sources,
            "sinks": parts.sinks,
            "consumers": parts.consumers,
            "nats_consumers": parts.nats_consumers,
            "targets": parts.targets,
            "providers": parts.providers,
            "credentials": parts.credentials,
            "syncs": parts.syncs,
        }
    )
    config.join()
    return config
