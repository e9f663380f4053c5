"""Texts of a provider that hold `{name}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.syncs.errors import SyncError

_NAME: Final = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)\}")
OPTIONAL: Final = frozenset({"cursor", "cursor_unix", "cursor_unix_ms", "cursor_iso", "key"})
"""Where one of these has no value, the parameter that holds it is left out."""
_ABSENT: Final = object()


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return texts, and lists and dicts of texts, with the values of their names.

    A text that is one name alone becomes its value, of whatever type.

    Raises `SyncError` for a name without a value.
    """
    found = _filled(value, values)
    return None if found is _ABSENT else found


def uses(value: Any, *searched: str) -> bool:
    """Return whether one of these names stands in `value`."""
    if isinstance(value, str):
        return any(name in searched for name in _NAME.findall(value))
    if isinstance(value, Mapping):
        return any(uses(each, *searched) for each in value.values())
    return isinstance(value, list) and any(uses(each, *searched) for each in value)


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        if any(name in OPTIONAL and name not in values for name in _NAME.findall(value)):
            return _ABSENT
        if alone := _NAME.fullmatch(value):
            return _value(alone[1], values)
        return _NAME.sub(lambda match: str(_value(match[1], values)), value)
    if isinstance(value, Mapping):
        pairs = {name: _filled(each, values) for name, each in value.items()}
        return {name: each for name, each in pairs.items() if each is not _ABSENT}
    if isinstance(value, list):
        return [each for each in (_filled(each, values) for each in value) if each is not _ABSENT]
    return value


def _value(name: str, values: Mapping[str, Any]) -> Any:
    if name not in values:
        known = ", ".join(sorted(values.keys() - OPTIONAL - {"collection"})) or "none"
        raise SyncError(
            "credential",
            f"The credential lacks the property {name}, which the provider needs; it has: {known}.",
            remedy=f"Add {name} to the credential's properties.",
        )
    return values[name]
