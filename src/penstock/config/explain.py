"""The text of a mistake: what is expected, and what is there, without its secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from penstock.config.strict import Untyped
from penstock.config.transforms import RouteRule
from penstock.config.yaml_lines import Document
from penstock.core.redact import MASK, redact_url
from penstock.core.text import Path, nearest

SECRET_KEY: Final = re.compile(
    r"password|passwd|token|secret|nkey_seed|access.?key|api.?key|private_key$|^headers$", re.I
)
_IN_QUOTES: Final = {
    "int_type": r"-?\d+", "float_type": r"-?\d+(\.\d+)?", "bool_type": "true|false|yes|no|on|off",
}  # fmt: skip
"""What looks like the value of a type where it stands in quotes."""
_EXPECTED: Final = {
    "int_parsing": "a whole number", "float_parsing": "a number", "bool_parsing": "true or false",
}  # fmt: skip


def explanation(model: type[BaseModel], error: ErrorDetails, path: Path, document: Document) -> str:
    """Return what is wrong with the value at `path`, and what is expected there."""
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    text = shown(path, given, document)
    message = message_of(error)
    expected = message.removeprefix("Input should be ").removeprefix("a valid ")
    expected = _EXPECTED.get(kind, expected)
    if kind == "missing":
        field = _model_at(model, error["loc"]).model_fields[str(error["loc"][-1])]
        options = [repr(option) for option in get_args(field.annotation)]
        hint = f"; expected {' or '.join(options)}" if options else ""
        return f"missing: this key has no default{hint}"
    if kind == "extra_forbidden":
        fields = _model_at(model, error["loc"]).model_fields
        return unknown_key(str(path[-1]), [field.alias or name for name, field in fields.items()])
    if kind == "value_error":
        # A message with the position in an expression has shown what is there.
        if text in message or given is None or "position " in message:
            return message
        return message if isinstance(given, dict | list) else f"{message} (got {text})"
    if kind == "union_tag_invalid":
        options = re.findall(r"'([^']*)'", str(context.get("expected_tags", "")))
        given = context.get("tag")
        return (
            f"the type is {given!r}: expected one of {', '.join(options)}{nearest(given, options)}"
        )
    if kind == "union_tag_not_found" and path[-1] != "route":
        return "missing: expected `type`"
    if kind == "union_tag_not_found":
        return f"expected an expression, or a list of rules {{when: …, to: …}}, got {text}"
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        return f"expected {expected}, got {text}{nearest(given, options)}"
    if kind in ("model_type", "dict_type"):
        return f"expected keys with their values, got {text}"
    if kind in ("tuple_type", "list_type"):
        hint = ": put it in [ ]" if isinstance(given, str) else ""
        return f"expected a list, got {text}{hint}"
    if kind == "too_short":
        return "expected at least one; leave the key out for its default"
    if isinstance(given, str) and re.fullmatch(_IN_QUOTES.get(kind, "(?!)"), given):
        return f"expected {expected}, got {text}: remove its quotes"
    if kind == "string_type" and isinstance(given, int | float):
        return f"expected a string, got {text}: put it in quotes"
    if given is None:
        return f"expected {expected}, got nothing; leave the key out for its default"
    return f"expected {expected}, got {text}"


def message_of(error: ErrorDetails) -> str:
    """Return what pydantic reports, without what it puts before a message of ours."""
    return error["msg"].removeprefix("Value error, ")


def shown(path: Path, value: Any, document: Document) -> str:
    """Return a value as a message may show it."""
    if not isinstance(value, str | int | float):
        return kind_of(value)
    keys = [key for key in path if isinstance(key, str)]
    raw = document.raw.get(path)
    if any(SECRET_KEY.search(key) for key in keys[2:] or keys) or _is_property(keys):
        return MASK
    if raw is None and keys and keys[-1] in ("url", "base_url", "store"):
        text = str(value)
        # Where a webhook's secret stands in its URL, only its owner knows.
        if keys[0] in ("consumers", "targets"):
            return MASK
        return redact_url(text) if "://" in text or not text else MASK
    text = redact_url(raw if raw is not None else str(value))
    return f"{text!r}" if isinstance(value, str) else f"{text} ({kind_of(value)})"


def _is_property(keys: list[str]) -> bool:
    return keys[:1] == ["credentials"] and keys[2:3] == ["properties"]


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return what is wrong with a key that is not one of `known`."""
    return f"unknown key{nearest(key, known)}; expected one of: {', '.join(known)}"


def path_in_file(loc: Path, value: Any) -> Path:
    """Return an error's path as the file has it: without the tags of what may have several forms.

    `value` is what was validated.
    """
    found: list[str | int] = []
    for i, part in enumerate(loc):
        is_there = (
            part in value
            if isinstance(value, Mapping)
            else isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        )
        if is_there:
            value = value[part]
        elif i < len(loc) - 1 or not isinstance(value, Mapping):
            continue
        found.append(part)
    return tuple(found)


def _model_at(model: type[BaseModel], path: Path) -> type[BaseModel]:
    """Return the model whose key the last part of `path` is, `model` itself or one inside it."""
    options = [model]
    for key in path[:-1]:
        tagged = [option for option in options if str(key) in _tags(option)]
        if tagged:
            options = tagged
            continue
        field = options[0].model_fields.get(str(key))
        if key == "rules" and "route" in path:
            return RouteRule
        options = (list(inner_models(field.annotation)) if field is not None else []) or options
    return options[0]


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    """Return what a model's `type` may be."""
    field = model.model_fields.get("type")
    return () if field is None else get_args(field.annotation)


def inner_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that a type is, or has in it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from inner_models(part)


def inner_model(annotation: Any, value: Any = None) -> type[BaseModel] | None:
    """Return the model that a type is, or has in it: of several the one of the value's `type`."""
    models = list(inner_models(annotation))
    given = value.get("type") if isinstance(value, Mapping) else None
    return next((m for m in models if given in _tags(m)), models[0] if models else None)


def kind_of(value: Any) -> str:
    """Return the kind of a value, as a message names it."""
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        Untyped: "a string",
    }
    names |= {list: "a list", dict: "a mapping", type(None): "nothing"}
    return names.get(type(value), "another type")
