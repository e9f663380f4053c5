"""Reads the YAML file; its errors name the file, the line and the key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from penstock.config import STORE_VARIABLE, yaml_lines
from penstock.config.explain import message_of
from penstock.config.models import type_of
from penstock.config.reader import Reader, names_of, text_of
from penstock.config.settings import CONFIG_FILE, Config, StoreSettings
from penstock.core.errors import ConfigError


def load(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> Config:
    """Read a configuration file; raises `ConfigError` with all that is wrong in it."""
    reader = Reader.of_file(path, environ)
    config = reader.config()
    reader.check()
    assert config is not None  # noqa: S101 - for the type checker
    return config.read_from(os.fspath(path))


def load_or_empty(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> Config:
    """Read the file of a process that follows the store: without content it configures the store alone.

    Raises `ConfigError`.
    """
    if has_content(path):
        return load(path, environ)
    return Config(sources={}, sinks={}, store=load_store(path, environ, embedded=True).store)


def has_content(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has more than comments; only one of the default name may be missing.

    Raises `ConfigError` where it can't be read.
    """
    if os.fspath(path) == CONFIG_FILE and not Path(path).exists():
        return False
    document = yaml_lines.parse(text_of(path), {})
    return document.value is not None or bool(document.problems)


def load_store(
    path: str | os.PathLike[str],
    environ: Mapping[str, str] = os.environ,
    given: str | None = None,
    *,
    embedded: bool = False,
) -> StoreSettings:
    """Return where the store is: as `given`, or as a file's `store` has it, which alone is read.

    Where there is no such file, or nothing in it, the variable `STORE_VARIABLE` names the store.
    Without that it is the embedded one, if the file is there or `embedded` is set. Variables that the
    rest of the file names may be unset. Raises `ConfigError`.
    """
    option, missing = "--store", not Path(path).exists()
    empty = given is None and (missing or not has_content(path))
    if empty:
        option, given = STORE_VARIABLE, environ.get(STORE_VARIABLE)
    if given is not None:
        try:
            return StoreSettings.model_validate({"store": given})
        except ValidationError as e:
            raise ConfigError([f"{option}: {message_of(each)}" for each in e.errors()]) from None
    if missing and not (embedded and os.fspath(path) == CONFIG_FILE):
        raise ConfigError(
            [
                f"{os.fspath(path)}: no such file: write one with `penstock init`, or name the store"
                f" by --store or the variable {STORE_VARIABLE}"
            ]
        )
    if empty:
        return StoreSettings()
    reader = Reader.of_file(path, environ)
    reader.document.problems = [
        problem
        for problem in reader.document.problems
        if problem[1][:1] in ((), ("store",), ("records",))
    ]
    root = reader.root()
    settings = None if root is None else reader.store(root)
    reader.check()
    assert settings is not None  # noqa: S101 - for the type checker
    return settings


def sink_names(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what the file calls its sinks, whatever else is wrong in it."""
    return list(names_of(Reader.of_file(path, environ).document.value, "sinks"))


def has_outboxes(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a file has a source of type outbox, whatever else is wrong in it."""
    sources = names_of(Reader.of_file(path, environ).document.value, "sources")
    return any(type_of("source", source) == "outbox" for source in sources.values())
