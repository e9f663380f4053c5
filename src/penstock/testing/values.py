"""Python values as Postgres prints them in text format, which is what the WAL's decoder is given."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Final
from uuid import UUID

from psycopg import postgres

_MODIFIER: Final = re.compile(r"\s*\(([\d\s,]*)\)")
_JSON: Final = ("json", "jsonb")
_QUOTED: Final = re.compile(r'[{}",\\\s]|\A\Z|\Anull\Z', re.I)


class ColumnType:
    """A column's type, by the name that SQL has for it: `bigint`, `numeric(10,2)`, `text[]`.

    Raises:
        ValueError: It is no built-in type. A column of an enum or of an extension's type is `text`,
            as its values have the same JSON.
    """

    def __init__(self, name: str) -> None:
        plain = _MODIFIER.sub("", name).strip().lower()
        element = plain.removesuffix("[]")
        info = postgres.types.get(element)
        if info is None:
            raise ValueError(
                f"{name!r} is no built-in type of Postgres: for a column of an enum or of an "
                "extension's type give text, whose JSON is the same"
            )
        self.name = info.name
        self.is_array = plain != element
        self.oid: int = info.array_oid if self.is_array else info.oid
        modifier = _MODIFIER.search(name)
        scale = modifier[1].split(",")[1:] if modifier and self.name == "numeric" else []
        self._scale = Decimal(1).scaleb(-int(scale[0])) if scale else None

    def text(self, value: Any) -> bytes | None:
        """Return a value as Postgres prints it; a text is taken to be that already.

        Raises:
            ValueError: The value does not fit the type.
            TypeError: There is no such value in Postgres.
        """
        if value is None:
            return None
        if self.is_array and isinstance(value, list | tuple):
            return self._array(value).encode()
        return self._one(value).encode()

    def _array(self, values: list[Any] | tuple[Any, ...]) -> str:
        items = []
        for value in values:
            if isinstance(value, list | tuple) and self.name not in _JSON:
                items.append(self._array(value))
                continue
            text = "NULL" if value is None else self._one(value)
            if value is not None and _QUOTED.search(text):
                text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
            items.append(text)
        return "{" + ",".join(items) + "}"

    def _one(self, value: Any) -> str:
        if self.name in _JSON:
            return _json(value)
        if self._scale is not None and isinstance(value, int | str | Decimal):
            number = Decimal(value)
            return str(
                number.quantize(self._scale, ROUND_HALF_UP) if number.is_finite() else number
            )
        if isinstance(value, str):
            return value
        if isinstance(value, bool):
            return "t" if value else "f"
        if isinstance(value, float):
            return _float(value)
        if isinstance(value, Decimal):
            return f"{value:f}" if value.is_finite() else str(value)
        if isinstance(value, int | UUID):
            return str(value)
        if isinstance(value, bytes | bytearray):
            return f"\\x{value.hex()}"
        if isinstance(value, datetime):
            return self._datetime(value)
        if isinstance(value, date | time):
            return _trimmed(value.isoformat())
        if isinstance(value, timedelta):
            return _interval(value)
        raise TypeError(
            f"{value!r} is a {type(value).__name__}: give the text that Postgres prints for it"
        )

    def _datetime(self, value: datetime) -> str:
        if self.name != "timestamptz":
            return _trimmed(value.replace(tzinfo=None).isoformat(" "))
        if value.tzinfo is None:
            raise ValueError(f"{value} has no offset, and the column is a timestamptz: give one")
        return _trimmed(value.astimezone(UTC).replace(tzinfo=None).isoformat(" ")) + "+00"


def _json(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    try:
        json.loads(value)
    except ValueError:
        raise ValueError(f"{value!r} is no JSON: a string in JSON has quotes around it") from None
    return value


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(value).removesuffix(".0")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _trimmed(text: str) -> str:
    """Return a time without the zeros at the end of its fraction."""
    return text.rstrip("0") if "." in text else text


def _interval(value: timedelta) -> str:
    minutes, seconds = divmod(value.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f"{value.microseconds / 1e6:.6f}"[1:].rstrip("0").rstrip(".")
    days = f"{value.days}D" if value.days else ""
    parts = [(hours, "H", ""), (minutes, "M", ""), (seconds, "S", fraction)]
    clock = "".join(f"{n}{more}{unit}" for n, unit, more in parts if n or more)
    if not days and not clock:
        return "PT0S"
    return f"P{days}" + (f"T{clock}" if clock else "")
