"""Secrets that come back masked, as the API has shown them: they stay what they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.api.problems import wrong
from penstock.config.secret_values import masked, secrets
from penstock.config.yaml_lines import replaced
from penstock.core.redact import MASK
from penstock.core.text import Path, dotted

_IN_URLS: Final = (f":{MASK}@", f"//{MASK}@", f"={MASK}")


def restored(kind: str, spec: Mapping[str, Any], old: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `spec` with the secrets of `old` in the place of their masks.

    Raises `Problem` of a mask that stands for none of them.
    """
    kept: dict[Path, Any] = {}
    if old is not None:
        shown = masked(kind, old)
        for path, stored in secrets(kind, old):
            if _at(spec, path) == _at(shown, path):
                kept[path] = stored
    for path in _masks(spec, ()):
        if path not in kept:
            raise wrong(
                dotted(path),
                f"{MASK} is what the API shows of a secret, and here it stands for none that is stored,"
                " or beside what has changed: give the secret itself, or ${NAME} for a variable of the"
                " process",
            )
    result: dict[str, Any] = replaced(spec, kept)
    return result


def merged(target: Any, patch: Any) -> Any:
    """Return what a merge patch (RFC 7396) makes of a value: null deletes, objects are merged."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def _masks(value: Any, path: Path) -> Iterator[Path]:
    """Yield where a mask stands: alone, in a URL's login, or as a parameter's value."""
    if isinstance(value, str):
        if value == MASK or any(mark in value for mark in _IN_URLS):
            yield path
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _masks(member, (*path, key))
    elif isinstance(value, list | tuple):
        for i, member in enumerate(value):
            yield from _masks(member, (*path, i))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value
