"""Random conditions over random rows, written in the language of filters and in Postgres' own."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

from penstock.expressions import Columns, Field, Kind, load_columns, parse_condition, typed
from penstock.expressions.array_probes import ask
from penstock.expressions.functions import FUNCTIONS, Arg
from penstock.expressions.literals import read
from penstock.expressions.nodes import Typed
from penstock.expressions.patterns import regular, similar
from penstock.expressions.spark.columns import compile as to_columns
from penstock.expressions.types import BOOL, INT, TEXT, UNFIT, Type
from penstock.expressions.values import arrow

TABLE = """
CREATE TABLE things (
    id int PRIMARY KEY, i bigint, k bigint, n numeric, m numeric(12,2), f float8, r float4,
    t text COLLATE pg_c_utf8, v varchar(20) COLLATE pg_c_utf8, c char(6) COLLATE pg_c_utf8, b bool,
    d date, ts timestamp, tz timestamptz, tm time, iv interval, u uuid, j jsonb, a int[], w numeric,
    js json)
"""
OUTCOMES = """
CREATE FUNCTION outcomes(condition text) RETURNS TABLE (id int, outcome text)
LANGUAGE plpgsql SET timezone = 'UTC' SET intervalstyle = 'postgres' AS $$
BEGIN
    FOR id IN SELECT t.id FROM things AS t ORDER BY 1 LOOP
        BEGIN
            EXECUTE 'SELECT (' || condition || ')::text FROM things AS record WHERE record.id = $1'
                INTO outcome USING id;
        EXCEPTION WHEN others THEN
            outcome := 'error ' || sqlstate || ' ' || sqlerrm;
        END;
        RETURN NEXT;
    END LOOP;
