"""Values to JSON without a server: the type table, round trips of literals, malformed input."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.postgres import types, values
from penstock.postgres.types import TypeInfo, Types
from penstock.postgres.values import Converter

INT4, TEXT, JSON, BOX, TIMESTAMPTZ = 23, 25, 114, 603, 1184
INT4_ARRAY, TEXT_ARRAY, BOX_ARRAY = 1007, 1009, 1020
PAIR, PAIR_ARRAY, NESTED, HSTORE, MOOD, VECTOR, DOMAIN = range(90_000, 90_007)
TAGS, TAGS_ARRAY, AMOUNT, EMPTY, CITEXT, CITEXT_ARRAY = range(90_007, 90_013)

INFOS = [
    TypeInfo(PAIR, "public", "pair", "c", attributes=(("n", INT4), ('the "text"', TEXT))),
    TypeInfo(PAIR_ARRAY, "public", "_pair", "b", element=PAIR),
    TypeInfo(NESTED, "public", "nested", "c", attributes=(("p", PAIR), ("ps", PAIR_ARRAY))),
    TypeInfo(HSTORE, "ext", "hstore", "b"),
    TypeInfo(MOOD, "public", "mood", "e"),
    TypeInfo(VECTOR, "public", "vector", "b"),
    TypeInfo(DOMAIN, "public", "positive", "d", base=INT4),
    TypeInfo(TAGS, "public", "tags", "d", base=TEXT_ARRAY),
    TypeInfo(TAGS_ARRAY, "public", "_tags", "b", element=TAGS),
    TypeInfo(AMOUNT, "public", "amount", "d", base=DOMAIN),
    TypeInfo(EMPTY, "public", "nothing", "c"),
    TypeInfo(CITEXT, "public", "citext", "b"),
    TypeInfo(CITEXT_ARRAY, "public", "_citext", "b", element=CITEXT),
]
TYPES = Types(INFOS)


def convert(oid: int, value: bytes) -> bytes:
    converter = TYPES.converter(oid)
    return value if converter is None else converter(value)


def parsed(result: bytes) -> Any:
    """Parse with the standard library, strictly; no line break may stand anywhere in the bytes."""
    assert b"\n" not in result
    assert b"\r" not in result
    return json.loads(result.decode(), parse_constant=lambda name: pytest.fail(f"bare {name}"))


# What array_out, record_out and hstore_out do: the parsers are to meet all that they print.


def array_out(items: list[Any], delimiter: str = ",") -> str:
    def one(item: str | list[Any] | None) -> str:
        if item is None:
            return "NULL"
        if isinstance(item, list):
            return array_out(item, delimiter)
        if item == "" or item.upper() == "NULL" or set(item) & set('"\\{} \t\n\r\v\f' + delimiter):
            return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return item

    return "{" + delimiter.join(map(one, items)) + "}"


def record_out(fields: list[str | None]) -> str:
    def one(field: str | None) -> str:
        if field is None:
            return ""
        if field == "" or set(field) & set('"\\(), \t\n\r\v\f'):
            return '"' + field.replace("\\", "\\\\").replace('"', '""') + '"'
        return field

    return "(" + ",".join(map(one, fields)) + ")"


def hstore_out(pairs: dict[str, str | None]) -> str:
    def quoted(item: str) -> str:
        return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return ", ".join(
        f"{quoted(key)}=>{'NULL' if item is None else quoted(item)}" for key, item in pairs.items()
    )


# Postgres takes any character but NUL; the ones with a meaning in a literal come often.
strings = st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.text(
    st.sampled_from('"\\{}(),;= \n\r\tNULa\u2028é😀')
)
optional = st.none() | strings | st.sampled_from(["NULL", "null", "", "\\", '"'])


@st.composite
def arrays(draw: st.DrawFn) -> list[Any]:
    """Draw arrays as Postgres has them: all sub-arrays of a level have the same length."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))

    def build(rest: list[int]) -> list[Any]:
        if len(rest) == 1:
            return draw(st.lists(optional, min_size=rest[0], max_size=rest[0]))
        return [build(rest[1:]) for _ in range(rest[0])]

    return build(lengths)


