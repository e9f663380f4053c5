"""Casts, as Postgres does them: what a text may look like, how numbers round; null for what fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

from penstock.expressions import keys
from penstock.expressions.literals import FALSE_WORDS, TRUE_WORDS, read
from penstock.expressions.nodes import Node
from penstock.expressions.spark.values import copies, is_infinite, let, literal
from penstock.expressions.times import DAY_10000, DAY_ONE, LAST_MOMENT
from penstock.expressions.types import DAY, TIMES, Kind, Type

_BLANK: Final = r"[ \t\n\x0b\f\r]*"
_INT: Final = rf"^{_BLANK}[+-]?[0-9]+{_BLANK}\z"
_NUMBER: Final = rf"^{_BLANK}[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,2}})?{_BLANK}\z"
_FLOAT: Final = rf"^{_BLANK}[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}})?{_BLANK}\z"
# What has no more than 18 digits after the point, whatever its exponent says.
_EXACT: Final = (
    rf"^{_BLANK}[+-]?(?:"
    r"(?:[0-9]+(?:\.[0-9]{0,18}0*)?|\.[0-9]{1,18}0*)(?:[eE]\+?[0-9]{1,2})?"
    r"|(?:[0-9]+(?:\.[0-9]{0,9}0*)?|\.[0-9]{1,9}0*)[eE]-0?[0-9]"
    rf"){_BLANK}\z"
)
_MOMENT: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[ T][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?"
    r"(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)?)?\z"
)
_ZONE: Final = r"(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)\z"
_ZONE_AFTER_TIME: Final = rf"(:[0-9]{{2}}(?:\.[0-9]+)?){_ZONE}"
_UUID: Final = r"^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\z"


def cast_value(node: Node, operand: Column, size: int) -> tuple[Column, int]:
    """Return a `cast` node's column and how many nodes it has."""
    have = node.args[0].type
    use: Callable[[Column], Column] = {
        Kind.TEXT: _to_text,
        Kind.BOOL: _to_bool,
        Kind.INT: _to_int,
        Kind.FLOAT: _to_float,
        Kind.NUMERIC: _to_numeric,
        Kind.KEY: _to_key,
        Kind.DATE: _to_time,
        Kind.TIMESTAMP: _to_time,
        Kind.TIMESTAMPTZ: _to_time,
    }[node.kind](node, have)
    if _once(node, have):
        return use(operand), size + 4
    return let(operand, size, use), copies(size, 3) * size + (40 if node.kind is Kind.KEY else 16)


def _once(node: Node, have: Type) -> bool:
    """Return whether a cast needs its operand no more than once."""
    match node.kind:
        case Kind.TEXT:
            return have.kind not in TIMES and node.value != "uuid"
        case Kind.INT:
            return have.kind is Kind.BOOL or (
                have.kind is Kind.NUMERIC and node.value in (None, 64)
            )
        case Kind.FLOAT:
            return not _is_text(have) and not node.type.single
        case Kind.NUMERIC:
            wide = node.value == "round" or node.type.scale >= have.scale
            return have.kind is Kind.INT or (have.kind is Kind.NUMERIC and wide)
        case Kind.KEY:
            return False
    return have.kind in TIMES and Kind.DATE not in (have.kind, node.kind)


def _is_text(type_: Type) -> bool:
    return type_.kind in (Kind.TEXT, Kind.JSON)


def _to_text(node: Node, have: Type) -> Callable[[Column], Column]:
    if node.value == "uuid":
        return lambda x: F.when(x.rlike(_UUID), F.lower(x))
    if isinstance(node.value, int):
        length = node.value
        if node.type.width:
            return lambda x: F.rtrim(F.substring(x, 1, length))
        return lambda x: F.substring(x, 1, length)
    if have.kind in TIMES:
        return lambda x: _time_text(x, have)
    return lambda x: x.cast("string")


