"""What each operator of an expression is in Spark, where it takes its operands' values alone.

None of them throws: what Postgres would raise an error for is null here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

from penstock.expressions.nodes import Constant, Node, Span
from penstock.expressions.spark import casing
from penstock.expressions.spark.like import like
from penstock.expressions.times import FIRST_DAY, FIRST_MOMENT, LAST_DAY, LAST_MOMENT
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

_SMALL: Final = 8
"""Up to how many nodes an operand is written out twice rather than bound to a name."""
_MAX_DAYS: Final = (1 << 31) - 1
# What stays a timestamp when some 20,000 years are added, in two steps.
_LAST_SHIFTED: Final = LAST_MOMENT - 20_100 * 366 * DAY
_MIN_INT: Final = -(1 << 63)


Call = Callable[[Node, list[Column], list[int]], tuple[Column, int, int]]
"""Gives a node's column from its operands' columns and sizes: and how many times it has each
operand, and how many nodes of its own."""


def literal(value: Constant, type_: Type) -> Column:
    """Return a literal column of a type."""
    if value is None:
        return F.lit(None).cast(type_.spark)
    match type_.kind:
        case Kind.NUMERIC:
            # With the digits of the type, not of the value.
            assert isinstance(value, Decimal | int)  # noqa: S101 - for the type checker
            return F.lit(str(value)).try_cast(type_.spark)
        case Kind.INT:
            return F.lit(value).cast("bigint")
        case Kind.INTERVAL:
            assert isinstance(value, Span)  # noqa: S101 - for the type checker
            return F.lit(value.comparable).cast("bigint")
        case Kind.DATE:
            return F.date_from_unix_date(F.lit(value))
        case Kind.TIMESTAMP:
            return F.timestamp_micros(F.lit(value)).cast("timestamp_ntz")
        case Kind.TIMESTAMPTZ:
            return F.timestamp_micros(F.lit(value))
    return F.lit(value)


def let(column: Column, size: int, use: Callable[[Column], Column]) -> Column:
    """Return what `use` makes of a column that it needs more than once."""
    if size <= _SMALL:
        return use(column)
    return F.element_at(F.transform(F.array(column), use), 1)


def let_both(x: Column, y: Column, size: int, use: Callable[[Column, Column], Column]) -> Column:
    """Return what `use` makes of two columns of one type, as `let` does of one."""
    if size <= _SMALL:
        return use(x, y)
    both = F.array(F.struct(x.alias("x"), y.alias("y")))
    return F.element_at(F.transform(both, lambda pair: use(pair["x"], pair["y"])), 1)


def copies(size: int, uses: int) -> int:
    """Return what an operand of `let` counts for, in copies of it.

    Spark analyses a lambda within a lambda several times over, so that deep ones must count for much
    more than their nodes.
    """
    return uses if size <= _SMALL else 2


def infinite(column: Column) -> Column:
    """Return whether a float is infinite."""
    return F.abs(column) == F.lit(math.inf)


def _float(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    """Postgres raises an error where a result of finite floats is infinite, or 0 for being small."""

    def raw(x: Column, y: Column) -> Column:
        match node.op:
            case "+":
                result = x + y
            case "-":
                result = x - y
            case "*":
                result = x * y
            case _:
                possible = F.when(y != F.lit(0.0), F.try_divide(x, y))
                result = possible.when((y == 0.0) & F.isnan(x), x)
        return result.cast("float").cast("double") if node.type.single else result

    def checked(x: Column, y: Column) -> Column:
        result = raw(x, y)
        vanished = F.lit(False)
        if node.op == "*":
            vanished = (result == 0.0) & (x != 0.0) & (y != 0.0)
        elif node.op == "/":
            vanished = (result == 0.0) & (x != 0.0) & ~infinite(y)
        grown = infinite(result) & ~infinite(x) & ~infinite(y)
        return F.when(~(grown | vanished), result)

    column = let_both(operands[0], operands[1], max(sizes), checked)
    return column, copies(max(sizes), 6), 40


def _integer(node: Node, operands: list[Column], _sizes: list[int]) -> tuple[Column, int, int]:
    x, y = operands
    match node.op:
        case "+":
            return F.try_add(x, y), 1, 1
        case "-":
            return F.try_subtract(x, y), 1, 1
        case "*":
            return F.try_multiply(x, y), 1, 1
        case "%":
            # What remains of the least bigint over -1 is 0, not an overflow.
            return F.when(y == F.lit(-1), x - x).otherwise(F.try_mod(x, y)), 2, 6
    possible = (y != F.lit(0)) & ((y != F.lit(-1)) | (x != F.lit(_MIN_INT)))
    return F.when(possible, F.call_function("div", x, y)), 3, 8


def _numeric(node: Node, operands: list[Column], _sizes: list[int]) -> tuple[Column, int, int]:
    x, y = operands
    function = {
        "+": F.try_add, "-": F.try_subtract, "*": F.try_multiply, "/": F.try_divide, "%": F.try_mod,
    }[node.op]  # fmt: skip
    return function(x, y).try_cast(node.type.spark), 1, 2


def _arithmetic(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    match node.kind:
        case Kind.FLOAT:
            return _float(node, operands, sizes)
        case Kind.NUMERIC:
            return _numeric(node, operands, sizes)
    return _integer(node, operands, sizes)


def _neg(node: Node, operands: list[Column], _sizes: list[int]) -> tuple[Column, int, int]:
    if node.kind in (Kind.INT, Kind.INTERVAL):
        return F.try_subtract(F.lit(0).cast("bigint"), operands[0]), 1, 3
    return F.negative(operands[0]), 1, 1


def _abs(node: Node, operands: list[Column], _sizes: list[int]) -> tuple[Column, int, int]:
    if node.kind is not Kind.INT:
        return F.abs(operands[0]), 1, 1

    # As a decimal the least bigint has an absolute value too, which is then no bigint.
    return F.abs(operands[0].cast("decimal(20,0)")).try_cast("bigint"), 2, 3


def _round(node: Node, operands: list[Column], _sizes: list[int]) -> tuple[Column, int, int]:
    if node.kind is Kind.FLOAT:
        return F.rint(operands[0]), 1, 1
    return F.round(operands[0], node.value or 0).try_cast(node.type.spark), 1, 2


def _upper(_: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    return let(operands[0], sizes[0], casing.upper), copies(sizes[0], 6), 14


def _like(node: Node, operands: list[Column], _sizes: list[int]) -> tuple[Column, int, int]:
    # LIKE is the one operator that sees a char(n)'s blanks.
    width = node.args[0].type.width
    text = F.rpad(operands[0], width, " ") if width else operands[0]
    return like(text, node.value, folded=node.op == "ilike"), 1, 3


def is_infinite(time: Column, type_: Type) -> Column:
    """Return whether a date or timestamp stands for infinity or -infinity."""
    plus, minus = TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY
    if type_.kind is Kind.DATE:
        plus, minus = DATE_INFINITY, DATE_MINUS_INFINITY
    return time.isin(literal(plus, type_), literal(minus, type_))


def _in_range(time: Column, type_: Type) -> Column:
    """Return whether Postgres has a date or timestamp."""
    first, last = FIRST_MOMENT, LAST_MOMENT
    if type_.kind is Kind.DATE:
        first, last = FIRST_DAY, LAST_DAY
    return (time >= literal(first, type_)) & (time <= literal(last, type_))


def _date_trunc(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    unit = node.value.removesuffix("s")

    def truncated(time: Column) -> Column:
        cut = F.date_trunc(unit, time.cast("timestamp")).cast(node.type.spark)
        return F.when(is_infinite(time, node.type), time).otherwise(cut)

    return let(operands[0], sizes[0], truncated), copies(sizes[0], 3), 14


def _shift(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    span: Span = node.value

    def moved(time: Column) -> Column:
        result = time
        if span.months:
            result = result + F.make_ym_interval(F.lit(0), F.lit(span.months))
        if span.days or span.microseconds:
            result = result + F.make_dt_interval(
                F.lit(span.days),
                F.lit(0),
                F.lit(0),
                F.lit(Decimal(span.microseconds).scaleb(-6)).cast("decimal(18,6)"),
            )
        return result

    def inside(result: Column) -> Column:
        return F.when(_in_range(result, node.type), result)

    def shifted(time: Column) -> Column:
        result = let(moved(time), 2 * _SMALL, inside)
        near = time <= literal(_LAST_SHIFTED, node.type)
        return F.when(is_infinite(time, node.type), time).when(near, result)

    return let(operands[0], sizes[0], shifted), copies(sizes[0], 4), 33


def _since(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    type_ = node.args[0].type
    plus, minus = literal(TIMESTAMP_INFINITY, type_), literal(TIMESTAMP_MINUS_INFINITY, type_)

    def between(x: Column, y: Column) -> Column:
        micros = [F.unix_micros(c.cast("timestamp")) for c in (x, y)]
        endless = F.when((x == plus) & (y == minus), F.lit(INTERVAL_INFINITY))
        endless = endless.when((x == minus) & (y == plus), F.lit(-INTERVAL_INFINITY))
        endless = endless.when(is_infinite(x, type_) & is_infinite(y, type_), None)
        endless = endless.when((x == plus) | (y == minus), F.lit(INTERVAL_INFINITY))
        endless = endless.when((x == minus) | (y == plus), F.lit(-INTERVAL_INFINITY))
        difference = endless.otherwise(F.try_subtract(*micros))
        return F.when(x.isNotNull() & y.isNotNull(), difference)

    column = let_both(operands[0], operands[1], max(sizes), between)
    return column, copies(max(sizes), 8), 40


def _days(node: Node, operands: list[Column], _sizes: list[int]) -> tuple[Column, int, int]:
    x, y = operands
    finite = ~is_infinite(x, node.args[0].type) & ~is_infinite(y, node.args[0].type)
    return F.when(finite, F.datediff(x, y).cast("bigint")), 2, 16


def _add_days(node: Node, operands: list[Column], sizes: list[int]) -> tuple[Column, int, int]:
    date, days = operands

    def moved(result: Column) -> Column:
        return F.when(_in_range(result, node.type), result)

    def added(near: Column) -> Column:
        # Infinity stays what it is, if there is a number to add at all.
        endless = is_infinite(date, node.type) & near.isNotNull()
        inside = let(F.date_add(date, near), 2 * _SMALL, moved)
        return F.when(endless, date).when(~is_infinite(date, node.type), inside)

    near = let(
        days, sizes[1], lambda n: F.when(n.between(-_MAX_DAYS, _MAX_DAYS), n).try_cast("int")
    )
    return let(near, 2 * _SMALL, added), copies(max(sizes), 4), 40


STRICT: Final[dict[str, Callable[..., Column]]] = {
    "not": lambda x: ~x,
    "=": lambda x, y: x == y,
    "<>": lambda x, y: x != y,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "concat": F.concat,
    "lower": casing.lower,
    "length": lambda x: F.char_length(x).cast("bigint"),
    "now": F.current_timestamp,
}
"""Operators that are one function of Spark's."""

CALLS: Final[dict[str, Call]] = {
    "+": _arithmetic,
    "-": _arithmetic,
    "*": _arithmetic,
    "/": _arithmetic,
    "%": _arithmetic,
    "neg": _neg,
    "abs": _abs,
    "upper": _upper,
    "round": _round,
    "like": _like,
    "ilike": _like,
    "date_trunc": _date_trunc,
    "shift": _shift,
    "since": _since,
    "days": _days,
    "add days": _add_days,
}
"""Operators that take some more."""
