"""JSON whose numbers keep their digits: `1.10` of a column is shown as `1.10`, not as the float 1.1."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

import orjson

_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


class _Number(float):
    """A number that calculates as a float, and is written as it was read."""

    text: str

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        number.text = text
        return number


def loads(text: str) -> Any:
    """Return a value; raise `ValueError` where a text is no JSON."""
    value = json.loads(text, parse_float=_Number, parse_int=_whole, parse_constant=_refuse)
    if _SURROGATE.search(text):
        orjson.loads(text)  # refuses half of a pair, which no page can have
    return value


def dumps(value: Any, option: int = 0) -> str:
    """Return a value as JSON."""
    return orjson.dumps(value, default=_written, option=option).decode()


def _whole(text: str) -> int | _Number:
    number = int(text) if len(text) <= 20 else None
    return number if number is not None and -(1 << 63) <= number < 1 << 64 else _Number(text)


def _written(value: Any) -> orjson.Fragment:
    if not isinstance(value, _Number):
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return orjson.Fragment(value.text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
