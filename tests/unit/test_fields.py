"""Values taken out of messages: every form of the message's table, and what has no such form."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.streams_help import Change, wire

from penstock.core.message import DELETE, TRUNCATE, UPDATE
from penstock.expressions.array_literals import asked as asked_text
from penstock.expressions.fields import Extractor, ddl, names, place, struct_type
from penstock.expressions.keys import key_of
from penstock.expressions.probes import RESULTS
from penstock.expressions.types import (
    BOOL,
    DATE,
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    DAY,
    FLOAT,
    INT,
    INTERVAL,
    JSON,
    KEY,
    NUMERIC,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
    TIMESTAMPTZ,
    Field,
    Kind,
    Reference,
    Type,
)

BAD = object()
REAL = Type(Kind.FLOAT, single=True)
PRICE = Type(Kind.NUMERIC, 5, 2, fixed=True)


def at(column: str, type_: Type, *path: str | int, root: str = "record") -> Field:
    return Field(Reference(root, column, path), type_)


def taken(batch: pa.RecordBatch, *fields: Field) -> list[list[Any]]:
    """Return the values of each field, `BAD` for what is marked so."""
    found = Extractor(fields)(batch)
    assert found.type == struct_type(fields)
    columns = []
    for number, field in enumerate(fields):
        word, mask = place(number)
        values = found.field(number)
        if field.kind in (Kind.TIMESTAMP, Kind.TIMESTAMPTZ):
            values = values.cast(pa.int64())
        elif field.kind is Kind.DATE:
            values = values.cast(pa.int32())
        marks = found.field(word).to_pylist()
        assert all(v is None for v, m in zip(values.to_pylist(), marks, strict=True) if m & mask)
        pairs = zip(values.to_pylist(), marks, strict=True)
        columns.append([BAD if m & mask else v for v, m in pairs])
    return columns


def value(json_text: str, type_: Type, *path: str | int) -> Any:
    """Return what a field of column `c` is in the record `{"c": json_text}`."""
    batch = wire([Change({"id": 1})])
    record = pa.array([f'{{"id":1,"c":{json_text}}}'], pa.string())
    batch = batch.set_column(0, batch.schema.field(0), record)
    ((found,),) = taken(batch, at("c", type_, *path))
    return found


def micros(*of: int) -> int:
    year, month, day, hour, minute, second = (*of, *[0] * (6 - len(of)))
    moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    return int((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()) * 10**6


def asked(json_text: str, op: str, text: str = "", *path: str | int) -> Any:
    """Return a probe's answer about column `c` of the record `{"c": json_text}`."""
    batch = wire([Change({"id": 1})])
    record = pa.array([f'{{"id":1,"c":{json_text}}}'], pa.string())
    batch = batch.set_column(0, batch.schema.field(0), record)
    field = Field(Reference("record", "c", path), RESULTS[op], probe=(op, text))
    assert Field.from_json(field.to_json()).probe == field.probe
    ((found,),) = taken(batch, field)
    return found


@pytest.mark.parametrize(
    ("json_text", "op", "text", "path", "answer"),
    [
        ('{"a": {"b": [1, 2.0]}, "t": true}', "@>", '{"a": {"b": [2]}}', (), True),
        ('{"a": {"b": [1, 2.0]}, "t": true}', "@>", '{"t": 1}', (), False),
        ('{"a": [[1, 2], 3]}', "@>", '{"a": [[2]]}', (), True),
        ('{"a": [[1, 2], 3]}', "@>", '{"a": [2]}', (), False),
        ('[1, "x", null]', "@>", '"x"', (), True),
        ('[1, "x", null]', "@>", "null", (), True),
        ('"x"', "@>", '["x"]', (), False),
        ("100000000000000000000000001", "@>", "100000000000000000000000002", (), False),
        ("null", "@>", "null", (), None),
        ('{"a": null}', "@>", "null", ("a",), True),
        ('{"a": null}', "@>", "null", ("b",), None),
        ('{"a": 1}', "?", "a", (), True),
        ('["a"]', "?", "a", (), True),
        ('"a"', "?", "a", (), True),
        ('{"b": "a"}', "?", "a", (), False),
        ("1", "?", "1", (), False),
        ('{"a": [1, {}]}', "array_length", "", ("a",), 2),
        ("[]", "array_length", "", (), 0),
        ('{"a": 1}', "array_length", "", (), BAD),
        ("null", "array_length", "", (), None),
        ('{"a": null}', "typeof", "", ("a",), "null"),
        ('{"a": -1.5}', "typeof", "", ("a",), "number"),
        ('{"a": ""}', "typeof", "", ("a",), "string"),
        ('{"a": false}', "typeof", "", ("a",), "boolean"),
        ('{"a": null}', "present", "", ("a",), True),
        ('{"a": null}', "present", "", ("b",), None),
        ("[" * 100_000, "@>", "1", (), BAD),
    ],
)
def test_what_is_asked_of_json(
    json_text: str, op: str, text: str, path: tuple[str | int, ...], answer: Any
) -> None:
    assert (
        asked(json_text, op, text, *path) is answer or asked(json_text, op, text, *path) == answer
    )