@pytest.mark.parametrize(
    ("oid", "value", "expected"),
    [
        (16, "t", "true"),
        (16, "f", "false"),
        (20, "-9223372036854775808", "-9223372036854775808"),
        (26, "4294967295", "4294967295"),
        (700, "1e+20", "1e+20"),
        (701, "-0", "-0"),
        (701, "1.7976931348623157e+308", "1.7976931348623157e+308"),
        (701, "5e-324", "5e-324"),
        (701, "NaN", '"NaN"'),
        (701, "Infinity", '"Infinity"'),
        (701, "-Infinity", '"-Infinity"'),
        (1700, "199.90", '"199.90"'),
        (1700, "NaN", '"NaN"'),
        (25, 'say "hi"\n', r'"say \"hi\"\n"'),
        (1042, "ab   ", '"ab   "'),
        (790, "-$1,000.00", '"-$1,000.00"'),
        (17, r"\x00ff", r'"\\x00ff"'),
        (17, r"\x", r'"\\x"'),
        (114, '{"a" :\r\n 1.10, "a": "\\u0000"}', '{"a" :   1.10, "a": "\\u0000"}'),
        (3802, "1.10", "1.10"),
        (1082, "0044-03-15 BC", '"0044-03-15 BC"'),
        (1083, "21:37:01.12747", '"21:37:01.12747"'),
        (1083, "24:00:00", '"24:00:00"'),
        (1266, "21:37:01.5+02", '"21:37:01.5+02"'),
        (1114, "2024-10-28 21:37:01", '"2024-10-28T21:37:01"'),
        (1114, "2024-10-28 21:37:01.12747", '"2024-10-28T21:37:01.127470"'),
        (1114, "infinity", '"infinity"'),
        (1114, "0044-03-15 12:00:00 BC", '"0044-03-15 12:00:00 BC"'),
        (1114, "0044-03-15 12:00:00.123 BC", '"0044-03-15 12:00:00.123 BC"'),
        (1114, "10000-01-01 00:00:00.12345", '"10000-01-01 00:00:00.12345"'),
        (1184, "2024-10-28 21:37:01+00", '"2024-10-28T21:37:01Z"'),
        (1184, "2024-10-28 21:37:01.12747+00", '"2024-10-28T21:37:01.127470Z"'),
        (1184, "2024-10-28 21:37:01.5+05:30", '"2024-10-28T16:07:01.500000Z"'),
        (1184, "1900-01-01 00:19:32+00:19:32", '"1900-01-01T00:00:00Z"'),
        (1184, "2024-10-28 21:37:01-03", '"2024-10-29T00:37:01Z"'),
        (1184, "-infinity", '"-infinity"'),
        (1184, "0044-03-15 12:00:00+00 BC", '"0044-03-15 12:00:00+00 BC"'),
        (1184, "10000-01-01 00:00:00+00", '"10000-01-01 00:00:00+00"'),
        (1184, "9999-12-31 23:00:00-02", '"9999-12-31 23:00:00-02"'),
        (1186, "P1M-1DT2H3M4S", '"P1M-1DT2H3M4S"'),
        (22, "1 2 3", '"1 2 3"'),
        (3908, '["2024-01-01 00:00:00",)', r'"[\"2024-01-01 00:00:00\",)"'),
        (1007, "{}", "[]"),
        (1007, "{1,NULL,-3}", "[1,null,-3]"),
        (1007, "[0:1][-1:0]={{1,2},{3,NULL}}", "[[1,2],[3,null]]"),
        (1022, "{1.5,NaN,NULL,-Infinity}", '[1.5,"NaN",null,"-Infinity"]'),
        (1000, "{t,f,NULL}", "[true,false,null]"),
        (1009, '[0:2]={NULL,"NULL",a}', '[null,"NULL","a"]'),
        (1009, '[-3:-2]={"=","[1:2]={a}"}', '["=","[1:2]={a}"]'),
        (199, '{"{\\"a\\":\n1.10}",null,NULL}', '[{"a": 1.10},null,null]'),
        (1185, '{"2024-10-28 21:37:01.5+00",NULL}', '["2024-10-28T21:37:01.500000Z",null]'),
        (1020, "{(1,1),(0,0);NULL;(2,2),(1,1)}", '["(1,1),(0,0)",null,"(2,2),(1,1)"]'),
        (1006, '{"1 2","3"}', '["1 2","3"]'),
        (PAIR, '(1,"a ""b"" \\\\")', r'{"n":1,"the \"text\"":"a \"b\" \\"}'),
        (PAIR, "(,)", '{"n":null,"the \\"text\\"":null}'),
        (PAIR, '(,"")', '{"n":null,"the \\"text\\"":""}'),
        (EMPTY, "()", "{}"),
        (HSTORE, "", "{}"),
        (HSTORE, '"a"=>"1", "b"=>NULL, "\\"c\\""=>"NULL"', r'{"a":"1","b":null,"\"c\"":"NULL"}'),
        (VECTOR, "[1,-2.5,1e-05]", "[1,-2.5,1e-05]"),
        (VECTOR, "[1,2](3)", '"[1,2](3)"'),
        (MOOD, "so so", '"so so"'),
        (CITEXT_ARRAY, "{Ab,NULL}", '["Ab",null]'),
        (AMOUNT, "7", "7"),
        (TAGS, "{a,NULL}", '["a",null]'),
        (TAGS_ARRAY, '{"{a,\\"b c\\"}",NULL}', '[["a","b c"],null]'),
        (99_999, "anything", '"anything"'),
    ],
)
def test_type_table(oid: int, value: str, expected: str) -> None:
    result = convert(oid, value.encode())
    assert result.decode() == expected
    parsed(result)


