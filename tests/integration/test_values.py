"""The type table against what a real Postgres prints, and what the catalog says about types.

Each type has a table with four columns: the type, an array of it, a domain over it, and an array of
that domain. A row goes in, what the output functions print comes back, and its conversion has to be
what Postgres itself makes of the value, by `to_jsonb` wherever the design asks for nothing else.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, NamedTuple

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from psycopg.rows import dict_row

from penstock.embedded.postgres import EmbeddedPostgres
from penstock.postgres import types, values
from penstock.postgres.types import TypeInfo, Types, load_types

OPTIONS = (
    "-c TimeZone=UTC -c DateStyle=ISO -c IntervalStyle=iso_8601 -c extra_float_digits=3"
    " -c bytea_output=hex"
)

quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Case(NamedTuple):
    """A type, literals that its input function takes, and the JSON expected of the value {v}."""

    type: str
    literals: SearchStrategy[str]
    expected: str = "to_jsonb({v})"


strings = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=10
) | st.sampled_from(["NULL", "null", "", " ", "a\nb\r", '"', "\\", "{a,b}", "(1,2)", "é\u2028😀"])
small = st.integers(-1000, 1000)
floats = st.floats(allow_nan=False, allow_infinity=False)
points = st.builds("({},{})".format, floats, floats)
times = st.times().map(str)
stamps = (
    st.datetimes().map(str)
    | st.datetimes().map(lambda moment: str(moment.replace(microsecond=120_000)))
    | st.sampled_from(
        ["infinity", "-infinity", "0044-03-15 12:00:00.5 BC", "294276-12-31 23:59:59"]
    )
)
zones = st.sampled_from(["", "+00", "+05:30", "-03", "+00:19:32", " Europe/Madrid"])
stamp_form = (
    "case when isfinite({v}) and {u} >= '0001-01-01' and {u} < '10000-01-01' then"
    " to_jsonb(regexp_replace(to_char({u}, 'YYYY-MM-DD\"T\"HH24:MI:SS.US'), '\\.000000$', '')"
    " || '{z}') else to_jsonb({v}::text) end"
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\"\\\n'", max_size=3), inner)
    ),
    max_leaves=6,
)
documents = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
    json_values,
    st.sampled_from([None, 1]),
    st.booleans(),
)
intervals = st.builds(
    "{} years {} months {} days {} seconds".format,
    small,
    small,
    small,
    st.decimals(-99, 99, places=6),
) | st.sampled_from(["0", "infinity", "-infinity", "1 month -1 day 02:03:04"])


def bounds(low: SearchStrategy[Any]) -> SearchStrategy[str]:
    """Draw range literals."""
    return st.builds(
        lambda pair, ends: f"{ends[0]}{pair[0]},{pair[1]}{ends[1]}",
        st.tuples(low, low).map(sorted),
        st.sampled_from(["[]", "()", "[)"]),
    ) | st.just("empty")


dates = st.dates().map(str)
int_ranges = bounds(small)
CASES = [
    Case("boolean", st.booleans().map(str)),
    Case("smallint", st.integers(-(2**15), 2**15 - 1).map(str)),
    Case("integer", st.integers(-(2**31), 2**31 - 1).map(str)),
    Case("bigint", st.integers(-(2**63), 2**63 - 1).map(str)),
    Case("oid", st.integers(0, 2**32 - 1).map(str), "to_jsonb({v}::bigint)"),
    Case("real", st.floats(width=32, allow_subnormal=False).map(str)),
    Case("double precision", st.floats(allow_subnormal=False).map(str)),
    Case(
        "numeric",
        st.decimals(-(10**30), 10**30, places=9).map(str)
        | st.sampled_from(["NaN", "Infinity", "-Infinity", "199.90", "0.000", "1e400"]),
        "to_jsonb({v}::text)",
    ),
    Case("text", strings),
    Case("varchar(10)", strings),
    Case("char(10)", strings),
    Case("name", strings),
    Case('"char"', st.characters(codec="ascii", exclude_characters="\0") | st.just("\\377")),
    Case("mood", st.sampled_from(["happy", 'so "so"', "NULL", "{}"])),
    Case("uuid", st.uuids().map(str)),
    Case("inet", st.ip_addresses().map(str) | st.just("10.1.2.3/8")),
    Case(
        "cidr",
        st.builds(
            lambda ip, bits: str(ipaddress.ip_network((ip, bits), strict=False)),
            st.ip_addresses(v=4),
            st.integers(0, 32),
        ),
    ),
    Case("macaddr", st.binary(min_size=6, max_size=6).map(bytes.hex)),
    Case("macaddr8", st.binary(min_size=8, max_size=8).map(bytes.hex)),
    Case("xml", st.sampled_from(["<a>b</a>", '<a>\n<b c="d"/>\n</a>', "plain"])),
    Case("money", small.map(lambda n: f"{n}.05")),
    Case("bit(8)", st.text("01", min_size=8, max_size=8)),
    Case("bit varying", st.text("01", max_size=9)),
    Case("int4range", int_ranges),
    Case("numrange", bounds(st.decimals(-99, 99, places=2))),
    Case("daterange", bounds(dates) | st.just("[0044-03-15 BC,)")),
    Case("tsrange", bounds(dates)),
    Case("tstzrange", bounds(dates)),
    Case("int8multirange", st.lists(int_ranges, max_size=3).map(lambda r: f"{{{','.join(r)}}}")),
    Case("tsmultirange", st.lists(bounds(dates), max_size=2).map(lambda r: f"{{{','.join(r)}}}")),
    Case("point", points),
    Case("lseg", st.builds("[{},{}]".format, points, points)),
    Case("box", st.builds("{},{}".format, points, points)),
    Case("path", st.builds("[{},{}]".format, points, points)),
    Case("polygon", st.builds("({},{})".format, points, points)),
    Case("line", st.just("{1,2,3}")),
    Case("circle", st.builds("<{},{}>".format, points, small.map(abs))),
    Case("tsvector", st.sampled_from(["'a b':1A,2 'it''s':3 c", "'\\\\':1", ""])),
    Case("tsquery", st.sampled_from(["a & (b | !'c d')", "'it''s' <-> b:*A", "'\\\\'"])),
    Case("pg_lsn", st.builds("{:X}/{:X}".format, *[st.integers(0, 2**32 - 1)] * 2)),
    Case("txid_snapshot", st.just("10:20:10,14,15")),
    Case("xid8", st.integers(0, 2**64 - 1).map(str)),
    Case("int2vector", st.lists(small, max_size=4).map(lambda n: " ".join(map(str, n))), "{s}"),
    Case("regclass", st.sampled_from(["pg_class", 'odd."Ta""ble"'])),
    Case("jsonpath", st.sampled_from(["$.a", '$."b c"[*] ? (@ > 1)'])),
    Case("json", documents, "{v}::jsonb"),
    Case("jsonb", documents),
    Case("date", dates | st.sampled_from(["infinity", "-infinity", "0044-03-15 BC", "12024-1-1"])),
    Case("time", times | st.just("24:00:00")),
    Case("timetz", st.builds("{}{}".format, times, st.sampled_from(["+00", "+02", "-03:30"]))),
    Case("timestamp", stamps, stamp_form.replace("{u}", "{v}").replace("{z}", "")),
    Case(
        "timestamptz",
        st.builds("{}{}".format, st.datetimes().map(str), zones) | stamps,
        stamp_form.replace("{u}", "({v} at time zone 'UTC')").replace("{z}", "Z"),
    ),
    Case("interval", intervals),
    Case("bytea", st.binary(max_size=20).map(lambda b: "\\x" + b.hex()), "to_jsonb({v}::text)"),
    Case(
        "vector",
        st.lists(st.floats(-1e9, 1e9, width=32), min_size=1, max_size=8).map(str),
        "to_jsonb({v}::real[])",
    ),
    Case("hstore", st.sampled_from(["", 'a=>1, "b c"=>NULL', '"\\"q\\""=>"\\\\"']), "{v}::jsonb"),
    Case("citext", strings),
]


@pytest.fixture(scope="module")
def connection(postgres: EmbeddedPostgres) -> Iterator[psycopg.Connection[Any]]:
    """Open a session with the settings that the capture fixes, in a database of this module."""
    url = postgres.create_database("test_values")
    with psycopg.connect(url, autocommit=True, options=OPTIONS) as session:
        session.execute("create type mood as enum ('happy', 'so \"so\"', 'NULL', '{}')")
        session.execute('create schema odd create table "Ta""ble" ()')
        for extension in session.execute(
            "select name from pg_available_extensions where name in ('vector', 'hstore', 'citext')"
        ).fetchall():
            session.execute(f"create extension {extension[0]}".encode())
        yield session


@contextmanager
def no_trace(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Roll back whatever happens inside."""
    with connection.transaction(force_rollback=True):
        yield