def questioned(json_text: str, op: str, type_: Type, *items: Any) -> Any:
    return asked(json_text, op, asked_text(type_, items))


@pytest.mark.parametrize(
    ("json_text", "op", "type_", "items", "answer"),
    [
        ('["a","b"]', "= any", TEXT, ["b"], True),
        ('["a",null]', "= any", TEXT, ["b"], None),
        ('["a","b"]', "<> all", TEXT, ["c"], True),
        ("null", "= any", TEXT, ["a"], None),
        ("[]", "= any", TEXT, [None], False),
        ("[]", "<> all", TEXT, [None], True),
        ('["a"]', "= all", TEXT, [None], None),
        ('["a","b"]', "<> any", TEXT, ["a"], True),
        ('["a",null]', "= all", TEXT, ["a"], None),
        ('["A"]', "= any", Type(Kind.TEXT, folded=True), ["a"], True),
        ('["a  "]', "array @>", Type(Kind.TEXT, width=3), ["a"], True),
        ("[[1,2],[3,null]]", "array @>", INT, [3, 1], True),
        ("[1,null]", "array @>", INT, [None], False),
        ("[1,null]", "array <@", INT, [1, None], False),
        ("[1,null]", "array &&", INT, [None, 2], False),
        ("[]", "array <@", INT, [], True),
        ('["1.50","NaN"]', "array <@", NUMERIC, [key_of("1.5"), key_of("NaN")], True),
        ('[0.1,-0.0,"NaN"]', "array @>", REAL, [0.10000000149011612, 0.0, "NaN"], True),
        # What the column's type could not have: it was another one then.
        ('"a"', "= any", TEXT, ["a"], BAD),
        ('{"a":1}', "array &&", TEXT, ["a"], BAD),
        ('["a",{}]', "= any", TEXT, ["a"], BAD),
        ('[1,"2"]', "= any", INT, [1], BAD),
        ('["294277-01-01T00:00:00"]', "= any", TIMESTAMP, [0], BAD),
        ("[" * 100_000, "= any", INT, [1], BAD),
    ],
)
def test_what_is_asked_of_arrays(
    json_text: str, op: str, type_: Type, items: list[Any], answer: Any
) -> None:
    assert questioned(json_text, op, type_, *items) is answer


@pytest.mark.parametrize(
    ("json_text", "op", "text", "answer"),
    [
        ("[[1,2,3],[4,5,6]]", "cardinality", "", 6),
        ("[]", "cardinality", "", 0),
        ("null", "cardinality", "", None),
        ("1", "cardinality", "", BAD),
        ("[[1,2,3],[4,5,6]]", "dimension", "1", 2),
        ("[[1,2,3],[4,5,6]]", "dimension", "2", 3),
        ("[[1,2,3],[4,5,6]]", "dimension", "3", None),
        ("[]", "dimension", "1", None),
        ("[]", "dimension", "2", None),
        ("{}", "dimension", "1", BAD),
    ],
)
def test_how_long_arrays_are(json_text: str, op: str, text: str, answer: Any) -> None:
    assert asked(json_text, op, text) == answer