def _time_text(time: Column, have: Type) -> Column:
    """Return a time as messages have it: a fraction of six digits or none."""
    if have.kind is Kind.DATE:
        text = F.date_format(time, "yyyy-MM-dd")
    else:
        zone = "'Z'" if have.kind is Kind.TIMESTAMPTZ else ""
        clock = "yyyy-MM-dd'T'HH:mm:ss"
        whole = F.date_format(time, "SSSSSS") == "000000"
        text = F.when(whole, F.date_format(time, clock + zone)).otherwise(
            F.date_format(time, f"{clock}.SSSSSS{zone}")
        )
    unit = 1 if have.kind is Kind.DATE else DAY
    first, after = literal(DAY_ONE * unit, have), literal(DAY_10000 * unit, have)
    sign = F.when(time > literal(0, have), "infinity").otherwise("-infinity")
    return F.when(is_infinite(time, have), sign).when((time >= first) & (time < after), text)


def _to_bool(_node: Node, have: Type) -> Callable[[Column], Column]:
    if not _is_text(have):
        return lambda x: x != F.lit(0)

    def parsed(x: Column) -> Column:
        word = F.lower(F.trim(x, F.lit(" \t\n\x0b\f\r")))
        return F.when(word.isin(*TRUE_WORDS), True).when(word.isin(*FALSE_WORDS), False)

    return parsed


def _to_int(node: Node, have: Type) -> Callable[[Column], Column]:
    bits: int = node.value or 64
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def ranged(x: Column) -> Column:
        return x if bits == 64 else F.when(x.between(low, high), x)

    match have.kind:
        case Kind.BOOL:
            return lambda x: x.cast("bigint")
        case Kind.INT:
            return ranged
        case Kind.NUMERIC:
            # Halves away from zero.
            return lambda x: ranged(F.round(x, 0).try_cast("bigint"))
        case Kind.FLOAT:
            # Halves to the even one; 2^63 itself is one too many.
            limit = float(1 << (bits - 1))

            def from_float(x: Column) -> Column:
                whole = F.rint(x)
                fits = (whole >= F.lit(-limit)) & (whole < F.lit(limit))
                return F.when(fits, whole.try_cast("bigint"))

            return from_float
    return lambda x: ranged(F.when(x.rlike(_INT), x).try_cast("bigint"))


def _to_float(node: Node, have: Type) -> Callable[[Column], Column]:
    single = node.type.single

    def narrowed(x: Column) -> Column:
        if not single:
            return x
        small = x.cast("float").cast("double")
        grown = (F.abs(small) == F.lit(math.inf)) & (F.abs(x) != F.lit(math.inf))
        vanished = (small == 0.0) & (x != 0.0)
        return F.when(~(grown | vanished), small)

    if not _is_text(have):
        return lambda x: narrowed(x.cast("double"))

    def parsed(x: Column) -> Column:
        value = F.when(x.rlike(_FLOAT), x).try_cast("double")
        # Out of range where there are digits but no finite value, or a value of 0 from others.
        zero = x.rlike(rf"^{_BLANK}[+-]?[0.]*(?:[eE].*)?{_BLANK}\z")
        fits = (F.abs(value) != F.lit(math.inf)) & ((value != 0.0) | zero)
        word = F.lower(F.trim(x, F.lit(" \t\n\x0b\f\r")))
        special = (
            F.when(word == "nan", math.nan)
            .when(word.isin("inf", "infinity", "+inf", "+infinity"), math.inf)
            .when(word.isin("-inf", "-infinity"), -math.inf)
        )
        return narrowed(F.when(fits, value).when(value.isNull(), special))

    return parsed


def _to_numeric(node: Node, have: Type) -> Callable[[Column], Column]:
    target = node.type.spark
    rounds = node.value == "round"
    match have.kind:
        case Kind.INT:
            return lambda x: x.try_cast(target)
        case Kind.NUMERIC:
            if rounds or node.type.scale >= have.scale:
                return lambda x: x.try_cast(target)
            return lambda x: F.when(_fits(x, node.type.scale), x.try_cast(target))
        case Kind.FLOAT:
            return _float_to_numeric(node, have)
    pattern = _NUMBER if rounds else _EXACT
    return lambda x: F.when(x.rlike(pattern), x).try_cast(target)


