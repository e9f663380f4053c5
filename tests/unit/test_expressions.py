"""What the language takes, and with what error it refuses all else."""

# A case is a line, and letters that look like others are the point of some.
# ruff: noqa: E501, RUF001

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.expressions import (
    ColumnType,
    ExpressionError,
    Field,
    Kind,
    Reference,
    parse_condition,
    parse_select,
    parse_value,
    typed,
)
from penstock.expressions.syntax import Expr


def column(name: str, **more: Any) -> ColumnType:
    return ColumnType("pg_catalog", name, **more)


ORDERS = {
    "id": column("int8"), "amount": column("numeric", typmod=(10 << 16 | 2) + 4),
    "weight": column("numeric"), "name": column("text"), "code": column("bpchar", typmod=7),
    "paid": column("bool"), "created_at": column("timestamptz"), "day": column("date"),
    "ratio": column("float8"), "key": column("uuid"), "data": column("jsonb"),
    "tags": column("_text", element=column("text")), "Odd Name": column("int4"),
    "mood": ColumnType("public", "mood", kind="e", labels=("sad", "happy")),
    "order": column("int4"), "span": column("interval"), "at": column("time"),
    "address": column("inet"), "ids": column("_int4", element=column("int4")),
    "times": column("_timestamp", element=column("timestamp")),
    "moods": ColumnType("public", "_mood", element=ColumnType("public", "mood", kind="e", labels=("sad", "happy"))),
    "words": ColumnType("public", "_citext", element=ColumnType("public", "citext")),
    "docs": column("_jsonb", element=column("jsonb")), "ranges": column("_int4range", element=column("int4range")),
}  # fmt: skip
COLUMNS = {("public", "orders"): ORDERS}


