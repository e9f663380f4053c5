"""String literals read as what they are compared with, before any row comes."""

from __future__ import annotations

import ipaddress
import math
import re
import struct
from decimal import Decimal, InvalidOperation
from typing import Final

from penstock.core.text import nearest
from penstock.expressions.nodes import Constant, Span
from penstock.expressions.times import FIRST_DAY, FIRST_MOMENT, LAST_DAY, LAST_MOMENT, days_of
from penstock.expressions.types import (
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    NUMERIC,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
    Kind,
    Type,
)

MAX_DIGITS: Final = 38
TRUE_WORDS: Final = ("t", "tr", "tru", "true", "y", "ye", "yes", "on", "1")
FALSE_WORDS: Final = ("f", "fa", "fal", "fals", "false", "n", "no", "of", "off", "0")
"""The texts that are booleans, in any case."""
_BLANKS: Final = " \t\n\v\f\r"
_INT: Final = re.compile(r"[+-]?[0-9]+")
_FLOAT: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_SPECIAL: Final = re.compile(r"(nan)|([+-]?)(inf|infinity)", re.IGNORECASE)
_MOMENT: Final = re.compile(
    r"(\d{4,7})-(\d\d?)-(\d\d?)"
    r"(?:[ tT]\s*(\d\d?):(\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?"
    r"\s*(?:([zZ]|UTC)|([+-])(\d\d)(?::?(\d\d))?)?)?(?:\s+([bB][cC]))?",
    re.ASCII,
)
_CLOCK: Final = re.compile(r"(\d\d?):(\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?", re.ASCII)
_PART: Final = re.compile(
    r"\s*(?:([+-]?)(\d+)(?:\.(\d+))?\s*([a-z]*)(?![\d:.])|([+-]?)(\d+):(\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?)",
    re.ASCII | re.IGNORECASE,
)
_ISO_PART: Final = re.compile(r"([+-]?\d+)(?:\.(\d+))?([YMWDHS])", re.ASCII)
_UUID: Final = re.compile(r"(?i)[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}")
_EXAMPLE: Final = "123e4567-e89b-12d3-a456-426614174000"
_SECOND: Final = 1_000_000
_UNITS: Final = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": _SECOND,
    "minute": 60 * _SECOND,
    "hour": 3_600 * _SECOND,
}
_DAYS: Final = {"day": 1, "week": 7}
_MONTHS: Final = {"month": 1, "year": 12, "decade": 120, "century": 1_200, "millennium": 12_000}
_SHORT: Final = {
    "us": "microsecond", "usec": "microsecond", "usecs": "microsecond",
    "ms": "millisecond", "msec": "millisecond", "msecs": "millisecond",
    "s": "second", "sec": "second", "secs": "second", "m": "minute", "min": "minute",
    "mins": "minute", "h": "hour", "hr": "hour", "hrs": "hour", "d": "day", "w": "week",
    "mon": "month", "mons": "month", "y": "year", "yr": "year", "yrs": "year",
    "centuries": "century", "millennia": "millennium",
}  # fmt: skip
_LONGEST: Final = 10_000 * 366 * 86_400 * _SECOND


def read(text: str, type_: Type) -> Constant:
    """Return the value of a literal of a type; raises `ValueError` with what would be one."""
    trimmed = text.strip(_BLANKS)
    match type_.kind:
        case Kind.BOOL:
            return _boolean(trimmed)
        case Kind.INT:
            return _integer(trimmed)
        case Kind.FLOAT:
            return _float(trimmed, single=type_.single)
        case Kind.NUMERIC:
            return number(trimmed)
        case Kind.DATE:
            return _date(trimmed)
        case Kind.TIMESTAMP | Kind.TIMESTAMPTZ:
            return _timestamp(trimmed, zoned=type_.kind is Kind.TIMESTAMPTZ)
        case Kind.TIME:
            return _time(trimmed)
        case Kind.INTERVAL:
            return span(trimmed)
    return _text(text, type_)


def number(text: str, *, most: int = MAX_DIGITS) -> Decimal:
    """Return a decimal number of at most so many digits; raises `ValueError`."""
    if not _FLOAT.fullmatch(text):
        if _SPECIAL.fullmatch(text):
            raise ValueError("NaN and infinity can only be compared with: write '…' without a cast")
        raise ValueError("a number like 12.50 is expected")
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise ValueError("a number like 12.50 is expected") from None
    precision, scale = digits(value)
    if precision > most or scale > most:
        raise ValueError(f"numbers have at most {most} digits here")
    return value


