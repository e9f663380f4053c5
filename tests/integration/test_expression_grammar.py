"""What belongs to what in an expression, compared with what Postgres makes of the same text."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.connect import Connection
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.expressions import ExpressionError, parse_value
from penstock.expressions.syntax import Expr

OPERATORS = ["<>", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "||", "~", "~~", "~~*"]
TYPES = """
CREATE TYPE v AS (x int);
CREATE FUNCTION truth(v) RETURNS bool LANGUAGE plpgsql AS 'BEGIN RETURN true; END';
CREATE CAST (v AS bool) WITH FUNCTION truth(v) AS IMPLICIT;
CREATE TABLE t (a v, b v, c v, d v, e v[]);
"""
BOTH = """
CREATE FUNCTION op({0}, {1}) RETURNS v LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE FUNCTION same({0}, {1}) RETURNS bool LANGUAGE plpgsql AS 'BEGIN RETURN true; END';
CREATE OPERATOR = (FUNCTION = same, LEFTARG = {0}, RIGHTARG = {1});
"""
"""All operators between `v` and boolean: whatever the grammar takes has a type."""


@pytest.fixture(scope="module")
def connection(postgres: EmbeddedPostgres) -> Iterator[Connection]:
    url = postgres.create_database("test_grammar")
    statements = [TYPES]
    for left in ("v", "bool"):
        for right in ("v", "bool"):
            statements.append(BOTH.format(left, right))
            statements += [
                f"CREATE OPERATOR {op} (FUNCTION = op, LEFTARG = {left}, RIGHTARG = {right})"
                for op in OPERATORS
            ]
        statements.append(
            f"CREATE FUNCTION op({left}, v[]) RETURNS v LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
            f"CREATE OPERATOR && (FUNCTION = op, LEFTARG = {left}, RIGHTARG = v[]);"
            f"CREATE OPERATOR <@ (FUNCTION = op, LEFTARG = {left}, RIGHTARG = v[])"
        )
        statements.append(
            f"CREATE FUNCTION op({left}) RETURNS v LANGUAGE plpgsql AS 'BEGIN RETURN $1; END';"
            f"CREATE OPERATOR - (FUNCTION = op, RIGHTARG = {left})"
        )
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())
        yield connection


VALUES = st.sampled_from(["record.a", "record.b", "record.c", "record.d", "(record.a or record.b)"])
BETWEEN = st.sampled_from(
    [
        "and", "or", "and not", "or not", "=", "<>", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "||",
        "~", "like", "ilike", "is distinct from", "+ -", "= -", "between record.c and",
    ]
)  # fmt: skip
BEHIND = st.sampled_from(
    ["", "", "", "is null", "is true", "in (record.a, record.b)", "= any(record.e)", "= all (record.e)",
     "&& '{}'", "<@ '{}'"]
)  # fmt: skip
PARTS = st.lists(st.tuples(BETWEEN, VALUES, BEHIND), min_size=1, max_size=5)
HEADS = st.tuples(st.sampled_from(["", "", "not", "-", "not -"]), VALUES)


def rendered(expr: Expr) -> str:
    """Return an expression with parentheses around each of its parts."""
    args = [rendered(arg) for arg in expr.args]
    match expr.op:
        case "reference":
            return str(expr.value)
        case "string":
            return f"'{expr.value}'"
        case "= any" | "= all":
            return f"({args[0]} {expr.op}({args[1]}))"
        case "not":
            return f"(not {args[0]})"
        case "neg":
            return f"(- {args[0]})"
        case "is null" | "is true":
            return f"({args[0]} {expr.op})"
        case "is distinct":
            return f"({args[0]} is distinct from {args[1]})"
        case "in":
            return f"({args[0]} in ({', '.join(args[1:])}))"
        case "between":
            return f"({args[0]} between {args[1]} and {args[2]})"
    found = args[0]
    for arg in args[1:]:
        found = f"({found} {expr.op} {arg})"
    return found


def plan(connection: Connection, text: str) -> list[tuple[object, ...]]:
    statement = f"EXPLAIN (VERBOSE, COSTS OFF) SELECT {text} AS value FROM t AS record"
    return connection.execute(statement.encode()).fetchall()


@given(head=HEADS, parts=PARTS)
@settings(max_examples=1500, deadline=None)
def test_what_belongs_to_what_is_as_in_postgres(
    connection: Connection, head: tuple[str, ...], parts: list[tuple[str, ...]]
) -> None:
    text = " ".join([*head, *(word for part in parts for word in part)])
    try:
        expr = parse_value(text).root
    except ExpressionError:
        return  # Postgres has a rule for what only parentheses make plain
    assert plan(connection, text) == plan(connection, rendered(expr)), rendered(expr)
