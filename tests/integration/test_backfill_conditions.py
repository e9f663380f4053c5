"""Conditions of backfills: what Postgres checks, and what a text can't do to the statement around it."""

# A case is a line.
# ruff: noqa: E501

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql

from penstock.backfill import condition
from penstock.core import queries
from penstock.core.connect import Connection
from penstock.core.errors import SetupError
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres

TABLES = """
CREATE TABLE orders (
    id bigint PRIMARY KEY, amount numeric, name text, paid bool, data jsonb, tags text[],
    created_at timestamptz, "Odd Name" int, span interval, "(" int, ")" int);
INSERT INTO orders SELECT
    n, n, 'a''' || n, n % 2 = 0, jsonb_build_object('x', n), ARRAY['t' || n], '2024-01-01', n, '1 day'
FROM generate_series(1, 10) AS n;
CREATE SEQUENCE drawn;
CREATE TABLE seen (n int);
CREATE FUNCTION evil(n bigint) RETURNS bool LANGUAGE plpgsql AS
    'BEGIN INSERT INTO public.seen VALUES (n); RETURN true; END';
CREATE OPERATOR === (PROCEDURE = evil, RIGHTARG = bigint);
"""
ORDERS = sql.Identifier("public", "orders")


@pytest.fixture(scope="module")
def connection(postgres: EmbeddedPostgres) -> Iterator[Connection]:
    database = Database("test_conditions", postgres.create_database("test_conditions"))
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(TABLES)
        connection.execute(queries.load("penstock.backfill", "tables.sql")["session"])
        yield connection
    database.drop(postgres.url)


@pytest.fixture(scope="module")
def owner(connection: Connection) -> Iterator[Connection]:
    """A session that may write."""
    with psycopg.connect(
        connection.info.dsn, password=connection.info.password, autocommit=True
    ) as own:
        yield own