FORMS: list[tuple[str, Type, Any]] = [
    ("true", BOOL, True),
    ("null", BOOL, None),
    ("1", BOOL, BAD),
    ('"t"', BOOL, BAD),
    ("9223372036854775807", INT, 2**63 - 1),
    ("-9223372036854775808", INT, -(2**63)),
    ("9223372036854775808", INT, BAD),
    ("1.5", INT, BAD),
    ('"1"', INT, BAD),
    ("true", INT, BAD),
    ("[1]", INT, BAD),
    ("1e-05", FLOAT, 1e-05),
    ("-0", FLOAT, -0.0),
    ("7", FLOAT, 7.0),
    ('"Infinity"', FLOAT, math.inf),
    ('"-Infinity"', FLOAT, -math.inf),
    ('"much"', FLOAT, BAD),
    ("0.1", REAL, 0.10000000149011612),
    ("16777217", REAL, 16777216.0),
    ('"199.90"', PRICE, Decimal("199.90")),
    ('"-999.99"', PRICE, Decimal("-999.99")),
    ('"1000.00"', PRICE, BAD),
    ('"0.001"', PRICE, BAD),
    ('"NaN"', PRICE, BAD),
    ('"Infinity"', NUMERIC, BAD),
    ('"12345678901234567890.123456789012345678"', NUMERIC,
     Decimal("12345678901234567890.123456789012345678")),
    ('"123456789012345678901"', NUMERIC, BAD),
    ("12", NUMERIC, Decimal(12)),
    ('"12 "', NUMERIC, BAD),
    ('"Grüße 🐘"', TEXT, "Grüße 🐘"),
    (r'"a\"b\\c\n"', TEXT, 'a"b\\c\n'),
    ('""', TEXT, ""),
    ("12345678901234567890123", TEXT, "12345678901234567890123"),
    ("1.10", TEXT, "1.10"),
    ("true", TEXT, "true"),
    ('{"a": 1}', TEXT, '{"a": 1}'),
    (r'"a\u0000b"', JSON, BAD),
    ('"ab   "', Type(Kind.TEXT, width=5), "ab"),
    ('"   "', Type(Kind.TEXT, width=3), ""),
    ('"2024-10-28"', DATE, date(2024, 10, 28).toordinal() - date(1970, 1, 1).toordinal()),
    ('"0001-01-01"', DATE, -719_162),
    ('"9999-12-31"', DATE, 2_932_896),
    ('"infinity"', DATE, DATE_INFINITY),
    ('"-infinity"', DATE, DATE_MINUS_INFINITY),
    ('"0044-03-15 BC"', DATE, -735_160),
    ('"4714-11-24 BC"', DATE, -2_440_588),
    ('"10000-01-01"', DATE, 2_932_897),
    ('"5874897-12-31"', DATE, 2_145_042_905),
    ('"2023-02-29"', DATE, BAD),
    ("20241028", DATE, BAD),
    ('"2024-10-28T21:37:01.127470"', TIMESTAMP, micros(2024, 10, 28, 21, 37, 1) + 127470),
    ('"2024-10-28T21:37:01"', TIMESTAMP, micros(2024, 10, 28, 21, 37, 1)),
    ('"1969-12-31T23:59:59.999999"', TIMESTAMP, -1),
    ('"infinity"', TIMESTAMP, TIMESTAMP_INFINITY),
    ('"2024-10-28T21:37:01.127470Z"', TIMESTAMPTZ, micros(2024, 10, 28, 21, 37, 1) + 127470),
    ('"-infinity"', TIMESTAMPTZ, TIMESTAMP_MINUS_INFINITY),
    ('"20240-10-28 21:37:01+00"', TIMESTAMPTZ, 576_571_556_221_000_000),
    ('"0044-03-15 12:00:00.5 BC"', TIMESTAMP, -735_160 * DAY + 43_200_500_000),
    ('"0044-03-15 12:00:00+00 BC"', TIMESTAMPTZ, -735_160 * DAY + 43_200_000_000),
    ('"4714-11-24 00:00:00 BC"', TIMESTAMP, -2_440_588 * DAY),
    ('"294246-12-31 23:59:59.999999"', TIMESTAMP, 106_751_982 * DAY - 1),
    ('"294276-12-31 23:59:59.999999"', TIMESTAMP, BAD),
    ('"2024-10-28T21:37:01.5+05:30"', TIMESTAMPTZ, micros(2024, 10, 28, 16, 7, 1) + 500_000),
    ('"1.50"', FLOAT, 1.5),
    ('"1' + 400 * '0' + '"', FLOAT, BAD),
    ('"0.' + 400 * '0' + '1"', FLOAT, BAD),
    ('"1.50"', KEY, key_of("1.5")),
    ('"NaN"', KEY, "5"),
    ("-12", KEY, key_of("-12")),
    ("true", KEY, BAD),
    ('"x"', KEY, BAD),
    ('"04:05:06.789"', TIME, "04:05:06.789"),
    ('"P1M-1DT2H3M4S"', INTERVAL, ((30 - 1) * 86_400 + 2 * 3_600 + 3 * 60 + 4) * 10**6),
    ('"PT-0.000001S"', INTERVAL, -1),
    ('"P178000000Y"', INTERVAL, BAD),
    ('"infinity"', INTERVAL, 2**63 - 1),
    ('"-infinity"', INTERVAL, 1 - 2**63),
    ('"1 day"', INTERVAL, BAD),
    ("5", INTERVAL, BAD),
    ("1.10", JSON, "1.10"),
    ('"text"', JSON, "text"),
    ("null", JSON, None),
    ('{"a": [1.10, "x"]}', JSON, '{"a": [1.10, "x"]}'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "type_", "expected"), FORMS)
