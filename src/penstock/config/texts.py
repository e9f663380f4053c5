"""Texts that the file holds itself, or names the file of: Lua programs and manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pydantic import ValidationInfo

from penstock.config.strict import StrictModel

FOLDER: Final = "folder"
"""The validation context's key for the folder that relative names of files start from; with None in
it no file is read."""
_BYTES: Final = 1 << 20


class Code(StrictModel):
    """A text, and the file that it was read from, if it was."""

    code: str
    file: str | None = None


def text_and_file(value: Any, info: ValidationInfo, expected: str) -> tuple[str, str | None]:
    """Return the text that a key holds, and the file that it was read from, if it was.

    Raises `ValueError`; `expected` is what the key takes.
    """
    if isinstance(value, str):
        return value, None
    if isinstance(value, dict) and all(isinstance(each, str) for each in value.values()):
        if list(value) == ["file"]:
            return _read(value["file"], info), value["file"]
        if set(value) == {"file", "code"}:  # as the store has it: the file may be elsewhere
            return value["code"], value["file"]
    raise ValueError(f"expected {expected}")


def _read(file: str, info: ValidationInfo) -> str:
    folder = (info.context or {}).get(FOLDER, ".")
    if folder is None:
        raise ValueError("no file is read for this: give the text itself")
    path = Path(folder) / Path(file).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    if len(data) > _BYTES:
        raise ValueError(f"{file}: {len(data):,} bytes; at most {_BYTES:,} are read")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file}: not UTF-8: save the file as UTF-8") from None
