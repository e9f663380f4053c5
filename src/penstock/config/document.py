"""A configuration file as a document: its entities as they are written, beside its own settings.

Variables stay unresolved in the entities, so that each process fills them from its own environment;
they are filled here only to validate what they give. A Lua program or a manifest that a file holds is
read into its entity, as other machines lack the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.config import yaml_lines
from penstock.config.models import SECTIONS, type_of
from penstock.config.providers import AirbyteProvider
from penstock.config.reader import Parts, Reader
from penstock.config.settings import Config
from penstock.config.texts import Code
from penstock.core.text import Path, dotted

_KINDS: Final = {section: kind for kind, section in SECTIONS.items()}

Key = tuple[str, str]
"""Kind and name of an entity."""
Spec = Mapping[str, Any]
"""An entity's keys with their values, as the file has them, in JSON."""


@dataclass(frozen=True, slots=True)
class ConfigDocument:
    """What a file configures: `entities`, and in `base` the settings that are a process's own.

    `base` has the store, Spark and the sources of type outbox, and no entity.
    """

    file: str
    entities: Mapping[Key, Spec]
    base: Config
    lines: Mapping[Path, int]

    def problem(self, key: Key, path: Path, message: str) -> str:
        """Return a mistake of an entity as the file's reader reports it: file, line, key, text."""
        whole = (SECTIONS[key[0]], key[1], *path)
        nearest = whole
        while nearest and nearest not in self.lines:
            nearest = nearest[:-1]
        return f"{self.file}:{self.lines.get(nearest, 1)}: {dotted(whole)}: {message}"


def read_document(
    path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ
) -> ConfigDocument:
    """Read a file; raises `ConfigError` with all that is wrong in it.

    What an entity refers to may be elsewhere, so that is not checked here.
    """
    reader = Reader.of_file(path, environ)
    return _document(reader)


def document_of(text: str, environ: Mapping[str, str], name: str = "document") -> ConfigDocument:
    """Read a text that came without its file, `name` in errors; the same as `read_document`.

    No file is read for it.
    """
    return _document(Reader.of_text(text, environ, name))


def _document(reader: Reader) -> ConfigDocument:
    parts = reader.entities()
    entities: dict[Key, Spec] = {}
    if parts is not None:
        reader.settings(parts)
        entities = dict(_entities(reader.document.written, parts))
        for (kind, name), spec in entities.items():
            for where in not_storable(spec, (SECTIONS[kind], name)):
                reader.problem(where, "a NUL character, or half of a surrogate pair: remove it")
    reader.check()
    assert parts is not None  # noqa: S101 - for the type checker
    assert parts.spark is not None  # noqa: S101 - as above
    assert parts.store is not None  # noqa: S101 - as above
    base = Config(
        sources={}, sinks={}, outboxes=parts.outboxes, store=parts.store.store,
        records=parts.store.records, spark=parts.spark,
    )  # fmt: skip
    return ConfigDocument(reader.file, entities, base.read_from(reader.file), reader.document.lines)


def _entities(root: Any, parts: Parts) -> Iterator[tuple[Key, Spec]]:
    for section, kind in _KINDS.items():
        given = root.get(section)
        for name, spec in given.items() if isinstance(given, dict) else ():
            if kind == "source" and type_of(kind, spec) == "outbox":
                continue
            if isinstance(spec, dict):
                yield (kind, name), _with_text(spec, parts, (kind, name))


def _with_text(spec: dict[str, Any], parts: Parts, key: Key) -> Spec:
    """Return a spec with the texts of the files that it names, if it names any."""
    kind, name = key
    sink = parts.sinks.get(name) if kind == "sink" else None
    if sink is not None and sink.transform is not None:
        transform = _with_code(spec["transform"], "lua", sink.transform.lua)
        return {**spec, "transform": transform}
    provider = parts.providers.get(name) if kind == "provider" else None
    if isinstance(provider, AirbyteProvider):
        return _with_code(spec, "manifest", provider.manifest)
    return spec


def _with_code(spec: Spec, key: str, code: Code | None) -> Spec:
    if code is None or not code.file:
        return spec
    return {**spec, key: {"file": code.file, "code": yaml_lines.escaped(code.code)}}


def not_storable(value: Any, path: Path) -> Iterable[Path]:
    """Yield the paths of strings that a `jsonb` can't hold."""
    if isinstance(value, str):
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            yield path
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from not_storable(key, (*path, key))
            yield from not_storable(member, (*path, key))
    elif isinstance(value, list | tuple):
        for i, member in enumerate(value):
            yield from not_storable(member, (*path, i))
