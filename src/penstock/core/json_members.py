"""Some members of a JSON object, each as the text that it is, whatever the others hold.

Postgres' json takes more than parsers do: half of a surrogate pair, numbers beyond a double, thousands
of levels. A message that has such a value somewhere must not keep the rest of it from being read.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import orjson

_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}:,]', re.S)
_OPEN, _CLOSE, _LIST, _COLON, _COMMA = "[{", "]}", "[", ":", ","
_NULL: Final = b"null"
_UNFIT: Final = re.compile(r'[\x00-\x1f"\\]')  # msgspec has no such names


class Members:
    """Reads the members called `names`, at a microsecond an object."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(dict.fromkeys(names))
        attributes = {f"m{at}": name for at, name in enumerate(self._names)}
        self._decode: Any = None
        if not any(map(_UNFIT.search, self._names)):
            fields = [(attribute, msgspec.Raw, None) for attribute in attributes]
            shape = msgspec.defstruct("Members", fields, rename=attributes, gc=False)
            self._decode = msgspec.json.Decoder(shape).decode

    def __call__(self, text: str | bytes | None) -> dict[str, bytes | None]:
        """Return the members of an object by their names; None for one that it lacks.

        All are None for a text that is none, or no object.
        """
        if not text:
            return dict.fromkeys(self._names)
        try:
            found = None if self._decode is None else self._decode(text)
        except (msgspec.MsgspecError, RecursionError):
            found = None
        if found is None:
            scanned = _scan(text if isinstance(text, str) else text.decode(errors="replace"))
            return {name: scanned.get(name) for name in self._names}
        raws = msgspec.structs.astuple(found)
        return {n: r if r is None else bytes(r) for n, r in zip(self._names, raws)}  # noqa: B905 - as many

    def rows(self, texts: Iterable[str | None]) -> list[Sequence[msgspec.Raw | bytes | None]]:
        """Return of each object what calling this with it gives, in the order of the names."""
        decode, take, nothing = self._decode, msgspec.structs.astuple, (None,) * len(self._names)
        if decode is not None:
            try:
                return [nothing if text is None else take(decode(text)) for text in texts]
            except (msgspec.MsgspecError, RecursionError):
                pass  # one of them takes longer to read
        return [tuple(self(text).values()) for text in texts]


@functools.lru_cache(maxsize=256)
def members(*names: str) -> Members:
    """Return what reads the members called `names`, made once."""
    return Members(names)


def text_of(value: bytes | None) -> str | None:
    """Return a string's text, any other value's JSON, and None for null or no value at all."""
    if value is None or value == _NULL:
        return None
    if value[:1] != b'"':
        return value.decode()
    try:
        text: str = orjson.loads(value)
    except orjson.JSONDecodeError:  # half of a surrogate pair is no text: its escapes are
        return value[1:-1].decode()
    return text


def _scan(text: str) -> dict[str, bytes]:
    """Return all members of an object by nothing but its quotes, brackets, colons and commas."""
    members: dict[str, bytes] = {}
    depth, key, start = 0, "", -1
    for found in _TOKEN.finditer(text):
        mark = found[0]
        if mark in _CLOSE:
            depth -= 1
        if start >= 0 and (depth == 0 or (depth == 1 and mark == _COMMA)):
            members[json.loads(key)] = text[start : found.start()].strip().encode()
            start = -1
        elif mark in _OPEN:
            depth += 1
            if depth == 1 and mark == _LIST:
                return {}
        elif depth == 1 and start < 0:
            if mark == _COLON:
                start = found.end()
            else:
                key = mark
    return members
