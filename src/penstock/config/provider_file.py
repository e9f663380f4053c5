"""A file that describes one provider, by itself or as the only one of a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.config.providers import PROVIDERS, ProviderSettings
from penstock.config.reader import Reader
from penstock.core.errors import ConfigError

_SECTION = "providers"


def read_provider(
    path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ
) -> tuple[str, ProviderSettings]:
    """Return the name and the settings of a file's provider; raises `ConfigError`.

    A provider by itself is called as its file.
    """
    reader = Reader.of_file(path, environ)
    document, name = reader.document, Path(path).stem.replace(".", "-").replace(" ", "-")
    value = document.value
    if isinstance(value, dict) and _SECTION not in value:
        before = _SECTION, name
        document.value = {_SECTION: {name: value}}
        document.lines = {(*before, *at): line for at, line in document.lines.items()}
        document.raw = {(*before, *at): text for at, text in document.raw.items()}
        document.problems = [(n, (*before, *at), text) for n, at, text in document.problems]
    root = document.value if isinstance(document.value, dict) else {}
    found: dict[str, ProviderSettings] = {}
    for each, spec in reader.parts(root, _SECTION):
        if (provider := reader.typed(PROVIDERS, spec, (_SECTION, each))) is not None:
            found[each] = provider
    reader.check()
    if len(found) != 1:
        raise ConfigError([f"{reader.file}:1: expected one provider, got {len(found)}"])
    return next(iter(found.items()))
