"""Objects of an API's answer, as the bytes that came: numbers keep all their digits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import astuple

from penstock.syncs.errors import SyncError

_ABSENT: Final = b""
_NULL: Final = b"null"
_PATH: Final = re.compile(r"[^.\[\]*?@'\"]+(?:\.[^.\[\]*?@'\"]+)*")


class Fields:
    """Reads some fields of objects, each as its JSON; a path has names joined by dots."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths: Final = [names(path) for path in paths]
        tops = list(dict.fromkeys(path[0] for path in self._paths))
        fields = [f"f{i}" for i in range(len(tops))]
        struct: Any = msgspec.defstruct(
            "Fields",
            [(field, msgspec.Raw, msgspec.Raw(_ABSENT)) for field in fields],
            rename=dict(zip(fields, tops, strict=True)),
        )
        self._decode: Final = msgspec.json.Decoder(struct).decode
        self._places: Final = [tops.index(path[0]) for path in self._paths]
        below: dict[int, list[int]] = {}
        for i, (place, path) in enumerate(zip(self._places, self._paths, strict=True)):
            if len(path) > 1:
                below.setdefault(place, []).append(i)
        self._below: Final = [
            (place, of, Fields([".".join(self._paths[i][1:]) for i in of]))
            for place, of in below.items()
        ]

    def read(self, data: bytes | msgspec.Raw) -> list[bytes]:
        """Return the JSON of each field, empty where it is missing or null.

        Raises `ValueError` where `data` is no object.
        """
        if not self._paths:
            return []
        try:
            struct = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from None
        members = [_ABSENT if raw == _NULL else raw for raw in map(bytes, astuple(struct))]
        found = [members[place] for place in self._places]
        for place, of, inner in self._below:
            has_members = members[place].startswith(b"{")
            values = inner.read(members[place]) if has_members else [_ABSENT] * len(of)
            for i, value in zip(of, values, strict=True):
                found[i] = value
        return found


def names(path: str) -> list[str]:
    """Return the names of a path such as `a.b`, `$.a.b` or `a.b[*]`; none for `$`."""
    short = path.removesuffix("[*]").removeprefix("$").removeprefix(".")
    if not short:
        return []
    if not _PATH.fullmatch(short):
        raise SyncError(
            "connector",
            f"{path!r} is not a path: expected names joined by dots, as in meta.updated_at.",
        )
    return short.split(".")


def items(content: bytes, selector: str) -> list[msgspec.Raw]:
    """Return the objects of an answer; `selector` is the path of their list.

    Raises `SyncError` where the answer has none there: that is no empty list.
    """
    raw: bytes | msgspec.Raw = content
    path = names(selector)
    for depth, name in enumerate(path):
        try:
            members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _none(
                selector, f"{'.'.join(path[:depth]) or 'it'} is no object: {error}"
            ) from None
        if name not in members:
            raise _none(selector, f"it lacks {'.'.join(path[: depth + 1])}")
        raw = bytes(members[name])
        if raw == _NULL:
            return []
    try:
        if bytes(raw).lstrip()[:1] == b"[":
            return msgspec.json.decode(raw, type=list[msgspec.Raw])
        msgspec.json.decode(raw, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _none(selector, str(error)) from None
    if bytes(raw).lstrip()[:1] != b"{":
        raise _none(selector, "there is neither a list nor an object")
    return [msgspec.Raw(bytes(raw))]


def _none(selector: str, why: str) -> SyncError:
    return SyncError(
        "bad_response",
        f"The answer has no objects at {selector}: {why}.",
        remedy="Compare data_selector with what the API answers.",
    )


def scalar(raw: bytes) -> str | None:
    """Return a JSON scalar as text, a number with all its digits; None where it is absent or null.

    Raises `ValueError` for an object or a list.
    """
    if not raw or raw == _NULL:
        return None
    if raw[:1] == b'"':
        try:
            return msgspec.json.decode(raw, type=str)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from None
    if raw[:1] in b"{[":
        raise ValueError("it is no text and no number")
    return raw.decode()


def key_of(parts: Sequence[bytes], fields: Sequence[str]) -> str:
    """Return the id of an object: the parts of its key, joined by `:` where there are several.

    Raises `ValueError` where one is missing.
    """
    if len(fields) == 1:
        return _key_part(parts[0], fields[0])
    texts = [_key_part(part, field) for part, field in zip(parts, fields, strict=True)]
    # Escaped, so that (a:b, c) and (a, b:c) are two.
    return ":".join(text.replace("\\", "\\\\").replace(":", "\\:") for text in texts)


def _key_part(raw: bytes, field: str) -> str:
    try:
        text = scalar(raw)
    except ValueError as error:
        raise ValueError(f"its key {field} can't be read: {error}") from None
    if not text:
        raise ValueError(f"it lacks its key {field}")
    return text


def excerpt(raw: bytes | msgspec.Raw) -> str:
    """Return the beginning of an object that can't be read."""
    return bytes(raw)[:500].decode(errors="replace")
