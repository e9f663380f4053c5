"""The text of a mistake in a pipeline's config: what is expected, and what is there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, get_args

import orjson
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from penstock.config.explain import message_of, unknown_key
from penstock.config.transforms import ROUTE_KINDS
from penstock.core.redact import MASK, redact_url
from penstock.core.text import Path, dotted, nearest
from penstock.outbox.config_keys import CONTENT, SECRETS, keys
from penstock.outbox.secrets import has_reference

_CONTENT: Final = re.compile(CONTENT)
_SHOWN: Final = 100
_KEYS: Final = keys("out")


def explanation(
    config: Mapping[str, Any], error: ErrorDetails, fields: Mapping[str, FieldInfo]
) -> str:
    """Return a sentence about a mistake: the key, the value as it was set, what is expected.

    `fields` are those of the model of a pipeline.
    """
    path: Path = tuple(p for p in error["loc"] if p not in ROUTE_KINDS)
    if not path:
        return message_of(error)
    key, kind, where = str(path[0]), error["type"], dotted(path)
    if kind == "extra_forbidden":
        known = list(_KEYS) if len(path) == 1 else ["when", "to"]
        return f"{where}: {unknown_key(str(path[-1]), known)}"
    expected = _KEYS[key].expected
    if kind == "missing" and len(path) == 1:
        return f"{where}: missing; expected {expected}"
    given: Any = config
    for step in path:
        try:
            given = given[step]
        except (LookupError, TypeError):  # a rule lacks the key
            return f"{where}: missing; expected {expected}"
    if has_reference(given):
        return f"{where}: {_shown(key, given)} gives what can't be used: expected {expected}"
    if kind == "value_error":
        message = message_of(error)
        shown = _shown(key, given)
        is_shown = shown in message or (isinstance(given, str) and repr(given) in message)
        return f"{where}: {message}" if is_shown else f"{where}: {message} (got {shown})"
    hint = ""
    if kind == "literal_error":
        hint = nearest(given, get_args(fields[key].annotation))
    return f"{where}: expected {expected}, got {_shown(key, given)}{hint}"


def _shown(key: str, value: Any) -> str:
    """Return a value as an error may show it."""
    if isinstance(value, list | tuple | Mapping):
        return "a list" if isinstance(value, list | tuple) else "an object"
    if key in SECRETS and not has_reference(value):
        return MASK
    if isinstance(value, str):
        text = redact_url(value) if key == "url" else value
        # A file's content in the place of its path may be a secret.
        if key in SECRETS or _CONTENT.search(text):
            text = MASK if _CONTENT.search(text) else _masked(text)
        value = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return orjson.dumps(value).decode()


def _masked(text: str) -> str:
    """Return a secret's text with all but its references masked."""
    references = re.findall(r"\$\{[A-Za-z_]+:[^{}]*\}", text)
    return "".join(references) if "".join(references) == text else MASK
