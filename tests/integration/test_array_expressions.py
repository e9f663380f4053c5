"""Questions about arrays have Postgres's answers: in a run, and in a consumer's filter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.arrays_help import SAMPLES, Lists, Question, questions
from tests.streams_help import Change, wire

from penstock.embedded.handles import Database
from penstock.expressions import ExpressionError, parse_condition, typed
from penstock.expressions.array_literals import elements
from penstock.expressions.fields import Extractor, place
from penstock.expressions.nodes import Node
from penstock.streams.consumers import sql_filter

ROWS = 40
PARTS = ["{", "}", '"', ",", "\\", " ", "\n", "\u00a0", "a", "NULL", "null", "nUll"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
METADATA = '{"table_schema":"public","table_name":"lists"}'


@pytest.fixture(scope="module")
def lists(postgres: Any) -> Iterator[Lists]:
    name = "test_array_expressions"
    database = Database(name, postgres.create_database(name))
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA penstock")
        yield Lists(connection)
    database.drop(postgres.url)


def in_a_run(lists: Lists, condition: str) -> list[bool | None]:
    """Return what Python finds of each row before Spark sees it."""
    node = typed(parse_condition(condition), lists.columns).root
    (field,) = typed(parse_condition(condition), lists.columns).fields
    batch = wire([Change({"id": at}) for at in range(len(lists.records))])
    records = pa.array(lists.records, pa.string())
    found = Extractor([field])(batch.set_column(0, batch.schema.field(0), records))
    bad = found.field(place(0)[0]).to_pylist()
    assert not any(bad), [r for r, b in zip(lists.records, bad, strict=True) if b][:3]
    return [_value(node, value) for value in found.field(0).to_pylist()]


def _value(node: Node, of_field: Any) -> Any:
    """Return what a condition is of one field's value."""
    match node.op:
        case "field":
            return of_field
        case "literal":
            return node.value
        case "is null":
            return _value(node.args[0], of_field) is None
        case "=":
            left, right = (_value(arg, of_field) for arg in node.args)
            return None if left is None else left == right
    raise AssertionError(node.op)


def in_a_filter(lists: Lists, condition: str) -> list[bool | None]:
    """Return what the store's Postgres finds: which messages pass, and which do by `not`."""
    version = lists.connection.info.server_version
    messages = [f'{{"record":{record},"metadata":{METADATA}}}' for record in lists.records]
    passed = []
    for text in (condition, f"not ({condition})"):
        made = sql_filter.planned(text, lists.columns, "shop", version)
        lists.connection.execute(sql_filter.create(1, made))
        rows = lists.connection.execute(
            "SELECT penstock.filter_1(m, 'insert') FROM unnest(%s::text[]) WITH ORDINALITY AS g (m, n)"
            " ORDER BY n",
            [messages],
        )
        found = [row[0] for row in rows]
        assert not [f for f in found if f and f.startswith("!")][:3], text
        passed.append([f is not None for f in found])
    return [True if yes else False if no else None for yes, no in zip(*passed, strict=True)]


@pytest.mark.parametrize("seed", range(2))
def test_questions_about_arrays_have_the_answers_of_postgres(lists: Lists, seed: int) -> None:
    rng = random.Random(seed)
    lists.fill(rng, ROWS)
    wrong: list[tuple[Question, str, str, Any, Any]] = []
    seen = set()
    for column in SAMPLES:
        for question in questions(rng, column):
            expected = lists.answers(question.theirs)
            seen.update(expected)
            for where, found in (
                ("run", in_a_run(lists, question.ours)),
                ("filter", in_a_filter(lists, question.ours)),
            ):
                wrong += [
                    (question, where, record, mine, theirs)
                    for record, mine, theirs in zip(lists.records, found, expected, strict=True)
                    if mine is not theirs
                ]
    assert not wrong, "\n".join(map(str, wrong[:20]))
    assert seen == {True, False, None}


@given(text=TEXTS | TEXTS.map("{{{}}}".format))
@settings(max_examples=2000, deadline=None)
def test_an_array_literal_is_read_as_postgres_reads_it(lists: Lists, text: str) -> None:
    try:
        row = lists.connection.execute("SELECT %s::text[]", [text]).fetchone()
    except psycopg.Error:
        row = None
    try:
        found = elements(text, 1)
    except ExpressionError:
        assert row is None or "{" in text.strip()[1:]  # several dimensions
    else:
        assert row == (found,)


@pytest.mark.parametrize("value", ['"a"', "1", '{"a":1}'])
@pytest.mark.parametrize(
    "condition",
    [
        "'a' = any(record.t)",
        "record.t && '{a}'",
        "cardinality(record.t) = 1",
        "array_length(record.t, 2) = 1",
    ],
)
def test_a_column_that_was_no_array_then_makes_a_dead_letter(
    lists: Lists, condition: str, value: str
) -> None:
    lists.records = [f'{{"id":1,"t":{value}}}']
    for evaluate in (in_a_run, in_a_filter):
        with pytest.raises(AssertionError, match="t"):
            evaluate(lists, condition)


def test_a_message_without_the_column_makes_a_dead_letter(lists: Lists) -> None:
    lists.records = ['{"id":1}']
    for evaluate in (in_a_run, in_a_filter):
        with pytest.raises(AssertionError):
            evaluate(lists, "'a' = any(record.t)")