def test_every_form(text: str, type_: Type, expected: Any) -> None:
    found = value(text, type_)
    assert found == expected
    assert type(found) is type(expected)


def test_nan_is_a_float() -> None:
    assert math.isnan(value('"NaN"', FLOAT))
    assert math.isnan(value('"NaN"', REAL))


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ('{"city": "Bern", "zip": 3000}', ("city",), "Bern"),
        ('{"city": "Bern", "zip": 3000}', ("zip",), "3000"),
        ('{"city": "Bern"}', ("zip",), None),
        ('{"a": {"b": [10, {"c": 1.10}]}}', ("a", "b", 1, "c"), "1.10"),
        ('{"a": {"b": [10]}}', ("a", "b", 1, "c"), None),
        ('["x", "y"]', (1,), "y"),
        ('["x", "y"]', (2,), None),
        ('["x", "y"]', ("x",), None),
        ('{"0": "x"}', (0,), None),
        ('"x"', ("x",), None),
        ("5", (0,), None),
        ("null", ("a",), None),
        ('{"a": null}', ("a",), None),
        ('{"a": 1, "a": 2}', ("a",), "2"),
        ('{"Odd \\"Name\\"": true}', ('Odd "Name"',), "true"),
        (r'{"a": "x\u0000"}', ("a",), BAD),
    ],
)
def test_paths_into_json(text: str, path: tuple[str | int, ...], expected: Any) -> None:
    assert value(text, JSON, *path) == expected


def test_an_element_has_its_own_kind() -> None:
    assert value('["1.50", null]', PRICE, 0) == Decimal("1.50")
    assert value('["1.50", null]', PRICE, 1) is None
    assert value("[[1, 2], [3, 4]]", INT, 1, 0) == 3
    assert value('["2024-01-01"]', DATE, 0) == date(2024, 1, 1).toordinal() - 719163
    assert value("[[1]]", INT, 0) is BAD


