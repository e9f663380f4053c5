"""Members of JSON objects: what a parser finds, also where a parser gives up."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import json_members
from penstock.core.json_members import Members, text_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(min_size=1), VALUES, max_size=6)


@given(OBJECTS, st.lists(st.text(min_size=1), max_size=3), st.booleans())
def test_each_member_is_found(of: dict[str, Any], others: list[str], spaced: bool) -> None:
    text = json.dumps(of, indent=1 if spaced else None, ensure_ascii=spaced)
    names = [*list(of)[::2], *others]
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(of)
    found = Members(names)(text)
    assert set(found) == set(names)
    for name, raw in found.items():
        assert (None if raw is None else json.loads(raw)) == of.get(name)
        assert (raw is None) == (name not in of)
    assert {k: json.loads(v) for k, v in json_members._scan(text).items()} == of


@pytest.mark.parametrize(
    "hard",
    [r'"\ud800"', r'"\"\\\ud800"', "1e999999", "9" * 500, "[" * 5000 + "]" * 5000,
     '{"a":' * 5000 + "[1,2]" + "}" * 5000],
)  # fmt: skip
def test_what_parsers_refuse_hides_nothing_else(hard: str) -> None:
    text = f'{{"id":7, "j" : {hard} ,"name":"a\\"b,:}}","none":null}}'
    found = Members(["id", "name", "none", "absent", "j"])(text)
    assert found == {
        "id": b"7", "name": rb'"a\"b,:}"', "none": b"null", "absent": None, "j": hard.encode(),
    }  # fmt: skip
    assert Members(["id"])(text.encode()) == {"id": b"7"}


@given(st.lists(OBJECTS | st.none(), max_size=4), st.sampled_from(["1", '"\\ud800"', "[" * 5000]))
def test_rows_have_what_each_object_has(of: list[dict[str, Any] | None], odd: str) -> None:
    names = dict.fromkeys([*(name for each in of if each for name in list(each)[::2]), "absent"])
    texts = [None if each is None else json.dumps(each) for each in of]
    texts.append(f'{{"odd":{odd}{"]" * odd.count("[")},"absent":2}}')
    read = Members(list(names))
    assert [
        tuple(None if raw is None else bytes(raw) for raw in row) for row in read.rows(texts)
    ] == [tuple(read(text).values()) for text in texts]


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "é", "a.b"])
def test_any_name_of_a_column(name: str) -> None:
    text = orjson.dumps({"x": name, name: 1})
    assert Members([name, "y"])(text) == {name: b"1", "y": None}


@pytest.mark.parametrize("text", [None, "", "null", "[1]", '[{"a":1}]', "7", '"a"'])
def test_what_is_no_object_has_no_members(text: str | None) -> None:
    assert Members(["a"])(text) == {"a": None}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        ("null", None),
        ('""', ""),
        ('"é\\n"', "é\n"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("true", "true"),
        ('{"a": 1.10}', '{"a": 1.10}'),
        (r'"a\ud800"', r"a\ud800"),
    ],
)
def test_text_of_a_value(value: str | None, text: str | None) -> None:
    assert text_of(None if value is None else value.encode()) == text


def test_any_text_is_its_own() -> None:
    for text in ("null", "7", '"', "\\", "\0"):
        assert text_of(orjson.dumps(text)) == text