def has_xml(connection: psycopg.Connection[Any]) -> bool:
    try:
        connection.execute("select xml '<a/>'")
    except psycopg.errors.FeatureNotSupported:
        return False
    return True


def types_of(connection: psycopg.Connection[Any], table: str) -> tuple[Types, list[int]]:
    """Return the types of a table's columns as the Relation message names them: domains too."""
    oids = [
        row[0]
        for row in connection.execute(
            "select atttypid from pg_attribute where attrelid = %s::regclass and attnum > 0"
            " order by attnum",
            (table,),
        )
    ]
    types = Types()
    types.add(load_types(connection, set().union(*map(types.unknown, oids))))
    assert not set().union(*map(types.unknown, oids)), "one lookup has to be enough"
    return types, oids


def converted(types: Types, oid: int, value: bytes | None) -> Any:
    if value is None:
        return None
    converter = types.converter(oid)
    result = value if converter is None else converter(value)
    assert b"\n" not in result
    assert b"\r" not in result
    return parsed(result)


def parsed(text: bytes | str) -> Any:
    return json.loads(
        text, parse_float=Decimal, parse_constant=lambda name: pytest.fail(f"bare {name}")
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.type)
def test_type(connection: psycopg.Connection[Any], case: Case) -> None:
    kind = case.type
    if connection.execute("select to_regtype(%s)", (kind,)).fetchall() == [(None,)]:
        pytest.skip(f"this server has no {kind}")
    if kind == "xml" and not has_xml(connection):
        pytest.skip("this server was built without libxml")
    form = case.expected.replace("{s}", "to_jsonb({v}::text)")
    insert = f"""
        insert into one
        select item::{kind}, %(items)s::text[]::{kind}[], item::alias, %(items)s::text[]::alias[]
        from unnest(%(items)s::text[]) as item
        returning v, a, d, da, ({form.replace("{v}", "v")})::text,
            (select coalesce(jsonb_agg({form.replace("{v}", "e")} order by i), '[]')
             from unnest(a) with ordinality as u (e, i))::text
    """

    @quick
    @given(st.lists(st.none() | case.literals, min_size=1, max_size=8))
    def round_trip(items: list[str | None]) -> None:
        with no_trace(connection):
            cursor = connection.execute(insert.encode(), {"items": items})
            result = cursor.pgresult
            assert result is not None
            for row in range(result.ntuples):
                v, a, d, da, one, many = (result.get_value(row, column) for column in range(6))
                expected = None if one is None else parsed(one)
                assert many is not None
                assert converted(types, oids[0], v) == expected
                assert converted(types, oids[2], d) == expected
                assert converted(types, oids[1], a) == parsed(many)
                assert converted(types, oids[3], da) == parsed(many)

    with no_trace(connection):
        connection.execute(f"create domain alias as {kind}".encode())
        connection.execute(f"create table one (v {kind}, a {kind}[], d alias, da alias[])".encode())
        types, oids = types_of(connection, "one")
        round_trip()