def count(connection: Connection, text: str, more: str = "") -> int:
    statement = f"SELECT count(*) FROM public.orders WHERE ({text}) {more}"
    row = connection.execute(statement.encode()).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("created_at >= '2024-01-01' and created_at < now() - interval '1 day'", 10),
        ("\"Odd Name\" in (1, 2) and name <> ''", 2),
        ("name = 'a'' or 1=1 --;('", 0),
        ("name = 'a\\'", 0),
        ("(data ->> 'x')::numeric > 5 and not paid", 2),
        ("data @> '{\"x\": 3}' or data ? 'y'", 1),
        ("tags[1] = 't4' or 't5' = any(tags)", 2),
        ("left(name, 2) = 'a''' and extract(year from created_at) = 2024", 10),
        ("case when paid then coalesce(amount, 0) else cast(id as numeric(10,2)) end between 1 and 3", 3),
        ("to_char(created_at, 'YYYY') = '2024' and concat(id, name) similar to '%(1|2)'", 2),
        ("orders.id % 2 = 0 and (orders.paid)", 5),
        ("name ~ '^a.[0-9]$' and name !~* 'A.9'", 8),
        ("amount::int8 = 1", 1),
        ("id = 1 or\n id =\t2", 2),
        ("name = 'user' or name = '(select' or name = 'pg_sleep(9)' or id = 3", 1),
        ("name <> '--' and name <> '/*' and name <> '{#' and name <> '#}' and id in(1,2)and name like'a%'", 2),
        ("b'1' = b'1' and x'f' = X'F' and name <> n'\\' and name <> '$$'", 10),
        ("id between symmetric 3 and 1 and (id, amount) = (2, 2)", 1),
    ],
)  # fmt: skip
def test_a_condition_as_postgres_has_it(connection: Connection, text: str, rows: int) -> None:
    condition.check(connection, ORDERS, text)
    assert count(connection, text) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("idd = 1", 'position 1: column "idd" does not exist. Perhaps you meant to reference the column'),
        ("id = 1 and\nnmae = 'x'", 'position 12: column "nmae" does not exist.'),
        ("record.id = 1", 'position 1: missing FROM-clause entry for table "record". Write a column alone'),
        ("data.x > 5", "position 1: missing FROM-clause entry for table \"data\". Write a column alone, as"
         " id, and a part of JSON as data ->> 'key'."),
        ("id", "position 1: argument of WHERE must be type boolean, not type bigint."),
        ("id = 'x'", 'position 6: invalid input syntax for type bigint: "x".'),
        ("id = ", "position 6: syntax error at or near"),
        ("id = 1 order by 1", 'position 8: syntax error at or near "order".'),
        ("id = 1 for update", 'position 8: syntax error at or near "for".'),
        ("", "position 1: it is empty."),
        ("  ", "position 1: it is empty."),
        ("id = 1; drop table orders", 'position 7: syntax error at or near ";".'),
        ("id = 1) or (true", 'position 7: syntax error at or near ")".'),
        ("id in (1", "position 9: syntax error at end of input."),
        ('"(" is null) or (true or ")" is null', 'position 12: syntax error at or near ")".'),
        ("a", 'position 1: column "a" does not exist.'),
        ("true) union select from public.seen where (true", 'position 5: syntax error at or near ")".'),
        ("true union select from public.seen", 'position 6: syntax error at or near "union".'),
        ("true) union (select from public.seen", "position 14: select is not allowed: no subqueries."),
        ("true) order by (id", 'position 5: syntax error at or near ")".'),
        ("true then true else (true", 'position 6: syntax error at or near "then".'),
        ("name = ' ))", "position 8: unterminated quoted string at or near"),
        ('"id = 1', "position 1: unterminated quoted identifier at or near"),
        ("true;", 'position 5: syntax error at or near ";".'),
        ("true /* /* */ or pg_sleep(9) is null -- */", "position 6: comments are not allowed."),
        ("{# pg_sleep(9) is null #} true", "position 1: the character U+007B is not allowed."),
        ("pg_sleep\u00a0(9) is null", "position 9: the character U+00A0 is not allowed."),
        ("show is null or pg_sleep(9) is null", "position 17: pg_sleep is not allowed"),
        ("name = $a$ or pg_sleep(9) is null or name = $a$", "position 8: '$' is not allowed"),
        ("pg_sleep\n\t(9) is null", "position 1: pg_sleep is not allowed"),
        ("array(\nselect n from public.seen) = '{}'", "position 8: select is not allowed: no subqueries."),
        ("true) --", "position 7: comments are not allowed."),
        ("true -- ", "position 6: comments are not allowed."),
        ("true /* ", "position 6: unterminated /* comment at or near"),
        ("1 +-- 2", "position 4: comments are not allowed."),
        ("name = 'x", "position 8: unterminated quoted string at or near"),
        ("name = E'x\\' or true --'", "position 8: strings with a prefix are not allowed"),
        ("name = U&'x'", "position 8: strings with a prefix are not allowed"),
        ('U&"pg\\005fsleep"(9) is null', "position 2: strings with a prefix are not allowed"),
        ("name = $$x$$", "position 8: '$' is not allowed"),
        ("id = $1", "position 6: '$' is not allowed"),
        ("id in (select 1)", "position 8: select is not allowed: no subqueries."),
        ("SELECT true", "position 1: select is not allowed: no subqueries."),
        ("exists ((SELECT 1))", "position 10: select is not allowed: no subqueries."),
        ("id in (values (1))", "position 8: values is not allowed: no subqueries."),
        ("(table seen) = 1", "position 2: table is not allowed: no subqueries."),
        ("(with x as (select 1) select 1) = 1", "position 2: with is not allowed: no subqueries."),
        ("pg_sleep(10) is null", "position 1: pg_sleep is not allowed: it has an effect, or its value is"),
        ('"pg_sleep" (10) is null', "position 1: pg_sleep is not allowed"),
        ("id = 1 and Nextval('public.drawn') = 1", "position 12: nextval is not allowed"),
        ("set_config('a.b', 'c', false) = 'c'", "position 1: set_config is not allowed"),
        ("current_setting('data_directory') like '/%'", "position 1: current_setting is not allowed"),
        ("pg_read_file('/etc/passwd') like 'r%'", "position 1: pg_read_file is not allowed"),
        ("query_to_xml('select 1', true, true, '') is null", "position 1: query_to_xml is not allowed"),
        ("table_to_xml('public.seen', true, true, '') is null", "position 1: table_to_xml is not allowed"),
        ("pg_terminate_backend(1)", "position 1: pg_terminate_backend is not allowed"),
        ("random() < 0.5", "position 1: random is not allowed"),
        ("id = 1 or current_user = name", "position 11: current_user is not allowed: its value is not the"),
        ("CURRENT_SCHEMA = name", "position 1: current_schema is not allowed"),
        ("evil(id)", "position 1: function evil(bigint) does not exist. Cast what is compared; functions"),
        ("public.evil(id)", "position 8: functions are called by their plain names alone."),
        ("operator(public.===) id", "position 1: functions are called by their plain names alone."),
        ("=== id", "position 1: operator does not exist: === bigint."),
        ("orders.evil", "position 1: column orders.evil does not exist."),
        ("(orders).Pg_restore_relation_stats", "position 10: pg_restore_relation_stats is not allowed"),
        ("count(*) > 1", "position 1: aggregate functions are not allowed in WHERE."),
        ("row_number() over () = 1", "position 1: window functions are not allowed in WHERE."),
        ("generate_series(1, 9) = 1", "position 1: set-returning functions are not allowed in WHERE."),
        ("name = '\x00'", "position 9: the character U+0000 is not allowed."),
        ("name = '\ud800'", "position 9: the character U+D800 is not allowed."),
        ("x" * 5000, "position 4001: it has 5,000 characters; at most 4,000 are allowed."),
    ],
)  # fmt: skip
def test_what_is_refused_and_where(connection: Connection, text: str, message: str) -> None:
    with pytest.raises(SetupError) as refused:
        condition.check(connection, ORDERS, text)
    assert str(refused.value).startswith(f"--where: {message}"), str(refused.value)
    left = "SELECT count(*) FROM pg_prepared_statements WHERE name = 'penstock_condition'"
    assert connection.execute(left).fetchone() == (0,)


