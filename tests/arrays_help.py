"""Random questions about random arrays of every type, and Postgres's answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import psycopg

from penstock.expressions import Columns, ColumnType, load_columns
from penstock.postgres.types import Types, load_types

LABELS = ["sad", 'so "so"', "NULL", "{}"]
TABLE = f"""
CREATE TYPE mood AS ENUM ({", ".join(f"'{label}'" for label in LABELS)});
CREATE DOMAIN short AS varchar(9);
CREATE TABLE lists (
    id int PRIMARY KEY, t text[], v varchar(9)[], s short[], c char(4)[], b bool[], h smallint[],
    i int[], k bigint[], n numeric[], m numeric(6,2)[], f float8[], r real[], d date[], ts timestamp[],
    tz timestamptz[], tm time[], iv interval[], u uuid[], x bytea[], a inet[], e mood[], ci text[])
"""
WORDS = [
    "", "a", "A", "b", "NULL", "null", "a,b", "{a}", 'it\'s "so"', "a\\b", " pad ", "日本", "nl\n",
]  # fmt: skip
WHOLE = ["0", "1", "-1", "2", "32767"]
EXACT = ["0", "1", "1.00", "-1.5", "1.5", "100"]
FLOATS = ["0", "-0", "1", "1.5", "0.1", "NaN", "Infinity", "-Infinity", "1e30", "1e-30"]
MOMENTS = [
    "2024-01-31", "2024-01-31 12:30:00.5", "0044-03-15 BC", "infinity", "-infinity", "1970-01-01",
    "250000-01-01",
]  # fmt: skip
SAMPLES: Final[dict[str, list[str]]] = {
    "t": WORDS,
    "v": WORDS[:9],
    "s": WORDS[:9],
    "c": ["", "a", "a  ", "A", "ab", "NULL"],
    "b": ["true", "false", "t", "no"],
    "h": WHOLE,
    "i": [*WHOLE, "2147483647"],
    "k": [*WHOLE, str(2**63 - 1), str(-(2**63))],
    "n": [*EXACT, "NaN", "Infinity", "-Infinity", "1e40", "1e-40", "-0.00"],
    "m": [*EXACT, "NaN", "1234.50"],
    "f": [*FLOATS, "1e300", "123456789012345678"],
    "r": FLOATS,
    "d": ["2024-01-31", "0044-03-15 BC", "infinity", "-infinity", "1970-01-01", "5874897-12-31"],
    "ts": MOMENTS,
    "tz": [*MOMENTS, "2024-01-31 02:00+02"],
    "tm": ["00:00", "12:30:00.5", "12:30:00.500", "23:59:59.999999"],
    "iv": ["1 day", "24 hours", "1 mon", "30 days", "-1 days", "1 year 2 mons 04:05:06.789", "0"],
    "u": ["123e4567-e89b-12d3-a456-426614174000", "123E4567E89B12D3A456426614174000",
          "00000000-0000-0000-0000-000000000000"],
    "x": ["\\x", "\\x00ff", "\\x00FF"],
    "a": ["10.0.0.1", "10.0.0.0/8", "::1"],
    "e": LABELS,
    "ci": ["a", "A", "straße", "STRASSE", "ΌΣΟΣ", "όσος", "İ", "i"],
}  # fmt: skip
"""Elements of each column; the last one stands for a citext."""
NUMBERS = ["0", "1", "1.0", "-1.5", "0.1", "100", "1e30", "9223372036854775808"]
OTHERS = {
    "b": ["true", "false"], "d": ["date '2024-01-31'"], "u": [f"uuid '{SAMPLES['u'][1]}'"],
    "ts": ["date '2024-01-31'", "timestamp '2024-01-31 12:30:00.5'"], "iv": ["interval '1 day'"],
    "tz": ["date '1970-01-01'", "timestamp '2024-01-31'", "timestamptz '2024-01-31 02:00+02'"],
    **dict.fromkeys(["h", "i", "k", "n", "m", "f", "r"], NUMBERS),
}  # fmt: skip
"""Literals that are no strings."""
CASTS = {
    "t": "::text[]", "v": "::varchar[]", "b": "::bool[]", "i": "::int[]", "n": "::numeric[]",
    "f": "::float8[]", "d": "::date[]", "tz": "::timestamp with time zone[]", "u": "::uuid[]",
}  # fmt: skip
"""Casts that array literals may have."""
_FOLDED = (
    "(case when record.ci is not null then array(select lower(y collate pg_c_utf8)"
    " from unnest(record.ci) as y) end)"
)


class Question(NamedTuple):
    """A condition about a column, and the same in Postgres' own language."""

    ours: str
    theirs: str


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def literal(rng: random.Random, elements: Sequence[str | None]) -> str:
    """Return an array of one dimension as Postgres reads it."""
    return "{" + rng.choice([",", " , "]).join(_element(rng, e) for e in elements) + "}"