def test_integers_need_no_converter_and_nothing_else_does_without() -> None:
    built_in = types._BUILT_IN_CONVERTERS
    assert {oid for oid, converter in built_in.items() if converter is None} == {20, 21, 23, 26}
    assert TYPES.converter(DOMAIN) is None
    assert TYPES.converter(AMOUNT) is None


@given(strings)
def test_text_round_trips(value: str) -> None:
    assert parsed(values.text(value.encode())) == value


def test_bytes_that_are_not_utf8_stay_visible() -> None:
    assert parsed(values.text(b"caf\xe9")) == "caf\\xe9"
    assert parsed(values.json(b'{"a": "caf\xe9"}')) == {"a": "caf\ufffd"}


def printed(moment: datetime) -> str:
    """Return what Postgres prints without an offset: trailing zeros of the fraction are gone."""
    whole = f"{moment:%H:%M:%S}"
    fraction = f".{moment.microsecond:06}".rstrip("0").rstrip(".")
    return f"{moment.year:04}-{moment:%m-%d} {whole}{fraction}"


@given(st.datetimes() | st.datetimes().map(lambda moment: moment.replace(microsecond=120_000)))
def test_timestamps(moment: datetime) -> None:
    text = printed(moment)
    assert parsed(values.timestamp(text.encode())) == moment.isoformat()
    assert parsed(values.timestamptz(f"{text}+00".encode())) == moment.isoformat() + "Z"


@given(
    st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1)),
    st.timedeltas(-timedelta(hours=15, minutes=59), timedelta(hours=15, minutes=59)),
)
def test_offsets_become_utc(moment: datetime, offset: timedelta) -> None:
    offset = timedelta(seconds=int(offset.total_seconds()))
    local = moment.replace(tzinfo=timezone(offset))
    seconds = abs(int(offset.total_seconds()))
    zone = f"{'-' if offset < timedelta(0) else '+'}{seconds // 3600:02}"
    if seconds % 3600:
        zone += f":{seconds // 60 % 60:02}"
    if seconds % 60:
        zone += f":{seconds % 60:02}"
    expected = local.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"
    assert parsed(values.timestamptz(f"{printed(moment)}{zone}".encode())) == expected


@given(
    st.integers(10_000, 294_276) | st.integers(10_000, 10_010),
    st.sampled_from(["01-01 00:00:00", "12-31 23:59:59.9", "02-10 10:10:10.123456"]),
    st.sampled_from(["", "+00", "+05:30"]),
)
def test_years_above_9999_stay_as_printed(year: int, rest: str, zone: str) -> None:
    value = f"{year}-{rest}{zone}"
    assert parsed(values.timestamptz(value.encode())) == value
    if not zone:
        assert parsed(values.timestamp(value.encode())) == value


@given(st.integers(1, 4714), st.sampled_from(["", ".1", ".123", ".123456"]))
def test_years_before_christ_stay_as_printed(year: int, fraction: str) -> None:
    value = f"{year:04}-06-15 01:02:03{fraction}"
    assert parsed(values.timestamp(f"{value} BC".encode())) == f"{value} BC"
    assert parsed(values.timestamptz(f"{value}+00 BC".encode())) == f"{value}+00 BC"


@given(arrays(), st.sampled_from([",", ";"]), st.sampled_from(["", "[0:2]=", "[-1:0][5:6]="]))
@example([""], ",", "")
@example(["\\", '\\"', "\\\\", '"\\'], ",", "")
def test_arrays_round_trip(items: list[Any], delimiter: str, bounds: str) -> None:
    literal = bounds + array_out(items, delimiter)
    assert parsed(values.array_of(values.text, delimiter)(literal.encode())) == items


@given(st.lists(st.none() | st.integers()), st.sampled_from(["", "[7:9]="]))
def test_integer_arrays_round_trip(items: list[int | None], bounds: str) -> None:
    literal = "{" + ",".join("NULL" if item is None else str(item) for item in items) + "}"
    assert parsed(convert(INT4_ARRAY, (bounds + literal).encode())) == items