def shape(expr: Expr) -> Any:
    """Return a tree as nested tuples; a leaf as its text."""
    if not expr.args:
        return str(expr.value) if expr.value is not None else expr.op
    return (expr.op, *[shape(a) for a in expr.args])


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("record.a and record.b or record.c", ("or", ("and", "record.a", "record.b"), "record.c")),
        ("not record.a = 1 and record.b", ("and", ("not", ("=", "record.a", "1")), "record.b")),
        ("record.a + 2 * 3 - 4", ("-", ("+", "record.a", ("*", "2", "3")), "4")),
        ("-record.a::int % 2", ("%", ("neg", ("cast", "record.a")), "2")),
        ("record.a || 'x' like 'y%'", ("like", ("||", "record.a", "x"), "y%")),
        ("record.a || 1 + 2 = 'x'", ("=", ("||", "record.a", ("+", "1", "2")), "x")),
        ("record.a not in (1, 2)", ("not", ("in", "record.a", "1", "2"))),
        (
            "record.a between 1 and 2 and record.b",
            ("and", ("between", "record.a", "1", "2"), "record.b"),
        ),
        ("record.a is not null", ("not", ("is null", "record.a"))),
        ("(record.a = 1) is not true", ("not", ("is true", ("=", "record.a", "1")))),
        ("record.a is not distinct from null", ("not", ("is distinct", "record.a", "null"))),
        (
            "case record.a when 1 then 'x' end",
            ("case", ("=", "record.a", "1"), "x", "null"),
        ),
        ("record.Data.City[0].zip", "record.data.\"City\"[0].zip"),
        ("record.\"Odd \"\"Name\" <> $$".replace("$$", "'a''b'"), ("<>", 'record."Odd ""Name"', "a'b")),
        ("record.select = record.order", ("=", "record.select", "record.order")),
        ("coalesce(lower(metadata.table_name), action)",
         ("coalesce", ("lower", "metadata.table_name"), "action")),
        ("((1))", "1"),
        ("record.größe = 1", ("=", 'record."größe"', "1")),
        ("record.a like '%'", ("like", "record.a", "%")),
        ("record.a = '-- no comment; select'", ("=", "record.a", "-- no comment; select")),
        ("record.a = 'x\\'", ("=", "record.a", "x\\")),
        ("trim(both 'x' from record.a)", ("btrim", "record.a", "x")),
        ("trim(leading from record.a)", ("ltrim", "record.a")),
        ("trim('x' from record.a)", ("btrim", "record.a", "x")),
        ("trim(trailing record.a)", ("rtrim", "record.a")),
        ("substring(record.a from 2 for -1)", ("substring", "record.a", "2", ("neg", "1"))),
        ("substring(record.a for 3)", ("substring", "record.a", "1", "3")),
        ("position('x' in record.a || 'y')", ("position", ("||", "record.a", "y"), "x")),
        ("extract(Year from record.a)", ("extract", "year", "record.a")),
        ("trim(case when record.a is distinct from 1 then 'x' end from record.b)",
         ("btrim", "record.b", ("case", ("is distinct", "record.a", "1"), "x", "null"))),
        ("record.a -> 'B' ->> 0 || 'x'", ("||", 'record.a."B"[0]', "x")),
        ("record.a #>> '{b,0,\"c d\"}'", 'record.a.b[0]."c d"'),
        ("record.a.b -> 'c' @> '{}'::jsonb", ("@>", "record.a.b.c", "{}")),
        ("'x' = any(record.a) and record.b", ("and", ("= any", "x", "record.a"), "record.b")),
        ("not 'x' <> Some (record.a)", ("not", ("<> any", "x", "record.a"))),
        ("1 <> all(record.a)", ("<> all", "1", "record.a")),
        ("record.a || 'y' = any(array['x', record.b])", ("in", ("||", "record.a", "y"), "x", "record.b")),
        ("record.a <> all('{x, NULL}')", ("not", ("in", "record.a", "x", "null"))),
        ("record.a <> any(array[1, 2])", ("or", ("<>", "record.a", "1"), ("<>", "record.a", "2"))),
        ("record.a = all(array[1])", ("=", "record.a", "1")),
        ("record.a && '{x}' = record.b @> array['y']",
         ("=", ("&&", "record.a", "{x}"), ("@>", "record.b", ("array", "y")))),
        ("array['x'] <@ record.a", ("@>", "record.a", ("array", "x"))),
        ("'{x}' && record.a", ("&&", "record.a", "{x}")),
        ("record.a ? 'x' and record.b", ("and", ("?", "record.a", "x"), "record.b")),
        ("record.a || 'y' ~ 'x'", ("~", ("||", "record.a", "y"), "x")),
        ("not record.a !~* 'x'", ("not", ("not", ("~*", "record.a", "x")))),
        ("record.a not similar to 'x' escape '!'", ("not", ("similar to", "record.a", "x"))),
        ("(record.a ->> 'x' in ('y')) is null", ("is null", ("in", "record.a.x", "y"))),
        ("record.a = record.b not in (1, 2)", ("=", "record.a", ("not", ("in", "record.b", "1", "2")))),
        ("+1 - - 2", ("-", "1", ("neg", "2"))),
    ],
)  # fmt: skip
def test_what_belongs_to_what(text: str, tree: Any) -> None:
    assert shape(parse_value(text).root) == tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "position 1: it is empty"),
        ("record.amount >", "position 16: it ends where a value is expected"),
        ("(record.a", "position 10: it ends where `)` is expected"),
        ("record.a)", "position 9: `)` without `(`"),
        ("case when true then 1", "position 22: it ends where `end` is expected"),
        ("record.a = 'x", "position 12: a quote that is opened here is not closed"),
        ("amount > 1", "position 1: unknown name amount; did you mean record.amount?"),
        ("recrod.amount > 1", "position 1: unknown name recrod.amount; did you mean record?"),
        ("metadata.tablename = 'x'", "position 1: unknown field metadata.tablename; did you mean table_name?"),
        ("action.x = 1", "position 1: unknown name action.x; the action is one word: action"),
        ("record.a = 1; drop table x", "position 13: ';' is not allowed: one expression alone"),
        ("record.a = (select 1)", "position 13: select is not allowed: no subqueries"),
        ("exists (select 1)", "position 1: exists is not allowed: no subqueries"),
        ("record.a = any(select 1)", "position 16: select is not allowed: no subqueries"),
        ("record.a = array(select 1)", "position 12: array is not allowed; write array['…', '…']"),
        ("record.a = any", "position 12: any is not allowed; write = any(record.…)"),
        ("record.a in (select 1)", "position 14: select is not allowed: no subqueries"),
        ("'a' > any(record.a)", "position 7: any(…) stands behind = and <> alone, not >"),
        ("'a' like any(record.a)", "position 10: any(…) stands behind = and <> alone"),
        ("some(record.a)", "position 1: any(…) stands behind = and <> alone"),
        ("all(record.a) = 'a'", "position 1: all(…) stands behind = and <> alone"),
        ("'a' = (any(record.a))", "position 8: any(…) stands behind = and <> alone"),
        ("'a' = any(record.a)::text", "position 20: no cast is taken behind any(…)"),
        ("'a' = any(record.a) || 'x'", "position 7: any(…) stands behind = and <> alone"),
        ("'a' = any(record.a) is null", "position 1: what belongs to what is not clear; put parentheses"),
        ("'a' = any(lower(record.a))", "position 11: any takes a column, array[…] or '{…}'"),
        ("record.a = any('{}')", "position 16: the array in any(…) is empty"),
        ("record.a = any('{a')", "position 16: '{a' is no array; one is written '{a,b}', or array['a', 'b']"),
        ("record.a = any('{{a},{b}}')", "position 16: '{{a},{b}}' has several dimensions"),
        ("record.a = array['a']", "position 12: array[…] stands beside @>, <@ and &&"),
        ("lower(array['a']) = 'a'", "position 7: array[…] stands beside @>, <@ and &&"),
        ("record.a in (array['a'])", "position 14: array[…] stands beside @>, <@ and &&"),
        ("record.a @> array[array['a']]", "position 19: array[…] stands beside @>, <@ and &&"),
        ("record.a @> array[]", "position 13: array[] is empty; an empty array is written '{}'"),
        ("record.a @> array['a'", "position 22: it ends where `]` is expected"),
        ("record.a @> array['a',]", "position 23: ']' is not expected here"),
        ("record.a @> array['a']::text", "position 25: an array is cast to text[], not to text"),
        ("record.a::text[] @> '{a}'", "position 11: arrays are not allowed as types but behind array[…] and '{…}'"),
        ("cast('{a}' as text[]) <@ record.a", "position 15: arrays are not allowed as types but behind"),
        ("'a'::text[] <@ record.a", "position 1: 'a' is no array; one is written '{a,b}', or array['a', 'b']"),
        ("record.a && record.b", "position 13: an array is '{…}' or array[…] here"),
        ("'{a}' && '{a}'", "position 1: && takes a column that is an array or JSON"),
        ("array['a'] <@ lower(record.a)", "position 15: @> takes a column that is an array or JSON"),
        ("pg_read_file('/etc/passwd') = 'x'", "position 1: unknown function pg_read_file; "
         "the reference lists the functions, under Expressions"),
        ("java_method('java.lang.Runtime', 'x') is null", "position 1: unknown function java_method;"),
        ("reflect('java.lang.System', 'exit', 1) is null", "position 1: unknown function reflect;"),
        ("lowr(record.a) = 'x'", "position 1: unknown function lowr; did you mean lower?"),
        ("pg_catalog.lower(record.a) = 'x'", "position 1: functions are called by their plain names alone"),
        ("record.lower(record.a) = 'x'", "position 1: functions are called by their plain names alone"),
        ("record.a -- = 1", "position 10: comments are not allowed"),
        ("record.a /* or true */ = 1", "position 10: comments are not allowed"),
        ("/* x */ record.a = 1", "position 1: comments are not allowed"),
        ("/* open", "position 1: "),
        ("record.a = $1", "position 12: '$' is not allowed"),
        ("record.a = $$x$$", "position 12: strings with a prefix or dollar signs are not allowed; write '…'"),
        ("record.a = E'\\x'", "position 12: strings with a prefix or dollar signs are not allowed"),
        ("record.a = U&'x'", "position 12: strings with a prefix or dollar signs are not allowed"),
        ("record.a = 'x' 'y'", "position 16: two strings side by side; join them by ||"),
        ("record.a == 1", "position 10: '==' is not allowed; write ="),
        ("record.a <=> 1", "position 10: '<=>' is not allowed; write is not distinct from"),
        ("record.a -> 'x' ->> record.b = 'y'", "position 21: after ->> a literal is expected: a key '…', or an index"),
        ("record.a -> -1 is null", "position 14: after -> a literal is expected: a key '…', or an index from 0"),
        ("record.a ->> 'x' ->> 'y' = 'z'", "position 1: ->> takes a column of JSON, or a part of one that -> gives"),
        ("lower(record.a) ->> 'x' = 'y'", "position 1: ->> takes a column of JSON"),
        ("1 + record.a ->> 'x' = 'y'", "position 1: ->> takes a column of JSON"),
        ("record.a ->> 'x'::text = 'y'", "position 14: after ->> a literal is expected"),
        ("record.a #>> 'x' = 'y'", "position 14: after #>> a path like '{key,0}' is expected"),
        ("record.a @> record.b", "position 13: the JSON after @> must be a '…' literal"),
        ("record.a ? 1", "position 12: the key after ? must be a '…' literal"),
        ("record.a ?| 'x'", "position 10: '?|' is not allowed; write two conditions"),
        ("record.a ->", "position 12: it ends where a value is expected"),
        ("-> 'a' = 'x'", "position 1: "),
        ("initcap(record.a) = 'A'", "position 1: there is no function initcap: what a word is depends on"),
        ("extract(year) = 1", "position 1: write extract(year from …), or date_part('year', …)"),
        ("position('a') = 1", "position 1: position takes 2 arguments, not 1"),
        ("nullif(record.a) = 1", "position 1: nullif takes 2 arguments, not 1"),
        ("record.a = 1_000", "position 12: this number can't be read"),
        ("record.a = 0x1F", "position 12: "),
        ("record.a = 1 = 2", "position 1: what belongs to what is not clear; put parentheses"),
        ("record.a = 1 is null", "position 1: what belongs to what is not clear; put parentheses"),
        ("record.a = not record.b", "position 16: what belongs to what is not clear; put parentheses"),
        ("record.a['x'] = 1", "position 9: an index is a number from 0 in brackets, and a key is written .key"),
        ("record.a[-1] = 1", "position 9: an index is a number from 0 in brackets"),
        ("record.a.0 = 1", "position "),
        ("record. = 1", "position 9: a name is expected here, not '='"),
        ("record.", "position 8: a column is expected after `record.`"),
        ("record.a::int[] is null", "position 11: arrays are not allowed as types"),
        ("record.a::regclass is null", "position 11: unknown type regclass; there are boolean, smallint,"),
        ("record.a::numerik = 1", "position 11: unknown type numerik; did you mean numeric?"),
        ("record.a::integer(3) = 1", "position 18: integer takes no such length or precision here"),
        ("cast(record.a as int format 'x') = 1", "position 18: `)` is expected after the type of a cast"),
        ("cast(record.a) = 1", "position 14: `as` and a type are expected here"),
        ("lower() = 'x'", "position 1: lower takes 1 arguments, not 0"),
        ("round(1, 2, 3) = 1", "position 1: round takes 1 to 2 arguments, not 3"),
        ("record.a in ()", "position 1: the list after `in` is empty"),
        ("record.a in (1,)", "position 16: a value is expected after the comma"),
        ("(1, 2) = (1, 2)", "position 2: this is not allowed here"),
        ("record.a between symmetric 2 and 1", "position 18: symmetric is not allowed"),
        ("current_timestamp > record.a", "position 1: current_timestamp is not allowed; write now()"),
        ("interval '1' day > record.a", "position 10: write the unit inside the quotes: interval '1 day'"),
        ("record.a is unknown", "position 13: unknown is not allowed; write is null"),
        ("record.a collate \"C\" = 'x'", "position 10: collate is not allowed"),
        ("record.* = 1", "position 8: a name is expected here, not '*'"),
        ("count(*) > 1", "position 1: unknown function count"),
        ("lower(distinct record.a) = 'x'", "position "),
        ("lower(record.a) over () = 'x'", "position 17: over is not allowed: no window functions"),
        ("{{ record.a }}", "position 1: '{' is not allowed"),
        ("@x = 1", "position 1: '@' is not allowed"),
        ("record.a = 1 as x", "position 14: as is not allowed here"),
        ("record.a record.b", "position 10: an operator is expected here"),
        ("record.a between 1 2", "position 20: an operator is expected here"),
        ("record.a not null", "position 1: this is not allowed here"),
        ("record.a at time zone 'UTC' = 1", "position 10: at is not allowed: times are UTC"),
        ("(case when record.a then 1)", "position 27: `end` is expected here"),
        ("record.a = 1\x00", "position 13: the character U+0000 is not allowed"),
        ("record.a = '\ud800'", "position 13: the character U+D800 is not allowed"),
        # Letters that become S and I in upper case.
        ("record.a ı\u017f null", "position 10: unknown name ıſ"),
        ("\u017felect = 1", "position 1: unknown name ſelect"),
        ("ab\u017f(record.a) = 1", "position 1: unknown function abſ"),
        ("record.a \uff1d 1", "position "),
        ("record.a = \u201cx\u201d", "position 12: "),
    ],
)  # fmt: skip
def test_what_is_refused_and_where(text: str, message: str) -> None:
    with pytest.raises(ExpressionError) as refused:
        parse_condition(text)
    assert str(refused.value).startswith(message), str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 1000 + "1" + ")" * 1000, "(" * 1000, "not " * 900 + "true", "- " * 1500 + "1",
        "case when " * 300 + "true", "lower(" * 600 + "record.a" + ")" * 600, "1" + "+1" * 1500,
        "record.a" + "::text" * 600, "record.a" + " is null" * 400, "record.a in (" * 300,
        "x" * 1_000_000, "'" * 1_000_000, "(" * 1_000_000, " " * 1_000_000, "record" + ".a" * 1900 + "(1)",
        "coalesce(" * 31 + "1" + ")" * 31, "-- " + "x" * 3000, "/*" * 1000, '"' * 3999, "1e" + "9" * 3000,
    ],
)  # fmt: skip
def test_what_is_deep_or_long_is_refused_at_once(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(ExpressionError) as refused:
        typed(parse_condition(text), COLUMNS)
    assert time.monotonic() - began < 2
    assert len(str(refused.value)) < 300


def test_a_text_is_parsed_once() -> None:
    assert parse_condition("record.id = 1") is parse_condition("record.id = 1")


def test_a_long_chain_is_not_deep() -> None:
    text = " and ".join(["record.paid"] * 240)
    assert len(typed(parse_condition(text), COLUMNS).root.args) == 240


@given(st.text(max_size=60))
def test_no_text_raises_anything_else(text: str) -> None:
    for parse in (parse_condition, parse_select):
        try:
            parse(text)
        except ExpressionError as error:
            assert str(error).startswith("position ")  # noqa: PT017 - most texts are refused


WORDS = st.sampled_from(
    [
        "record.id",
        "record.name",
        "record.data.x",
        "record.data[0]",
        "action",
        "1",
        "2.5",
        "'x'",
        "'1",
        "day'",
        "null",
        "true",
        "(",
        ")",
        ",",
        "+",
        "-",
        "*",
        "/",
        "%",
        "||",
        "=",
        "<>",
        "<",
        "and",
        "or",
        "not",
        "is",
        "null",
        "in",
        "between",
        "like",
        "case",
        "when",
        "then",
        "else",
        "end",
        "::",
        "int",
        "numeric(5,2)",
        "cast",
        "as",
        "coalesce(",
        "lower(",
        "round(",
        "date_trunc(",
        "'day'",
        "now()",
        "interval",
        "date",
        "distinct",
        "from",
        "escape",
        "->",
        "->>",
        "#>>",
        "@>",
        "?",
        "~",
        "!~*",
        "similar to",
        "'{a,0}'",
        "'[a-c]+$'",
        "trim(",
        "both",
        "substring(",
        "position(",
        "extract(",
        "year",
        "for",
        "concat_ws(",
        "greatest(",
        "nullif(",
        "left(",
        "jsonb_typeof(",
        "record.data",
        "record.tags",
        "any(",
        "<> all(",
        "array[",
        "]",
        "&&",
        "<@",
        "'{a}'",
        "cardinality(",
    ]
)


@given(st.lists(WORDS, max_size=14))
def test_no_words_raise_anything_else(words: list[str]) -> None:
    try:
        typed(parse_value(" ".join(words)), COLUMNS)
    except ExpressionError as error:
        assert 1 <= error.position <= len(" ".join(words)) + 2  # noqa: PT017 - most are refused


def test_a_select_list() -> None:
    items = parse_select(
        "record.id, record.name = any(array['a', 'b']) as \"Na me\", record.data.city, action, "
        "cast(record.amount as integer) as Whole, round(record.weight, 2) as select"
    )
    assert [name for name, _ in items] == ["id", "Na me", "city", "action", "whole", "select"]
    assert items[0][1].references == (Reference("record", "id"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("upper(record.a)", "position 1: a name is missing; write `… as name`"),
        ("record.a[0]", "position 1: a name is missing; write `… as name`"),
        ("record.a, record.a", "position 11: the name a is there twice"),
        ("record.a, ", "position 11: an expression is expected here"),
        (", record.a", "position 1: an expression is expected here"),
        ("*", "position 1: `*` is not allowed; name the columns"),
        ("record.a as x y", "position "),
        ("record.a as x; drop", "position "),
        ("record.a + as x", "position 11: it ends where a value is expected"),
        ("record.a as 'x'", "position 13: \"'x'\" is no name"),
    ],
)
def test_a_select_list_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ExpressionError) as refused:
        parse_select(text)
    assert str(refused.value).startswith(message), str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("record.id = 1 and record.amonut > 5",
         "position 19: unknown column record.amonut of public.orders; did you mean record.amount?"),
        ("record.\"odd name\" = 1", 'position 1: unknown column record."odd name" of public.orders; '
         'did you mean record."Odd Name"?'),
        ("record.amount.x = 1", "position 1: record.amount is a numeric, which has no parts"),
        ("record.tags.x = 1", "position 1: record.tags is an array; its first element is record.tags[0]"),
        ("record.data = 'x'", "position 1: record.data is JSON as a whole; compare a part of it"),
        ("record.id", "position 1: a condition is expected, but this is an integer"),
        ("record.paid and record.id", "position 17: a condition is expected here, not an integer"),
        ("record.id = 'x'", "position 13: 'x' is not an integer: a whole number is expected"),
        ("record.id = '1.5'", "position 13: '1.5' is not an integer: a whole number is expected"),
        ("record.id = 99999999999999999999", None),
        ("record.amount > 'many'", "position 17: 'many' is not a numeric: a number like 12.50 is expected"),
        ("record.amount = 'NaN'", None),
        ("record.amount > 1e100", None),
        ("record.amount + 1 > 1e100", None),
        ("record.amount + 1 > '1e100' and record.amount * 2 <> 'NaN'", None),
        ("record.id = '1e50'", "position 13: '1e50' is not an integer: a whole number is expected"),
        ("record.amount + 1e100 > 1", "position 17: numbers have at most 38 digits here"),
        ("record.amount = 'NaN'::numeric", "position 17: 'NaN' is not a numeric: NaN and infinity can only"),
        ("record.created_at > '0044-03-15 BC'", None),
        ("record.created_at > '4714-11-23 BC'", "position 21: '4714-11-23 BC' is not a timestamptz: there is"),
        ("record.created_at > '294276-01-01'", "position 21: '294276-01-01' is not a timestamptz: timestamps end"),
        ("record.ratio > 1e100", None),
        ("record.ratio = 'NaN'", None),
        ("record.ratio = '1e999'", "position 16: '1e999' is not a float: it is out of a double precision's range"),
        ("record.ratio = 1e390", "position 16: '1E+390' is not a float: it is out of a double precision's range"),
        ("record.ratio > -1e-390", "position 17: '-1E-390' is not a float: it is out of a double precision's range"),
        ("record.created_at > '2024-13-01'", "position 21: '2024-13-01' is not a timestamptz: there is no such day"),
        ("record.created_at > 'yesterday'", "position 21: 'yesterday' is not a timestamptz: write now()"),
        ("record.created_at > 'soon'", "position 21: 'soon' is not a timestamptz: a time like 2024-10-28 21:37:01"),
        ("record.day = '2024-02-30'", "position 14: '2024-02-30' is not a date: there is no such day"),
        ("record.key = 'x'", "position 14: 'x' is not a uuid: a uuid like"),
        ("record.mood = 'hapy'", "position 15: 'hapy' is not an enum: the enum has no such label; did you mean happy?"),
        ("record.mood > 'sad'", "position 1: this is an enum, of which = and <> alone are known, not >"),
        ("record.address = '10.0.0.300'", "position 18: '10.0.0.300' is not an inet: an address like"),
        ("record.paid = 'maybe'", "position 15: 'maybe' is not a boolean: true or false is expected"),
        ("record.id = record.name", "position 13: an integer and a text don't go together; cast one of them"),
        ("record.created_at = record.id", "position 21: a timestamptz and an integer don't go together"),
        ("coalesce(record.code, 'x') like 'x'", "position 1: like sees the blanks of a char(n)"),
        ("record.name like record.code", "position 18: the pattern of like must be a '…' literal"),
        ("record.name like 'x\\'", "position 18: the pattern ends with its escape character"),
        ("record.id like '1%'", "position 1: like takes a text, and this is an integer; cast it by ::text"),
        ("record.name + 1 = 2", "position 1: + takes numbers, and this is a text"),
        ("record.created_at + '1 day' > now()", "position 21: write what this is: interval '…'"),
        ("record.created_at + 1 > now()", "position 1: + does not go with a timestamptz and an integer"),
        ("now() - interval '1 dya' > record.created_at",
         "position 9: interval '1 dya': there is no unit dya; did you mean day?"),
        ("record.created_at + record.span > now()", "position 21: only interval '…' can be added to a time"),
        ("date_trunc('fortnight', record.day) = now()", "position 12: unknown unit 'fortnight'; there are"),
        ("date_trunc(record.name, record.day) = now()", "position 12: the unit must be a literal, like 'day'"),
        ("round(record.ratio, 2) = 1", "position 1: round takes no places for a float; cast it by ::numeric"),
        ("record.ratio % 2 = 1", "position 1: % takes no floats; cast both by ::numeric"),
        ("(record.ratio * 2)::text = 'x'", "position 2: this is a float that was computed"),
        ("(record.weight * 2)::text = 'x'", "position 2: how many digits this has after the point is not known"),
        ("(record.amount * 2)::text = 'x'", None),
        ("record.ratio::text = 'x' and record.weight || '' = 'y'", None),
        ("record.day::integer = 1", "position 1: this is a date, which can't be cast to integer"),
        ("70000::smallint = 1", "position 1: 70000 is out of smallint's range"),
        ("record.amount::numeric(50,2) = 1", "position 1: numeric(50,2): at most 38 digits"),
        ("record.data.x > 5 and record.data.ok and record.data.y[0].z = 'a'", None),
        ("record.data.at > now()", "position "),
        ("record.data.at::timestamptz > now()", None),
        ("record.tags[0] = 'x' and record.order = 1 and record.\"Odd Name\" = 2", None),
        ("record.data.a + record.data.b > 1", "position 1: what + is to work on is not known; cast it by ::numeric"),
        ("coalesce(record.id, 'x') = 1", "position 21: 'x' is not an integer"),
        ("case when record.paid then 1 else 'x' end = 1", "position 35: 'x' is not an integer"),
        ("record.span > '1 month' and record.at < '10:30'", None),
        ("metadata.commit_timestamp > now() - interval '1 hour' and metadata.commit_lsn > 5", None),
        ("changes.amount <> record.amount and action = 'update'", None),
        ("record.data -> 'a' = '1'", "position 1: -> gives JSON, which is not taken here; ->> gives its text"),
        ("record.data -> 'a'", "position 1: -> gives JSON, which is not taken here"),
        ("record.name ->> 'a' = 'x'", "position 1: this takes json or jsonb, and record.name is of type text"),
        ("record.tags ->> 0 = 'x'", "position 1: this takes json or jsonb, and record.tags is of type text[]; "
         "an element is record.tags[0]"),
        ("metadata.database ->> 'a' = 'x'", "position 1: metadata.database.a is no JSON"),
        ("'a' = any(record.tags) and record.tags @> array['b', null] and '{1,2}' && record.ids", None),
        ("record.tags @> array['a'::text, varchar 'b'] and record.ids && array['1'::int, -2]", None),
        ("record.tags @> array['a', null]::text[] and '{1,\"2\"}'::bigint[] && record.ids", None),
        ("record.ids <@ array[1, -2]::int[] and '{}'::int[] <@ record.ids and record.id = any('{1}'::int[])", None),
        ("record.ids && array[1]::numeric[]", "position 21: a literal is expected here that is an integer"),
        ("record.tags @> array['a'::varchar(1)]", "position 22: a literal is expected here that is a text"),
        ("record.tags @> array[record.name::text]", "position 22: a literal is expected here that is a text"),
        ("record.tags @> array['1'::int]", "position 22: a literal is expected here that is a text"),
        ("'{\"a\": 1}' <@ record.data", None),
        ("-1.5 = any(record.ids) and null <> all(record.ids) and record.ids <@ array[-1, '2']", None),
        ("date '2024-01-31' = any(record.times) and '{infinity}' <@ record.times", None),
        ("cardinality(record.tags) > 1 and array_length(record.ids, 2) is null", None),
        ("record.data @> '{\"a\": 1}' and (1 = any(record.ids)) is null", None),
        ("record.id = any(array[1, 2]) and record.name <> all('{a,\"b c\"}')", None),
        ("record.tags = '{a}'", "position 1: record.tags is an array; write '…' = any(record.tags), or record.tags @>"),
        ("'a' in (record.tags[0], record.tags)", "position 25: record.tags is an array; write"),
        ("record.name = any(record.tags)", "position 1: a literal is expected here: '…' = any(record.…)"),
        ("1 = any(record.tags)", "position 1: an integer does not go with the elements of the array, of which"),
        ("text 'a' = any(record.words)", "position 1: a text does not go with the elements of the array"),
        ("timestamptz '2024-01-31' = any(record.times)", "position 1: a timestamptz does not go with"),
        ("'x' = any(record.ids)", "position 1: 'x' is not an integer: a whole number is expected"),
        ("'hapy' = any(record.moods)", "position 1: 'hapy' is not an enum: the enum has no such label; did you mean"),
        ("'a' = any(record.name)", "position 11: an array is expected here, and record.name is of type text"),
        ("'a' = any(record.data)", "position 11: an array is expected here, and record.data is of type jsonb; "
         "of JSON ask by @> or ?"),
        ("'a' = any(record.tags[0])", "position 11: an array is expected here: record.tags, without an index"),
        ("'a' = any(metadata.database)", "position 11: an array is expected here, and metadata.database is a text"),
        ("'a' = any(record.docs)", "position 11: the elements of record.docs are JSON or rows"),
        ("cardinality(record.docs) = 1", "position 13: the elements of record.docs are JSON or rows"),
        ("'[1,2)' = any(record.ranges)", "position 15: the elements of record.ranges are of a type without operators"),
        ("cardinality(record.ranges) = 1", None),
        ("record.data @> array['a']", "position 1: an array is expected here, and record.data is of type jsonb"),
        ("record.data -> 'a' && '{a}'", "position 1: a column that is an array is expected here"),
        ("record.data <@ '{}'", "position 1: an array is expected here, and record.data is of type jsonb"),
        ("record.tags @> array['a', 1]", "position 27: a literal is expected here that is a text"),
        ("record.tags @> array[record.name]", "position 22: a literal is expected here that is a text"),
        ("record.tags @> '{a'", "position 16: '{a' is no array"),
        ("record.ids && '{1,x}'", "position 15: 'x' is not an integer: a whole number is expected"),
        ("record.nope && '{1}'", "position 1: unknown column record.nope of public.orders; "),
        ("array_length(record.tags, 0) = 1", "position 27: the dimension must be a number from 1 to 6"),
        ("array_length(record.tags, record.id) = 1", "position 27: the dimension must be a number from 1 to 6"),
        ("cardinality(record.name) = 1", "position 13: an array is expected here, and record.name is of type text"),
        ("array_to_string(record.tags, ',') = 'a'", "position 1: there is no function array_to_string"),
        ("record.data @> '{a: 1}'", "position 16: '{a: 1}' is not JSON"),
        ("jsonb_typeof(record.data ->> 'a') = 'x'", "position 14: a column of JSON is expected here"),
        ("json_typeof(record.data) = 'x'", "position 13: this takes json, and record.data is of type jsonb"),
        ("record.name ~ record.name", "position 15: the pattern of ~ must be a '…' literal"),
        ("record.id ~ '1'", "position 1: ~ takes a text, and this is an integer; cast it by ::text"),
        ("record.code ~ 'x'", "position 1: ~ sees the blanks of a char(n) in this; cast it by ::text"),
        ("record.name ~ '(a'", "position 15: '(a': `)` is missing"),
        ("record.name ~ '(a|b)*'", "position 15: '(a|b)*': a group can't be repeated without end"),
        ("record.name ~ 'a.*b.*c.*d'", "position 15: 'a.*b.*c.*d': it has too many of * and +"),
        ("record.name ~ '\\1'", "position 15: '\\\\1': \\1 is not taken here"),
        ("record.name ~ '(?=a)'", "position 15: '(?=a)': (?…) is not taken here, but (?:…)"),
        ("record.name similar to '[[:alpha:]]'", "position 24: '[[:alpha:]]': [:…:], [.….] and [=…=] are not"),
        ("record.name ~ '" + "(a|a)" * 20 + "'", "position 15: '(a|a)"),
        ("left(record.name, record.amount) = 'x'", "position 19: left takes an integer here, not a numeric; cast it"),
        ("left(record.name, 3000000000) = 'x'", "position 19: 3000000000 is out of integer's range"),
        ("left(record.id, 1) = 'x'", "position 6: left takes a text, and this is an integer; cast it by ::text"),
        ("substring(record.name from 'a') = 'x'", "position 28: 'a' is not an integer"),
        ("concat(record.code, 'x') = 'x'", "position 8: concat sees the blanks of a char(n) in this"),
        ("greatest(record.mood, 'sad') = 'sad'", "position 1: greatest does not compare an enum here"),
        ("power(record.amount, 2) = 4", "position 7: power takes a float here, not a numeric; cast it by ::float8"),
        ("sqrt(2.0) > 1", "position 6: sqrt takes a float here, not a numeric; cast it by ::float8"),
        ("trunc(record.ratio, 2) = 1", "position 1: trunc takes no places for a float; cast it by ::numeric"),
        ("extract(yaer from record.day) = 1", "position 9: unknown unit 'yaer'; there are microseconds"),
        ("extract(hour from record.day) = 1", "position 9: a date has no hour"),
        ("extract(day from record.span) = 1", "position 18: extract takes a date or timestamp, not an interval"),
    ],
)  # fmt: skip
def test_what_the_types_allow(text: str, message: str | None) -> None:
    if message is None:
        assert typed(parse_condition(text), COLUMNS).kind is Kind.BOOL
        return
    with pytest.raises(ExpressionError) as refused:
        typed(parse_condition(text), COLUMNS)
    assert str(refused.value).startswith(message), str(refused.value)