def test_where_the_values_come_from() -> None:
    batch = wire(
        [
            Change({"id": 1, "a": 5}),
            Change({"id": 1, "a": 6}, UPDATE, {"a": 5}),
            Change({"id": 1}, DELETE),
            Change({}, TRUNCATE),
        ]
    )
    fields = [
        at("a", INT), at("a", INT, root="changes"), at("", TEXT, root="action"),
        at("table_name", TEXT, root="metadata"), at("commit_lsn", INT, root="metadata"),
        at("commit_idx", INT, root="metadata"), at("transaction_id", INT, root="metadata"),
        at("commit_timestamp", TIMESTAMPTZ, root="metadata"),
        at("database", TEXT, root="metadata"), at("idempotency_key", TEXT, root="metadata"),
    ]  # fmt: skip
    assert taken(batch, *fields) == [
        [5, 6, BAD, None],
        [None, 5, None, None],
        ["insert", "update", "delete", "truncate"],
        ["items"] * 4,
        [101] * 4,
        [0, 1, 2, 3],
        [7] * 4,
        [micros(2026, 1, 1)] * 4,
        ["shop"] * 4,
        [f"tag-101-{n}" for n in range(4)],
    ]


def unavailable(batch: pa.RecordBatch, row: int, *columns: str) -> pa.RecordBatch:
    """Return a batch in which the metadata of a row names columns that the WAL lacks."""
    texts = batch.column("metadata").to_pylist()
    texts[row] = orjson.dumps(orjson.loads(texts[row]) | {"unavailable": list(columns)}).decode()
    number = batch.schema.get_field_index("metadata")
    return batch.set_column(number, batch.schema.field(number), pa.array(texts, pa.string()))


def test_what_the_wal_lacks_is_bad_and_what_is_not_there_is_null() -> None:
    batch = wire(
        [
            Change({"id": 1, "note": None, "data": None}), Change({"id": 2}),
            Change({"id": 3, "note": "x", "data": {}}),
        ]
    )  # fmt: skip
    found = taken(
        unavailable(batch, 1, "note", "data"),
        at("note", TEXT), at("data", JSON, "a"), at("id", INT), at("note", TEXT, root="changes"),
    )  # fmt: skip
    assert found == [[None, BAD, "x"], [None, BAD, None], [1, 2, 3], [None, None, None]]


@pytest.mark.parametrize("odd", [False, True])
def test_a_column_that_is_not_there_is_null_only_where_its_table_lacks_it(odd: bool) -> None:
    changes = [
        Change({"id": 1}), Change({"id": 2, "n": None}), Change({"id": 3, "n": 3}), Change({}, TRUNCATE),
        Change({"id": 5}, DELETE), Change({"id": 6}, UPDATE, {"id": 5}),
    ]  # fmt: skip
    batch = wire([*changes, Change({"id": [], "n": 7})] if odd else changes)
    lacking = Field(Reference("record", "n"), INT, (("public", "items"),))
    other = Field(Reference("record", "n"), INT, (("public", "orders"),))
    found = taken(batch, at("n", INT), lacking, other, at("n", INT, root="changes"), at("id", INT))
    assert found[0][:6] == [BAD, None, 3, None, BAD, BAD]
    assert found[1][:6] == [None, None, 3, None, None, None]
    assert found[2] == found[0]
    assert found[3][:6] == [None] * 6
    assert Field.from_json(lacking.to_json()) == lacking


def test_one_column_in_several_kinds() -> None:
    batch = wire([Change({"id": 7, "c": "1.50", "d": {"a": 1}})])
    fields = (at("id", INT), at("id", TEXT), at("c", PRICE), at("c", TEXT), at("d", JSON),
              at("d", JSON, "a"), at("d", TEXT))  # fmt: skip
    found = [column[0] for column in taken(batch, *fields)]
    assert found == [7, "7", Decimal("1.50"), "1.50", '{"a":1}', "1", '{"a":1}']


def test_a_row_of_another_shape_spoils_no_other() -> None:
    """A column's type has changed; then a value is bad, or text, and the next batch is read too."""
    extract = Extractor((at("c", INT), at("t", TEXT), at("n", PRICE)))
    first = wire([Change({"c": i, "t": "x", "n": "1.00"}) for i in range(3)])
    odd = wire([Change({"c": 1, "t": "x", "n": "1.00"}), Change({"c": [1], "t": 1.5, "n": {}}),
                Change({"c": 3, "t": {"a": 1}, "n": "3.00"})])  # fmt: skip
    assert extract(first).field("bad").to_pylist() == [0, 0, 0]
    for _ in range(2):
        found = extract(odd)
        assert found.field("f0").to_pylist() == [1, None, 3]
        assert found.field("f1").to_pylist() == ["x", "1.5", '{"a":1}']
        assert found.field("f2").to_pylist() == [Decimal("1.00"), None, Decimal("3.00")]
        assert found.field("bad").to_pylist() == [0, 0b101, 0]
    assert extract(first).field("f0").to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("text", ["[" * 5_000 + "]" * 5_000, r'"\ud800"'])
