"""The kinds of values that expressions work on, and the fields of a message that they need.

A `Field` names a place in a message and the form that its value must be brought in before an
expression sees it: the Spark type `Type.spark`, the Arrow type that goes with it.

    kind         Spark            value
    bool         boolean
    int          bigint           smallint, integer, bigint, oid
    float        double           real (`single`): the nearest float32, as a double
    numeric      decimal(p,s)     `precision`, `scale`; what does not fit exactly is bad, as is NaN
    key          string           a numeric of any size, to be compared: see `penstock.expressions.keys`
    text         string           as the message has it; char(n) (`width`): without trailing blanks
    date         date             days; see `DATE_INFINITY`
    timestamp    timestamp_ntz    microseconds; see `TIMESTAMP_INFINITY`
    timestamptz  timestamp        microseconds, UTC; the session's time zone must be UTC
    time         string           as the message has it
    interval     bigint           microseconds, a day 24 hours, a month 30 days, as Postgres compares
    json         string           what `->>` gives: a string without its quotes, any other value's
                                  JSON text, null for null and for what is not there

A value that has no such form (a timestamp after the year 294246, a numeric too long) is bad. A field of
kind text may name a column of any other type: then it is the value's JSON text, a string without
its quotes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from penstock.core.tables import quote_name

DAY: Final = 86_400_000_000
"""A day in microseconds."""
DATE_INFINITY: Final = (1 << 31) - 1
"""`infinity` as a date, in days since 1970: after any date that Postgres has."""
DATE_MINUS_INFINITY: Final = -(1 << 31)
"""`-infinity` as a date, in days since 1970."""
TIMESTAMP_INFINITY: Final = (1 << 63) - 1
"""`infinity` as a timestamp or timestamptz, in microseconds since 1970."""
TIMESTAMP_MINUS_INFINITY: Final = -(1 << 62)
"""`-infinity` as a timestamp or timestamptz, in microseconds since 1970: before any of Postgres'."""

INTERVAL_INFINITY: Final = (1 << 63) - 1
"""`infinity` as an interval, in microseconds; `-infinity` is the same below zero."""

UNFIT: Final[Any] = type("Unfit", (), {"__repr__": lambda _: "UNFIT"})()
"""In the place of a value that does not have the form of its kind."""