def _element(rng: random.Random, element: str | None) -> str:
    if element is None:
        return rng.choice(["NULL", "null"])
    if element.isalnum() and element.lower() != "null" and rng.random() < 0.5:
        return element
    return '"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _array(rng: random.Random, samples: Sequence[str]) -> str | None:
    """Return an array of any shape, as Postgres reads it."""

    def some(count: int) -> str:
        return literal(
            rng, [None if rng.random() < 0.15 else rng.choice(samples) for _ in range(count)]
        )

    shape = rng.random()
    if shape < 0.1:
        return None
    if shape < 0.2:
        return "{}"
    if shape < 0.7:
        return some(rng.randint(1, 4))
    if shape < 0.8:
        return "[0:1]=" + some(2)
    if shape < 0.9:
        return f"{{{some(2)},{some(2)},{some(2)}}}"
    return f"{{{{{some(1)},{some(1)}}}}}"


class Lists:
    """A table of arrays, its rows as records of messages, and questions about it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        for statement in ("SET timezone = 'UTC'", "SET intervalstyle = 'iso_8601'", TABLE):
            connection.execute(statement)
        columns = load_columns(connection, [("public", "lists")])["public", "lists"]
        oids = [column.oid for column in columns.values()]
        types = Types(load_types(connection, oids))
        self._converters = [(name, types.converter(c.oid)) for name, c in columns.items()]
        folded = replace(columns["ci"], element=ColumnType("public", "citext"))
        self.columns: Columns = {("public", "lists"): {**columns, "ci": folded}}
        self.records: list[str] = []

    def fill(self, rng: random.Random, count: int) -> None:
        self.connection.execute("TRUNCATE lists")
        rows = [[at, *(_array(rng, SAMPLES[name]) for name in SAMPLES)] for at in range(count)]
        marks = ", ".join(["%s"] * len(rows[0]))
        with self.connection.cursor() as cursor:
            cursor.executemany(f"INSERT INTO lists VALUES ({marks})", rows)
        names = [name for name, _ in self._converters]
        select = ", ".join(f"{name}::text" for name in names)
        found = self.connection.execute(f"SELECT {select} FROM lists ORDER BY lists.id").fetchall()
        self.records = [self._record(row) for row in found]

    def _record(self, row: Sequence[str | None]) -> str:
        parts = []
        for (name, convert), text in zip(self._converters, row, strict=True):
            raw = b"null" if text is None else text.encode()
            value = raw if text is None or convert is None else convert(raw)
            parts.append(f'"{name}":{value.decode()}')
        return f"{{{','.join(parts)}}}"

    def answers(self, condition: str) -> list[bool | None]:
        query = f"SELECT ({condition}) FROM lists AS record ORDER BY record.id"
        return [row[0] for row in self.connection.execute(query.encode())]


def questions(rng: random.Random, column: str) -> list[Question]:
    """Return a question of each kind about a column."""
    name, samples = f"record.{column}", SAMPLES[column]
    made: list[Question] = []

    def same(text: str) -> None:
        made.append(Question(text, text))

    if column != "ci":
        same(f"cardinality({name}) = {rng.choice([0, 1, 2, 6])}")
        for dimension in (1, 2, 3, 4):
            same(f"array_length({name}, {dimension}) = {rng.choice([1, 2, 3])}")
            same(f"array_length({name}, {dimension}) is null")
    for op in ("= any", "<> all", "<> any", "= all", "= some"):
        value = rng.choice([quoted(rng.choice(samples)), *OTHERS.get(column, []), "null"])
        left = f"lower({value} collate pg_c_utf8)" if column == "ci" else value
        made.append(
            Question(f"{value} {op}({name})", f"{left} {op}({_FOLDED if column == 'ci' else name})")
        )
    for op in ("@>", "<@", "&&"):
        chosen: list[str | None] = rng.sample(samples, rng.randint(0, min(3, len(samples))))
        if op == "<@" and rng.random() < 0.7:
            chosen = list(samples)
        if rng.random() < 0.2:
            chosen.append(None)
        text = quoted(literal(rng, chosen))
        listed = ", ".join("null" if e is None else quoted(e) for e in chosen)
        ours = f"array[{listed}]" if chosen and rng.random() < 0.5 else text
        if rng.random() < 0.3:
            ours += CASTS.get(column, "")
        if column == "ci":
            lowered = f"array(select lower(y collate pg_c_utf8) from unnest({text}::text[]) as y)"
            made.append(Question(f"{name} {op} {ours}", f"{_FOLDED} {op} {lowered}"))
        else:
            made.append(Question(f"{name} {op} {ours}", f"{name} {op} {text}"))
            swapped = {"@>": "<@", "<@": "@>"}.get(op, op)
            made.append(Question(f"{ours} {swapped} {name}", f"{text} {swapped} {name}"))
    return made