def digits(value: Decimal) -> tuple[int, int]:
    """Return how many digits a number takes, and how many of them stand after the point."""
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)  # noqa: S101 - neither NaN nor infinite
    scale = max(0, -exponent)
    whole = max(0, value.adjusted() + 1) if value else 0
    return max(1, whole + scale), scale


def _boolean(text: str) -> bool:
    word = text.lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError("true or false is expected")


def _integer(text: str) -> int:
    if not _INT.fullmatch(text):
        raise ValueError("a whole number is expected")
    value = int(text) if len(text) < 30 else 1 << 64
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("it is out of a bigint's range")
    return value


def _float(text: str, *, single: bool) -> float:
    if special := _SPECIAL.fullmatch(text):
        return math.nan if special[1] else -math.inf if special[2] == "-" else math.inf
    if not _FLOAT.fullmatch(text):
        raise ValueError("a number like 12.5 is expected")
    value = float(text)
    if single:
        value = narrow(value)
    if math.isinf(value) or (value == 0 and re.search(r"[1-9]", re.split("[eE]", text)[0])):
        raise ValueError(f"it is out of a {'real' if single else 'double precision'}'s range")
    return value


def narrow(value: float) -> float:
    """Return the nearest float32 as a float; infinite beyond its range."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _days(year: str, month: str, day: str, era: str | None) -> int:
    number = 1 - int(year) if era else int(year)
    if (
        not int(year)
        or not FIRST_DAY <= (days := days_of(number, int(month), int(day))) <= LAST_DAY
    ):
        raise ValueError("there is no such day")
    return days


def _date(text: str) -> int:
    special = _infinity(text, DATE_INFINITY, DATE_MINUS_INFINITY)
    if special is not None:
        return special
    if match := _MOMENT.fullmatch(text):
        _clock(match[4] or "0", match[5] or "0", match[6], match[7])
        return _days(match[1], match[2], match[3], match[12])
    raise ValueError("a date like 2024-10-28 is expected")


def _timestamp(text: str, *, zoned: bool) -> int:
    special = _infinity(text, TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY)
    if special is not None:
        return special
    match = _MOMENT.fullmatch(text)
    if match is None:
        raise ValueError("a time like 2024-10-28 21:37:01 is expected, in UTC or with its offset")
    value = _days(match[1], match[2], match[3], match[12]) * 24 * _UNITS["hour"]
    value += _clock(match[4] or "0", match[5] or "0", match[6], match[7])
    # Postgres passes the offset by where the type has none.
    if match[9] and zoned:
        hours, minutes = int(match[10]), int(match[11] or 0)
        if hours > 15 or minutes > 59:
            raise ValueError("there is no such offset from UTC")
        offset = hours * _UNITS["hour"] + minutes * _UNITS["minute"]
        value += offset if match[9] == "-" else -offset
    if not FIRST_MOMENT <= value <= LAST_MOMENT:
        raise ValueError("timestamps end with the year 294246 here")
    return value


def _clock(hour: str, minute: str, second: str | None, fraction: str | None) -> int:
    if int(hour) > 23 or int(minute) > 59 or int(second or 0) > 59:
        raise ValueError("there is no such time of day")
    micros = int((fraction or "0").ljust(6, "0"))
    return (
        int(hour) * _UNITS["hour"]
        + int(minute) * _UNITS["minute"]
        + int(second or 0) * _SECOND
        + micros
    )


def _infinity(text: str, plus: int, minus: int) -> int | None:
    match text.lower():
        case "infinity" | "+infinity":
            return plus
        case "-infinity":
            return minus
        case "epoch":
            return 0
        case "now" | "today" | "tomorrow" | "yesterday":
            raise ValueError("write now(), which is taken anew for each batch")
    return None


def _time(text: str) -> str:
    match = _CLOCK.fullmatch(text)
    if match is None:
        raise ValueError("a time of day like 21:37:01 is expected")
    _clock(match[1], match[2], match[3], match[4])
    fraction = (match[4] or "").rstrip("0")
    clock = f"{match[1]:0>2}:{match[2]}:{match[3] or '00'}"
    return f"{clock}.{fraction}" if fraction else clock


def span(text: str) -> Span:
    """Return an interval's months, days and microseconds; raises `ValueError`."""
    parts = list(_iso_parts(text) if text[:1] in ("P", "p") else _parts(text))
    months = sum(m for m, _, _ in parts)
    days = sum(d for _, d, _ in parts)
    microseconds = sum(u for _, _, u in parts)
    result = Span(months, days, microseconds)
    if max(abs(Span(m, d, u).comparable) for m, d, u in parts) > _LONGEST:
        raise ValueError("it is longer than 10,000 years")
    return result


