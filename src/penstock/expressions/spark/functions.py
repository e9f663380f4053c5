"""What functions are in Spark: those of the table in `penstock.expressions.functions`, and others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

from penstock.expressions.calls import ENDLESS
from penstock.expressions.functions import Arg, Function
from penstock.expressions.nodes import Node
from penstock.expressions.spark.values import (
    Call,
    copies,
    infinite,
    is_infinite,
    let,
    let_both,
    literal,
)
from penstock.expressions.types import Kind

_OWN_SIZE: Final = 16
"""How many nodes a function of the table counts for."""


def called(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int]:
    """Return the column of a function of the table, and how many nodes it has."""
    function: Function = node.value
    assert function.spark is not None  # noqa: S101 - calls.py types the others
    build, total = function.spark, sum(sizes)
    columns = [
        column.try_cast("int") if expected is Arg.INTEGER else column
        for column, expected in zip(operands, function.args, strict=False)
    ]
    if function.uses == 1 or copies(max(sizes), function.uses) == function.uses:
        return build(F, *columns), function.uses * total + _OWN_SIZE
    names = [f"a{at}" for at in range(len(columns))]
    bound = F.struct(*[c.alias(n) for c, n in zip(columns, names, strict=True)])
    column = F.element_at(
        F.transform(F.array(bound), lambda args: build(F, *[args[n] for n in names])), 1
    )
    return column, 2 * total + _OWN_SIZE


def _trunc(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    def cut(x: Column) -> Column:
        if node.kind is Kind.FLOAT:
            return F.when(x < 0.0, _float_whole("ceil", x)).otherwise(_float_whole("floor", x))
        whole = F.floor(F.abs(x), F.lit(node.value or 0)).try_cast(node.type.spark)
        return F.when(x < 0, F.negative(whole)).otherwise(whole)

    return let(operands[0], sizes[0], cut), copies(sizes[0], 7), 16


def _whole(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    """Return `ceil` or `floor`: Spark's give a bigint of a float."""
    if node.kind is Kind.NUMERIC:
        whole = (F.ceil if node.op == "ceil" else F.floor)(operands[0])
        return whole.try_cast(node.type.spark), 1, 2
    column = let(operands[0], sizes[0], lambda x: _float_whole(node.op, x))
    return column, copies(sizes[0], 3), 6


def _float_whole(op: str, x: Column) -> Column:
    near = F.rint(x)
    if op == "ceil":
        return F.when(near < x, near + F.lit(1.0)).otherwise(near)
    return F.when(near > x, near - F.lit(1.0)).otherwise(near)


