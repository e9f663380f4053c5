"""A message's JSON values as Arrow arrays of the kinds that expressions work on."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.expressions.types import (
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    DAY,
    INTERVAL_INFINITY,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
    Kind,
    Type,
)

UNFIT: Final[Any] = type("Unfit", (), {"__repr__": lambda _: "UNFIT"})()
"""In the place of a value that has not the form that its kind asks for."""

_ARROW: Final = {
    Kind.BOOL: pa.bool_(),
    Kind.INT: pa.int64(),
    Kind.FLOAT: pa.float64(),
    Kind.DATE: pa.date32(),
    Kind.TIMESTAMP: pa.timestamp("us"),
    Kind.TIMESTAMPTZ: pa.timestamp("us", "UTC"),
    Kind.INTERVAL: pa.int64(),
}
_UNIX: Final = datetime(1970, 1, 1)
_MICROSECOND: Final = timedelta(microseconds=1)
_LONG: Final = 1 << 63
_FLOATS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_DECIMAL: Final = re.compile(r"-?\d+(?:\.\d+)?\Z", re.ASCII)
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


def _at_once(type_: Type, values: Sequence[Any]) -> pa.Array:
    kind, target = type_.kind, arrow_type(type_)
    if kind is Kind.FLOAT and type_.single:
        return pa.array(values, pa.float32()).cast(target)
    if kind in (Kind.BOOL, Kind.INT, Kind.FLOAT):
        return pa.array(values, target)
    if kind is Kind.INTERVAL:
        raise TypeError
    texts = pa.array(values, pa.string())
    if kind is Kind.TEXT and type_.width:
        return pc.utf8_rtrim(texts, " ")
    return texts if target == pa.string() else texts.cast(target)


def _bool(_: Type, value: Any) -> Any:
    return value


def _int(_: Type, value: Any) -> Any:
    return value if -_LONG <= value < _LONG else UNFIT


def _float(type_: Type, value: Any) -> Any:
    if isinstance(value, str):
        return _FLOATS.get(value, UNFIT)
    if not type_.single:
        return value
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return UNFIT


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


def _date(_: Type, value: Any) -> Any:
    if value in ("infinity", "-infinity"):
        return DATE_INFINITY if value == "infinity" else DATE_MINUS_INFINITY
    try:
        return date.fromisoformat(value).toordinal() - _UNIX.toordinal()
    except ValueError:
        return UNFIT


def _timestamp(_: Type, value: Any) -> Any:
    if value in ("infinity", "-infinity"):
        return TIMESTAMP_INFINITY if value == "infinity" else TIMESTAMP_MINUS_INFINITY
    try:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is not None:
            moment = moment.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):
        return UNFIT
    return (moment - _UNIX) // _MICROSECOND


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
    Kind.TEXT: ((str, int, bool), _text),
    Kind.TIME: (_STRING, _text),
    Kind.JSON: (_STRING, _text),
    Kind.DATE: (_STRING, _date),
    Kind.TIMESTAMP: (_STRING, _timestamp),
    Kind.TIMESTAMPTZ: (_STRING, _timestamp),
    Kind.INTERVAL: (_STRING, _interval),
}
