"""Values that Spark computed, in the JSON forms that messages have."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.expressions.times import DAY_10000, DAY_ONE, civil
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


def _text(value: str) -> pa.Scalar:
    return pa.scalar(value, pa.string())


# Made once: each conversion of a Python value looks for optional modules, 0.1 ms a time.
_NULL: Final = _text("null")
_TRUE: Final = _text("true")
_FALSE: Final = _text("false")
_QUOTE: Final = _text('"')
_NOTHING: Final = _text("")
_ESCAPED: Final = r'[\x00-\x1f"\\\x7f]'
_INFINITIES: Final = {
    Kind.DATE: (DATE_INFINITY, DATE_MINUS_INFINITY, pa.int32()),
    Kind.TIMESTAMP: (TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY, pa.int64()),
    Kind.TIMESTAMPTZ: (TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY, pa.int64()),
}


def json_texts(type_: Type, values: pa.Array) -> pa.Array:
    """Return the JSON of each value of a column that Spark computed, `null` for null."""
    if type_.kind is Kind.BOOL:
        texts = pc.if_else(values, _TRUE, _FALSE)
    elif type_.kind is Kind.INT:
        texts = values.cast(pa.string())
    elif type_.kind is Kind.FLOAT:
        texts = _floats(values, single=type_.single)
    elif type_.kind is Kind.NUMERIC:
        texts = _quoted(_numerics(values, fixed=type_.fixed))
    elif type_.kind in _INFINITIES:
        texts = _quoted(_moments(type_.kind, values))
    elif type_.kind is Kind.INTERVAL:
        texts = pa.array(
            [None if v is None else f'"{_interval(v)}"' for v in values.to_pylist()], pa.string()
        )
    else:
        texts = strings(values)
    return pc.fill_null(texts, _NULL) if texts.null_count else texts


def strings(values: pa.Array) -> pa.Array:
    """Return texts as JSON strings; null stays null."""
    if pc.any(pc.match_substring_regex(values, _ESCAPED)).as_py():
        dumped = [None if v is None else orjson.dumps(v).decode() for v in values.to_pylist()]
        return pa.array(dumped, pa.string())
    return _quoted(values)


def _quoted(texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(_QUOTE, texts, _QUOTE, _NOTHING)


def _floats(values: pa.Array, *, single: bool) -> pa.Array:
    texts = (values.cast(pa.float32()) if single else values).cast(pa.string())
    if pc.all(pc.is_finite(values)).as_py() is not False:
        return texts
    words = {"nan": '"NaN"', "-nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}
    return pa.array([words.get(text, text) for text in texts.to_pylist()], pa.string())


def _numerics(values: pa.Array, *, fixed: bool) -> pa.Array:
    texts = values.cast(pa.string())
    if pc.any(pc.match_substring(texts, "E")).as_py():
        texts = pa.array([None if t is None else f"{Decimal(t):f}" for t in texts.to_pylist()])
    if fixed or not values.type.scale:
        return texts
    # How many digits after the point Postgres would print is not known of these.
    return pc.replace_substring_regex(texts, r"\.?0*$", "")


def _moments(kind: Kind, values: pa.Array) -> pa.Array:
    unit = 1 if kind is Kind.DATE else DAY
    numbers = values.cast(_INFINITIES[kind][2])
    beyond = pc.or_(pc.less(numbers, DAY_ONE * unit), pc.greater_equal(numbers, DAY_10000 * unit))
    if pc.any(beyond).as_py():
        return pa.array([_moment(kind, n) for n in numbers.to_pylist()], pa.string())
    texts = values.cast(pa.string())
    if kind is not Kind.DATE:
        texts = pc.replace_substring(texts, " ", "T")
        texts = pc.replace_substring_regex(texts, r"\.000000(Z?)$", r"\1")
    return texts


def _moment(kind: Kind, number: int | None) -> str | None:
    """Return a time as messages have it: as Postgres prints it where ISO 8601 has no plain form."""
    above, below, _ = _INFINITIES[kind]
    if number is None or number in (above, below):
        return {None: None, above: "infinity", below: "-infinity"}[number]
    day, rest = (number, 0) if kind is Kind.DATE else divmod(number, DAY)
    year, month, of_month = civil(day)
    plain = 0 < year < 10_000
    text = f"{year if year > 0 else 1 - year:04}-{month:02}-{of_month:02}"
    if kind is not Kind.DATE:
        seconds, micros = divmod(rest, 1_000_000)
        clock = f"{seconds // 3_600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        # Postgres leaves out the zeros that ISO 8601 keeps.
        fraction = f".{micros:06}" if micros else ""
        zone = "" if kind is Kind.TIMESTAMP else "Z" if plain else "+00"
        text += f"{'T' if plain else ' '}{clock}{fraction if plain else fraction.rstrip('0')}{zone}"
    return text if year > 0 else f"{text} BC"


def _interval(microseconds: int) -> str:
    """Return an ISO 8601 duration: days, and what is left of one."""
    if microseconds >= INTERVAL_INFINITY:
        return "infinity"
    if microseconds <= -INTERVAL_INFINITY:
        return "-infinity"
    sign = -1 if microseconds < 0 else 1
    days, rest = divmod(abs(microseconds), DAY)
    minutes, rest = divmod(rest, 60_000_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{Decimal(sign * rest).scaleb(-6):f}"
    if "." in seconds:
        seconds = seconds.rstrip("0").rstrip(".")
    text = f"{sign * days}D" if days else ""
    time = "".join(f"{sign * n}{unit}" for n, unit in ((hours, "H"), (minutes, "M")) if n)
    if rest:
        time += f"{seconds}S"
    if not text and not time:
        time = "0S"
    return f"P{text}" + (f"T{time}" if time else "")
