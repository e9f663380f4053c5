"""The types that keep arithmetic on numerics exact within the 38 digits that Spark has.

Postgres' numerics have as many digits as they need. Spark rounds where a result's type would need
more than 38, so operands are first brought into types whose result fits as a whole; an operand
that does not fit into its type exactly makes the row bad, instead of a rounded result.
"""

from __future__ import annotations

from typing import Final

from penstock.expressions.types import Kind, Type

_MAX: Final = 38
_KEPT_SCALE: Final = 9
"""How many digits after the point factors keep that could not be multiplied as they are."""
_QUOTIENT_SCALE: Final = 18


def numeric(whole: int, scale: int, *, fixed: bool = True) -> Type:
    """Return the numeric of so many digits before and after the point."""
    return Type(Kind.NUMERIC, max(1, whole + scale), scale, fixed=fixed)


def whole(type_: Type) -> int:
    """Return how many digits a numeric has before the point."""
    return type_.precision - type_.scale


def common(types: list[Type]) -> Type:
    """Return the numeric that compares with all of these: no digit after the point is given up."""
    scale = max(t.scale for t in types)
    before = min(max(whole(t) for t in types), _MAX - scale)
    return numeric(before, scale, fixed=all(t.fixed and t.scale == scale for t in types))


def sum_types(a: Type, b: Type) -> tuple[Type, Type, Type]:
    """Return the types of both operands of + and -, and of the result."""
    scale = max(a.scale, b.scale)
    before = min(max(whole(a), whole(b)), _MAX - 1 - scale)
    operand_a = numeric(min(whole(a), before), a.scale, fixed=a.fixed)
    operand_b = numeric(min(whole(b), before), b.scale, fixed=b.fixed)
    before = max(whole(operand_a), whole(operand_b))
    return operand_a, operand_b, numeric(before + 1, scale, fixed=a.fixed and b.fixed)


def product_types(
    a: Type, b: Type, *, keep_a: bool = False, keep_b: bool = False
) -> tuple[Type, Type, Type]:
    """Return the types of both factors, and of the product; `keep`: that factor is a literal."""
    scale_a, scale_b, whole_a, whole_b = a.scale, b.scale, whole(a), whole(b)
    if a.precision + b.precision + 1 > _MAX and scale_a + scale_b > 2 * _KEPT_SCALE:
        # The longer fraction is given up first: a type without a declared scale has one of 18.
        if keep_b or (scale_a >= scale_b and not keep_a):
            scale_a = min(scale_a, max(_KEPT_SCALE, 2 * _KEPT_SCALE - scale_b))
        if keep_a or (scale_b >= scale_a and not keep_b):
            scale_b = min(scale_b, max(_KEPT_SCALE, 2 * _KEPT_SCALE - scale_a))
    for _ in range(2 * _MAX):
        if whole_a + scale_a + whole_b + scale_b < _MAX:
            break
        if whole_b == 0 or keep_b or (whole_a >= whole_b and not keep_a):
            whole_a = max(0, whole_a - 1)
        else:
            whole_b -= 1
    factor_a = numeric(whole_a, scale_a, fixed=a.fixed and scale_a == a.scale)
    factor_b = numeric(whole_b, scale_b, fixed=b.fixed and scale_b == b.scale)
    precision = min(_MAX, factor_a.precision + factor_b.precision + 1)
    fixed = factor_a.fixed and factor_b.fixed
    return factor_a, factor_b, Type(Kind.NUMERIC, precision, scale_a + scale_b, fixed=fixed)


def quotient_types(a: Type, b: Type) -> tuple[Type, Type, Type]:
    """Return the types of dividend and divisor, and of the quotient: 18 digits after the point.

    Spark gives a quotient of numeric(p1,s1) and numeric(p2,s2) p1 - s1 + s2 digits before the point,
    max(6, s1 + p2 + 1) after it, and cuts the latter where both are more than 38.
    """
    scale_b = min(b.scale, _KEPT_SCALE)
    whole_b = min(whole(b), 20)
    whole_a = min(whole(a), _MAX - _QUOTIENT_SCALE - scale_b)
    divisor = numeric(whole_b, scale_b)
    # Enough digits after the dividend's point for the quotient to have its 18.
    scale_a = max(min(a.scale, _MAX - whole_a), _QUOTIENT_SCALE - divisor.precision - 1)
    dividend = numeric(whole_a, scale_a)
    return dividend, divisor, numeric(whole_a + scale_b, _QUOTIENT_SCALE, fixed=False)


def remainder_types(a: Type, b: Type) -> tuple[Type, Type, Type]:
    """Return the types of both operands of %, and of the remainder."""
    scale = max(a.scale, b.scale)
    before = _MAX - scale
    operand_a = numeric(min(whole(a), before), a.scale, fixed=a.fixed)
    operand_b = numeric(min(whole(b), before), b.scale, fixed=b.fixed)
    result = numeric(min(whole(operand_a), whole(operand_b)), scale, fixed=a.fixed and b.fixed)
    return operand_a, operand_b, result
