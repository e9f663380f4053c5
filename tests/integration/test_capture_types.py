"""The type table end to end: from the row, through the WAL and the stream, into the record.

The database and the role have every output setting wrong; the capture's session must not care.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo
from tests.integration.capturing import Reader, capturing, database_in, prepare
from tests.integration.test_values import CASES, OPTIONS, Case, has_xml, parsed

from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.postgres import raw_rows

STRANGE = {
    "timezone": "'Asia/Kathmandu'", "datestyle": "'German, DMY'", "intervalstyle": "sql_standard",
    "extra_float_digits": "0", "bytea_output": "escape", "quote_all_identifiers": "on",
    "search_path": "odd", "client_min_messages": "error", "xmloption": "document",
    "statement_timeout": "'5s'", "idle_session_timeout": "'10s'", "lock_timeout": "'1s'",
    "transaction_timeout": "'3s'", "client_encoding": "LATIN1", "array_nulls": "off",
}  # fmt: skip


def make_strange(database: Database) -> None:
    for number, (name, value) in enumerate(STRANGE.items()):
        whose = "postgres IN DATABASE" if number % 2 else ""
        kind = "ROLE" if whose else "DATABASE"
        database.execute(f'ALTER {kind} {whose} "{database.name}" SET {name} = {value}')


def test_every_type(database: Database) -> None:
    database.execute("CREATE TYPE mood AS ENUM ('happy', 'so \"so\"', 'NULL', '{}')")
    database.execute('CREATE SCHEMA odd CREATE TABLE "Ta""ble" ()')
    for (extension,) in database.execute(
        "SELECT name FROM pg_available_extensions WHERE name IN ('vector', 'hstore', 'citext')"
    ):
        database.execute(f"CREATE EXTENSION {extension}")
    with database.connect(autocommit=True, options=OPTIONS) as session:
        cases = [case for case in CASES if exists(session, case)]
        assert len(cases) > 50
        columns = []
        for i, case in enumerate(cases):
            session.execute(f"CREATE DOMAIN alias{i} AS {case.type}".encode())
            columns += [
                f"v{i} {case.type}", f"a{i} {case.type}[]", f"d{i} alias{i}", f"da{i} alias{i}[]",
            ]  # fmt: skip
        session.execute(f"CREATE TABLE t (id serial PRIMARY KEY, {', '.join(columns)})".encode())
        make_strange(database)
        prepare(database)
        with Reader(database.url) as reader:
            travel(session, cases, reader)


def exists(session: psycopg.Connection[Any], case: Case) -> bool:
    row = session.execute("SELECT to_regtype(%s)", [case.type]).fetchone()
    assert row is not None
    return row[0] is not None and (case.type != "xml" or has_xml(session))


def travel(session: psycopg.Connection[Any], cases: list[Case], reader: Reader) -> None:
    names, values, expected = [], [], []
    for i, case in enumerate(cases):
        names += [f"v{i}", f"a{i}", f"d{i}", f"da{i}"]
        values += [
            f"%(i{i})s::{case.type}", f"%(l{i})s::text[]::{case.type}[]",
            f"%(i{i})s::alias{i}", f"%(l{i})s::text[]::alias{i}[]",
        ]  # fmt: skip
        form = case.expected.replace("{s}", "to_jsonb({v}::text)")
        many = (
            f"CASE WHEN a{i} IS NOT NULL THEN (SELECT coalesce(jsonb_agg("
            f"{form.replace('{v}', 'e')} ORDER BY n), '[]') FROM unnest(a{i})"
            " WITH ORDINALITY AS u (e, n)) END"
        )
        expected += [f"({form.replace('{v}', f'v{i}')})::text", f"({many})::text"]
    insert = f"INSERT INTO t ({', '.join(names)}) VALUES ({', '.join(values)}) RETURNING id"
    select = f"SELECT {', '.join(expected)} FROM t WHERE id = %s"

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def one_row(data: st.DataObject) -> None:
        drawn: dict[str, Any] = {}
        for i, case in enumerate(cases):
            drawn[f"i{i}"] = data.draw(st.none() | case.literals)
            drawn[f"l{i}"] = data.draw(st.lists(st.none() | case.literals, max_size=3))
        row = session.execute(insert.encode(), drawn).fetchone()
        assert row is not None
        reported = session.execute(select.encode(), row).fetchone()
        assert reported is not None
        (message,) = reader.read()
        record = parsed(message.raw)
        for i, case in enumerate(cases):
            one, many = (
                None if text is None else parsed(text) for text in reported[2 * i : 2 * i + 2]
            )
            assert record[f"v{i}"] == one, case.type
            assert record[f"d{i}"] == one, case.type
            assert record[f"a{i}"] == many, case.type
            assert record[f"da{i}"] == many, case.type

    one_row()


def test_output_settings_are_the_captures_own(database: Database) -> None:
    make_strange(database)
    with capturing(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, d date, z timestamptz, i interval, f float8, b bytea,"
        " r regclass, t text)",
    ) as reader:
        with database.connect(autocommit=True, client_encoding="utf8") as connection:
            connection.execute(
                "INSERT INTO public.t VALUES (1, '2024-10-28', '2024-10-28 21:37:01+00',"
                " '1 mon -1 day 2 h', 0.1::float8 + 0.2::float8, '\\x00ff', 'public.t', 'é😀')"
            )
        (message,) = reader.read()
    assert message.record == {
        "id": 1, "d": "2024-10-28", "z": "2024-10-28T21:37:01Z", "i": "P1M-1DT2H",
        "f": 0.30000000000000004, "b": "\\x00ff", "r": "public.t", "t": "é😀",
    }  # fmt: skip


def test_composite_types_that_change_while_it_runs(database: Database) -> None:
    """Postgres does not report it: the values themselves show it."""
    with capturing(
        database,
        "CREATE TYPE pair AS (l int, r text)",
        "CREATE DOMAIN alias AS pair",
        "CREATE TYPE nest AS (p pair, n int)",
        "CREATE TABLE t (id serial PRIMARY KEY, p pair, ps pair[], a alias, n nest)",
    ) as reader:
        values = "(p, ps, a, n) VALUES ({0}, ARRAY[{0}::pair], {0}, ({0}::pair, 7))"
        database.execute("INSERT INTO t " + values.format("(1, 'x')"))
        pair = {"l": 1, "r": "x"}
        (message,) = reader.read()
        assert message.record == {
            "id": 1,
            "p": pair,
            "ps": [pair],
            "a": pair,
            "n": {"p": pair, "n": 7},
        }
        database.execute("ALTER TYPE pair ADD ATTRIBUTE m bool")
        database.execute("INSERT INTO t " + values.format("(1, 'x', true)"))
        pair = {"l": 1, "r": "x", "m": True}
        (message,) = reader.read()
        assert message.record == {
            "id": 2,
            "p": pair,
            "ps": [pair],
            "a": pair,
            "n": {"p": pair, "n": 7},
        }
        database.execute("ALTER TYPE pair DROP ATTRIBUTE r")
        database.execute("INSERT INTO t " + values.format("(1, true)"))
        pair = {"l": 1, "m": True}
        (message,) = reader.read()
        assert message.record == {
            "id": 3,
            "p": pair,
            "ps": [pair],
            "a": pair,
            "n": {"p": pair, "n": 7},
        }


def test_types_made_while_it_runs(database: Database) -> None:
    with capturing(database, "CREATE TABLE t (id int PRIMARY KEY)") as reader:
        database.execute("INSERT INTO t VALUES (1)")
        assert len(reader.read()) == 1
        database.execute("CREATE TYPE mood AS ENUM ('a')")
        database.execute("CREATE DOMAIN moods AS mood[]")
        database.execute("ALTER TABLE t ADD m moods")
        database.execute("INSERT INTO t VALUES (2, '{a,NULL}')")
        database.execute("ALTER TYPE mood ADD VALUE 'b c'")
        database.execute("INSERT INTO t VALUES (3, '{b c}')")
        assert [m.record for m in reader.read()] == [
            {"id": 2, "m": ["a", None]},
            {"id": 3, "m": ["b c"]},
        ]


COLUMNS = """id int PRIMARY KEY, name text, amount numeric, at timestamptz, day timestamp,
 doc jsonb, flag bool, ratio float8, bytes bytea, list text[]"""
ROWS = """SELECT n, CASE n % 7 WHEN 0 THEN NULL WHEN 1 THEN 'a "b" \\ ' || n ELSE 'é' || n END,
 n / 8.0, timestamptz '2024-10-28 21:37:01+00' + n * interval '0.01 s',
 timestamp '2024-10-28' + n * interval '1 day', jsonb_build_object('n', n), n % 3 = 0,
 CASE n % 500 WHEN 0 THEN 'NaN' ELSE n / 3.0 END, decode(lpad(to_hex(n), 8, '0'), 'hex'),
 ARRAY[n::text, NULL] FROM generate_series({first}, {last}) n"""

NOT_UTF8 = """SELECT n, 'caf' || chr(233), jsonb_build_object('a', 'caf' || chr(233)),
 ARRAY['x' || chr(233), NULL] FROM generate_series(3000, 3099) n"""


@pytest.mark.parametrize("encoding", ["UTF8", "SQL_ASCII"])
def test_many_rows_are_captured_as_few_are(
    postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Also in a database that takes any bytes, whatever they are."""
    with database_in(postgres, encoding) as database:
        prepare(database, f"CREATE TABLE t ({COLUMNS})")
        url = make_conninfo(database.url, client_encoding="utf8")
        with psycopg.connect(url, autocommit=True) as session:
            session.execute(f"INSERT INTO t {ROWS.format(first=256, last=1255)}".encode())
            for n in range(2000, 2100):
                session.execute(f"INSERT INTO t {ROWS.format(first=n, last=n)}".encode())
            session.execute("UPDATE t SET flag = NOT flag WHERE id < 1000")
            session.execute("DELETE FROM t WHERE id < 300")
        if encoding == "SQL_ASCII":
            database.execute(f"INSERT INTO t (id, name, doc, list) {NOT_UTF8}")
        read = {}
        for few in (1, 1 << 30):
            monkeypatch.setattr(raw_rows, "FEW", few)
            with Reader(url) as reader:
                read[few] = reader.read()
        odd = [m.record for m in read[1] if m.record and m.record["id"] >= 3000]
        assert len(read[1]) - len(odd) == 1_000 + 100 + 744 + 44
        assert read[1] == read[1 << 30]
        assert len(odd) == (100 if encoding == "SQL_ASCII" else 0)
        for record in odd:
            found = record["name"], record["doc"], record["list"]
            assert found == ("caf\\xe9", {"a": "caf\ufffd"}, ["x\\xe9", None])
