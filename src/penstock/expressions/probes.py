"""What is asked of a JSON value without Spark: `@>`, `?`, its type, the length of an array.

A `Field` with a probe gives the answer in the place of the value. Postgres's arrays have `array_probes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import msgspec

from penstock.expressions.types import BOOL, INT, TEXT, UNFIT, Type

UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeError)
"""What decoding some JSON may raise that Postgres takes: half a surrogate pair, endless nesting."""
RESULTS: Final[dict[str, Type]] = {
    "@>": BOOL,
    "?": BOOL,
    "present": BOOL,
    "typeof": TEXT,
    "array_length": INT,
    "= any": BOOL,
    "<> all": BOOL,
    "<> any": BOOL,
    "= all": BOOL,
    "array @>": BOOL,
    "array &&": BOOL,
    "array <@": BOOL,
    "cardinality": INT,
    "dimension": INT,
}
"""The probes, and the type of what each gives."""
_DECODE: Final = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal).decode
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_TYPES: Final = {
    "{": "object",
    "[": "array",
    '"': "string",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}


def decoded(raw: bytes) -> Any:
    """Return a JSON value, its numbers as decimals; raises one of `UNREADABLE`."""
    try:
        return _DECODE(raw.decode())
    except ValueError as error:
        raise msgspec.DecodeError(str(error)) from None


def probe(op: str, text: str) -> Callable[[bytes], Any]:
    """Return what gives a probe's answer for a JSON text; `UNFIT` where Postgres raises an error.

    `text` is the JSON after `@>`, the key after `?`; else it is empty. Calls raise one of `UNREADABLE`.
    """
    match op:
        case "@>":
            part = decoded(text.encode())
            return lambda raw: _contains(decoded(raw), part)
        case "?":
            return lambda raw: _has(decoded(raw), text)
        case "typeof":
            return lambda raw: _TYPES.get(chr(raw.lstrip()[0]), "number")
        case "array_length":
            return lambda raw: len(_ITEMS(raw)) if raw.lstrip()[:1] == b"[" else UNFIT
    return lambda _: True


def _has(value: Any, key: str) -> bool:
    if isinstance(value, dict | list):
        return key in value
    return bool(isinstance(value, str) and value == key)


def _contains(value: Any, part: Any) -> bool:
    if isinstance(value, list) and not isinstance(part, list | dict):
        return any(_equal(item, part) for item in value)
    return _within(value, part)


def _within(value: Any, part: Any) -> bool:
    """Return whether `value` contains `part`, of which no array may stand for its element."""
    if isinstance(part, dict):
        return isinstance(value, dict) and all(
            key in value and _within(value[key], item) for key, item in part.items()
        )
    if isinstance(part, list):
        return isinstance(value, list) and all(
            any(_within(each, item) for each in value) for item in part
        )
    return _equal(value, part)


def _equal(value: Any, part: Any) -> bool:
    """Return whether two values that are no containers are the same: to Python True is 1."""
    return type(value) is type(part) and not isinstance(value, dict | list) and value == part