class Kind(enum.StrEnum):
    """What sort of value it is; see the table at the top of this file."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    NUMERIC = "numeric"
    KEY = "key"
    TEXT = "text"
    DATE = "date"
    TIMESTAMP = "timestamp"
    TIMESTAMPTZ = "timestamptz"
    TIME = "time"
    INTERVAL = "interval"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Type:
    """A kind and what more is known of its values.

    Attributes:
        kind: The kind.
        precision: Of a numeric: how many digits at most, 38 or fewer.
        scale: Of a numeric: how many of them stand after the point.
        fixed: Of a numeric: whether Postgres prints all values with `scale` digits after the point.
        ordered: Whether `<` and `>` mean what they mean in Postgres; if not, only `=` is taken.
        single: Of a float: whether it is a real.
        folded: Of a text: whether case makes no difference (citext).
        width: Of a text: n of a char(n), 0 for any other.
        form: Of a text: the type that it is the text of, where that is no text itself: uuid, bytea,
            inet, enum, opaque (any other).
        labels: Of an enum's text: its labels.
    """

    kind: Kind
    precision: int = 0
    scale: int = 0
    fixed: bool = False
    ordered: bool = True
    single: bool = False
    folded: bool = False
    width: int = 0
    form: str = ""
    labels: tuple[str, ...] = ()

    @property
    def spark(self) -> str:
        """The Spark type of the values, as DDL."""
        if self.kind is Kind.NUMERIC:
            return f"decimal({self.precision},{self.scale})"
        return _SPARK[self.kind]

    def __str__(self) -> str:
        if self.form:
            return _FORMS[self.form]
        return _NAMES[self.kind]


_SPARK: Final = {
    Kind.BOOL: "boolean",
    Kind.INT: "bigint",
    Kind.FLOAT: "double",
    Kind.KEY: "string",
    Kind.TEXT: "string",
    Kind.DATE: "date",
    Kind.TIMESTAMP: "timestamp_ntz",
    Kind.TIMESTAMPTZ: "timestamp",
    Kind.TIME: "string",
    Kind.INTERVAL: "bigint",
    Kind.JSON: "string",
}
_NAMES: Final = {
    Kind.BOOL: "a boolean",
    Kind.INT: "an integer",
    Kind.FLOAT: "a float",
    Kind.NUMERIC: "a numeric",
    Kind.KEY: "a numeric",
    Kind.TEXT: "a text",
    Kind.DATE: "a date",
    Kind.TIMESTAMP: "a timestamp",
    Kind.TIMESTAMPTZ: "a timestamptz",
    Kind.TIME: "a time",
    Kind.INTERVAL: "an interval",
    Kind.JSON: "a JSON value",
}

_FORMS: Final = {
    "uuid": "a uuid",
    "bytea": "a bytea",
    "inet": "an inet",
    "enum": "an enum",
    "opaque": "of a type without operators here",
}

BOOL: Final = Type(Kind.BOOL)
INT: Final = Type(Kind.INT)
FLOAT: Final = Type(Kind.FLOAT)
NUMERIC: Final = Type(Kind.NUMERIC, 38, 18)
KEY: Final = Type(Kind.KEY)
TEXT: Final = Type(Kind.TEXT)
DATE: Final = Type(Kind.DATE)
TIMESTAMP: Final = Type(Kind.TIMESTAMP)
TIMESTAMPTZ: Final = Type(Kind.TIMESTAMPTZ)
TIME: Final = Type(Kind.TIME)
INTERVAL: Final = Type(Kind.INTERVAL)
JSON: Final = Type(Kind.JSON, ordered=False)

NUMBERS: Final = frozenset({Kind.INT, Kind.NUMERIC, Kind.FLOAT})
TIMES: Final = frozenset({Kind.DATE, Kind.TIMESTAMP, Kind.TIMESTAMPTZ})
NAMED: Final = {
    "boolean": BOOL,
    "smallint": INT,
    "integer": INT,
    "bigint": INT,
    "real": Type(Kind.FLOAT, single=True),
    "double precision": FLOAT,
    "numeric": NUMERIC,
    "text": TEXT,
    "varchar": TEXT,
    "uuid": Type(Kind.TEXT, form="uuid"),
    "date": DATE,
    "timestamp": TIMESTAMP,
    "timestamptz": TIMESTAMPTZ,
    "time": TIME,
    "interval": INTERVAL,
}
"""The types that casts and typed literals name, by their canonical names, without parameters."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A place in a message.

    `root` is record, changes, metadata or action; `column` is the column or metadata field, empty
    for the action; `path` leads into the column's JSON: keys, and indexes from 0.
    """

    root: str
    column: str
    path: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        if self.root == "action":
            return self.root
        head = quote_name(self.column)
        if self.root:
            head = f"{self.root}.{head}"
        return head + "".join(
            f"[{part}]" if isinstance(part, int) else f".{quote_name(part)}" for part in self.path
        )


@dataclass(frozen=True, slots=True)
class Field:
    """A place in a message and the form that its value is needed in.

    `lacking`: the tables, by schema and name, that lack the column: there it is null. In messages of
    any other table a column that is not there has no value.
    `probe`: what is asked of the JSON that is there, and the text that it is asked with: see
    `penstock.expressions.probes` and `array_probes`. Without one its value is taken.
    """

    reference: Reference
    type: Type
    lacking: tuple[tuple[str, str], ...] = ()
    probe: tuple[str, str] | None = None

    @property
    def kind(self) -> Kind:
        """The kind of its values."""
        return self.type.kind

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes, of JSON's types alone."""
        reference, type_ = self.reference, self.type
        return {
            "root": reference.root,
            "column": reference.column,
            "path": list(reference.path),
            "kind": type_.kind.value,
            "precision": type_.precision,
            "scale": type_.scale,
            "single": type_.single,
            "width": type_.width,
            "lacking": [list(table) for table in self.lacking],
            "probe": None if self.probe is None else list(self.probe),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the field that `to_json` was called on, as far as taking its value needs it."""
        return cls(
            Reference(data["root"], data["column"], tuple(data["path"])),
            Type(
                Kind(data["kind"]),
                precision=data["precision"],
                scale=data["scale"],
                single=data["single"],
                width=data["width"],
            ),
            tuple((schema, table) for schema, table in data["lacking"]),
            None if data["probe"] is None else (data["probe"][0], data["probe"][1]),
        )
