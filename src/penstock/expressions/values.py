"""A message's JSON values as Arrow arrays of the kinds that expressions work on."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from datetime import time, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.expressions.keys import (
    BIAS,
    INFINITY,
    MINUS_INFINITY,
    MOST_DIGITS,
    POSITIVE,
    ZERO,
    key_of,
)
from penstock.expressions.times import FIRST_DAY, LAST_DAY, LAST_MOMENT, days_of
from penstock.expressions.types import (
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    DAY,
    INTERVAL_INFINITY,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
    UNFIT,
    Kind,
    Type,
)

_ARROW: Final = {
    Kind.BOOL: pa.bool_(),
    Kind.INT: pa.int64(),
    Kind.FLOAT: pa.float64(),
    Kind.DATE: pa.date32(),
    Kind.TIMESTAMP: pa.timestamp("us"),
    Kind.TIMESTAMPTZ: pa.timestamp("us", "UTC"),
    Kind.INTERVAL: pa.int64(),
}
# As messages have them, and as Postgres prints what ISO 8601 has no plain form for.
_MOMENT: Final = re.compile(
    r"(\d{4,7})-(\d\d)-(\d\d)"
    r"(?:[T ](\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?:Z|[+-]\d\d(?::\d\d(?::\d\d)?)?)?))?( BC)?",
    re.ASCII,
)
_MICROSECOND: Final = timedelta(microseconds=1)
_LONG: Final = 1 << 63
_DECIMAL: Final = re.compile(r"-?\d+(?:\.\d+)?\Z", re.ASCII)
_PLAIN_NUMBER: Final = r"^[0-9]+(?:\.[0-9]+)?$"
_FEW: Final = 100  # values for which a loop is faster than Arrow's functions
# Made once: a conversion takes 0.1 ms.
_NOUGHT: Final = pa.scalar(0, pa.int32())
_BIAS: Final = pa.scalar(BIAS, pa.int32())
_POSITIVE: Final = pa.scalar(POSITIVE, pa.string())
_ZERO: Final = pa.scalar(ZERO, pa.string())
_NOTHING: Final = pa.scalar("", pa.string())
_NUMBER: Final = r"(-?\d+(?:\.\d+)?)"
_INTERVAL: Final = re.compile(
    rf"P(?:{_NUMBER}Y)?(?:{_NUMBER}M)?(?:{_NUMBER}D)?"
    rf"(?:T(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}S)?)?\Z"
)
_UNITS: Final = (360 * DAY, 30 * DAY, DAY, 3_600_000_000, 60_000_000, 1_000_000)
_EXACT: Final = Context(prec=80, traps=[InvalidOperation, Inexact])


def arrow_type(type_: Type) -> pa.DataType:
    """Return the Arrow type that goes with `type_.spark`."""
    if type_.kind is Kind.NUMERIC:
        return pa.decimal128(type_.precision, type_.scale)
    return _ARROW.get(type_.kind, pa.string())


def arrow(type_: Type, values: Sequence[Any]) -> tuple[pa.Array, list[int]]:
    """Return the values of one field as an array of `arrow_type`, and the rows that do not fit.

    `values` are decoded JSON, None for null. What does not fit is null.
    """
    try:
        return _at_once(type_, values), []
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        takes, convert = _BY_HAND[type_.kind]
        fitted = [
            None if v is None else convert(type_, v) if type(v) in takes else UNFIT for v in values
        ]
    unfit = [row for row, value in enumerate(fitted) if value is UNFIT]
    kept = [None if value is UNFIT else value for value in fitted]
    target = arrow_type(type_)
    if type_.kind in (Kind.TIMESTAMP, Kind.TIMESTAMPTZ):
        return pa.array(kept, pa.int64()).cast(target), unfit
    if type_.kind is Kind.DATE:
        return pa.array(kept, pa.int32()).cast(target), unfit
    return pa.array(kept, target), unfit


def converter(type_: Type) -> Callable[[Any], Any]:
    """Return what converts one value, which is not None; it gives `UNFIT` for what does not fit."""
    takes, convert = _BY_HAND[type_.kind]
    return lambda value: convert(type_, value) if type(value) in takes else UNFIT


def _at_once(type_: Type, values: Sequence[Any]) -> pa.Array:
    kind, target = type_.kind, arrow_type(type_)
    if kind is Kind.FLOAT and type_.single:
        return pa.array(values, pa.float32()).cast(target)
    if kind in (Kind.BOOL, Kind.INT, Kind.FLOAT):
        return pa.array(values, target)
    if kind is Kind.INTERVAL or (kind is Kind.KEY and len(values) < _FEW):
        raise TypeError
    texts = pa.array(values, pa.string())
    if kind is Kind.KEY:
        return _keys(texts)
    if kind is Kind.TEXT and type_.width:
        return pc.utf8_rtrim(texts, " ")
    return texts if target == pa.string() else texts.cast(target)


def _keys(texts: pa.Array) -> pa.Array:
    """Return `key_of` each text, at a quarter of its cost; raises `ValueError` where one has none."""
    if not pc.all(pc.match_substring_regex(texts, _PLAIN_NUMBER)).as_py():
        raise ValueError
    at = pc.find_substring(texts, ".")
    digits = pc.replace_substring(texts, ".", "")
    length = pc.binary_length(digits)
    if (pc.max(length).as_py() or 0) > MOST_DIGITS:
        raise ValueError
    kept = pc.ascii_ltrim(digits, "0")
    whole = pc.if_else(pc.less(at, _NOUGHT), length, at)
    power = pc.add(pc.add(whole, pc.subtract(pc.binary_length(kept), length)), _BIAS)
    found = pc.binary_join_element_wise(
        _POSITIVE, power.cast(pa.string()), pc.ascii_rtrim(kept, "0"), _NOTHING
    )
    return pc.if_else(pc.equal(kept, _NOTHING), _ZERO, found)


def _bool(_: Type, value: Any) -> Any:
    return value


def _int(_: Type, value: Any) -> Any:
    return value if -_LONG <= value < _LONG else UNFIT


def _float(type_: Type, value: Any) -> Any:
    key = ZERO
    if isinstance(value, str):
        found = key_of(value)
        if found is None:
            return UNFIT
        key, value = found, float(value)
        if math.isinf(value) and key not in (INFINITY, MINUS_INFINITY):
            return UNFIT
    if type_.single:
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            return UNFIT
    # Postgres refuses a numeric that is too small for a float as it does one that is too large.
    return UNFIT if value == 0 and key != ZERO else value


def _numeric(type_: Type, value: Any) -> Any:
    if isinstance(value, str) and _DECIMAL.match(value) is None:
        return UNFIT  # not a number, infinite, or what only Python takes for one
    try:
        number = Decimal(value)
        scaled = number.quantize(Decimal(1).scaleb(-type_.scale), context=_EXACT)
    except (InvalidOperation, Inexact):
        return UNFIT
    return scaled if len(scaled.as_tuple().digits) <= type_.precision else UNFIT


def _text(type_: Type, value: Any) -> Any:
    if isinstance(value, str):
        return value.rstrip(" ") if type_.width else value
    return str(value).lower()  # true and false, as JSON has them


def _key(_: Type, value: Any) -> Any:
    key = key_of(str(value))
    return UNFIT if key is None else key


def _date(_: Type, value: Any) -> Any:
    if value in ("infinity", "-infinity"):
        return DATE_INFINITY if value == "infinity" else DATE_MINUS_INFINITY
    match = _MOMENT.fullmatch(value)
    return UNFIT if match is None or match[4] else _day(match)


def _timestamp(_: Type, value: Any) -> Any:
    if value in ("infinity", "-infinity"):
        return TIMESTAMP_INFINITY if value == "infinity" else TIMESTAMP_MINUS_INFINITY
    match = _MOMENT.fullmatch(value)
    if match is None or (day := _day(match)) is UNFIT:
        return UNFIT
    try:
        clock = time.fromisoformat(match[4] or "00:00")
    except ValueError:
        return UNFIT
    seconds = (clock.hour * 60 + clock.minute) * 60 + clock.second
    moment = day * DAY + seconds * 1_000_000 + clock.microsecond
    if (offset := clock.utcoffset()) is not None:
        moment -= offset // _MICROSECOND
    return moment if moment <= LAST_MOMENT else UNFIT


def _day(match: re.Match[str]) -> Any:
    year = int(match[1])
    try:
        days = days_of(1 - year if match[5] else year, int(match[2]), int(match[3]))
    except ValueError:
        return UNFIT
    return days if FIRST_DAY <= days <= LAST_DAY else UNFIT


def _interval(_: Type, value: Any) -> Any:
    if value in ("infinity", "-infinity"):
        return INTERVAL_INFINITY if value == "infinity" else -INTERVAL_INFINITY
    match = _INTERVAL.match(value)
    if match is None:
        return UNFIT
    total = sum(Decimal(n) * unit for n, unit in zip(match.groups(), _UNITS, strict=True) if n)
    return int(total) if -_LONG <= total < _LONG else UNFIT


_STRING: Final = (str,)
_BY_HAND: Final[dict[Kind, tuple[tuple[type, ...], Callable[[Type, Any], Any]]]] = {
    Kind.BOOL: ((bool,), _bool),
    Kind.INT: ((int,), _int),
    Kind.FLOAT: ((float, int, str), _float),
    Kind.NUMERIC: ((str, int), _numeric),
    Kind.KEY: ((str, int), _key),
    Kind.TEXT: ((str, int, bool), _text),
    Kind.TIME: (_STRING, _text),
    Kind.JSON: (_STRING, _text),
    Kind.DATE: (_STRING, _date),
    Kind.TIMESTAMP: (_STRING, _timestamp),
    Kind.TIMESTAMPTZ: (_STRING, _timestamp),
    Kind.INTERVAL: (_STRING, _interval),
}
