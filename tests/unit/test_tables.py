"""Table patterns: the spelling of names, and what a pattern matches and covers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.tables import TablePattern, matches_any, qualified_name

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@pytest.mark.parametrize(
    ("text", "schema", "table"),
    [
        ("public.orders", "public", "orders"),
        ("public.*", "public", None),
        ("Public.Orders", "public", "orders"),
        ('"Odd Name"."t.x"', "Odd Name", "t.x"),
        ('public."say ""hi"""', "public", 'say "hi"'),
        ('"a*".*', "a*", None),
        ('public."*"', "public", "*"),
        ("größe.ÉTÉ", "größe", "ÉtÉ"),
    ],
)
def test_parse(text: str, schema: str, table: str | None) -> None:
    assert TablePattern.parse(text) == TablePattern(schema, table)


@pytest.mark.parametrize(
    "text", ["", "orders", "*", "*.*", "*.orders", "a.b.c", "a.", ".b", '"a.b', "a b.c", 'a."" ']
)
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected schema\.table or schema\.\*"):
        TablePattern.parse(text)


@given(names, names)
def test_a_printed_name_parses_to_itself(schema: str, table: str) -> None:
    assert TablePattern.parse(qualified_name(schema, table)) == TablePattern(schema, table)


def test_matches_and_covers() -> None:
    every, one = TablePattern.parse("public.*"), TablePattern.parse("public.orders")
    assert every.covers(one)
    assert every.covers(every)
    assert one.covers(one)
    assert not one.covers(every)
    assert matches_any([one], "public", "orders")
    assert not matches_any([one], "public", "items")
    assert not matches_any([every], "other", "orders")