def test_the_fields_of_an_expression_and_their_json() -> None:
    made = typed(
        parse_condition(
            "record.amount > 5 and record.data.a[0] = 'x' and record.code = 'ab' and record.amount < 9 "
            "and record.weight is null and record.amount::text = '1.00'"
        ),
        COLUMNS,
    )
    assert [(str(f.reference), f.type.spark) for f in made.fields] == [
        ("record.amount", "string"), ("record.data.a[0]", "string"), ("record.code", "string"),
        ("record.weight", "string"), ("record.amount", "string"),
    ]  # fmt: skip
    for field in made.fields:
        again = Field.from_json(field.to_json())
        assert again.reference == field.reference
        assert (again.type.spark, again.type.width) == (field.type.spark, field.type.width)
    assert len(set(made.fields)) == 5


def test_columns_of_several_tables() -> None:
    tables = {
        ("public", "a"): {"id": column("int4"), "n": column("int8"), "x": column("text"), "only": column("int4")},
        ("public", "b"): {"id": column("int8"), "n": column("numeric"), "x": column("timestamp")},
    }  # fmt: skip
    made = typed(parse_condition("record.id = 1 and record.n > 0.5 and record.only = 2"), tables)
    assert [f.type.spark for f in made.fields] == ["bigint", "string", "bigint"]
    assert [f.lacking for f in made.fields] == [(), (), (("public", "b"),)]
    assert made.lacking == ((Reference("record", "only"), (("public", "b"),)),)
    with pytest.raises(ExpressionError) as refused:
        typed(parse_condition("record.x = '1'"), tables)
    assert str(refused.value) == (
        "position 1: record.x is a text in public.a, a timestamp in public.b; filter these tables by "
        "sinks of their own"
    )
    with pytest.raises(ExpressionError) as refused:
        typed(parse_condition("record.onyl = 1"), tables)
    assert str(refused.value) == (
        "position 1: unknown column record.onyl: none of the 2 tables has it; did you mean record.only?"
    )
    with pytest.raises(ExpressionError, match="no table to look in"):
        typed(parse_condition("record.id = 1"), {})
