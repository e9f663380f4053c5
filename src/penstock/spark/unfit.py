"""Why an expression has no value for a message: what a dead letter's reason has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec
import pyarrow as pa

from penstock.core.json_members import members, text_of
from penstock.expressions import decimals
from penstock.expressions.fields import extractor, place
from penstock.expressions.probes import UNREADABLE
from penstock.expressions.types import TIMES, Field, Kind
from penstock.expressions.walk import Walk

_NUMBER: Final = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|NaN|[+-]?Infinity", re.IGNORECASE
)
_TIME: Final = re.compile(r"[+-]?[0-9]{4,}-[0-9]{2}-[0-9]{2}\b.*")
_LONGEST: Final = 60


def unfit_reason(captured: pa.RecordBatch, row: int, fields: Sequence[Field]) -> str:
    """Return why an expression over `fields` has no value for a message."""
    message = captured.slice(row, 1)
    found = extractor(tuple(fields))(message)
    bad = [
        field
        for at, field in enumerate(fields)
        if found.field(place(at)[0])[0].as_py() & place(at)[1]
    ]
    if not bad:
        return "an overflow, a division by zero or a cast that fails"
    left_out = members("unavailable")(message.column("metadata")[0].as_py())["unavailable"] or b"[]"
    names = set(msgspec.json.decode(left_out, type=list[str]))
    lacking = [f for f in bad if f.reference.root == "record" and f.reference.column in names]
    if lacking:
        return (
            f"{_names(lacking)} {'is' if len(lacking) == 1 else 'are'} not in the WAL"
            " (REPLICA IDENTITY FULL has it there)"
        )
    return "; ".join(dict.fromkeys(_reason(message, field) for field in bad))


def _names(fields: Sequence[Field]) -> str:
    return ", ".join(dict.fromkeys(str(field.reference) for field in fields))


def _reason(message: pa.RecordBatch, field: Field) -> str:
    reference = field.reference
    text = message.column(reference.root)[0].as_py() if reference.root in _ROOTS else None
    raw = None if text is None else members(reference.column)(text)[reference.column]
    if raw is None:
        return f"{reference} is not in the message: its table lacked the column when the row was written"
    value: str | None
    try:
        at = Walk(reference.path)(raw) if reference.path else raw
        value = None if at is None else text_of(bytes(at))
    except UNREADABLE as error:
        return f"{reference} can't be read: {error}"
    if field.probe is not None:
        return f"{reference} is {_UNASKED.get(field.probe[0], _NO_ARRAY)}"
    shown = (value or "")[:_LONGEST]
    if field.kind in (Kind.NUMERIC, Kind.KEY, Kind.FLOAT) and _NUMBER.fullmatch(value or ""):
        return f"{reference} is {shown}, {_limit(field)}"
    if field.kind in TIMES and _TIME.fullmatch(value or ""):
        last = "5874897" if field.kind is Kind.DATE else "294246"
        return f"{reference} is {shown}; the years from 4714 BC to {last} can be compared"
    if field.kind in (Kind.TEXT, Kind.JSON):
        return f"{reference} is no text that Postgres could have, or nested too deep"
    if reference.path:
        return f"{reference} is not {field.type} in this message"
    return (
        f"{reference} is not {field.type} in this message: the column had another type when the row"
        " was written"
    )


def _limit(field: Field) -> str:
    type_ = field.type
    match field.kind:
        case Kind.FLOAT:
            return f"which is out of a {'real' if type_.single else 'double precision'}'s range"
        case Kind.KEY:
            return "which is out of a numeric's range"
    return (
        f"and what computes with it takes up to {decimals.whole(type_)} digits before the"
        f" point and {type_.scale} after it, no NaN and no infinity (a comparison of the column alone"
        " takes any)"
    )


_UNASKED: Final = {
    "array_length": "no array",
    **dict.fromkeys(("@>", "?", "typeof", "present"), "nested too deep"),
}
_NO_ARRAY: Final = "no array of its column's type in this message, or has a value out of range"
_ROOTS: Final = frozenset({"record", "changes", "metadata"})