_WANTED: Final = "an interval like '1 day' or '2 hours 30 minutes' is expected"


def _parts(text: str) -> list[tuple[int, int, int]]:
    parts: list[tuple[int, int, int]] = []
    at = 0
    while at < len(text):
        match = _PART.match(text, at)
        if match is None:
            raise ValueError(_WANTED)
        at = match.end()
        if match[4] is None:
            clock = int(match[6]) * _UNITS["hour"] + _clock("0", match[7], match[8], match[9])
            parts.append((0, 0, -clock if match[5] == "-" else clock))
            continue
        unit = match[4].lower()
        unit = (_SHORT.get(unit) or unit.removesuffix("s")) if unit else "second"
        parts.append(_amount(match[1] == "-", match[2], match[3] or "", unit))
    if not parts or len(parts) > 20:
        raise ValueError(_WANTED)
    return parts


def _iso_parts(text: str) -> list[tuple[int, int, int]]:
    date, _, clock = text[1:].upper().partition("T")
    parts: list[tuple[int, int, int]] = []
    for chunk, units in (
        (date, {"Y": "year", "M": "month", "W": "week", "D": "day"}),
        (clock, {"H": "hour", "M": "minute", "S": "second"}),
    ):
        at = 0
        while at < len(chunk):
            match = _ISO_PART.match(chunk, at)
            if match is None or match[3] not in units:
                raise ValueError(_WANTED)
            at = match.end()
            amount = match[1].lstrip("+-")
            parts.append(_amount(match[1][0] == "-", amount, match[2] or "", units[match[3]]))
    if not parts or len(parts) > 20:
        raise ValueError(_WANTED)
    return parts


def _amount(negative: bool, whole: str, fraction: str, unit: str) -> tuple[int, int, int]:
    if len(whole) > 15 or len(fraction) > 15:
        raise ValueError("it is longer than 10,000 years")
    sign = -1 if negative else 1
    amount = Decimal(f"{whole}.{fraction or 0}") * sign
    if unit in _MONTHS:
        months = amount * _MONTHS[unit]
        if months != int(months):
            raise ValueError("a part of a month has no one length; write days")
        return int(months), 0, 0
    if unit in _DAYS:
        days = amount * _DAYS[unit]
        rest = (days - int(days)) * 24 * _UNITS["hour"]
        return 0, int(days), round(rest)
    if unit in _UNITS:
        return 0, 0, round(amount * _UNITS[unit])
    raise ValueError(f"there is no unit {unit[:20]}{nearest(unit, [*_UNITS, *_DAYS, *_MONTHS])}")


def _text(text: str, type_: Type) -> str:
    match type_.form:
        case "uuid":
            if not _UUID.fullmatch(text.strip(_BLANKS)):
                raise ValueError(f"a uuid like {_EXAMPLE} is expected")
            plain = text.strip(_BLANKS).lower().replace("-", "")
            return "-".join((plain[:8], plain[8:12], plain[12:16], plain[16:20], plain[20:]))
        case "bytea":
            if not re.fullmatch(r"\\x(?:[0-9a-fA-F]{2})*", text):
                raise ValueError(r"bytes in hexadecimal like \x00ff are expected")
            return text.lower()
        case "inet":
            try:
                found = ipaddress.ip_interface(text.strip(_BLANKS))
            except ValueError:
                raise ValueError("an address like 10.0.0.1 or 10.0.0.0/8 is expected") from None
            whole = found.network.prefixlen == found.max_prefixlen and "/" not in text
            return str(found.ip) if whole else text.strip(_BLANKS).lower()
        case "enum" if type_.labels and text not in type_.labels:
            known = nearest(text, type_.labels) or "; it has " + ", ".join(type_.labels[:10])
            raise ValueError(f"the enum has no such label{known}")
    return text.rstrip(" ") if type_.width else text


def numeric_type(value: Decimal) -> Type:
    """Return the type that a numeric literal has; none holds one that only a float can take."""
    precision, scale = digits(value)
    return Type(NUMERIC.kind, precision, scale, fixed=True)
