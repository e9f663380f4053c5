"""Backfills of any table: types, keys, orders, columns and rows that are published, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.backfilling import Backfilling, backfilling
from tests.integration.capturing import PUBLICATION, Message, prepare
from tests.integration.test_capture_types import exists, make_strange
from tests.integration.test_values import CASES, OPTIONS

from penstock.embedded.handles import Database
from penstock.postgres.backfill import sizing

TEXTS = [
    "b",
    "B",
    "a",
    "á",
    "Z",
    "",
    " ",
    "a'b",
    'a"b',
    "a\\b",
    "a,b\n(c)",
    "{%s}",
    "ß",
    "😀",
    "\ufeffx",
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "FEWEST", 4)
    monkeypatch.setattr(sizing, "MOST", 6)


def by_key(found: Sequence[Message]) -> dict[str, list[Message]]:
    """Return messages by the primary keys of their rows, as JSON."""
    keyed: dict[str, list[Message]] = {}
    for message in found:
        keyed.setdefault(orjson.dumps(message.metadata["record_pks"]).decode(), []).append(message)
    return keyed


def assert_as_inserted(driver: Backfilling, table: str = "public.t", **spec: Any) -> list[Message]:
    """Backfill a table, and compare each row with what the WAL told of its insert."""
    driver.start(table, **spec)
    driver.run()
    reads = by_key(driver.reads())
    inserts = by_key([m for m in driver.received if m.action == "insert" and m.table == table])
    assert reads.keys() == inserts.keys()
    for key, (read, *more) in reads.items():
        assert not more, "read twice"
        (insert,) = inserts[key]
        assert read.raw == insert.raw
        assert (read.group, read.old_group) == (insert.group, insert.old_group)
        assert read.metadata.keys() == insert.metadata.keys()
        assert read.metadata["unavailable"] == []
        assert read.metadata["idempotency_key"] == read.key
        assert read.changes is None
        assert read.position > insert.position
    return driver.reads()


def test_every_type_reads_as_the_wal_tells_it(database: Database) -> None:
    database.execute("CREATE TYPE mood AS ENUM ('happy', 'so \"so\"', 'NULL', '{}')")
    database.execute('CREATE SCHEMA odd CREATE TABLE "Ta""ble" ()')
    database.execute('CREATE TYPE pair AS (l int, "r ""%s" text, at timestamptz)')
    with database.connect(autocommit=True, options=OPTIONS) as session:
        cases = [case for case in CASES if exists(session, case)]
        columns = [f'"v{i} %s{{" {c.type}, a{i} {c.type}[]' for i, c in enumerate(cases)]
        session.execute(
            f"CREATE TABLE t (id serial PRIMARY KEY, p pair, ps pair[], {', '.join(columns)})".encode()
        )
        make_strange(database)
        prepare(database)
        names = ", ".join(f'"v{i} %%s{{", a{i}' for i in range(len(cases)))
        values = ", ".join(f"%s::{c.type}, %s::text[]::{c.type}[]" for c in cases)
        insert = f"INSERT INTO t (p, ps, {names}) VALUES (%s, %s, {values})"

        @settings(
            max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), database=None
        )
        @given(st.data())
        def rows(data: st.DataObject) -> None:
            with session.transaction():
                for _ in range(10):
                    drawn: list[Any] = [
                        '(1,"a ""b",\'2024-10-28 21:37:01.5+02\')',
                        '{"(2,,)",NULL}',
                    ]
                    for case in cases:
                        drawn.append(data.draw(st.none() | case.literals))
                        drawn.append(data.draw(st.lists(st.none() | case.literals, max_size=2)))
                    session.execute(insert.encode(), drawn)

        rows()
        with Backfilling(database.url) as driver:
            assert len(assert_as_inserted(driver)) >= 20


KEYS = {
    "negative numbers": ("k int", ["0", "-1", "1", "-2147483648", "2147483647", "-7", "8", "9"]),
    "numeric": ("k numeric", ["0", "-1.10", "1e30", "NaN", "-Infinity", "Infinity", "1.1", "2"]),
    "float": ("k float8", ["0", "-1.5", "1e-300", "NaN", "-Infinity", "Infinity", "0.1", "3"]),
    "bool": ("k bool", ["t", "f"]),
    "text": ("k text", TEXTS),
    "text in C": ('k text COLLATE "C"', TEXTS),
    "text in ICU": ('k text COLLATE "und-x-icu"', TEXTS),
    "text without case": ("k text COLLATE nocase", ["b", "a", "Ä", "z", "", "ab", "Aa", "x y"]),
    "varchar": ("k varchar(9)", TEXTS),
    "char": ("k char(9)", [t for t in TEXTS if t.strip()]),
    "one char": ('k "char"', ["a", "B", "-", "'", "z", "\\377"]),
    "name": ("k name", TEXTS),
    "uuid": ("k uuid", [f"{n:032x}" for n in (0, 1, 2**127, 2**128 - 1, 7, 2**64, 99)]),
    "enum": ("k mood", ["sad", "ok", "happy", "so 'so", "B"]),
    "timestamp": (
        "k timestamp",
        [
            "2024-10-28 21:37:01.12747",
            "infinity",
            "-infinity",
            "0044-03-15 BC",
            "2024-10-28",
            "10001-1-1",
        ],
    ),
    "timestamptz": (
        "k timestamptz",
        ["2024-10-28 21:37:01.1+05:30", "infinity", "2024-10-28", "1-1-1 BC"],
    ),
    "date": ("k date", ["2024-10-28", "infinity", "0044-03-15 BC", "1999-01-01", "2000-02-29"]),
    "interval": ("k interval", ["1 month", "29 days", "-1 day", "1 year -1 us", "0", "99:00"]),
    "bytea": ("k bytea", ["\\x", "\\x00", "\\xff", "\\x5c27", "\\x0001", "abc", "z"]),
    "inet": ("k inet", ["10.0.0.1", "10.0.0.0/8", "::1", "192.168.0.0/24", "10.0.0.1/31"]),
    "cidr": ("k cidr", ["10.0.0.0/8", "::/0", "192.168.0.0/24", "10.0.0.0/31", "1.2.3.4"]),
    "bits": ("k bit(3)", ["000", "101", "111", "001", "010", "100"]),
    "bit varying": ("k varbit", ["", "0", "1", "101", "0001", "11111111111"]),
    "money": ("k money", ["1", "-2.5", "100000", "0", "7.07", "3"]),
    "array": ("k int[]", ["{}", "{1}", "{1,2}", "{-1,NULL}", "{{1},{2}}", "{3}"]),
    "range": ("k int4range", ["empty", "[1,2)", "(,)", "[5,)", "[1,9)", "[0,1)"]),
    "jsonb": ("k jsonb", ['{"a": 1}', "1", '"x\'"', "[]", "null", '{"a": 1.10}']),
    "composite type": ("k pair", ['(1,"a,b")', "(1,)", "(0,z)", '(2,"")', "(,x)"]),
    "domain": ("k grade", ["A1", "B2", "Z9", "c3", "Ä4"]),
    "domain over enum": ("k feeling", ["sad", "ok", "happy"]),
    "type of an own order": ("k odd.folded", ["b", "A", "c", "D", "aa", "Zz", "'"]),
}
TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'B', 'ok', 'happy', 'so ''so')",
    "CREATE DOMAIN feeling AS mood",
    "CREATE TYPE pair AS (l int, r text)",
    'CREATE DOMAIN grade AS text COLLATE "C" CHECK (length(VALUE) = 2)',
    "CREATE SCHEMA odd",
    "CREATE TYPE odd.folded",
    "CREATE FUNCTION odd.folded_in(cstring) RETURNS odd.folded IMMUTABLE STRICT"
    " LANGUAGE internal AS 'textin'",
    "CREATE FUNCTION odd.folded_out(odd.folded) RETURNS cstring IMMUTABLE STRICT"
    " LANGUAGE internal AS 'textout'",
    "CREATE TYPE odd.folded (INPUT = odd.folded_in, OUTPUT = odd.folded_out, LIKE = text,"
    " CATEGORY = 'S')",
    # Printed through other casts, its text would be another; in another order, rows would be missed.
    "CREATE FUNCTION odd.shown(odd.folded) RETURNS text IMMUTABLE STRICT LANGUAGE sql"
    " AS $$ SELECT 'x' $$",
    "CREATE CAST (odd.folded AS text) WITH FUNCTION odd.shown(odd.folded) AS IMPLICIT",
    "CREATE FUNCTION odd.compare(a odd.folded, b odd.folded) RETURNS int IMMUTABLE STRICT"
    " LANGUAGE plpgsql"
    " AS $$ BEGIN RETURN bttextcmp(lower(textin(odd.folded_out(a))) COLLATE \"C\","
    " lower(textin(odd.folded_out(b))) COLLATE \"C\"); END $$",
    *(
        f"CREATE FUNCTION odd.f{n}(a odd.folded, b odd.folded) RETURNS bool IMMUTABLE STRICT"
        f" LANGUAGE sql AS $$ SELECT odd.compare(a, b) {op} 0 $$;"
        f" CREATE OPERATOR odd.{op} (LEFTARG = odd.folded, RIGHTARG = odd.folded, FUNCTION = odd.f{n})"
        for n, op in enumerate(("<", "<=", "=", ">=", ">"), 1)
    ),
    "CREATE OPERATOR CLASS odd.ops DEFAULT FOR TYPE odd.folded USING btree AS OPERATOR 1 odd.<,"
    " OPERATOR 2 odd.<=, OPERATOR 3 odd.=, OPERATOR 4 odd.>=, OPERATOR 5 odd.>,"
    " FUNCTION 1 odd.compare(odd.folded, odd.folded)",
)  # fmt: skip


NO_CASE = (
    "CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
)


def keys_of(database: Database) -> dict[str, tuple[str, list[str]]]:
    """Return the keys that this server can have: it may be built without ICU."""
    try:
        database.execute(NO_CASE)
    except psycopg.errors.FeatureNotSupported:
        return {k: v for k, v in KEYS.items() if "icu" not in v[0] and "nocase" not in v[0]}
    return KEYS


def test_any_primary_key(database: Database) -> None:
    keys = keys_of(database)
    prepare(database, *TYPES)
    with database.connect(autocommit=True) as session:
        for number, (column, literals) in enumerate(keys.values()):
            single, first, last = (f"t{number}{kind}" for kind in "sfl")
            session.execute(f"CREATE TABLE {single} ({column} PRIMARY KEY, v int)".encode())
            for name, key in ((first, "k, n"), (last, "n, k")):
                session.execute(
                    f"CREATE TABLE {name} (v int, {column}, n int, PRIMARY KEY ({key}))".encode()
                )
            for literal in literals:
                session.execute(f"INSERT INTO {single} VALUES (%s)".encode(), [literal])
                for name in (first, last):
                    session.execute(
                        f"INSERT INTO {name} SELECT 1, %s, n FROM generate_series(-1, 1) n".encode(),
                        [literal],
                    )
    with Backfilling(database.url) as driver:
        for number, (name, (_, literals)) in enumerate(keys.items()):
            for kind, rows in (("s", 1), ("f", 3), ("l", 3)):
                before = len(driver.reads())
                driver.start(f"public.t{number}{kind}")
                driver.run()
                reads = driver.reads()[before:]
                assert len(reads) == len(literals) * rows, name
                assert len(by_key(reads)) == len(reads), name
    inserts = {(m.table, m.raw): m.group for m in driver.received if m.action == "insert"}
    reads_found = {(m.table, m.raw): m.group for m in driver.reads()}
    assert reads_found == inserts