END $$
"""
TEXTS = [
    "", "a", "A", "ab", "abc", "aB%", "a_c", "a\\b", "x", "zz", " pad ", "日本", "😀", "😀b", "\uffff",
    "it's", "1", "-7", "2.50", "true", "2024-02-29", "line\nbreak", "50% off", "ÿ", "straße", "STRASSE",
    "İI", "ΌΣΟΣ", "όσος", "ǅ", "ﬁn", "ᾳᾼ", "ŉ",
]  # fmt: skip
INTS = [0, 1, -1, 2, 3, 7, 10, -10, 100, 2**31, -(2**31), 2**63 - 1, -(2**63)]
NUMERICS = [
    "0", "1", "-1", "1.5", "2.50", "0.005", "-0.5", "99.995", "12345.1234", "1e3", "3.1416",
]  # fmt: skip
"""Products of two are factors themselves, which keep 9 digits before the point and 9 after it."""
FLOATS = [
    "0", "-0", "1", "-1", "0.1", "1.5", "2.5", "-2.5", "1e300", "-1e300", "1e-300", "NaN", "Infinity",
    "-Infinity", "3.3333333333333335", "123456.789",
]  # fmt: skip
REALS = ["0", "1", "0.1", "1.5", "-2.5", "1e30", "1e-30", "NaN", "Infinity", "-Infinity"]
WIDE = [
    "0", "1", "1.5", "-1e20", "1e20", "1e-25", "-1e-25", "NaN", "Infinity", "-Infinity", "1e400",
    "123456789012345678901234567890.5", "99999999999999999999", "100000000000000000000.000",
    "0.1234567890123456789", "-99999999999999999999.99",
]  # fmt: skip
DAYS = [
    "2024-01-31", "2024-02-29", "2023-12-31", "1970-01-01", "1582-10-10", "0044-03-15", "0001-01-01",
    "0044-03-15 BC", "0001-12-31 BC", "4713-01-01 BC", "9999-12-31", "20240-05-06", "250000-01-01",
]  # fmt: skip
CLOCKS = ["00:00:00", "23:59:59.999999", "12:30:00", "01:02:03.5"]
SPANS = [
    "0", "1 day", "24 hours", "1 mon", "30 days", "-1 days", "1 year 2 mons 3 days 04:05:06.789",
    "-1 mons +5 days -02:00:00", "00:00:00.000001", "2 weeks",
]  # fmt: skip
UUIDS = ["123e4567-e89b-12d3-a456-426614174000", "00000000-0000-0000-0000-000000000000"]
DOCUMENTS: list[Any] = [
    {"s": "a", "x": 1, "ok": True, "l": [1, "b", None], "o": {"deep": "z"}},
    {"s": "", "x": 1.50, "ok": False, "l": []},
    {"s": "ab", "x": -3, "l": [2.5]},
    {"s": None, "x": None, "ok": None},
    {"l": "scalar", "x": 10**400}, {"l": 7, "x": "NaN", "s": ["a"]},
    {}, [], "text", 5,
]  # fmt: skip


def random_rows(rng: random.Random, count: int) -> list[list[Any]]:
    """Return rows for `things`; values as text that Postgres reads."""

    def of(values: Sequence[Any], nulls: float = 0.15) -> Any:
        return None if rng.random() < nulls else rng.choice(values)

    def moment() -> str:
        if rng.random() < 0.08:
            return rng.choice(["infinity", "-infinity"])
        return stamp(rng.choice(DAYS), rng.choice(CLOCKS))

    rows = []
    for number in range(count):
        day = of(["infinity", "-infinity"], 0) if rng.random() < 0.08 else of(DAYS)
        cents = None if rng.random() < 0.1 else f"{rng.randint(-(10**6), 10**6) / 100:.2f}"
        small = None if rng.random() < 0.1 else rng.randint(-20, 20)
        document = of(DOCUMENTS)
        array = of([[1, 2, 3], [], [None, 5]])
        rows.append(
            [number, of(INTS), small, of(NUMERICS), cents, of(FLOATS), of(REALS), of(TEXTS), of(TEXTS),
             of([t[:6] for t in TEXTS]), of([True, False]), day, of([moment()]), of([moment()]),
             of(CLOCKS), of(SPANS), of(UUIDS), None if document is None else json.dumps(document), array,
             of(WIDE), None if document is None else json.dumps(document)]
        )  # fmt: skip
    return rows


def stamp(day: str, clock: str, zone: str = "", between: str = " ") -> str:
    """Return a moment as Postgres reads it."""
    era = " BC" if day.endswith(" BC") else ""
    return f"{day.removesuffix(' BC')}{between}{clock}{zone}{era}"


FORMS: dict[str, list[str]] = {
    "coalesce": ["coalesce(<text>, <text>, 'z')", "coalesce(<int>, <numeric>)"],
    "nullif": ["nullif(<text>, <text>)", "nullif(<int>, <int>)", "nullif(record.m, <int>)"],
    "greatest": [
        "greatest(<plain>, <plain>)", "greatest(<int>, <int>, <int>)", "greatest(<numeric>, <int>)",
        "greatest(<float>, <float>)", "greatest(record.b, <condition>)",
    ],
    "least": [
        "least(<plain>, <plain>, <plain>)", "least(<int>, <int>)", "least(<numeric>, <int>, null)",
        "least(<float>, <float>)", "least(<int>)",
    ],
    "lower": ["lower(<text>)"],
    "upper": ["upper(<text>)"],
    "length": ["length(<text>)"],
    "char_length": ["char_length(<text>)"],
    "character_length": ["character_length(<text>)"],
    "concat": [
        "concat(<plain>, <int>, <plain>, <condition>)", "concat(<plain>)", "concat(null, <plain>)",
    ],
    "concat_ws": [
        "concat_ws(<text>, <plain>, <int>, <plain>, record.b)", "concat_ws('-', <plain>, null)",
    ],
    "trim": [
        "trim(<text>)", "trim(both <text> from <text>)", "trim(leading from <text>)",
        "trim(<text> from <text>)", "trim(trailing <text> from <text>)", "trim(<text>, <text>)",
    ],
    "substring": [
        "substring(<text> from <int>)", "substring(<text> from <int> for <int>)",
        "substring(<text> for <int>)", "substring(<text>, <int>, <int>)", "substring(<text>, <int>)",
    ],
    "position": ["position(<text> in <text>)", "position('' in <text>)", "position('b' in <text>)"],
    "abs": ["abs(<int>)", "abs(<numeric>)", "abs(<float>)", "abs(record.i)"],
    "ceil": ["ceil(<int>)", "ceil(<numeric>)", "ceil(<float>)", "ceil(record.m)"],
    "ceiling": ["ceiling(<numeric>)"],
    "floor": ["floor(<int>)", "floor(<numeric>)", "floor(<float>)", "floor(record.m)"],
    "round": ["round(<int>)", "round(<numeric>)", "round(<float>)", "round(record.m, 1)"],
    "trunc": [
        "trunc(<int>)", "trunc(<numeric>)", "trunc(<float>)", "trunc(record.m, 1)",
        "trunc(record.m, -2)", "trunc(<numeric>, 3)", "trunc(record.m, 5)", "trunc(<int>, -1)",
    ],
    "sign": ["sign(<int>)", "sign(<numeric>)", "sign(<float>)"],
    "mod": ["mod(<int>, <int>)", "mod(<numeric>, <int>)", "mod(record.m, 0.7)"],
    "power": [
        "power(<float>, <int>)", "power(<int>, <int>)", "power(<float>, <float>)", "power(<float>, 0.5)",
    ],
    "pow": ["pow(<int>, 2)"],
    "sqrt": ["sqrt(<float>)", "sqrt(<int>)", "sqrt(record.m::float8)"],
    "now": ["now() > record.tz"],
    "date_trunc": ["date_trunc('hour', record.ts) = record.ts"],
    "date_part": [
        "date_part('<part>', record.ts)", "date_part('<part>', record.tz)",
        "date_part('<part>', record.d)", "date_part('<clock>', record.ts)",
    ],
    "extract": [
        "extract(<part> from record.ts)", "extract(<part> from record.tz)",
        "extract(<part> from record.d)", "extract(<clock> from record.ts)",
    ],
    "jsonb_typeof": ["jsonb_typeof(record.j)", "jsonb_typeof(record.j -> '<key>')"],
    "json_typeof": ["json_typeof(record.js)", "json_typeof(record.js -> '<key>')"],
    "jsonb_array_length": ["jsonb_array_length(record.j)", "jsonb_array_length(record.j -> 'l')"],
    "json_array_length": ["json_array_length(record.js -> 'l')"],
    "cardinality": ["cardinality(record.a)"],
    "array_length": ["array_length(record.a, 1)", "array_length(record.a, 2)"],
    "= any": [
        "<whole> = any(record.a)", "<whole> <> all(record.a)", "<whole> <> any(record.a)",
        "null = all(record.a)", "record.k = any(array[1, 2, null])",
        "record.k::int <> all('{1,<whole>}')", "record.k = any(array[record.i, <whole>])",
        "record.k <> any(array[1, <whole>])", "record.k::int = all('{1,<whole>}')",
    ],
    "&&": [
        "record.a && '{<whole>}'", "record.a @> array[<whole>]", "record.a <@ '{1,2,3,null}'",
        "'{<whole>,1}' <@ record.a",
    ],
    "->": [
        "record.j -> '<key>' ->> '<key>'", "record.j -> 'l' ->> 1", "record.js ->> '<key>'",
        "record.j -> 'o' -> 'deep' is null", "record.j -> '<key>' is not null",
        "(record.js -> '<key>' ->> 0) || 'x'",
        "case when jsonb_typeof(record.j -> 'l') = 'array' then record.j -> 'l' ->> 0 end",
        "record.j ->> '<key>' || <text>",
    ],
    "#>": ["record.j #>> '{o,deep}'", "record.j #> '{l}' ->> 1", "record.j #>> '{l,1}'",
           "record.js #>> '{o}'"],
    "@>": ["record.j @> '<json>'", "record.j -> '<key>' @> '<json>'::jsonb"],
    "?": ["record.j ? '<key>'", "record.j -> '<key>' ? '<member>'"],
    "~": ["<plain> ~ '<regular>'", "<plain> ~* '<regular>'", "<plain> !~ '<regular>'",
          "lower(<plain>) !~* '<regular>'", "record.j ->> 's' ~ '<regular>'"],
    "similar to": ["<plain> similar to '<similar>'", "<plain> not similar to '<similar>'",
                   "<plain> similar to 'a!%' escape '!'"],
}  # fmt: skip
"""Calls of what the table of functions types by rules of its own, and uses of operators."""
REGULAR = [
    "a", "^a", "b$", "^a.*b$", "a.b", "", "^$", "[a-c]+", "^[^a-z]*$", "\\d+", "^-?\\d+(\\.\\d+)?$",
    "\\w", "^\\w+$", "\\s", "^\\S+$", "(a|b)c", "^(a|ab)b?", "x|z{2}", "a{1,2}B", "\\.", "50% o",
    "e\nb", ".*a.*b", "STRASSE", "straße", "^.$", "^..?$", "[[]|_", "[]_]", "[\\d-]", "^[\\w.]+$",
    "a|", "(?:1|true)$", "^(t|f)[a-z]{3,}", "\u03c3", "ß", "^[A-Z]+$", "[^\\d]$", "é|ÿ", "\\W",
    "\\D{2}", "(ab){1,2}",
]  # fmt: skip
SIMILAR = [
    "%", "a%", "%b", "%a%", "_", "__", "(a|b)%", "a|b|x", "[a-c]+", "%[0-9]{2}", "1|-7|2.50", "a_c",
    "A?", "%(rue|ome)", "\\%", "a\\\\b", "a\\_c", "50\\%%", "[^a]%", "%\n%", "", ".", "^a",
]  # fmt: skip
WHOLE = ["round", "trunc", "floor", "ceil", "sign"]
PARTS = ["year", "month", "day", "dow", "isodow", "doy", "week", "quarter", "isoyear", "epoch"]
FINITE_PARTS = [p for p in PARTS if p not in ("year", "isoyear", "epoch")]
"""Those that are null for `infinity`; the others are documented to be dead letters there."""
CLOCK_PARTS = ["hour", "minute", "second", "milliseconds", "microseconds", "seconds", "hours"]
CONTAINED = [
    '{"s": "a"}', '{"x": 1.0}', '{"x": 1.5, "ok": false}', '{"l": ["b"]}', '{"l": [1]}', '{"l": []}',
    '{"l": [true]}', '{"l": "scalar"}', '{"l": ["scalar"]}', '{"o": {}}', '{"o": {"deep": "z"}}',
    '{}', '[]', '"text"', '["text"]', '5', '[5]', '5.0', 'null', '{"s": null}', '1', '[1, null]', '"b"',
    'true',
]  # fmt: skip


class Pair(NamedTuple):
    """An expression in the language of filters, and the same in Postgres'."""

    ours: str
    theirs: str


