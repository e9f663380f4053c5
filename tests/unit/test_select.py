"""Transforms in SQL: records put together of what passes through and of what Spark computed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.streams_help import Change, wire

from penstock.core.message import DELETE, TRUNCATE, UPDATE
from penstock.expressions.spark.json_texts import json_texts
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
    NUMERIC,
    TEXT,
    TIMESTAMP,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
    TIMESTAMPTZ,
    Kind,
    Reference,
    Type,
)
from penstock.expressions.values import arrow
from penstock.postgres import values
from penstock.spark.select import Item, Select

REAL = Type(Kind.FLOAT, single=True)
PRICE = Type(Kind.NUMERIC, 10, 2, fixed=True)


def record(column: str, *path: str | int, root: str = "record", name: str = "") -> Item:
    return Item(name or column, Reference(root, column, path))


def selected(
    batch: pa.RecordBatch, *items: Item, computed: Sequence[pa.Array] = ()
) -> pa.RecordBatch:
    names = [item.column for item in items if item.type is not None]
    results = pa.StructArray.from_arrays([*computed, pa.nulls(batch.num_rows)], [*names, "other"])
    found, unread = Select(items)(batch, results)
    assert not unread
    assert found.schema.equals(batch.schema)
    return found


def with_text(batch: pa.RecordBatch, row: int, column: str, text: str) -> pa.RecordBatch:
    texts = batch.column(column).to_pylist()
    texts[row] = text
    number = batch.schema.get_field_index(column)
    return batch.set_column(number, batch.schema.field(number), pa.array(texts, pa.string()))


def test_what_stands_alone_keeps_its_json() -> None:
    text = '{"id":1,"n":12345678901234567890.10,"d":{"a": [1.10, {"b": "\\u00e9"}]},"s":"x"}'
    batch = with_text(wire([Change({"id": 1})]), 0, "record", text)
    found = selected(
        batch, record("n"), record("d"), record("d", "a", 0, name="first"),
        record("d", "a", 1, "b", name="deep"), record("d", "none", name="none"), record("nope"),
        record("s", name='odd "name"'), Item("what", Reference("action", "")),
        record("commit_lsn", root="metadata"), record("table_name", root="metadata"),
        record("n", root="changes", name="old"),
    )  # fmt: skip
    assert found.column("record").to_pylist() == [
        '{"n":12345678901234567890.10,"d":{"a": [1.10, {"b": "\\u00e9"}]},"first":1.10,'
        '"deep":"\\u00e9","none":null,"nope":null,"odd \\"name\\"":"x","what":"insert",'
        '"commit_lsn":101,"table_name":"items","old":null}'
    ]
    assert found.column("changes").to_pylist() == [None]
    assert found.column("metadata").equals(batch.column("metadata"))


def test_a_column_whose_name_has_a_quote() -> None:
    found = selected(wire([Change({'a"b': 1, "c\\d": 2})]), record('a"b'), record("c\\d", name="e"))
    assert found.column("record").to_pylist() == ['{"a\\"b":1,"e":2}']


def test_columns_side_by_side() -> None:
    batch = wire([Change({"id": 1, "100%": 2, "%b": None}), Change({"%b": "%s"})])
    items = (record("100%"), record("%b"), record("id"), record("id", name="again"))
    assert selected(batch, *items).column("record").to_pylist() == [
        '{"100%":2,"%b":null,"id":1,"again":1}', '{"100%":null,"%b":"%s","id":null,"again":null}',
    ]  # fmt: skip


def test_old_values_of_what_passes_through() -> None:
    batch = wire(
        [
            Change(
                {"id": 1, "a": 2, "b": 3, "c": {"d": 4}}, UPDATE, {"a": 1, "b": 2, "c": {"d": 3}}
            ),
            Change({"id": 1, "a": 2}, UPDATE, {}),
            Change({"id": 1}, DELETE),
        ]
    )
    items = (record("a", name="x"), record("a", name="y"), record("c", "d", name="d"))
    found = selected(batch, *items)
    assert found.column("changes").to_pylist() == ['{"x":1,"y":1}', "{}", None]


def test_what_the_wal_lacks_is_left_out_and_named() -> None:
    batch = wire([Change({"id": 1, "a": 1}), Change({"id": 2}), Change({"id": 3})])
    for row, names in ((1, ["big", "data", "other"]), (2, ["other"])):
        metadata = orjson.loads(batch.column("metadata")[row].as_py()) | {"unavailable": names}
        batch = with_text(batch, row, "metadata", orjson.dumps(metadata).decode())
    found = selected(
        batch, record("id"), record("big", name="b"), record("data", "k", name="k"), record("big"),
        Item("n", type=INT, column="v"), computed=[pa.array([7, 8, 9], pa.int64())],
    )  # fmt: skip
    assert found.column("record").to_pylist() == [
        '{"id":1,"b":null,"k":null,"big":null,"n":7}', '{"id":2,"n":8}',
        '{"id":3,"b":null,"k":null,"big":null,"n":9}',
    ]  # fmt: skip
    metadata = [orjson.loads(text) for text in found.column("metadata").to_pylist()]
    assert [m["unavailable"] for m in metadata] == [[], ["b", "k", "big"], []]
    for text, was in zip(metadata, batch.column("metadata").to_pylist(), strict=True):
        assert text | {"unavailable": None} == orjson.loads(was) | {"unavailable": None}


def test_a_truncate_stays_as_it_is() -> None:
    found = selected(wire([Change({}, TRUNCATE), Change({"id": 1})]), record("id"))
    assert found.column("record").to_pylist() == ["{}", '{"id":1}']


def test_what_cannot_be_read_fails_alone() -> None:
    # Later versions of Python read 10,000 levels.
    deep = '{"id":1,"d":' + "[" * 100_000 + "]" * 100_000 + "}"
    batch = with_text(wire([Change({"id": 1}), Change({"id": 2})]), 0, "record", deep)
    results = pa.StructArray.from_arrays([pa.nulls(2)], ["other"])
    found, unread = Select([record("id"), record("d", 0, 0, name="x")])(batch, results)
    assert set(unread) == {0}
    assert "d can't be read" in unread[0]
    assert found.column("record")[1].as_py() == '{"id":2,"x":null}'
    whole, unread = Select([record("id"), record("d")])(batch, results)
    assert not unread
    assert whole.column("record")[0].as_py() == deep


FORMS: list[tuple[Type, Any, str]] = [
    (BOOL, True, "true"), (BOOL, False, "false"), (BOOL, None, "null"),
    (INT, 2**63 - 1, "9223372036854775807"), (INT, -1, "-1"),
    (FLOAT, 0.1, "0.1"), (FLOAT, -0.0, "-0"), (FLOAT, 1e300, "1e+300"), (FLOAT, 7.0, "7"),
    (FLOAT, float("nan"), '"NaN"'), (FLOAT, float("inf"), '"Infinity"'),
    (FLOAT, float("-inf"), '"-Infinity"'), (REAL, 0.10000000149011612, "0.1"),
    (PRICE, Decimal("199.90"), '"199.90"'), (PRICE, Decimal("-0.01"), '"-0.01"'),
    (PRICE, Decimal("0.00"), '"0.00"'), (NUMERIC, Decimal("1.5"), '"1.5"'),
    (NUMERIC, Decimal("100"), '"100"'), (NUMERIC, Decimal("0.000000000000000001"),
                                         '"0.000000000000000001"'),
    (NUMERIC, Decimal("0"), '"0"'), (Type(Kind.NUMERIC, 5, 0), Decimal("100"), '"100"'),
    (TEXT, "Grüße", '"Grüße"'), (TEXT, 'a"b\\\n\x01', r'"a\"b\\\n\u0001"'), (TEXT, "", '""'),
    (TEXT, None, "null"), (JSON, '{"a":1}', r'"{\"a\":1}"'),
    (DATE, date(2024, 10, 28), '"2024-10-28"'), (DATE, date(1, 1, 1), '"0001-01-01"'),
    (TIMESTAMP, datetime(2024, 10, 28, 21, 37, 1, 127470), '"2024-10-28T21:37:01.127470"'),
    (TIMESTAMP, datetime(2024, 10, 28, 21, 37, 1), '"2024-10-28T21:37:01"'),
    (TIMESTAMP, datetime(2024, 10, 28, 21, 37, 1, 500000), '"2024-10-28T21:37:01.500000"'),
    (TIMESTAMPTZ, datetime(2024, 10, 28, 21, 37, 1, 127470, UTC), '"2024-10-28T21:37:01.127470Z"'),
    (TIMESTAMPTZ, datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), '"1969-12-31T23:59:59Z"'),
    (INTERVAL, 0, '"PT0S"'), (INTERVAL, DAY, '"P1D"'), (INTERVAL, -DAY - 1, '"P-1DT-0.000001S"'),
    (INTERVAL, 2 * DAY + 3_723_500_000, '"P2DT1H2M3.5S"'), (INTERVAL, 2**63 - 1, '"infinity"'),
]  # fmt: skip
ARROW = {
    Kind.BOOL: pa.bool_(), Kind.INT: pa.int64(), Kind.FLOAT: pa.float64(), Kind.DATE: pa.date32(),
    Kind.TIMESTAMP: pa.timestamp("us"), Kind.TIMESTAMPTZ: pa.timestamp("us", "UTC"),
    Kind.INTERVAL: pa.int64(), Kind.TEXT: pa.string(), Kind.JSON: pa.string(),
}  # fmt: skip


def column(type_: Type, found: list[Any]) -> pa.Array:
    if type_.kind is Kind.NUMERIC:
        return pa.array(found, pa.decimal128(type_.precision, type_.scale))
    return pa.array(found, ARROW[type_.kind])


@pytest.mark.parametrize(("type_", "value", "expected"), FORMS)
def test_computed_values_have_the_messages_forms(type_: Type, value: Any, expected: str) -> None:
    assert json_texts(type_, column(type_, [value])).to_pylist() == [expected]
    assert json_texts(type_, column(type_, [None, value])).to_pylist() == ["null", expected]


def test_infinite_times() -> None:
    dates = pa.array([DATE_INFINITY, 0], pa.int32()).cast(pa.date32())
    assert json_texts(DATE, dates).to_pylist() == ['"infinity"', '"1970-01-01"']
    moments = pa.array([TIMESTAMP_MINUS_INFINITY, None, TIMESTAMP_INFINITY], pa.int64())
    for type_ in (TIMESTAMP, TIMESTAMPTZ):
        found = json_texts(type_, moments.cast(ARROW[type_.kind])).to_pylist()
        assert found == ['"-infinity"', "null", '"infinity"']


def test_days_and_moments_that_iso_8601_has_no_plain_form_for() -> None:
    """They are as Postgres prints them, and as messages have them."""
    days = [-735_160, -719_163, -719_162, 2_932_897, 2_145_042_905, None, DATE_MINUS_INFINITY]
    assert json_texts(DATE, pa.array(days, pa.int32()).cast(pa.date32())).to_pylist() == [
        '"0044-03-15 BC"', '"0001-12-31 BC"', '"0001-01-01"', '"10000-01-01"', '"5874897-12-31"', "null",
        '"-infinity"',
    ]  # fmt: skip
    moments = pa.array([-735_160 * DAY + 500_000, 0, 1, 2_932_897 * DAY], pa.int64())
    for type_, zone, plain in ((TIMESTAMP, "", ""), (TIMESTAMPTZ, "+00", "Z")):
        found = json_texts(type_, moments.cast(ARROW[type_.kind])).to_pylist()
        assert found == [
            f'"0044-03-15 00:00:00.5{zone} BC"', f'"1970-01-01T00:00:00{plain}"',
            f'"1970-01-01T00:00:00.000001{plain}"', f'"10000-01-01 00:00:00{zone}"',
        ]  # fmt: skip


@given(st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)), st.text(), st.floats())
def test_computed_values_look_like_captured_ones(at: datetime, text: str, number: float) -> None:
    """The capture's own converters show what a value looks like in a message."""
    text = text.encode(errors="ignore").decode().replace("\0", "")
    printed = at.isoformat(" ").encode()
    assert json_texts(TIMESTAMP, column(TIMESTAMP, [at]))[0].as_py().encode() == values.timestamp(
        printed
    )
    utc = at.replace(tzinfo=UTC)
    tail = printed.rstrip(b"0").rstrip(b".") if b"." in printed else printed
    assert json_texts(TIMESTAMPTZ, column(TIMESTAMPTZ, [utc]))[0].as_py().encode() == (
        values.timestamptz(tail + b"+00")
    )
    assert orjson.loads(json_texts(TEXT, column(TEXT, [text]))[0].as_py()) == text
    found = orjson.loads(json_texts(FLOAT, column(FLOAT, [number]))[0].as_py())
    assert found == number or isinstance(found, str)


@given(st.timedeltas(timedelta(days=-100_000), timedelta(days=100_000)))
def test_an_interval_is_read_as_it_was_written(span: timedelta) -> None:
    number = span // timedelta(microseconds=1)
    text = orjson.loads(json_texts(INTERVAL, column(INTERVAL, [number]))[0].as_py())
    assert arrow(INTERVAL, [text])[0].to_pylist() == [number]
