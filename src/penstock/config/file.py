"""Reads the YAML file; its errors name the file, the line and the key.

All mistakes of a file are reported at once. No message holds a secret: values that came from the
environment are shown as the file names them, passwords and URLs are masked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.config import yaml_lines
from penstock.config.settings import (
    Config,
    Consumer,
    NatsSinkSettings,
    OutboxSource,
    PostgresSource,
    PullConsumer,
    Sink,
    SparkSettings,
    StoreSettings,
    StreamSinkSettings,
    WebhookConsumer,
    consumer_contradictions,
    contradictions,
    slot_name,
    store_contradictions,
)
from penstock.config.strict import NAME_RULE, Untyped, is_name
from penstock.config.transforms import FOLDER, ROUTE_KINDS, RouteRule
from penstock.core.errors import ConfigError
from penstock.core.redact import MASK, redact_url
from penstock.core.text import dotted, nearest

__all__ = [
    "Config",
    "NatsSinkSettings",
    "OutboxSource",
    "PostgresSource",
    "PullConsumer",
    "SparkSettings",
    "StoreSettings",
    "StreamSinkSettings",
    "WebhookConsumer",
    "load",
    "load_store",
    "redact_url",
    "sink_names",
]

_SECRET_KEY: Final = re.compile(
    r"password|passwd|token|secret|nkey_seed|access.?key|^headers$", re.I
)
_KEYS: Final = ("sources", "sinks", "consumers", "store", "spark")

_IN_QUOTES: Final = {
    "int_type": r"-?\d+", "float_type": r"-?\d+(\.\d+)?", "bool_type": "true|false|yes|no|on|off",
}  # fmt: skip
"""What looks like the value of a type where it stands in quotes."""
_EXPECTED: Final = {
    "int_parsing": "a whole number", "float_parsing": "a number", "bool_parsing": "true or false",
}  # fmt: skip

_SINKS: Final[dict[str, type[NatsSinkSettings | StreamSinkSettings]]] = {
    "nats": NatsSinkSettings,
    "stream": StreamSinkSettings,
}
_CONSUMERS: Final[dict[str, type[PullConsumer | WebhookConsumer]]] = {
    "pull": PullConsumer,
    "webhook": WebhookConsumer,
}

_M = TypeVar("_M", bound=BaseModel)


def load(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> Config:
    """Read a configuration file; raises `ConfigError` with all that is wrong in it."""
    reader = _Reader(path, environ)
    config = reader.config()
    reader.check()
    assert config is not None  # noqa: S101 - for the type checker
    return config.read_from(os.fspath(path))


def load_store(
    path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ
) -> StoreSettings:
    """Read a configuration file for its `store` alone: where only that is needed.

    Variables that the rest of the file names may be unset. Raises `ConfigError`.
    """
    reader = _Reader(path, environ)
    reader.document.problems = [
        problem for problem in reader.document.problems if problem[1][:1] in ((), ("store",))
    ]
    root = reader.root()
    settings = None if root is None else reader.store(root)
    reader.check()
    assert settings is not None  # noqa: S101 - for the type checker
    return settings


def sink_names(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what the file calls its sinks, whatever else is wrong in it."""
    return list(_names(_Reader(path, environ).document.value, "sinks"))


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

    def __init__(self, path: str | os.PathLike[str], environ: Mapping[str, str]):
        self.file = os.fspath(path)
        self.document = yaml_lines.parse(_read(self.file), environ)
        if self.document.value is None and not self.document.problems:
            message = f"{self.file}:1: the file is empty: write one with `penstock init`"
            raise ConfigError([message])

    def check(self) -> None:
        if self.document.problems:
            raise ConfigError(self.report())

    def root(self) -> dict[str, Any] | None:
        root = self.document.value
        if not isinstance(root, dict):
            if root is not None:
                self.problem((), "expected the keys sources and sinks")
            return None
        for key in root:
            if key not in _KEYS:
                self.problem((key,), _unknown(key, _KEYS))
        return root

    def store(self, root: dict[str, Any]) -> StoreSettings | None:
        given = {"store": root["store"]} if "store" in root else {}
        return self.model(StoreSettings, given, ())

    def config(self) -> Config | None:
        root = self.root()
        if root is None:
            return None
        sources: dict[str, PostgresSource] = {}
        outboxes: dict[str, OutboxSource] = {}
        for name, value in self.parts(root, "sources"):
            if _type(value) == "outbox":
                if outbox := self.model(OutboxSource, value, ("sources", name)):
                    outboxes[name] = outbox
                continue
            default = slot_name(f"penstock_{name}")
            filled = {"slot": default, "publication": default} | value
            if source := self.model(PostgresSource, filled, ("sources", name)):
                sources[name] = source
        sinks: dict[str, Sink] = {}
        given = _names(root, "sources")
        relayed = [name for name, source in given.items() if _type(source) == "outbox"]
        # Nothing but outboxes: their sinks are not in the file.
        bare = "sinks" not in root and 0 < len(relayed) == len(given)
        for name, value in () if bare else self.parts(root, "sinks"):
            if sink := self.typed(_SINKS, value, ("sinks", name)):
                sinks[name] = sink
                if sink.source in relayed:
                    message = (
                        f"{sink.source!r} is an outbox, whose pipelines are set in its database:"
                        " select tide.relay_set_outbox(…)"
                    )
                    self.problem(("sinks", name, "source"), message)
        consumers: dict[str, Consumer] = {}
        for name, value in self.parts(root, "consumers") if root.get("consumers") else ():
            if consumer := self.typed(_CONSUMERS, {"type": "pull"} | value, ("consumers", name)):
                consumers[name] = consumer
        spark = self.model(SparkSettings, root.get("spark") or {}, ("spark",))
        store = self.store(root)
        for path, message in contradictions(sources, sinks, _names(root, "sources")):
            self.problem(path, message)
        given = _names(root, "sinks")
        streams = [n for n, sink in given.items() if _type(sink) == "stream"]
        for path, message in consumer_contradictions(consumers, given, streams):
            self.problem(path, message)
        if spark is not None and "store" not in root:
            for path, message in store_contradictions(None, spark):
                self.problem(path, message)
        if self.document.problems or spark is None or store is None:
            return None
        return Config(
            sources=sources, sinks=sinks, outboxes=outboxes, consumers=consumers,
            store=store.store, spark=spark,
        )  # fmt: skip

    def parts(self, root: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        value = root.get(key)
        if not isinstance(value, dict) or not value:
            if key not in root or value in ({}, None):
                self.problem((key,), f"missing: expected at least one {key[:-1]} under a name")
            else:
                self.problem((key,), f"expected {key} by name, got {_kind(value)}")
            return
        for name, part in value.items():
            if not is_name(name):
                self.problem((key, name), f"{name!r} is not a name: expected {NAME_RULE}")
            if isinstance(part, dict):
                yield name, part
            else:
                self.problem((key, name), f"expected the {key[:-1]}'s keys, got {_kind(part)}")

    def typed(
        self, models: Mapping[str, type[_M]], value: dict[str, Any], path: yaml_lines.Path
    ) -> _M | None:
        """Validate a part whose `type` selects its model."""
        if model := models.get(_type(value)):
            return self.model(model, value, path)
        types = " or ".join(map(repr, models))
        where, given = (*path, "type"), value.get("type")
        if "type" not in value:
            self.problem(where, f"missing: this key has no default; expected {types}")
        else:
            shown = self.shown(where, given)
            self.problem(where, f"expected {types}, got {shown}{nearest(given, models)}")
        return None

    def model(self, model: type[_M], value: Any, path: yaml_lines.Path) -> _M | None:
        try:
            folder = os.path.dirname(self.file)  # noqa: PTH120 - "" is the current one here
            return model.model_validate(value, context={FOLDER: folder})
        except ValidationError as e:
            for error in e.errors(include_url=False, include_context=True):
                where = (*path, *_in_file(error["loc"]))
                self.problem(where, self.explain(model, error, where))
            return None

    def problem(self, path: yaml_lines.Path, message: str) -> None:
        # What a missing variable leaves behind is wrong too, and so is the list that it stands in:
        # not worth a second message.
        if not any(
            known == path or (known[:-1] == path and isinstance(known[-1], int))
            for _, known, _ in self.document.problems
        ):
            self.document.problems.append((self.document.line(path), path, message))

    def explain(self, model: type[BaseModel], error: ErrorDetails, path: yaml_lines.Path) -> str:
        kind, given, context = error["type"], error["input"], error.get("ctx", {})
        message = error["msg"].removeprefix("Value error, ")
        expected = message.removeprefix("Input should be ").removeprefix("a valid ")
        expected = _EXPECTED.get(kind, expected)
        if kind == "missing":
            field = _model_at(model, error["loc"]).model_fields[str(error["loc"][-1])]
            options = [repr(option) for option in get_args(field.annotation)]
            hint = f"; expected {' or '.join(options)}" if options else ""
            return f"missing: this key has no default{hint}"
        if kind == "extra_forbidden":
            return _unknown(str(path[-1]), _model_at(model, error["loc"]).model_fields)
        if kind == "value_error":
            shown = self.shown(path, given)
            # A message with the position in an expression has shown what is there.
            if shown in message or given is None or "position " in message:
                return message
            return message if isinstance(given, dict | list) else f"{message} (got {shown})"
        if kind == "union_tag_not_found":
            shown = self.shown(path, given)
            return f"expected an expression, or a list of rules {{when: …, to: …}}, got {shown}"
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
        if isinstance(given, str) and re.fullmatch(_IN_QUOTES.get(kind, "(?!)"), given):
            return f"expected {expected}, got {self.shown(path, given)}: remove its quotes"
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
        if raw is None and keys and keys[-1] in ("url", "store"):
            text = str(value)
            # Where a webhook's secret stands in its URL, only its owner knows.
            if keys[0] == "consumers":
                return MASK
            return redact_url(text) if "://" in text or not text else MASK
        text = redact_url(raw if raw is not None else str(value))
        return f"{text!r}" if isinstance(value, str) else f"{text} ({_kind(value)})"

    def report(self) -> list[str]:
        """Return the problems as lines of text, in the order of the file."""
        return [
            f"{self.file}:{line}:{f' {dotted(path)}:' if path else ''} {message}"
            for line, path, message in sorted(self.document.problems, key=lambda p: p[0])
        ]


def _unknown(key: str, known: Iterable[str]) -> str:
    return f"unknown key{nearest(key, known)}; expected one of: {', '.join(known)}"


def _model_at(model: type[BaseModel], path: yaml_lines.Path) -> type[BaseModel]:
    """Return the model whose key the last part of `path` is, `model` itself or one inside it."""
    for key in path[:-1]:
        field = model.model_fields.get(str(key))
        if key == "rules" and "route" in path:
            return RouteRule
        inner = field.annotation if field is not None else None
        if get_origin(inner) is UnionType:
            inner = next(a for a in get_args(inner) if a is not type(None))
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return model


def _in_file(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return an error's path as the file has it: without the tag of a route's form."""
    if len(loc) > 1 and loc[0] == "route" and loc[1] in ROUTE_KINDS:
        return (loc[0], *loc[2:])
    return loc


def _names(root: Any, key: str) -> dict[str, Any]:
    """Return the parts under a key as the file has them, wrong ones too."""
    value = root.get(key) if isinstance(root, dict) else None
    return value if isinstance(value, dict) else {}


def _type(part: Any) -> str:
    """Return what a part names as its type, or nothing."""
    value = part.get("type") if isinstance(part, dict) else None
    return value if isinstance(value, str) else ""


def _kind(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        Untyped: "a string",
    }
    names |= {list: "a list", dict: "a mapping", type(None): "nothing"}
    return names.get(type(value), "another type")
