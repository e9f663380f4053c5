"""Reads the YAML file; its errors name the file, the line and the key.

All mistakes of a file are reported at once. No message holds a secret: values that came from the
environment are shown as the file names them, passwords and URLs are masked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock import yaml_lines
from penstock.redact import MASK, redact_url
from penstock.settings import (
    Config,
    NatsSinkSettings,
    PostgresSource,
    SparkSettings,
    contradictions,
    dotted,
    nearest,
    slot_name,
)

__all__ = [
    "Config",
    "ConfigError",
    "NatsSinkSettings",
    "PostgresSource",
    "SparkSettings",
    "load",
    "redact_url",
]

_SECRET_KEY: Final = re.compile(r"password|passwd|token|secret|nkey_seed|access.?key", re.I)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
_NAME_RULE: Final = "letters, digits, `_` and `-`, at most 63 of them, a letter or a digit first"

_M = TypeVar("_M", bound=BaseModel)


class ConfigError(Exception):
    """A configuration that cannot be used; `problems` has one line of text for each mistake."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)


def load(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> Config:
    """Read a configuration file; raises `ConfigError` with all that is wrong in it."""
    file = os.fspath(path)
    document = yaml_lines.parse(_read(file), environ)
    if document.value is None and not document.problems:
        raise ConfigError([f"{file}:1: the file is empty: write one with `penstock init`"])
    reader = _Reader(document)
    config = reader.config()
    if reader.document.problems or config is None:
        raise ConfigError(reader.report(file))
    return config


def _read(file: str) -> str:
    try:
        data = Path(file).read_bytes()
    except FileNotFoundError:
        raise ConfigError([f"{file}: no such file: write one with `penstock init`"]) from None
    except OSError as e:
        raise ConfigError([f"{file}: cannot be read: {e.strerror}"]) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ConfigError([f"{file}:{line}: not UTF-8: save the file as UTF-8"]) from None


class _Reader:
    """Validates a document part by part, so that one mistake does not hide another."""

    def __init__(self, document: yaml_lines.Document):
        self.document = document

    def config(self) -> Config | None:
        root = self.document.value
        if not isinstance(root, dict):
            if root is not None:
                self.problem((), "expected the keys sources and sinks")
            return None
        for key in root:
            if key not in Config.model_fields:
                self.problem((key,), _unknown(key, Config.model_fields))
        sources: dict[str, PostgresSource] = {}
        for name, value in self.parts(root, "sources"):
            default = slot_name(f"penstock_{name}")
            filled = {"slot": default, "publication": default} | value
            if source := self.model(PostgresSource, filled, ("sources", name)):
                sources[name] = source
        sinks: dict[str, NatsSinkSettings] = {}
        for name, value in self.parts(root, "sinks"):
            if sink := self.model(NatsSinkSettings, value, ("sinks", name)):
                sinks[name] = sink
        spark = self.model(SparkSettings, root.get("spark") or {}, ("spark",))
        known = root.get("sources")
        names = known if isinstance(known, dict) else sources
        for path, message in contradictions(sources, sinks, names):
            self.problem(path, message)
        if self.document.problems or spark is None:
            return None
        return Config(sources=sources, sinks=sinks, spark=spark)

    def parts(self, root: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        value = root.get(key)
        if not isinstance(value, dict) or not value:
            if key not in root or value in ({}, None):
                self.problem((key,), f"missing: expected at least one {key[:-1]} under a name")
            else:
                self.problem((key,), f"expected {key} by name, got {_kind(value)}")
            return
        for name, part in value.items():
            if not _NAME.match(name):
                self.problem((key, name), f"{name!r} is not a name: expected {_NAME_RULE}")
            if isinstance(part, dict):
                yield name, part
            else:
                self.problem((key, name), f"expected the {key[:-1]}'s keys, got {_kind(part)}")

    def model(self, model: type[_M], value: Any, path: yaml_lines.Path) -> _M | None:
        try:
            return model.model_validate(value)
        except ValidationError as e:
            for error in e.errors(include_url=False, include_context=True):
                where = (*path, *error["loc"])
                self.problem(where, self.explain(model, error, where))
            return None

    def problem(self, path: yaml_lines.Path, message: str) -> None:
        # What a missing variable leaves behind is wrong too, and not worth a second message.
        if not any(known == path for _, known, _ in self.document.problems):
            self.document.problems.append((self.document.line(path), path, message))

    def explain(self, model: type[BaseModel], error: ErrorDetails, path: yaml_lines.Path) -> str:
        kind, given, context = error["type"], error["input"], error.get("ctx", {})
        message = error["msg"].removeprefix("Value error, ")
        expected = message.removeprefix("Input should be ").removeprefix("a valid ")
        if kind == "missing":
            field = model.model_fields[str(error["loc"][-1])]
            options = [repr(option) for option in get_args(field.annotation)]
            hint = f"; expected {' or '.join(options)}" if options else ""
            return f"missing: this key has no default{hint}"
        if kind == "extra_forbidden":
            return _unknown(str(path[-1]), model.model_fields)
        if kind == "value_error":
            shown = self.shown(path, given)
            return message if shown in message or given is None else f"{message} (got {shown})"
        if kind == "literal_error":
            options = re.findall(r"'([^']*)'", str(context.get("expected", "")))
            return f"expected {expected}, got {self.shown(path, given)}{nearest(given, options)}"
        if kind in ("model_type", "dict_type"):
            return f"expected keys with their values, got {self.shown(path, given)}"
        if kind in ("tuple_type", "list_type"):
            hint = ": put it in [ ]" if isinstance(given, str) else ""
            return f"expected a list, got {self.shown(path, given)}{hint}"
        if kind == "too_short":
            return "expected at least one; leave the key out for its default"
        if kind == "string_type" and isinstance(given, int | float):
            return f"expected a string, got {self.shown(path, given)}: put it in quotes"
        if given is None:
            return f"expected {expected}, got nothing; leave the key out for its default"
        return f"expected {expected}, got {self.shown(path, given)}"

    def shown(self, path: yaml_lines.Path, value: Any) -> str:
        """Return a value as a message may show it."""
        if not isinstance(value, str | int | float):
            return _kind(value)
        keys = [key for key in path if isinstance(key, str)]
        raw = self.document.raw.get(path)
        if any(_SECRET_KEY.search(key) for key in keys[2:] or keys):
            return MASK
        if raw is None and keys and keys[-1] == "url":
            text = str(value)
            return redact_url(text) if "://" in text or not text else MASK
        text = redact_url(raw if raw is not None else str(value))
        return f"{text!r}" if isinstance(value, str) else f"{text} ({_kind(value)})"

    def report(self, file: str) -> list[str]:
        """Return the problems as lines of text, in the order of the file."""
        return [
            f"{file}:{line}:{f' {dotted(path)}:' if path else ''} {message}"
            for line, path, message in sorted(self.document.problems, key=lambda p: p[0])
        ]


def _unknown(key: str, known: Iterable[str]) -> str:
    return f"unknown key{nearest(key, known)}; expected one of: {', '.join(known)}"


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "a mapping", type(None): "nothing"}
    return names.get(type(value), "another type")