@given(
    st.lists(st.lists(st.none() | strings, min_size=2, max_size=2), min_size=1, max_size=3),
    st.integers(-3, 3),
)
@quick
def test_nested_arrays_with_lower_bounds(
    connection: psycopg.Connection[Any], items: list[list[str | None]], low: int
) -> None:
    cursor = connection.execute(
        "select (%s || (%s::text[])::text)::text[]",
        (f"[{low}:{low + len(items) - 1}][5:6]=", items),
    )
    assert cursor.pgresult is not None
    assert converted(Types(), 1009, cursor.pgresult.get_value(0, 0)) == items


texts = st.none() | strings
pairs = st.none() | st.tuples(st.none() | small, texts, texts)


@given(st.none() | st.tuples(pairs, st.none() | st.lists(pairs, max_size=3)))
@quick
def test_composites(connection: psycopg.Connection[Any], value: Any) -> None:
    with no_trace(connection):
        connection.execute(
            """
            create domain tags as text[];
            create type pair as (n int, gone int, "the ""text"" of it" text, tags tags);
            alter type pair drop attribute gone;
            create type nested as (pair pair, pairs pair[]);
            create table t (v nested)
            """
        )
        types, oids = types_of(connection, "t")
        rows: list[Any] = [] if value is None else [value[0], *(value[1] or [])]
        # The pairs go in as columns, so that no code of ours or psycopg's writes a row literal.
        cursor = connection.execute(
            """
            with pairs as (
                select i, case when given then
                    row(n, "text", case when tag is not null then array[tag, null, 'x'] end)::pair
                end as pair
                from unnest(%s::bool[], %s::int[], %s::text[], %s::text[])
                    with ordinality as u (given, n, "text", tag, i)
            )
            insert into t
            select case when %s then row(
                (select pair from pairs where i = 1),
                case when %s then array(select pair from pairs where i > 1 order by i) end
            )::nested end
            returning v, to_jsonb(v)::text
            """,
            (
                [row is not None for row in rows],
                *([row and row[column] for row in rows] for column in range(3)),
                value is not None,
                value is not None and value[1] is not None,
            ),
        )
        result = cursor.pgresult
        assert result is not None
        expected = result.get_value(0, 1)
        assert converted(types, oids[0], result.get_value(0, 0)) == (
            None if expected is None else parsed(expected)
        )


