"""Numerics of any size, NaN and infinities compared as Postgres compares them.

A decimal of Spark's has 38 digits, a numeric of Postgres' has 131,072 before its point and 16,383 after
it. So where one that may have more is compared, all that it is compared with becomes a *key*: a text
whose order, by its bytes, is that of the numbers.

    0                       -infinity
    1 <exponent> <digits> ~ a negative number, exponent and digits each taken from 9
    2                       zero
    3 <exponent> <digits>   a positive number: 0.<digits> times 10 to the power of the exponent
    4                       infinity
    5                       NaN, which is greater than all others and equal to itself
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from penstock.expressions import decimals
from penstock.expressions.errors import ExpressionError
from penstock.expressions.literals import number
from penstock.expressions.nodes import Node
from penstock.expressions.types import KEY, NUMERIC, Kind, Type

MINUS_INFINITY: Final = "0"
NEGATIVE: Final = "1"
ZERO: Final = "2"
POSITIVE: Final = "3"
INFINITY: Final = "4"
NAN: Final = "5"
END: Final = "~"
"""What stands behind the digits of a negative number: more than any digit."""
BIAS: Final = 500_000
"""What is added to an exponent, so that all have six digits."""
COMPLEMENT: Final = str.maketrans("0123456789", "9876543210")
MOST_DIGITS: Final = 131_072
"""Up to which power of ten a number has a key."""
_NUMBER: Final = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,7}))?", re.ASCII)
_WORDS: Final = {
    "nan": NAN, "infinity": INFINITY, "inf": INFINITY, "+infinity": INFINITY, "+inf": INFINITY,
    "-infinity": MINUS_INFINITY, "-inf": MINUS_INFINITY,
}  # fmt: skip
_BLANKS: Final = " \t\n\v\f\r"


def key_of(text: str) -> str | None:
    """Return the key of a number as Postgres' numeric reads it, None for what is none."""
    match = _NUMBER.fullmatch(text) or _NUMBER.fullmatch(text := text.strip(_BLANKS))
    if match is None:
        return _WORDS.get(text.lower())
    sign, whole, fraction, exponent = match.groups(default="")
    if not whole and not fraction:
        return None
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return ZERO
    power = len(digits) - len(fraction) + (int(exponent) if exponent else 0)
    if abs(power) > MOST_DIGITS:
        return None
    key = f"{power + BIAS}{digits.rstrip('0')}"
    return f"{NEGATIVE}{key.translate(COMPLEMENT)}{END}" if sign == "-" else f"{POSITIVE}{key}"


def keyed(nodes: Sequence[Node], positions: Sequence[int]) -> tuple[Node, ...] | None:
    """Return operands of a comparison as keys, None where these are not what they are compared by.

    Raises `ExpressionError` for a string that is no number.
    """
    kinds = {node.kind for node in nodes if node.op != "unknown"}
    numbers = kinds & {Kind.INT, Kind.NUMERIC}
    if not numbers or kinds - {Kind.INT, Kind.NUMERIC, Kind.JSON}:
        return None
    far = Kind.NUMERIC in kinds and any(map(_is_far, nodes))
    if not far and not any(map(_is_open, nodes)):
        return None
    return tuple(_key(n, p) for n, p in zip(nodes, positions, strict=True))


def _is_open(node: Node) -> bool:
    """Return whether a number may be one that a decimal of Spark's can't hold."""
    if node.op in ("coalesce", "case"):
        return any(map(_is_open, _results(node)))
    if node.op == "literal":
        # What a column without declared scale has in Spark.
        return node.kind is Kind.NUMERIC and (
            decimals.whole(node.type) > decimals.whole(NUMERIC) or node.type.scale > NUMERIC.scale
        )
    source = exact_source(node)
    # A numeric(p,s) may be NaN too.
    return source.op == "field" and source.kind in (Kind.NUMERIC, Kind.JSON, Kind.TEXT)


def _is_far(node: Node) -> bool:
    """Return whether a string is a number that no decimal of Spark's holds."""
    if node.op != "unknown" or node.value is None:
        return False
    try:
        number(node.value.strip(_BLANKS))
    except ValueError:
        return key_of(node.value) is not None
    return False


def _results(node: Node) -> Sequence[Node]:
    """Return what a `coalesce` or `case` may give."""
    return node.args if node.op == "coalesce" else (*node.args[1:-1:2], node.args[-1])


def with_results(node: Node, to: Type, converted: Callable[[Node], Node]) -> Node:
    """Return a `coalesce` or `case` of another type, with each of its results converted."""
    if node.op == "coalesce":
        return Node("coalesce", to, tuple(map(converted, node.args)))
    *branches, last = node.args
    args = [converted(arg) if at % 2 else arg for at, arg in enumerate(branches)]
    return Node("case", to, (*args, converted(last)))


def exact_source(node: Node) -> Node:
    """Return what a number has its exact value from: what was cast to numeric without a rounding."""
    while node.op == "cast" and node.kind is Kind.NUMERIC and node.value in (None, "exact"):
        (of,) = node.args
        if of.kind not in (Kind.NUMERIC, Kind.INT):
            read = of.kind is Kind.JSON or (of.kind is Kind.TEXT and not of.type.form)
            return of if of.op == "field" and read else node
        node = of
    return node


def _key(node: Node, position: int) -> Node:
    match node.op:
        case "unknown" | "literal":
            return _literal(node, position)
        case "coalesce" | "case":
            return with_results(node, KEY, lambda result: _key(result, position))
    source = exact_source(node)
    if source.op == "field":
        return Node("field", KEY, value=replace(source.value, type=KEY))
    if source is not node:
        return _key(source, position)
    # What was computed is a decimal of Spark's.
    return Node("cast", KEY, (node,))


def _literal(node: Node, position: int) -> Node:
    if node.value is None:
        return Node("literal", KEY, value=None)
    key = key_of(str(node.value))
    if key is None:
        raise ExpressionError(
            position, f"{str(node.value)[:50]!r} is not a numeric: a number like 12.50 is expected"
        )
    return Node("literal", KEY, value=key)
