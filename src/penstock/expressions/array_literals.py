"""Reads the literal of an array, `{a,"b c",NULL}`, as Postgres does, and its elements.

Elements are compared in a form that is one for each value: 1.0 and 1.00 have the same, as have `A` and
`a` of a citext. Literals are brought into it once, messages' elements by `array_probes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from penstock.expressions.casing import lowered
from penstock.expressions.errors import ExpressionError
from penstock.expressions.keys import key_of
from penstock.expressions.literals import read
from penstock.expressions.nodes import Span
from penstock.expressions.syntax import Expr, TypeName
from penstock.expressions.types import UNFIT, Kind, Type

_BLANKS: Final = " \t\n\v\f\r"
_BLANK: Final = f"[{_BLANKS}]"
_PLAIN: Final = rf'(?:[^{_BLANKS},{{}}"\\]|\\.)'
_ELEMENT: Final = re.compile(
    rf'{_BLANK}*(?:"((?:[^"\\]|\\.)*)"|({_PLAIN}+(?:{_BLANK}+{_PLAIN}+)*)){_BLANK}*([,}}])',
    re.DOTALL,
)
_EMPTY: Final = re.compile(rf"{_BLANK}*\{{{_BLANK}*\}}{_BLANK}*")
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_NAN: Final = "NaN"


def elements(text: str, position: int) -> list[str | None]:
    """Return the elements of an array of one dimension, None for null; raises `ExpressionError`."""
    if _EMPTY.fullmatch(text):
        return []
    inner = text.strip(_BLANKS)
    if not inner.startswith("{"):
        raise _refusal(text, position)
    if inner[1:].lstrip(_BLANKS).startswith("{"):
        raise ExpressionError(
            position, f"{text[:50]!r} has several dimensions; write all elements in one: '{{a,b}}'"
        )
    found: list[str | None] = []
    end, delimiter = 1, ","
    while delimiter == ",":
        match = _ELEMENT.match(inner, end)
        if match is None:
            raise _refusal(text, position)
        quoted, plain, delimiter = match.groups()
        end = match.end()
        if quoted is None and plain.lower() == "null":
            found.append(None)
        else:
            found.append(_ESCAPED.sub(r"\1", plain if quoted is None else quoted))
    if end != len(inner):
        raise _refusal(text, position)
    return found


def items(literal: Expr) -> Sequence[Expr]:
    """Return the elements of `array[…]` or `'{…}'`; raises as `elements` does."""
    if not isinstance(literal.value, str):
        return literal.args
    at = literal.position
    texts = elements(literal.value, at)
    return [Expr("null" if text is None else "string", at, (), text) for text in texts]


def of_type(literal: Expr, type_: TypeName) -> Expr:
    """Return `array[…]` or `'{…}'` with its elements cast to a type; raises as `elements` does."""
    to = type_._replace(is_array=False)
    cast = [i if i.op == "null" else Expr("cast", i.position, (i,), to) for i in items(literal)]
    return Expr("array", literal.position, tuple(cast))


def _refusal(text: str, position: int) -> ExpressionError:
    return ExpressionError(
        position, f"{text[:50]!r} is no array; one is written '{{a,b}}', or array['a', 'b']"
    )


def literal_form(text: str, type_: Type) -> Any:
    """Return the form in which a literal is compared with elements of a type; raises `ValueError`."""
    if type_.kind is Kind.NUMERIC:
        if (key := key_of(text)) is None:
            raise ValueError("a number like 12.50 is expected")
        return key
    return form_of(read(text, type_), type_)


def form_of(value: Any, type_: Type) -> Any:
    """Return the form in which a value of a type is compared; `UNFIT` is left as it is."""
    if isinstance(value, Span):
        return value.comparable
    if type_.folded and isinstance(value, str):
        return lowered(value)
    if type_.kind is Kind.FLOAT and value is not UNFIT:
        return value if value == value else _NAN  # noqa: PLR0124 - NaN does not equal itself
    return value


def asked(type_: Type, items: Iterable[Any]) -> str:
    """Return the text of a probe that compares elements of a type with literals, in their form."""
    return json.dumps(
        {
            "kind": type_.kind,
            "single": type_.single,
            "folded": type_.folded,
            "width": type_.width,
            "items": list(items),
        }
    )
