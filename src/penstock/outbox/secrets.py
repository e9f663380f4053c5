"""References in a pipeline's config: `${env:NAME}` and `${file:path}`, wherever a string stands.

Only the relay's own process resolves them: what is stored, shown and logged is the config as it was
set. A reference in the value of another one stays as it is.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.core.text import Path as KeyPath

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_]+):([^{}]*)\}")
_FILE_BYTES: Final = 64 * 1024


class UnresolvedError(ValueError):
    """A reference without a value: the message has it and the reason, `path` its key."""

    def __init__(self, path: KeyPath, reference: str, reason: str) -> None:
        super().__init__(f"{reference} can't be resolved: {reason}")
        self.path = path
        self.reference = reference


def has_reference(value: Any) -> bool:
    """Return whether a string, or one anywhere in a list or an object, holds a reference."""
    if isinstance(value, Mapping):
        return any(map(has_reference, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_reference, value))
    return isinstance(value, str) and _REFERENCE.search(value) is not None


def resolve(value: Any, environ: Mapping[str, str], path: KeyPath = ()) -> Any:
    """Return `value`, a JSON value, with the references in its strings replaced.

    A file is read as UTF-8 and loses the line end at its end. Raises `UnresolvedError`, which shows
    no other reference's value.
    """
    if isinstance(value, Mapping):
        return {key: resolve(item, environ, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve(item, environ, (*path, at)) for at, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return _REFERENCE.sub(lambda found: _resolved(found, environ, path), value)


def _resolved(found: re.Match[str], environ: Mapping[str, str], path: KeyPath) -> str:
    kind, name = found[1], found[2]
    if kind == "env":
        if name not in environ:
            raise UnresolvedError(
                path, found[0], "the relay's environment has no such variable; set it there"
            )
        return environ[name]
    if kind == "file":
        return _read(path, found[0], name)
    raise UnresolvedError(path, found[0], "expected ${env:NAME} or ${file:path}")


def _without_waiting(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_NONBLOCK)


def _read(path: KeyPath, reference: str, name: str) -> str:
    try:
        # Opening a FIFO would wait for its writer.
        with open(Path(name).expanduser(), "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnresolvedError(path, reference, "it is no regular file")
            data = file.read(_FILE_BYTES + 1)
    except UnresolvedError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is no path"
        raise UnresolvedError(path, reference, f"the relay can't read the file: {reason}") from None
    if len(data) > _FILE_BYTES:
        raise UnresolvedError(path, reference, f"the file has more than {_FILE_BYTES:,} bytes")
    try:
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise UnresolvedError(path, reference, "the file is not UTF-8") from None