def test_a_composite_follows_the_table_where_to_jsonb_does_not(
    connection: psycopg.Connection[Any],
) -> None:
    with no_trace(connection):
        connection.execute(
            """
            create type mix as (price numeric, at timestamptz, ratio float8[], raw bytea, j json);
            create table t (v mix[]);
            """
        )
        types, oids = types_of(connection, "t")
        cursor = connection.execute(
            """
            insert into t select array[row(
                199.90, '2024-10-28 21:37:01.12747+02', '{NaN,1e20}', 'a"', E'{"a":\n1.10}'
            )::mix] returning v
            """
        )
        assert cursor.pgresult is not None
        value = cursor.pgresult.get_value(0, 0)
        converter = types.converter(oids[0])
        assert value is not None
        assert converter is not None
        assert converter(value).decode() == (
            '[{"price":"199.90","at":"2024-10-28T19:37:01.127470Z","ratio":["NaN",1e+20],'
            r'"raw":"\\x6122","j":{"a": 1.10}}]'
        )


def test_forms_that_no_cast_gives(connection: psycopg.Connection[Any]) -> None:
    cursor = connection.execute(
        """
        select interval '1 month -1 day 02:03:04', 199.90, timetz '21:37:01.12747+02',
            timestamp '2024-10-28 21:37:01.12747', '1e-7'::float4, bytea 'a"', 'x'::char(3)
        """
    )
    result = cursor.pgresult
    assert result is not None
    assert [
        converted(Types(), result.ftype(column), result.get_value(0, column))
        for column in range(result.nfields)
    ] == [
        "P1M-1DT2H3M4S",
        "199.90",
        "21:37:01.12747+02",
        "2024-10-28T21:37:01.127470",
        Decimal("1e-7"),
        "\\x6122",
        "x  ",
    ]