class Generator:
    """Makes conditions."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def same(self, text: str) -> Pair:
        return Pair(text, text)

    def pick(self, *choices: Callable[[], Pair]) -> Pair:
        return self.rng.choice(choices)()

    def join(self, form: str, *parts: Pair) -> Pair:
        return Pair(form.format(*[p.ours for p in parts]), form.format(*[p.theirs for p in parts]))

    def quoted(self, text: str) -> str:
        return "'" + text.replace("'", "''") + "'"

    # Calls

    def call(self, name: str) -> Pair:
        """Return a call of a function, or a use of an operator."""
        forms = FORMS.get(name)
        if forms is None:
            function = FUNCTIONS[name]
            count = self.rng.randint(function.least, function.most)
            args = ", ".join(
                "<int>" if a is Arg.INTEGER else "<text>" for a in function.args[:count]
            )
            forms = [f"{name}({args})"]
        form = self.rng.choice(forms)
        return self.same(re.sub(r"<(\w+)>", self.argument, form))

    def argument(self, match: re.Match[str]) -> str:
        """Return an argument that is written the same in both languages."""
        rng = self.rng
        match match[1]:
            case "text":
                texts = ["record.t", "record.t", "record.v", "record.c", "(record.j ->> 's')"]
                return rng.choice(
                    [*texts, "lower(record.t)", "null", *map(self.quoted, TEXTS), "'a'", "'b'"]
                )
            case "plain":
                return rng.choice(
                    ["record.t", "record.v", "(record.j ->> 's')", *map(self.quoted, TEXTS)]
                )
            case "int":
                return rng.choice(
                    ["record.k::int"] * 3
                    + [
                        "length(record.t)",
                        "0",
                        "1",
                        "2",
                        "3",
                        "-1",
                        "-2",
                        "null::int",
                        "65",
                        "931",  # so many of the longest of TEXTS are not too long for `repeat`
                    ]
                    + ["2147483647"]
                )
            case "numeric":
                return rng.choice(
                    ["record.n", "record.m", "record.m", "1.5", "-2.55", "record.m * 1.1"]
                )
            case "float":
                return rng.choice(["record.f", "record.f", "record.r", "'1.5'::float8"])
            case "condition":
                return rng.choice(["record.k > 0", "record.b", "record.t = 'a'"])
            case "part":
                return rng.choice(PARTS)
            case "clock":
                return rng.choice(CLOCK_PARTS)
            case "key":
                return rng.choice(["s", "x", "ok", "l", "o", "deep", "none"])
            case "regular":
                return rng.choice(REGULAR) if rng.random() < 0.5 else self.pattern(regular)
            case "similar":
                made = self.pattern(lambda text: similar(text, None))
                return rng.choice(SIMILAR) if rng.random() < 0.5 else made
            case "whole":
                return rng.choice(["0", "1", "2", "3", "5"])
            case "member":
                return rng.choice(["deep", "b", "z", "scalar", "a", "1"])
            case "json":
                return rng.choice(CONTAINED)
        raise AssertionError(match[0])

    def pattern(self, read: Callable[[str], object]) -> str:
        """Return a random pattern that the language takes."""
        while True:
            text = "".join(
                self.rng.choices("aabb()[]|*+?{},12^$.\\dwsS-:%_é", k=self.rng.randint(1, 8))
            )
            with contextlib.suppress(ValueError):
                read(text)
                return text

    def called(self, *result: Type) -> Pair:
        """Return a call of one of the table's functions that gives one of some types."""
        return self.call(
            self.rng.choice(
                [n for n, f in FUNCTIONS.items() if f.spark is not None and f.result in result]
            )
        )

    # Values by kind

    def integer(self, depth: int) -> Pair:
        rng = self.rng
        leaf = [
            lambda: self.same(rng.choice(["record.i", "record.k", "record.k"])),
            lambda: self.same(str(rng.choice([0, 1, 2, 3, 7, 100, 2**31, 2**40]))),
            lambda: Pair("record.a[0]", "record.a[1]"),
        ]
        if depth <= 0:
            return self.pick(*leaf)
        return self.pick(
            *leaf,
            lambda: self.join(
                f"({{0}} {rng.choice('+-*/%')} {{1}})",
                self.integer(depth - 1),
                self.integer(depth - 1),
            ),
            lambda: self.join("(- {0})", self.integer(depth - 1)),
            lambda: self.join("abs({0})", self.integer(depth - 1)),
            lambda: self.join("length({0})", self.text(depth - 1)),
            lambda: self.join("({0})::bigint", self.numeric(depth - 1)),
            lambda: self.join("({0})::bigint", self.floating(depth - 1)),
            lambda: self.join("({0})::smallint", self.numeric(depth - 1)),
            lambda: self.join("(({0})::text)::int", self.text(0)),
            lambda: self.join("({0} - {1})", self.date(0), self.date(0)),
            lambda: self.called(INT),
            lambda: self.join(
                "coalesce({0}, {1})", self.integer(depth - 1), self.integer(depth - 1)
            ),
            lambda: self.case(depth, self.integer),
        )

    def numeric(self, depth: int) -> Pair:
        rng = self.rng
        leaf = [
            lambda: self.same(rng.choice(["record.n", "record.m", "record.m"])),
            lambda: self.same(rng.choice(["1.5", "0.01", "100.00", "-2.5", "0.0"])),
        ]
        if depth <= 0:
            return self.pick(*leaf)
        return self.pick(
            *leaf,
            lambda: self.join(
                f"({{0}} {rng.choice('+-*%')} {{1}})",
                self.numeric(depth - 1),
                self.numeric(depth - 1),
            ),
            lambda: self.join(
                f"({{0}} {rng.choice('+-*')} {{1}})", self.numeric(depth - 1), self.small()
            ),
            lambda: self.join("abs({0})", self.numeric(depth - 1)),
            lambda: self.join(
                f"{rng.choice(['round', 'trunc', 'floor', 'ceil', 'sign'])}({{0}})",
                self.numeric(depth - 1),
            ),
            lambda: self.join("greatest({0}, {1})", self.numeric(depth - 1), self.small()),
            lambda: self.same(f"extract({rng.choice(FINITE_PARTS)} from record.d)"),
            lambda: self.same(
                "(case when record.d > '-infinity' and record.d < 'infinity' then"
                f" extract({rng.choice(['year', 'isoyear'])} from record.d) end)"
            ),
            lambda: self.join(
                f"round({{0}}, {rng.choice([-2, -1, 0, 1, 2, 5])})", self.numeric(depth - 1)
            ),
            lambda: self.join("({0})::numeric(10,1)", self.numeric(depth - 1)),
            lambda: self.join("({0})::numeric(10,2)", self.text(0)),
            lambda: self.join("({0})::numeric", self.small()),
            lambda: self.same("(case when record.f <> 'NaN' then record.f end)::numeric(8,3)"),
            lambda: self.case(depth, self.numeric),
        )

    def wide(self, depth: int) -> Pair:
        """Return a numeric of any size, of which nothing is computed."""
        rng = self.rng
        leaf = [
            lambda: self.same("record.w"),
            lambda: self.same(rng.choice(["1e30", "-1e-25", "123456789012345678901234567890.5"])),
            lambda: Pair("record.j.x::numeric", "(record.j ->> 'x')::numeric"),
        ]
        if depth <= 0:
            return self.pick(*leaf)
        return self.pick(
            *leaf,
            lambda: self.join("coalesce({0}, {1})", self.same("record.w"), self.numeric(0)),
            lambda: self.join("coalesce({0}, {1})", self.numeric(0), self.same("record.w")),
            lambda: self.case(
                depth, lambda _: self.same(rng.choice(["record.w", "record.n", "0.5"]))
            ),
        )

    def small_integer(self) -> Pair:
        return self.same(self.rng.choice(["record.k::int", "2", "-1"]))

    def small(self) -> Pair:
        return self.same(self.rng.choice(["record.k", "2", "10"]))

    def floating(self, depth: int) -> Pair:
        rng = self.rng
        leaf = [lambda: self.same(rng.choice(["record.f", "record.f", "record.r"]))]
        if depth <= 0:
            return self.pick(*leaf)
        return self.pick(
            *leaf,
            lambda: self.join(
                f"({{0}} {rng.choice('+-*/')} {{1}})",
                self.floating(depth - 1),
                self.floating(depth - 1),
            ),
            lambda: self.join(
                f"({{0}} {rng.choice('+-*/')} {{1}})", self.floating(depth - 1), self.small()
            ),
            lambda: self.join("abs({0})", self.floating(depth - 1)),
            lambda: self.join(
                f"{rng.choice(['round', 'trunc', 'floor', 'ceil', 'sign'])}({{0}})",
                self.floating(depth - 1),
            ),
            lambda: self.join("sqrt(abs({0}))", self.floating(depth - 1)),
            lambda: self.join(
                "least({0}, {1})", self.floating(depth - 1), self.floating(depth - 1)
            ),
            lambda: self.join("(- {0})", self.floating(depth - 1)),
            lambda: self.join("({0})::float8", self.numeric(depth - 1)),
            lambda: self.join("({0})::real", self.floating(depth - 1)),
            lambda: self.join("({0})::float8", self.text(0)),
        )

    def text(self, depth: int) -> Pair:
        rng = self.rng
        leaf = [
            lambda: self.same(rng.choice(["record.t", "record.v", "record.c"])),
            lambda: Pair("record.j.s::text", "(record.j ->> 's')"),
            lambda: Pair("record.j.l[1]::text", "(record.j #>> '{l,1}')"),
        ]
        if depth <= 0:
            return self.pick(*leaf)
        return self.pick(
            *leaf,
            lambda: self.join("lower({0})", self.text(depth - 1)),
            lambda: self.called(TEXT),
            lambda: self.called(TEXT),
            lambda: self.join("replace({0}, 'a', {1})", self.plain(depth - 1), self.plain(0)),
            lambda: self.join("left({0}, {1})", self.text(depth - 1), self.small_integer()),
            lambda: self.join(
                "substring({0} from {1})", self.text(depth - 1), self.small_integer()
            ),
            lambda: self.join("upper({0})", self.text(depth - 1)),
            lambda: self.join("({0} || {1})", self.text(depth - 1), self.text(depth - 1)),
            lambda: self.join("({0} || '-' || {1})", self.text(depth - 1), self.same("record.k")),
            lambda: self.join("({0})::varchar(2)", self.text(depth - 1)),
            lambda: self.join("({0})::text", self.integer(depth - 1)),
            lambda: self.same("record.m::text"),
            lambda: self.join("(round({0}, 2))::text", self.same("record.m")),
            lambda: self.same("record.b::text"),
            lambda: self.same("record.d::text"),
            lambda: self.join("coalesce({0}, 'none')", self.plain(depth - 1)),
            lambda: self.case(depth, self.plain),
        )

    def plain(self, depth: int) -> Pair:
        """Return a text that is no char(n), whose blanks count when it meets texts in a `case`."""
        return self.join("({0})::text", self.text(depth))

    def date(self, depth: int) -> Pair:
        leaf = [lambda: self.same("record.d"), lambda: self.same(f"date '{self.rng.choice(DAYS)}'")]
        if depth <= 0:
            return self.pick(*leaf)
        return self.pick(
            *leaf,
            lambda: self.same(f"(record.d + {self.rng.choice([0, 1, 30, -31, 366])})"),
            lambda: self.same("(record.d - record.k::int)"),
            lambda: self.join("({0})::date", self.timestamp(depth - 1)),
        )

    def timestamp(self, depth: int) -> Pair:
        rng = self.rng
        leaf = [
            lambda: self.same("record.ts"),
            lambda: self.same(f"timestamp '{self.moment()}'"),
        ]
        if depth <= 0:
            return self.pick(*leaf)
        return self.pick(
            *leaf,
            lambda: self.join(
                f"({{0}} {rng.choice('+-')} interval '{rng.choice(SPANS)}')", self.timestamp(0)
            ),
            lambda: self.join(
                f"({{0}} {rng.choice('+-')} interval '{rng.choice(SPANS)}')", self.date(0)
            ),
            lambda: self.join(f"date_trunc('{self.unit()}', {{0}})", self.timestamp(depth - 1)),
            lambda: self.join("({0})::timestamp", self.date(depth - 1)),
        )

    def unit(self) -> str:
        return self.rng.choice(
            ["second", "minute", "hour", "day", "week", "month", "quarter", "year"]
        )

    def zoned(self, depth: int) -> Pair:
        rng = self.rng
        leaf = [
            lambda: self.same("record.tz"),
            lambda: self.same(f"timestamptz '{self.moment(rng.choice(['Z', '+02', '']))}'"),
        ]
        if depth <= 0:
            return self.pick(*leaf)
        return self.pick(
            *leaf,
            lambda: self.same("now()"),
            lambda: self.join(
                f"({{0}} {rng.choice('+-')} interval '{rng.choice(SPANS)}')", self.zoned(0)
            ),
            lambda: self.join(f"date_trunc('{self.unit()}', {{0}})", self.zoned(depth - 1)),
            lambda: self.join(f"date_trunc('{self.unit()}', {{0}})", self.date(0)),
            lambda: self.join("({0})::timestamptz", self.timestamp(depth - 1)),
        )

    def moment(self, zone: str = "", between: str = " ") -> str:
        return stamp(self.rng.choice(DAYS), self.rng.choice(CLOCKS), zone, between)

    def interval(self, depth: int) -> Pair:
        return self.pick(
            lambda: self.same("record.iv"),
            lambda: self.same(f"interval '{self.rng.choice(SPANS)}'"),
            lambda: self.join("({0} - {1})", self.timestamp(0), self.timestamp(0)),
            lambda: self.join("({0} - {1})", self.zoned(0), self.timestamp(0)),
        )

    def case(self, depth: int, of: Callable[[int], Pair]) -> Pair:
        form = self.rng.choice(
            ["case when {0} then {1} else {2} end", "case when {0} then {1} when {3} then {2} end"]
        )
        return self.join(
            form, self.condition(depth - 1), of(depth - 1), of(depth - 1), self.condition(depth - 1)
        )

    # Conditions

    def comparison(self, depth: int) -> Pair:
        op = self.rng.choice(["=", "<>", "<", "<=", ">", ">=", "!="])
        kinds: list[tuple[Callable[[int], Pair], Callable[[int], Pair]]] = [
            (self.integer, self.integer), (self.integer, self.numeric), (self.numeric, self.numeric),
            (self.floating, self.floating), (self.floating, self.integer), (self.numeric, self.floating),
            (self.text, self.text), (self.date, self.date), (self.timestamp, self.timestamp),
            (self.date, self.timestamp), (self.zoned, self.zoned), (self.timestamp, self.zoned),
            (self.interval, self.interval), (self.wide, self.wide), (self.wide, self.numeric),
            (self.wide, self.integer), (self.wide, self.floating),
        ]  # fmt: skip
        left, right = self.rng.choice(kinds)
        if self.rng.random() < 0.15:
            op = self.rng.choice(["is distinct from", "is not distinct from"])
        return self.join(f"{{0}} {op} {{1}}", left(depth - 1), right(depth - 1))

    def literal(self) -> Pair:
        rng = self.rng
        op = rng.choice(["=", "<>", "<", ">="])
        return self.pick(
            lambda: self.same(f"record.i {op} '{rng.choice(INTS)}'"),
            lambda: self.same(f"record.n {op} '{rng.choice(NUMERICS)}'"),
            lambda: self.same(f"record.m {op} {rng.choice(NUMERICS)}"),
            lambda: self.same(f"record.w {op} '{rng.choice(WIDE)}'"),
            lambda: self.same(f"record.w in ('{rng.choice(WIDE)}', 1e20, record.i)"),
            lambda: self.same(f"record.w between '-Infinity' and '{rng.choice(WIDE)}'"),
            lambda: self.same(f"record.f {op} '{rng.choice(FLOATS)}'"),
            lambda: self.same(f"record.r {op} {rng.choice(['0.1', '1.5', '3', '1e30'])}"),
            lambda: self.same(f"record.t {op} {self.quoted(rng.choice(TEXTS))}"),
            lambda: self.same(f"record.c {op} {self.quoted(rng.choice(TEXTS)[:6])}"),
            lambda: self.same(f"record.d {op} '{rng.choice([*DAYS, 'infinity', '-infinity'])}'"),
            lambda: self.same(f"record.ts {op} '{self.moment(between='T')}'"),
            lambda: self.same(f"record.tz {op} '{self.moment('-05:30')}'"),
            lambda: self.same(f"record.tm {op} '{rng.choice(CLOCKS)}'"),
            lambda: self.same(f"record.iv {op} '{rng.choice(SPANS)}'"),
            lambda: self.same(f"record.u {rng.choice(['=', '<>'])} '{rng.choice(UUIDS).upper()}'"),
            lambda: self.same("record.b = 'yes'"),
            lambda: self.called(BOOL),
            lambda: self.call(rng.choice(["@>", "?", "~", "similar to", "= any", "&&"])),
            lambda: self.same(f"nullif(record.t, {self.quoted(rng.choice(TEXTS))}) is null"),
            lambda: Pair(f"record.j.s {op} 'a'", f"(record.j ->> 's') {op} 'a'"),
            lambda: Pair(f"record.j.x {op} 1", f"(record.j ->> 'x')::numeric {op} 1"),
            lambda: Pair(f"record.j.o.deep {op} 'z'", f"(record.j #>> '{{o,deep}}') {op} 'z'"),
            lambda: Pair(f"record.j.l[0] {op} 1.5", f"(record.j #>> '{{l,0}}')::numeric {op} 1.5"),
            lambda: Pair("record.j.ok", "(record.j ->> 'ok')::boolean"),
            lambda: Pair("record.j.ok is not true", "((record.j ->> 'ok')::boolean) is not true"),
        )

    def like(self, depth: int) -> Pair:
        rng = self.rng
        pattern = rng.choice(
            ["%", "a%", "%b", "%a%", "_", "__", "a\\%", "aB\\%", "a\\_c", "a\\\\b", "\\a%", "%\\\\%", "",
             "😀_", "_b", "% %", "%\n%", "ab!%", "50!% %"]
        )  # fmt: skip
        op = rng.choice(["like", "ilike", "not like", "not ilike"])
        escape = rng.choice(["", "", " escape '!'", " escape ''"])
        if escape == " escape '!'" and pattern.endswith("!"):
            escape = ""
        return self.join(f"{{0}} {op} {self.quoted(pattern)}{escape}", self.text(min(depth - 1, 1)))

    def condition(self, depth: int) -> Pair:
        if depth <= 0:
            return self.pick(
                self.literal, lambda: self.same("record.b"), lambda: self.comparison(1)
            )
        sub = depth - 1
        return self.pick(
            self.literal,
            lambda: self.comparison(depth),
            lambda: self.comparison(depth),
            lambda: self.like(depth),
            lambda: self.join("({0} and {1})", self.condition(sub), self.condition(sub)),
            lambda: self.join("({0} or {1} or {2})", *[self.condition(sub) for _ in range(3)]),
            lambda: self.join("not ({0})", self.condition(sub)),
            lambda: self.join("({0}) is null", self.anything(sub)),
            lambda: self.join("({0}) is not null", self.anything(sub)),
            lambda: self.join(f"({{0}}) is {self.truth()}", self.condition(sub)),
            lambda: self.join(
                "{0} in ({1}, {2}, null)", self.integer(0), self.integer(sub), self.integer(0)
            ),
            lambda: self.join("{0} not in ({1}, 'x', 'ab')", self.text(0), self.text(sub)),
            lambda: self.join("{0} in (1, 2.50, {1})", self.numeric(0), self.numeric(sub)),
            lambda: self.join(
                "{0} between {1} and {2}", self.numeric(0), self.integer(0), self.numeric(sub)
            ),
            lambda: self.join(
                "{0} not between {1} and {2}", self.date(sub), self.date(0), self.timestamp(0)
            ),
            lambda: self.join("coalesce({0}, {1})", self.condition(sub), self.condition(sub)),
            lambda: self.case(depth, self.condition),
        )  # fmt: skip

    def truth(self) -> str:
        return self.rng.choice(["true", "not true", "false", "not false"])

    def anything(self, depth: int) -> Pair:
        return self.pick(
            lambda: self.integer(depth), lambda: self.numeric(depth), lambda: self.floating(depth),
            lambda: self.text(depth), lambda: self.date(depth), lambda: self.zoned(depth),
            lambda: self.condition(depth),
        )  # fmt: skip


