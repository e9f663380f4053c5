"""References in a pipeline's config: `${env:NAME}` and `${file:path}`, wherever a string stands.

They are resolved in the relay's own process and nowhere else: what is stored, shown and logged is the
config as it was set. What a reference gives is taken as it is, and not looked through again.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_]+):([^{}]*)\}")
_FILE_BYTES: Final = 64 * 1024

Place = tuple[str | int, ...]
"""Where in the config a value stands: keys and indexes, outermost first."""


class UnresolvedError(ValueError):
    """A reference that gives nothing; the message names it and says why, `place` where it stands."""

    def __init__(self, place: Place, reference: str, why: str) -> None:
        super().__init__(f"{reference} can't be resolved: {why}")
        self.place = place
        self.reference = reference


def has_reference(value: Any) -> bool:
    """Tell whether a string, or one anywhere in a list or an object, holds a reference."""
    if isinstance(value, Mapping):
        return any(map(has_reference, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_reference, value))
    return isinstance(value, str) and _REFERENCE.search(value) is not None


def resolve(value: Any, environ: Mapping[str, str], place: Place = ()) -> Any:
    """Return `value`, a JSON value, with the references in its strings replaced.

    A file is read as UTF-8 and loses the line end at its end. Raises `UnresolvedError`, in which
    nothing stands of what other references gave.
    """
    if isinstance(value, Mapping):
        return {key: resolve(item, environ, (*place, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve(item, environ, (*place, at)) for at, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return _REFERENCE.sub(lambda found: _resolved(found, environ, place), value)


def _resolved(found: re.Match[str], environ: Mapping[str, str], place: Place) -> str:
    kind, name = found[1], found[2]
    if kind == "env":
        if name not in environ:
            raise UnresolvedError(
                place, found[0], "the relay's environment has no such variable; set it there"
            )
        return environ[name]
    if kind == "file":
        return _read(place, found[0], name)
    raise UnresolvedError(place, found[0], "expected ${env:NAME} or ${file:path}")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read(place: Place, reference: str, name: str) -> str:
    try:
        # To open a FIFO would wait for who writes it.
        with open(Path(name).expanduser(), "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnresolvedError(place, reference, "it is no regular file")
            data = file.read(_FILE_BYTES + 1)
    except UnresolvedError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is no path"
        raise UnresolvedError(
            place, reference, f"the relay can't read the file: {reason}"
        ) from None
    if len(data) > _FILE_BYTES:
        raise UnresolvedError(place, reference, f"the file has more than {_FILE_BYTES:,} bytes")
    try:
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise UnresolvedError(place, reference, "the file is not UTF-8") from None