def test_json_numbers_keep_their_digits(connection: psycopg.Connection[Any]) -> None:
    text = '{"a": 1.10, "b": 12345678901234567890.1234567890, "c": 1E400}'
    cursor = connection.execute("select %s::json, '1.10'::jsonb", (text,))
    assert cursor.pgresult is not None
    assert values.json(cursor.pgresult.get_value(0, 0) or b"").decode() == text
    assert values.json(cursor.pgresult.get_value(0, 1) or b"") == b"1.10"


def test_the_built_in_table_is_the_catalog_s(connection: psycopg.Connection[Any]) -> None:
    # Category Z is internal, and the rows of catalog tables are looked up like any composite.
    catalog = connection.execute(
        """
        select typname, oid, typarray from pg_type
        where oid < 10000 and typtype in ('b', 'r', 'm') and typarray <> 0
        """
    ).fetchall()
    entries = [entry.split() for _, types in types._BUILT_IN for entry in types.split(",")]
    assert sorted((name, int(oid), int(array)) for name, oid, array in entries) == sorted(catalog)


def test_load_types(connection: psycopg.Connection[Any]) -> None:
    with no_trace(connection):
        connection.execute(
            """
            create schema evil;
            create table evil.pg_type ();
            create table evil.pg_attribute ();
            create domain evil.age as int;
            create type evil."Odd name" as (ages evil.age[], mood mood, corners box[]);
            create domain evil.odd as evil."Odd name";
            set local search_path = evil, pg_catalog;
            """
        )
        row = connection.execute("select to_regtype('evil.odd')::oid, 1::oid").fetchone()
        assert row is not None
        connection.row_factory = dict_row  # whatever the caller prefers
        try:
            infos = load_types(connection, row)
        finally:
            connection.row_factory = psycopg.rows.tuple_row
    by_name = {info.name: info for info in infos}
    assert set(by_name) >= {"odd", "Odd name", "_age", "age", "mood", "_box", "box"}
    age, ages, odd = by_name["age"], by_name["_age"], by_name["Odd name"]
    assert age == TypeInfo(age.oid, "evil", "age", "d", base=23)
    assert ages == TypeInfo(ages.oid, "evil", "_age", "b", element=age.oid)
    assert by_name["odd"].base == odd.oid
    assert odd.attributes == (
        ("ages", ages.oid),
        ("mood", by_name["mood"].oid),
        ("corners", 1020),
    )
    assert (by_name["_box"].element, by_name["_box"].delimiter) == (603, ";")
    assert load_types(connection, []) == []


def test_vectors_of_numbers_are_no_arrays(connection: psycopg.Connection[Any]) -> None:
    infos = {info.name: info for info in load_types(connection, [22, 30, 600, 19])}
    assert {name: info.element for name, info in infos.items()} == {
        "int2vector": 0,
        "oidvector": 0,
        "point": 0,
        "name": 0,
    }


@pytest.mark.parametrize("name", ["hstore", "citext"])
def test_extension_types_are_known_by_their_names(
    connection: psycopg.Connection[Any], name: str
) -> None:
    """Stand in for extensions that the server lacks: a type of that name that prints its text."""
    with no_trace(connection):
        connection.execute(
            f"""
            create schema ext;
            create type ext.{name};
            create function ext.take(cstring) returns ext.{name}
                language internal immutable strict as 'textin';
            create function ext.give(ext.{name}) returns cstring
                language internal immutable strict as 'textout';
            create type ext.{name} (input = ext.take, output = ext.give, like = text);
            create table t (v ext.{name}, a ext.{name}[])
            """.encode()
        )
        types, oids = types_of(connection, "t")
        cursor = connection.execute(
            f"""
            insert into t select item::ext.{name}, array[item, null]::ext.{name}[]
            from (values ('"a"=>"1", "b"=>NULL'::text)) as u (item) returning v, a
            """.encode()
        )
        assert cursor.pgresult is not None
        expected = {"a": "1", "b": None} if name == "hstore" else '"a"=>"1", "b"=>NULL'
        assert converted(types, oids[0], cursor.pgresult.get_value(0, 0)) == expected
        assert converted(types, oids[1], cursor.pgresult.get_value(0, 1)) == [expected, None]