class Outcome(NamedTuple):
    """What Spark gives for a condition and a row."""

    value: Any
    bad: bool


def theirs_of(field: Field) -> str:
    """Return the SQL that gives a field's text in `things`."""
    reference = field.reference
    column = f"record.{reference.column}"
    if reference.column == "a" and not reference.path:
        return f"to_json({column})::text"
    if field.probe is not None:
        return f"({column} #> '{{{','.join(str(p) for p in reference.path)}}}')::text"
    if not reference.path:
        return f"{column}::text"
    if reference.column == "a":
        (index,) = reference.path
        assert isinstance(index, int)
        return f"{column}[{index + 1}]::text"
    return f"{column} #>> '{{{','.join(str(p) for p in reference.path)}}}'"


def arrow_type(type_: Type) -> pa.DataType:
    """Return the Arrow type of a field's values."""
    if type_.kind is Kind.NUMERIC:
        return pa.decimal128(type_.precision, type_.scale)
    return {
        Kind.BOOL: pa.bool_(), Kind.INT: pa.int64(), Kind.FLOAT: pa.float64(), Kind.DATE: pa.date32(),
        Kind.TIMESTAMP: pa.timestamp("us"), Kind.TIMESTAMPTZ: pa.timestamp("us", "UTC"),
        Kind.INTERVAL: pa.int64(),
    }.get(type_.kind, pa.string())  # fmt: skip


