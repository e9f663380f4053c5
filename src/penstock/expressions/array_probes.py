"""What is asked of a column that is an array, over its JSON: `'a' = any(…)`, `@>`, `&&`, its length.

The answers are Postgres's: null is neither true nor false, null elements equal nothing, and all elements
count, whatever the dimensions. Literals have the form in which elements are compared already; see
`array_literals`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any, Final

import msgspec

from penstock.expressions.array_literals import form_of
from penstock.expressions.probes import probe
from penstock.expressions.types import KEY, UNFIT, Kind, Type
from penstock.expressions.values import converter

_LIST: Final = msgspec.json.Decoder(list).decode
_PLAIN: Final = {Kind.BOOL: bool, Kind.TEXT: str, Kind.TIME: str}
"""Kinds whose values have one form anyway, unless case or blanks make no difference."""


def ask(op: str, text: str) -> Callable[[bytes], Any]:
    """Return what gives any probe's answer for a JSON text, None for null, `UNFIT` for what has none.

    `text` is what `array_literals.asked` gives, or a dimension; else what `probes.probe` takes. Calls
    raise one of `UNREADABLE`.
    """
    if op == "cardinality":
        return lambda raw: len(_flat(_LIST(raw)))
    if op == "dimension":
        return partial(_length, int(text))
    if op not in _ANSWERS:
        return probe(op, text)
    given = json.loads(text)
    type_ = Type(
        Kind(given["kind"]), single=given["single"], folded=given["folded"], width=given["width"]
    )
    elements = _elements(KEY if type_.kind is Kind.NUMERIC else type_)
    answer = _ANSWERS[op](given["items"])

    def answered(raw: bytes) -> Any:
        found = elements(raw)
        return UNFIT if UNFIT in found else answer(found)

    return answered


def _elements(type_: Type) -> Callable[[bytes], list[Any]]:
    """Return what gives all elements of an array, None for null."""
    convert = converter(type_)
    plain = None if type_.folded or type_.width else _PLAIN.get(type_.kind)
    expected = {plain, NoneType}

    def elements(raw: bytes) -> list[Any]:
        values = _LIST(raw)
        kinds = set(map(type, values))
        if plain is not None and kinds <= expected:
            return values
        if list in kinds:
            values = _flat(values)
        return [None if v is None else form_of(convert(v), type_) for v in values]

    return elements


def _flat(values: list[Any]) -> list[Any]:
    """Return the elements of an array of any number of dimensions."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list):
            found += _flat(value)
        else:
            found.append(value)
    return found


def _length(dimension: int, raw: bytes) -> int | None:
    values: Any = _LIST(raw)
    for _ in range(dimension - 1):
        values = values[0] if values else None
        if not isinstance(values, list):
            return None
    return len(values) or None


_Answer = Callable[[list[Any]], bool | None]


def _equals_any(items: list[Any], *, negated: bool = False) -> _Answer:
    (value,) = items

    def answer(elements: list[Any]) -> bool | None:
        if not elements:
            return negated
        if value is None:
            return None
        if value in elements:
            return not negated
        return None if None in elements else negated

    return answer


def _differs_from_any(items: list[Any], *, negated: bool = False) -> _Answer:
    (value,) = items
    no_other = {value, None}

    def answer(elements: list[Any]) -> bool | None:
        if not elements:
            return negated
        if value is None:
            return None
        if not no_other.issuperset(elements):
            return not negated
        return None if None in elements else negated

    return answer


def _contains(items: list[Any]) -> _Answer:
    part = set(items)
    if None in part:
        return lambda _: False
    return part.issubset


def _overlaps(items: list[Any]) -> _Answer:
    some = set(items) - {None}
    return lambda elements: not some.isdisjoint(elements)


def _within(items: list[Any]) -> _Answer:
    whole = set(items) - {None}
    return whole.issuperset


_ANSWERS: Final[dict[str, Callable[[list[Any]], _Answer]]] = {
    "= any": _equals_any,
    "<> all": partial(_equals_any, negated=True),
    "<> any": _differs_from_any,
    "= all": partial(_differs_from_any, negated=True),
    "array @>": _contains,
    "array &&": _overlaps,
    "array <@": _within,
}