def test_json_that_cannot_be_read_makes_its_row_bad_and_raises_nothing(text: str) -> None:
    batch = wire([Change({"id": 1}), Change({"id": 2})])
    records = pa.array([f'{{"id":1,"c":{text}}}', '{"id":2,"c":"x"}'], pa.string())
    batch = batch.set_column(0, batch.schema.field(0), records)
    ((first, second), (_, text_)) = taken(batch, at("id", INT), at("c", JSON))
    assert first in (1, BAD)
    assert (second, text_) == (2, "x")


def test_many_fields_have_many_words() -> None:
    fields = [at(f"c{i}", INT) for i in range(130)]
    record: dict[str, Any] = {f"c{i}": "bad" if i in (0, 62, 63, 129) else i for i in range(130)}
    found = taken(wire([Change(record)]), *fields)
    assert [i for i, (v,) in enumerate(found) if v is BAD] == [0, 62, 63, 129]
    assert names(fields)[-3:] == ["bad", "bad1", "bad2"]
    assert ddl(fields[:2]) == "struct<f0:bigint,f1:bigint,bad:bigint>"
    assert ddl([at("a", PRICE), at("b", TIMESTAMP)]).startswith(
        "struct<f0:decimal(5,2),f1:timestamp"
    )
    assert names([]) == ["bad"]


def test_a_sliced_and_an_empty_batch() -> None:
    batch = wire([Change({"id": i}) for i in range(5)])
    assert taken(batch.slice(2, 2), at("id", INT)) == [[2, 3]]
    assert taken(batch.slice(0, 0), at("id", INT), at("x", NUMERIC)) == [[], []]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.lists(JSON_VALUES, min_size=1, max_size=6))
def test_whatever_json_there_is_nothing_raises_and_text_is_what_json_says(
    values: list[Any],
) -> None:
    types = (BOOL, INT, FLOAT, REAL, PRICE, NUMERIC, TEXT, DATE, TIMESTAMP, TIMESTAMPTZ, INTERVAL)
    batch = wire([Change({"id": 1}) for _ in values])
    texts = [json.dumps({"c": v}, ensure_ascii=False, separators=(",", ":")) for v in values]
    batch = batch.set_column(0, batch.schema.field(0), pa.array(texts, pa.string()))
    fields = [at("c", type_) for type_ in types]
    for kind, column in zip(types, taken(batch, *fields), strict=True):
        assert len(column) == len(values), kind
    (jsons,), (ints,) = taken(batch, at("c", JSON)), taken(batch, at("c", INT))
    for given_, text, number in zip(values, jsons, ints, strict=True):
        if isinstance(given_, str):
            assert text == (BAD if "\0" in given_ else given_)
        else:
            expected = json.dumps(given_, ensure_ascii=False, separators=(",", ":"))
            assert text == (None if given_ is None else expected)
        if isinstance(given_, int) and not isinstance(given_, bool):
            assert number == (given_ if -(2**63) <= given_ < 2**63 else BAD)
        elif given_ is not None:
            assert number is BAD


@given(
    st.lists(st.decimals(allow_nan=False, allow_infinity=False, places=3) | st.none(), min_size=1),
    st.integers(0, 6),
)
def test_numerics_are_exact_or_bad(values: list[Decimal | None], scale: int) -> None:
    type_ = Type(Kind.NUMERIC, 9, scale)
    records: list[Change] = [Change({"c": None if v is None else format(v, "f")}) for v in values]
    (found,) = taken(wire(records), at("c", type_))
    for given_, got in zip(values, found, strict=True):
        if given_ is None:
            assert got is None
        elif got is BAD:
            fits = abs(given_) * 10**scale < 10**9 and given_ * 10**scale % 1 == 0
            assert not fits
        else:
            assert got == given_