def leaf_value(text: str | None, type_: Type) -> Any:
    """Return a value from its text as Postgres prints it."""
    if text is None or type_.kind in (Kind.TEXT, Kind.JSON, Kind.TIME):
        return text
    value = read(text, type_)
    return value.comparable if type_.kind is Kind.INTERVAL else value  # type: ignore[union-attr]


def probed(texts: Sequence[str | None], field: Field) -> tuple[pa.Array, list[int]]:
    """Return what a field's probe gives of the JSON of all rows, and the rows where it fails."""
    assert field.probe is not None
    answer = ask(*field.probe)
    # A column has the same null for JSON's null and for none.
    there = [t is not None and (t != "null" or bool(field.reference.path)) for t in texts]
    answers = [answer(t.encode()) if ok and t else None for ok, t in zip(there, texts, strict=True)]
    unfit = [row for row, found in enumerate(answers) if found is UNFIT]
    kept = [None if found is UNFIT else found for found in answers]
    return arrow(field.type, kept)[0], unfit


def arrow_column(texts: Sequence[str | None], field: Field) -> tuple[pa.Array, list[int]]:
    """Return a field's values of all rows, and the rows whose value does not fit."""
    type_ = field.type
    if field.probe is not None:
        return probed(texts, field)
    if type_.kind in (Kind.KEY, Kind.FLOAT, Kind.NUMERIC):
        return arrow(type_, texts)
    values = [leaf_value(t, type_) for t in texts]
    chosen = arrow_type(type_)
    if type_.kind is Kind.DATE:
        return pa.array(values, pa.int32()).cast(chosen), []
    if type_.kind in (Kind.TIMESTAMP, Kind.TIMESTAMPTZ):
        return pa.array(values, pa.int64()).cast(chosen), []
    return pa.array(values, chosen), []