def test_deep_nesting_is_taken(connection: Connection) -> None:
    text = "(" * 1990 + "true" + ")" * 1990
    condition.check(connection, ORDERS, text)


TOKENS = st.lists(
    st.sampled_from(
        ["(", ")", "(", ")", "'", "'", '"', "''", "\\", "\\'", "E", "e'", "U&", "u&'", "$$", "$a$", "--", "/*",
         "*/", "-", "\n", ";", "or", "and", "true", "id", "= 1", "name", "like", "'x'", "in", "select", "1",
         "lower(", "x\u00a0", "\u00e9", "not", "null", ",", "||", "&", "uescape '!'", "order by", "limit 1",
         "offset 0", '"("', '")"', "=", "e'\\'' ", "union", "[", "]", "::text", "0x", "1e", "b'", "n'"]
    ),
    max_size=12,
)  # fmt: skip


@given(tokens=TOKENS, space=st.sampled_from(["", " "]))
@settings(max_examples=2000, deadline=None)
def test_no_text_leaves_its_parentheses(
    connection: Connection, tokens: list[str], space: str
) -> None:
    text = space.join(tokens)
    try:
        condition.check(connection, ORDERS, text)
    except SetupError as error:
        assert str(error).startswith("--where: position ")  # noqa: PT017 - most are refused
        return
    try:
        assert count(connection, text, "AND false") == 0
    except psycopg.DataError:
        return


HIDING = st.lists(
    st.sampled_from(
        ["true", "or", "and", "id = 1", "(", ")", "pg_sleep(0) is null", "random() < 1", "(select true)", "or pg_sleep",
         "(0) is null", '"pg_sleep"', 'U&"pg\\005fsleep"', "current_user = name", "name = 'a'", "or name = '", "'", "''",
         "e'\\'", "E'", "$$", "$a$", "a$", "--", "/*", "*/", "{#", "#}", "\n", "\u00a0", "\x0c", "show", "begin", "1e",
         "0x", "n'", "x'0'", "is not null", "lower(name) = name", "not"]
    ),
    max_size=10,
)  # fmt: skip


@given(pieces=HIDING, space=st.sampled_from(["", " "]))
@settings(max_examples=3000, deadline=None)
def test_no_text_hides_a_call(
    connection: Connection, owner: Connection, pieces: list[str], space: str
) -> None:
    text = space.join(pieces)
    with contextlib.suppress(SetupError):
        condition.check(connection, ORDERS, text)
        assert not forbidden(owner, text), text


@pytest.mark.parametrize("text", ["pg_sleep(0) is null", "id in (select 1)", "current_user = name"])
def test_the_tree_shows_what_is_forbidden(owner: Connection, text: str) -> None:
    assert forbidden(owner, text)


def forbidden(owner: Connection, text: str) -> set[str]:
    """Return what Postgres' own tree of a condition has of calls with an effect and of queries."""
    with owner.transaction(force_rollback=True):
        view = f"CREATE TEMP VIEW understood AS SELECT 1 AS n FROM public.orders WHERE ({text})"
        owner.execute(view.encode())
        tree = "SELECT ev_action::text FROM pg_rewrite WHERE ev_class = 'understood'::regclass"
        row = owner.execute(tree).fetchone()
        volatile = owner.execute("SELECT oid::text FROM pg_proc WHERE provolatile = 'v'").fetchall()
    assert row is not None
    called = set(re.findall(r":funcid (\d+)", row[0])) & {oid for (oid,) in volatile}
    return called | set(re.findall("{SUBLINK|{SQLVALUEFUNCTION", row[0]))
