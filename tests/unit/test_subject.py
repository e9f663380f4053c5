"""Subject templates: reading, escaping, rendering."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.message import WIRE_SCHEMA
from penstock.core.subject import DEFAULT_SUBJECT, SubjectTemplate, covers, is_subject, overlaps
from penstock.core.subject_token import EMPTY, NULL, escape, escape_parts


def rows(*values: dict[str, Any]) -> pa.RecordBatch:
    usual = {"table_schema": "public", "table_name": "orders", "action": "insert", "record": "{}"}
    return pa.RecordBatch.from_pylist([usual | v for v in values], schema=WIRE_SCHEMA)


def render(template: str, *values: dict[str, Any], **known: Any) -> list[str]:
    known = {"source": "shop", "database": "db"} | known
    subjects = SubjectTemplate.parse(template).render(rows(*values), **known)
    return [s.decode() for s in subjects.to_pylist()]


def test_default() -> None:
    assert render(DEFAULT_SUBJECT, {}, {"table_name": "items"}, {"action": "delete"}, {}) == [
        "shop.public.orders.insert",
        "shop.public.items.insert",
        "shop.public.orders.delete",
        "shop.public.orders.insert",
    ]


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)

KEY = st.integers() | st.uuids().map(str) | NAMES | st.none() | st.floats(allow_nan=False)
KEYS = st.lists(KEY, max_size=3)


def metadata(pks: list[Any], unavailable: Sequence[str] = (), **more: Any) -> str:
    """Return metadata as the capture writes it."""
    values = {"idempotency_key": "t-1-2", "record_pks": pks, "unavailable": unavailable, **more}
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


METADATA = (
    st.none()
    | st.sampled_from(["{}", '{"record_pks": [1], "unavailable": []}'])
    | st.builds(metadata, KEYS, st.lists(NAMES, max_size=2))
)


@pytest.mark.parametrize(
    "template",
    [
        "all",
        DEFAULT_SUBJECT,
        "{database}.{action}",
        "{table}.{record.a}",
        "x.{record.a|dots}.{schema}",
        "{key}",
        "x.{key}.{table}.{key}{record.a}",
        "{schema}.{table}.{key}",
    ],
)
@given(
    values=st.lists(
        st.fixed_dictionaries(
            {
                "table_schema": NAMES,
                "table_name": st.none() | NAMES,
                "action": st.sampled_from(["insert", "update", "delete", "truncate"]),
                "idempotency_key": NAMES,
                "metadata": METADATA,
                "record": st.dictionaries(st.sampled_from("abc"), st.none() | NAMES).map(
                    json.dumps
                ),
            }
        ),
        min_size=1,
    ),
    database=st.none() | NAMES,
)
def test_subjects_of_a_few_rows_are_the_same(
    template: str, values: list[dict[str, Any]], database: str | None
) -> None:
    few = SubjectTemplate.parse(template).render_few(
        rows(*values), source="shop", database=database
    )
    assert [s.decode() for s in few] == render(template, *values, database=database)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain_ä-1", "plain_ä-1"),
        ("_", "_"),
        ("", EMPTY),
        (None, NULL),
        ("a b.c*d>e%f\tg\r\nh\0", "a%20b%2Ec%2Ad%3Ee%25f%09g%0D%0Ah%00"),
        ("%null", "%25null"),
        ("$JS", "%24JS"),
        ("a$b", "a$b"),
        (True, "true"),
        (42, "42"),
        (1.5, "1%2E5"),
        ([1, 2], "[1,2]"),
        ("null", "null"),
    ],
)
def test_escape(value: Any, expected: str) -> None:
    assert escape(value) == expected


@given(st.one_of(st.none(), st.text()), st.one_of(st.none(), st.text()))
def test_a_value_is_one_token_and_no_two_collide(one: str | None, two: str | None) -> None:
    assert re.fullmatch(r"[^\x00-\x20\x7f.*>]+", escape(one))
    assert (escape(one) == escape(two)) == (one == two)


def test_record_columns() -> None:
    found = render(
        "{table}.{record.region}.{record.a.b}",
        {"record": '{"region":"eu west","a.b":1}'},
        {"record": '{"region":null,"a.b":true}'},
        {"record": None},
        {"table_name": "x", "record": '{"region":"","a.b":"*"}'},
    )
    assert found == [
        "orders.eu%20west.1",
        f"orders.{NULL}.true",
        f"orders.{NULL}.{NULL}",
        f"x.{EMPTY}.%2A",
    ]
    assert SubjectTemplate.parse("{record.a}.{record.b}.{record.a}").record_columns == ("a", "b")


@pytest.mark.parametrize(
    ("pks", "expected"),
    [
        ([42], "42"),
        ([-7], "-7"),
        (["plain_ä-1"], "plain_ä-1"),
        (["6f1c-4b"], "6f1c-4b"),
        ([7, "eu"], "7,eu"),
        (["a.b", 1.5], "a%2Eb,1%2E5"),
        (["a,b"], "a%2Cb"),
        (["a", "b"], "a,b"),
        (["x y*>", ""], f"x%20y%2A%3E,{EMPTY}"),
        (["$JS"], "%24JS"),
        (['quo"te\\n\n'], 'quo"te\\n%0A'),
        ([None, 2], f"{NULL},2"),
        ([{"record_pks": [1], "unavailable": []}], '{"record_pks":[1]%2C"unavailable":[]}'),
        ([], "%id-t-5-0"),
    ],
)
def test_key(pks: list[Any], expected: str) -> None:
    row = {"idempotency_key": "t-5-0"}
    plain = row | {"metadata": metadata([1])}
    alone = row | {"metadata": metadata(pks)}
    assert render("rows.{table}.{key}", alone) == [f"rows.orders.{expected}"]
    # Beside others, with columns that the WAL lacks, with a route behind them, and written otherwise.
    more = row | {"metadata": metadata(pks, ['odd"],"unavailable":[', "x"], route="a")}
    other = row | {"metadata": json.dumps({"record_pks": pks}, separators=(",", ":"))}
    for several in ([plain, alone, plain], [plain, more, plain], [plain, other, plain]):
        assert render("{key}", *several) == ["1", expected, "1"]


def test_key_of_a_truncate() -> None:
    truncated = {"action": "truncate", "metadata": metadata([]), "idempotency_key": "t-5-0"}
    assert render("{table}.{key}", truncated) == [f"orders.{NULL}"]


def test_key_is_the_rows_own_whatever_the_group_is() -> None:
    """The group hashes are no part of it: rows of one group keep their subjects apart."""
    one, other = ({"metadata": metadata([n]), "group_hash": 5} for n in (1, 2))
    assert render("{key}", one, other) == ["1", "2"]


@given(st.lists(NAMES, min_size=1, max_size=3), st.lists(NAMES, min_size=1, max_size=3))
def test_a_key_is_one_token_and_no_two_collide(one: list[str], other: list[str]) -> None:
    (a,), (b,) = (render("{key}", {"metadata": metadata(pks)}) for pks in (one, other))
    assert re.fullmatch(r"[^\x00-\x20\x7f.*>]+", a)
    assert (a == b) == (one == other)


def test_constant_parts() -> None:
    assert render("all", {}, {}) == ["all", "all"]
    assert render("{source}.{database}", {}, source="s p", database=None) == [f"s%20p.{NULL}"]
    assert render("x-{schema}{table}", {"table_schema": ""}) == [f"x-{EMPTY}orders"]
    assert render("{schema}") == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("order.shipped", "order.shipped"),
        ("a", "a"),
        ("", EMPTY),
        (None, NULL),
        (".", f"{EMPTY}.{EMPTY}"),
        ("a..b.", f"a.{EMPTY}.b.{EMPTY}"),
        ("a b.*.>", "a%20b.%2A.%3E"),
        ("$JS.API.$x", "%24JS.API.%24x"),
        ("%null.%", "%25null.%25"),
        (1.5, "1.5"),
    ],
)
def test_a_value_may_keep_its_dots(value: Any, expected: str) -> None:
    record = {"record": json.dumps({"type": value})}
    assert render("events.{record.type|dots}.{table}", record) == [f"events.{expected}.orders"]
    assert SubjectTemplate.parse("{record.type|dots}").record_columns == ("type",)


@given(st.one_of(st.none(), st.text()), st.one_of(st.none(), st.text()))
def test_values_with_dots_are_whole_tokens_and_no_two_collide(
    one: str | None, two: str | None
) -> None:
    assert is_subject(pa.array([escape_parts(one)])).to_pylist() == [True]
    assert (escape_parts(one) == escape_parts(two)) == (one == two)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("events.{record.type|dots}", "events.>"),
        ("events.{table}.v-{record.type|dots}.x", "events.*.>"),
        ("{record.type|dots}", ">"),
    ],
)
def test_what_covers_a_value_with_dots(template: str, expected: str) -> None:
    assert SubjectTemplate.parse(template).wildcard() == expected
    assert covers(expected, expected)


@pytest.mark.parametrize(
    ("template", "position", "what"),
    [
        ("", 0, "empty"),
        ("a.{table", 2, "without its '}'"),
        ("a.table}", 7, "without its '{'"),
        ("a.{nope}", 2, "unknown variable {nope}"),
        ("a.{record.}", 2, "unknown variable"),
        ("a b", 1, "a blank is not allowed"),
        ("a\tb", 1, "a tab is not allowed"),
        ("a\nb", 1, "a line end is not allowed"),
        ("a.\x01", 2, "the control character U+0001 is not allowed"),
        ("a.{schema|dots}", 2, "{schema} is one token"),
        ("a.{record.|dots}", 2, "unknown variable"),
        ("a.{key|dots}", 2, "{key} is one token"),
        ("a.*", 2, "not allowed"),
        ("a.>", 2, "not allowed"),
        (".a", 0, "empty"),
        ("a.", 1, "empty"),
        ("a..b", 2, "empty"),
        ("$JS.API.{table}", 0, "belong to the server"),
    ],
)
def test_errors_name_the_position(template: str, position: int, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)) as caught:
        SubjectTemplate.parse(template)
    assert f"position {position}:" in str(caught.value)
    assert repr(template) in str(caught.value)


def test_wildcard() -> None:
    template = SubjectTemplate.parse("x.{source}.pre-{table}.{record.a.b}")
    assert template.wildcard() == "x.*.*.*"
    assert template.wildcard("shop") == "x.shop.*.*"
    assert SubjectTemplate.parse("plain").wildcard() == "plain"


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.>", "a.*.*", True),
        ("a.>", "a", False),
        (">", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.*", True),
        ("a.b", "a.*", False),
        ("a.*", "a.b.c", False),
        ("a.*.c", "a.b", False),
        ("a.*", "a.>", False),
    ],
)
def test_covers(pattern: str, subject: str, expected: bool) -> None:
    assert covers(pattern, subject) is expected


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ("a.*", "a.b", True), ("a.>", "*.b.c", True), ("a", "a.>", False), ("a.b", "a.*.c", False),
        ("*", ">", True), ("a.b", "a.c", False),
    ],
)  # fmt: skip
def test_overlaps(one: str, other: str, overlap: bool) -> None:
    assert overlaps(one, other) is overlap
    assert overlaps(other, one) is overlap