class Bed:
    """Evaluates conditions over the rows of `things`, by Postgres and by Spark."""

    def __init__(self, connection: psycopg.Connection[Any], spark: SparkSession) -> None:
        self.connection = connection
        self.spark = spark
        connection.execute("SET timezone = 'UTC'")
        connection.execute(TABLE)
        connection.execute(OUTCOMES)
        self.columns: Columns = load_columns(connection, [("public", "things")])

    def fill(self, rows: Sequence[Sequence[Any]]) -> None:
        self.connection.execute("TRUNCATE things")
        marks = ", ".join(["%s"] * len(rows[0]))
        with self.connection.cursor() as cursor:
            cursor.executemany(f"INSERT INTO things VALUES ({marks})", rows)

    def typed(self, condition: str) -> Typed:
        return typed(parse_condition(condition), self.columns)

    def postgres(self, condition: str) -> list[str | None]:
        found = self.connection.execute("SELECT outcome FROM outcomes(%s)", [condition]).fetchall()
        return [row[0] for row in found]

    def spark_outcomes(self, all_typed: Sequence[Typed]) -> list[list[Outcome]]:
        """Return each expression's outcome on each row, by one job."""
        fields = list(dict.fromkeys(f for t in all_typed for f in t.fields))
        names = [f"f{number}" for number in range(len(fields))]
        select = ", ".join(theirs_of(f) for f in fields) or "1"
        rows = self.connection.execute(
            f"SELECT {select} FROM things AS record ORDER BY id"
        ).fetchall()
        texts = list(zip(*rows, strict=True))
        arrays, marks = [], []
        for text, field in zip(texts, fields, strict=False):
            values, unfit = arrow_column(text, field)
            arrays.append(values)
            marks.append(pa.array([row in unfit for row in range(len(rows))], pa.bool_()))
        structs = pa.StructArray.from_arrays(
            [*arrays, *marks], names=[*names, *(f"b{number}" for number in range(len(fields)))]
        )
        offsets = pa.array([0, len(structs)], pa.int32())
        table = pa.table({"fields": pa.ListArray.from_arrays(offsets, structs)})
        numbers = {field: number for number, field in enumerate(fields)}

        def of(message: Column) -> Column:
            def leaf(field: Field) -> tuple[Column, Column]:
                return message[f"f{numbers[field]}"], message[f"b{numbers[field]}"]

            made = [to_columns(t, leaf) for t in all_typed]
            return F.struct(
                *[
                    F.struct(m.value.alias("v"), m.bad.alias("b")).alias(f"c{at}")
                    for at, m in enumerate(made)
                ]
            )

        frame = self.spark.createDataFrame(table).select(F.transform("fields", of).alias("r"))
        (result,) = frame.collect()
        return [
            [Outcome(row[at].v, row[at].v is None and row[at].b) for row in result.r]
            for at in range(len(all_typed))
        ]