@given(st.lists(st.tuples(strings, optional), min_size=1, unique_by=lambda field: field[0]))
def test_composites_round_trip(fields: list[tuple[str, str | None]]) -> None:
    converter = values.composite([(name, values.text) for name, _ in fields])
    literal = record_out([field for _, field in fields])
    assert parsed(converter(literal.encode())) == dict(fields)


pairs = st.tuples(st.none() | st.integers(), optional)


@given(st.none() | pairs, st.lists(st.none() | pairs))
def test_nested_composites_round_trip(
    pair: tuple[int | None, str | None] | None,
    others: list[tuple[int | None, str | None] | None],
) -> None:
    def literal(item: tuple[int | None, str | None] | None) -> str | None:
        return item and record_out([None if item[0] is None else str(item[0]), item[1]])

    def expected(item: tuple[int | None, str | None] | None) -> dict[str, Any] | None:
        return item and {"n": item[0], 'the "text"': item[1]}

    value = record_out([literal(pair), array_out([literal(item) for item in others])])
    assert parsed(convert(NESTED, value.encode())) == {
        "p": expected(pair),
        "ps": [expected(item) for item in others],
    }


@given(st.dictionaries(strings, optional))
def test_hstores_round_trip(value: dict[str, str | None]) -> None:
    assert parsed(values.hstore(hstore_out(value).encode())) == value


@given(st.binary() | st.text(st.sampled_from('{}(),"\\=>NUL[]:;t0 \n')).map(str.encode))
@settings(max_examples=300)
def test_malformed_input_never_raises(value: bytes) -> None:
    for converter in types._BUILT_IN_CONVERTERS.values():
        if converter is not None:
            converter(value)
    strict: list[Converter] = [
        values.text,
        values.boolean,
        values.timestamp,
        values.timestamptz,
        values.hstore,
        values.array_of(values.text),
        values.array_of(values.boolean),
        values.array_of(values.composite([("a", values.text), ("b", values.text)])),
        values.composite([("a", values.text), ("b", values.array_of(values.text))]),
        values.composite([]),
    ]
    for converter in strict:
        parsed(converter(value))


@pytest.mark.parametrize(
    ("oid", "value"),
    [
        (TEXT_ARRAY, '{"a"'),
        (TEXT_ARRAY, '{"a"}}'),
        (TEXT_ARRAY, '{"a"},{"b"}'),
        (TEXT_ARRAY, '{"a"}},{{"b"}'),
        (TEXT_ARRAY, '{"a"}\n'),
        (TEXT_ARRAY, '"a"'),
        (TEXT_ARRAY, ""),
        (PAIR, "(1,a,b)"),
        (PAIR, "(1)"),
        (PAIR, "(1,a"),
        (PAIR, ""),
        (PAIR, '(1,"a)'),
        (EMPTY, "(1)"),
        (HSTORE, '"a"=>'),
        (HSTORE, '"a"=>"b" "c"=>"d"'),
        (16, "maybe"),
        (700, "word"),
        (1114, "yesterday"),
        (1184, "2024-10-28 21:37:01"),
        (17, "octal\\000"),
    ],
)
def test_what_cannot_be_read_is_a_string_of_the_text(oid: int, value: str) -> None:
    assert parsed(convert(oid, value.encode())) == value


def test_unknown_asks_for_what_is_missing_at_any_depth() -> None:
    types = Types()
    assert types.unknown(INT4) == set()
    assert types.unknown(BOX_ARRAY) == set()
    assert types.unknown(NESTED) == {NESTED}
    types.add([info for info in INFOS if info.oid == NESTED])
    assert types.unknown(NESTED) == {PAIR, PAIR_ARRAY}
    types.add([info for info in INFOS if info.oid == PAIR_ARRAY])
    assert types.unknown(NESTED) == {PAIR}
    assert types.unknown(TAGS_ARRAY) == {TAGS_ARRAY}
    types.add(INFOS)
    assert all(not types.unknown(info.oid) for info in INFOS)


def test_a_type_learnt_anew_changes_its_converters() -> None:
    types = Types(INFOS)
    pairs = types.converter(PAIR_ARRAY)
    assert pairs is not None
    assert types.converter(PAIR_ARRAY) is pairs
    types.add([TypeInfo(PAIR, "public", "pair", "c", attributes=(("x", INT4),))])
    renewed = types.converter(PAIR_ARRAY)
    assert renewed is not None
    assert parsed(renewed(b"{(1)}")) == [{"x": 1}]


def test_a_type_that_contains_itself_ends() -> None:
    types = Types([TypeInfo(1 << 20, "public", "loop", "d", base=1 << 20)])
    assert types.unknown(1 << 20) == set()
    assert types.converter(1 << 20) is values.text