def _sign(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    def sign(x: Column) -> Column:
        above, below, zero = (F.lit(n).cast(node.type.spark) for n in (1, -1, 0))
        if node.kind is Kind.FLOAT:
            # To Spark NaN is above all numbers; Postgres finds it neither above nor below 0.
            return F.when(F.isnan(x) | (x == 0.0), zero).when(x > 0.0, above).when(x < 0.0, below)
        return F.when(x > 0, above).when(x < 0, below).when(x == 0, zero)

    return let(operands[0], sizes[0], sign), copies(sizes[0], 4), 14


def _sqrt(_: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    # NaN is above 0 in Spark, so it stays.
    root = let(operands[0], sizes[0], lambda x: F.when(x >= 0.0, F.sqrt(x)))
    return root, copies(sizes[0], 2), 4


def _power(_: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    """Null where Postgres raises an error: beyond a float, 0 to below 0, a root of less than 0."""

    def checked(x: Column, y: Column) -> Column:
        result = F.pow(x, y)
        nan = F.isnan(x) | F.isnan(y)
        one = (x == 1.0) | (y == 0.0)
        endless = infinite(x) | infinite(y)
        impossible = ((x == 0.0) & (y < 0.0)) | ((x < 0.0) & (F.rint(y) != y))
        lost = infinite(result) | ((result == 0.0) & (x != 0.0)) | F.isnan(result)
        found = F.when(one, F.lit(1.0)).when(nan, F.lit(math.nan)).when(impossible, None)
        return found.when(endless & (F.abs(x) == 1.0), F.lit(1.0)).when(endless | ~lost, result)

    column = let_both(operands[0], operands[1], max(sizes), checked)
    column = F.when(operands[0].isNotNull() & operands[1].isNotNull(), column)
    return column, copies(max(sizes), 12) + 1, 60


def _matches(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    java, longest = node.value
    if not longest:
        return operands[0].rlike(java), 1, 2

    def matched(text: Column) -> Column:
        return F.when(F.char_length(text) <= F.lit(longest), text.rlike(java))

    return let(operands[0], sizes[0], matched), copies(sizes[0], 2), 6


def part(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    """Return a field of a date or timestamp, as `extract` or `date_part` gives it."""
    type_ = node.args[0].type
    of = _float_part if node.op == "date_part" else _exact_part

    def found(time: Column) -> Column:
        value = F.when(~is_infinite(time, type_), of(node, time).cast(node.type.spark))
        if node.op == "extract" or node.value not in ENDLESS:
            return value
        above = time > literal(0, type_)
        endless = F.when(above, F.lit(math.inf)).otherwise(F.lit(-math.inf))
        return F.when(is_infinite(time, type_), endless).otherwise(value)

    return let(operands[0], sizes[0], found), copies(sizes[0], 5), 30


def _micros(time: Column) -> Column:
    return F.unix_micros(time.cast("timestamp"))


def _exact_part(node: Node, time: Column) -> Column:
    """Return a field as a number without rounding."""
    if node.value == "epoch":
        if node.args[0].kind is Kind.DATE:
            return F.unix_date(time).cast("bigint") * F.lit(86_400)
        return _scaled(_micros(time), 6)
    digits = {"microseconds": 0, "milliseconds": 3, "second": 6}.get(node.value)
    if digits is not None:
        return _scaled(F.pmod(_micros(time), F.lit(60_000_000)), digits)
    return _calendar(node.value, time)


def _scaled(micros: Column, digits: int) -> Column:
    unit = F.lit(f"{10**-digits:.{digits}f}").cast(f"decimal({digits + 1},{digits})")
    return micros.cast("decimal(19,0)") * unit


def _float_part(node: Node, time: Column) -> Column:
    """Return a field as a float, computed in Postgres' steps."""
    if node.value == "epoch":
        return _micros(time).cast("double") / F.lit(1e6)
    if node.value not in ("microseconds", "milliseconds", "second"):
        return _calendar(node.value, time)
    micros = F.pmod(_micros(time), F.lit(60_000_000))
    seconds = F.floor(micros / F.lit(1e6)).cast("double")
    rest = (micros % F.lit(1_000_000)).cast("double")
    match node.value:
        case "microseconds":
            return micros.cast("double")
        case "milliseconds":
            return seconds * F.lit(1000.0) + rest / F.lit(1000.0)
    return seconds + rest / F.lit(1e6)


def _calendar(field: str, time: Column) -> Column:
    """Return a field that is a whole number. There is no year 0: before 1 comes -1, 1 BC."""
    if field in ("year", "isoyear"):
        year = F.year(time) if field == "year" else F.extract(F.lit("YEAROFWEEK"), time)
        return F.when(year > 0, year).otherwise(year - F.lit(1))
    match field:
        case "dow":
            return F.dayofweek(time) - F.lit(1)
        case "isodow":
            return F.weekday(time) + F.lit(1)
    function = {
        "minute": F.minute, "hour": F.hour, "day": F.dayofmonth, "doy": F.dayofyear,
        "week": F.weekofyear, "month": F.month, "quarter": F.quarter,
    }[field]  # fmt: skip
    return function(time)


def _greatest(*columns: Column) -> Column:
    return F.greatest(*columns) if len(columns) > 1 else columns[0]


def _least(*columns: Column) -> Column:
    return F.least(*columns) if len(columns) > 1 else columns[0]


SKIPPING_NULLS: Final[dict[str, Callable[..., Column]]] = {
    "greatest": _greatest,
    "least": _least,
    "concat all": lambda *columns: F.concat_ws("", *columns),
    "concat_ws": lambda *columns: F.call_function("concat_ws", *columns),
}
"""Functions that leave out arguments that are null."""

FUNCTION_CALLS: Final[dict[str, Call]] = {
    "matches": _matches,
    "trunc": _trunc,
    "ceil": _whole,
    "floor": _whole,
    "sign": _sign,
    "sqrt": _sqrt,
    "power": _power,
    "extract": part,
    "date_part": part,
}
"""Functions whose types `calls.py` settles."""