def _to_key(_: Node, have: Type) -> Callable[[Column], Column]:
    """Return what makes a key of a number that was computed: see `penstock.expressions.keys`."""

    def key(x: Column) -> Column:
        text = (x.cast("decimal(20,0)") if have.kind is Kind.INT else x).cast("string")
        bare = F.ltrim(text, F.lit("-"))
        digits = F.replace(bare, F.lit("."), F.lit(""))
        kept = F.ltrim(digits, F.lit("0"))
        whole = F.length(F.substring_index(bare, ".", 1))
        power = whole + F.length(kept) - F.length(digits) + F.lit(keys.BIAS)
        digits_key = F.concat(power.cast("string"), F.rtrim(kept, F.lit("0")))
        other = F.concat(
            F.lit(keys.NEGATIVE),
            F.translate(digits_key, "0123456789", "9876543210"),
            F.lit(keys.END),
        )
        key = F.when(kept == "", keys.ZERO).when(text.startswith("-"), other)
        return key.otherwise(F.concat(F.lit(keys.POSITIVE), digits_key))

    return lambda x: F.when(x.isNotNull(), key(x))


def _fits(x: Column, scale: int) -> Column:
    """Return whether a numeric has no more than so many digits after the point."""
    quantum = F.lit(str(Decimal(1).scaleb(-scale))).cast(f"decimal({max(1, scale)},{scale})")
    return F.try_mod(x, quantum) == 0


def _float_to_numeric(node: Node, have: Type) -> Callable[[Column], Column]:
    # Postgres goes by the 15 (of a real 6) digits that a float has for certain.
    form = "%.5e" if have.single else "%.14e"
    least = F.lit(1e-3)

    def from_float(x: Column) -> Column:
        finite = (F.abs(x) != F.lit(math.inf)) & ~F.isnan(x)
        if node.value != "round":
            # A smaller one could have more digits after the point than there is room for.
            finite = finite & ((F.abs(x) >= least) | (x == 0.0))
        # It is rounded away, and Spark reads no such exponents.
        readable = F.when(F.abs(x) < F.lit(10.0 ** -(node.type.scale + 2)), "0").otherwise(
            F.format_string(form, x)
        )
        return F.when(finite, readable).try_cast(node.type.spark)

    return from_float


def _to_time(node: Node, have: Type) -> Callable[[Column], Column]:
    if have.kind in TIMES:
        return _time_to_time(node, have)

    def parsed(x: Column) -> Column:
        text = F.trim(x, F.lit(" \t\n\x0b\f\r"))
        readable = F.when(text.rlike(_MOMENT) & ~text.startswith("0000"), text)
        if node.kind is Kind.DATE:
            # The whole must be a time that there is, though its day alone counts.
            value = readable.try_cast("timestamp")
            value = F.when(value.isNotNull(), F.substring(text, 1, 10).try_cast("date"))
        elif node.kind is Kind.TIMESTAMP:
            value = F.regexp_replace(readable, _ZONE_AFTER_TIME, "$1").try_cast("timestamp_ntz")
        else:
            value = readable.try_cast("timestamp")
        word = F.lower(text)
        plus, minus = _infinities(node.type)
        return F.when(word == "infinity", plus).when(word == "-infinity", minus).otherwise(value)

    return parsed


def _time_to_time(node: Node, have: Type) -> Callable[[Column], Column]:
    target = node.type.spark
    if Kind.DATE not in (have.kind, node.kind):
        return lambda x: x.cast(target)

    def cast(x: Column) -> Column:
        plus, minus = _infinities(node.type)
        sign = F.when(x > literal(0, have), plus).otherwise(minus)
        endless = F.when(is_infinite(x, have), sign)
        if have.kind is Kind.DATE:
            return endless.when(x <= literal(LAST_MOMENT // DAY, have), x.cast(target))
        return endless.otherwise(x.cast(target))

    return cast


def _infinities(type_: Type) -> tuple[Column, Column]:
    return literal(read("infinity", type_), type_), literal(read("-infinity", type_), type_)
