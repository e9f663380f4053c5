"""Backfills of any table: types, keys, orders, columns and rows that are published, refusals."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import orjson
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.backfilling import TEXTS, Backfilling, backfilling, before_watermarks
from tests.integration.capturing import PATIENCE, Message, database_in, prepare
from tests.integration.test_capture_types import exists, make_strange
from tests.integration.test_values import CASES, OPTIONS

from penstock.backfill.chunks import planner, sizing
from penstock.backfill.events import Delivered, Started
from penstock.backfill.read.chunk import with_messages
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.postgres.reads import RANGE_BITS, BackfillSpec, cursor_from_json


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


def assert_as_inserted(
    driver: Backfilling, table: str = "public.t", *, absent: Sequence[str] = (), **spec: Any
) -> list[Message]:
    """Backfill a table, and compare each row with what the WAL has of its insert.

    `absent` are the columns that neither has.
    """
    driver.start(table, **spec)
    driver.run()
    reads = by_key(driver.reads())
    inserts = by_key([m for m in driver.received if m.action == "insert" and m.table == table])
    assert reads.keys() == inserts.keys()
    for key, (found, *more) in reads.items():
        assert not more, "read twice"
        (insert,) = inserts[key]
        assert found.raw == insert.raw
        assert (found.group, found.old_group) == (insert.group, insert.old_group)
        assert found.metadata.keys() == insert.metadata.keys()
        assert found.metadata["unavailable"] == insert.metadata["unavailable"] == [*absent]
        assert found.metadata["idempotency_key"] == found.key
        assert found.changes is None
        assert found.position > insert.position
    return driver.reads()


def test_every_type_reads_as_in_the_wal(database: Database) -> None:
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


def test_rows_of_a_partitioned_table(database: Database) -> None:
    with backfilling(
        database,
        "CREATE TABLE t (id int, at date, v text, PRIMARY KEY (at, id)) PARTITION BY RANGE (at)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')",
        # Other columns in another order, as it was attached later.
        "CREATE TABLE t2 (v text, gone int, at date NOT NULL, id int NOT NULL)",
        "ALTER TABLE t2 DROP gone",
        "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')",
    ) as driver:
        for year in (2024, 2025):
            database.execute(
                f"INSERT INTO t SELECT n, '{year}-03-01', n FROM generate_series(1, 9) n"
            )
        assert len(assert_as_inserted(driver)) == 18
        driver.start("public.t1")
        assert driver.failed().code == "not_published"


def test_partitions_that_are_published_by_themselves(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    database.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    with Backfilling(database.url) as driver:
        database.execute("INSERT INTO t SELECT n, n FROM generate_series(1, 9) n")
        assert len(assert_as_inserted(driver, "public.t1")) == 9
        driver.start("public.t")
        failed = driver.failed()
        assert failed.code == "not_published"
        assert "publish_via_partition_root" in failed.remedy


def test_odd_names_and_a_table_that_others_inherit(database: Database) -> None:
    with backfilling(
        database,
        'CREATE TABLE "T %s.{x} ""q""" ("Key %(a)s" int, "order" text, "{}" int, PRIMARY KEY ("order",'
        ' "Key %(a)s"))',
        'CREATE TABLE child () INHERITS ("T %s.{x} ""q""")',
    ) as driver:
        name = '"T %s.{x} ""q"""'
        for n in range(9):
            database.execute(f"INSERT INTO {name} VALUES ({n}, 'o''{n % 3}', {n})")
        database.execute("INSERT INTO child VALUES (1, 'of the child', 1)")
        assert len(assert_as_inserted(driver, 'public.T %s.{x} "q"')) == 9


def test_bytes_that_are_no_utf8(postgres: EmbeddedPostgres) -> None:
    """A SQL_ASCII database takes them; where a key has some, a backfill can't say where it is."""
    with (
        database_in(postgres, "SQL_ASCII") as database,
        backfilling(
            database,
            "CREATE TABLE t (id int PRIMARY KEY, name text, list text[])",
            "CREATE TABLE k (id text PRIMARY KEY)",
        ) as driver,
    ):
        database.execute(
            "INSERT INTO t SELECT n, 'caf' || chr(233), ARRAY['x' || chr(233), 'é']"
            " FROM generate_series(1, 20) n"
        )
        found = assert_as_inserted(driver, where="list[2] = 'é'")
        record = {"name": "caf\\xe9", "list": ["x\\xe9", "é"]}
        assert [m.record for m in found] == [{"id": n, **record} for n in range(1, 21)]
        database.execute("INSERT INTO k SELECT chr(200 + n) FROM generate_series(1, 20) n")
        driver.start("public.k")
        assert driver.failed().code == "not_utf8"


def test_columns_and_rows_that_are_published(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, secret text, v int, twice int GENERATED ALWAYS AS (v * 2)"
        " STORED, late text)"
    )
    database.execute("ALTER TABLE t DROP late")
    database.execute("CREATE PUBLICATION p FOR TABLE t (v, id, twice) WHERE (id % 2 = 0)")
    database.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    database.execute("INSERT INTO t (id, secret, v) SELECT n, 's', n FROM generate_series(-9, 9) n")
    with Backfilling(database.url) as driver:
        reads = assert_as_inserted(driver)
        assert [m.record["id"] for m in reads] == list(range(-8, 9, 2))
        assert reads[0].record == {"id": -8, "v": -8, "twice": -16}


def test_generated_columns_that_are_not_published(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v int, twice int GENERATED ALWAYS AS (v * 2) STORED,"
        " thrice int GENERATED ALWAYS AS (v * 3) VIRTUAL)"
    )
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    database.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    database.execute("INSERT INTO t SELECT n, n FROM generate_series(1, 9) n")
    with Backfilling(database.url) as driver:
        reads = assert_as_inserted(driver, absent=["twice", "thrice"])
        assert reads[0].record == {"id": 1, "v": 1}


def test_rows_that_a_condition_holds_for(database: Database) -> None:
    with backfilling(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT n, CASE WHEN n % 100 < 3 THEN 'a%b' ELSE '{c}' END"
        " FROM generate_series(1, 2000) n",
    ) as driver:
        chosen = [n for n in range(1, 2001) if n % 100 < 3]
        driver.start(where="\"v\" LIKE 'a\\%%' OR \"v\" = '{d}'")
        driver.run()
        assert [m.record["id"] for m in driver.reads()] == chosen
        before = len(driver.reads())
        driver.start(where="id / (id - 7) = 1 AND id > 3", cursor=("2", "?"))
        assert driver.failed().code == "cursor"
        driver.start(where="id / (id - 7) > 1")
        failed = driver.failed()
        assert "zero" in failed.message
        driver.start(where="false")
        driver.run()
        assert len(driver.reads()) == before


@pytest.mark.parametrize("scans", [(1, 1), (3, 10)])
def test_few_rows_of_many_that_are_looked_through(
    database: Database, monkeypatch: pytest.MonkeyPatch, scans: tuple[int, int]
) -> None:
    monkeypatch.setattr(planner, "_SCANS", scans)
    monkeypatch.setattr(sizing, "FEWEST", 1)
    prepare(
        database,
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t SELECT n FROM generate_series(1, 60) n",
    )
    conditions = {
        "id % 7 = 0": range(7, 61, 7), "id > 55": range(56, 61), "id < 4": range(1, 4),
        "id = 60": [60], "true": range(1, 61),
    }  # fmt: skip
    for splits in (1, 2, 3):
        with Backfilling(database.url, splits=splits) as driver:
            for where, chosen in conditions.items():
                before = len(driver.reads())
                driver.start(where=where)
                driver.run()
                assert [m.record["id"] for m in driver.reads()[before:]] == list(chosen), where


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
@pytest.mark.parametrize(
    "columns", [(None, None), (["a"], None), (["a", "b"], ["a"]), (None, ["b"]), ([], [])]
)
def test_a_row_is_read_into_the_split_of_its_changes(
    database: Database, identity: str, columns: tuple[list[str] | None, list[str] | None]
) -> None:
    """So that the lane that has them keeps their order."""
    prepare(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text, b numeric)",
        f"ALTER TABLE t REPLICA IDENTITY {identity}",
        "INSERT INTO t SELECT n, 'x' || n % 5, n % 7 FROM generate_series(1, 50) n",
    )
    with Backfilling(database.url, splits=5, grouping=lambda *_: columns) as driver:
        reader = driver.reader
        driver.start()
        driver.await_event(Started)
        read, changed = dict[int, int](), dict[int, int]()
        while len(read) < 50 or len(changed) < 50:
            end = reader.capture.available(reader.position, 10_000, PATIENCE)
            for chunk in reader.capture.take(reader.position, end):
                whole = chunk if chunk.reads is None else with_messages(chunk, 5)
                for piece in whole.pieces:
                    records = piece.messages.column("record").to_pylist()
                    each = piece.each or [min(piece.splits)] * len(records)
                    to = changed if chunk.reads is None else read
                    to |= {orjson.loads(r)["id"]: s for r, s in zip(records, each, strict=True)}
            reader.position = end
            reader.capture.confirm(end)
            if len(read) == 50 and not changed:
                database.execute("UPDATE t SET id = id")
        assert read == changed


def weights(driver: Backfilling) -> list[int]:
    """Return the bytes of the records of each range that was read."""
    found: dict[tuple[int, int], int] = {}
    for message in driver.reads():
        at = (message.position.lsn, message.position.idx >> RANGE_BITS)
        found[at] = found.get(at, 0) + len(orjson.dumps(message.record))
    return list(found.values())


def test_ranges_of_heavy_rows_have_few(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighed as text: in the table these rows are small, as they are compressed."""
    monkeypatch.setattr(sizing, "MOST", 1000)
    monkeypatch.setattr(sizing, "RANGE_BYTES", 200_000)
    with backfilling(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, doc text, n int)",
        "INSERT INTO t SELECT n, repeat('x', 20000) FROM generate_series(1, 150) n",
    ) as driver:
        driver.start()
        driver.run()
        assert [message.record["id"] for message in driver.reads()] == list(range(1, 151))
        assert 150_000 < max(weights(driver)) < 210_000


def test_rows_that_get_heavy_are_read_again_in_smaller_ranges(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "FEWEST", 30)
    monkeypatch.setattr(sizing, "MOST", 1000)
    monkeypatch.setattr(sizing, "RANGE_BYTES", 200_000)
    monkeypatch.setattr(sizing, "TOO_HEAVY", 300_000)
    # Ranges grow, however slow the machine is, and whether changes are live or not.
    monkeypatch.setattr(sizing, "LIVE_MOST", 1000)
    for seconds in ("IDLE_SECONDS", "LIVE_SECONDS"):
        monkeypatch.setattr(sizing, seconds, 3600.0)
    with backfilling(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, doc text)",
        # Ranges end at multiples of 30, and the next 16 rows are weighed. So one that ends before row
        # 616 is followed by one with heavy rows that are not weighed, and any that ends behind has 14.
        "INSERT INTO t SELECT n, repeat('x', CASE WHEN n > 616 THEN 30000 ELSE 1 END)"
        " FROM generate_series(1, 700) n",
    ) as driver:
        driver.start()
        driver.run()
        assert {message.record["id"] for message in driver.reads()} == set(range(1, 701))
        assert max(weights(driver)) < 450_000  # of the fewest rows that are read at once
        assert len({reads.attempt for reads in driver.chunks}) > 1


SORTED = (
    "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v int)",
    "INSERT INTO t SELECT n, CASE WHEN n % 3 > 0 THEN timestamptz '2024-01-01+00' + (n * 37 % 11) *"
    " interval '1 day' END, n FROM generate_series(1, 30) n",
)


def test_rows_in_the_order_of_a_column_nulls_last(database: Database) -> None:
    with backfilling(database, *SORTED) as driver:
        driver.start(sort_by="at")
        driver.run()
        order = database.execute("SELECT id FROM t ORDER BY at NULLS LAST, id")
        assert [m.record["id"] for m in driver.reads()] == [row[0] for row in order]
        cursors = [e.cursor for e in driver.events if isinstance(e, Delivered)]
    for cursor in cursors:
        assert cursor is not None
        with Backfilling(database.url) as again:
            again.start(sort_by="at", cursor=cursor)
            again.run()
            key = [cursor[0], cursor[0], int(str(cursor[1]))]
            left = database.execute(
                "SELECT id FROM t WHERE CASE WHEN %s::timestamptz IS NULL THEN at IS NULL AND id > %s"
                " ELSE at IS NULL OR (at, id) > (%s, %s) END ORDER BY at NULLS LAST, id",
                [key[0], key[2], key[1], key[2]],
            )
            assert [m.record["id"] for m in again.reads()] == [row[0] for row in left]


@pytest.mark.parametrize("where", [None, "v > 0"])
def test_rows_that_writers_move_to_the_end_are_not_followed_for_ever(
    database: Database, monkeypatch: pytest.MonkeyPatch, where: str | None
) -> None:
    monkeypatch.setattr(sizing, "MOST", 1000)
    monkeypatch.setattr(sizing, "LIVE_MOST", 10)
    monkeypatch.setattr(planner, "_SCANS", (1000, 1000))
    moved: list[int] = []

    def move(_: object) -> None:
        moved.append(1)
        if len(moved) < 100:
            database.execute("UPDATE t SET v = nextval('s') WHERE id <= 50")

    before_watermarks(monkeypatch, move)
    with backfilling(
        database,
        "CREATE SEQUENCE s",
        "CREATE TABLE t (id int PRIMARY KEY, v bigint)",
        "CREATE INDEX ON t (v)",
        "INSERT INTO t SELECT n, nextval('s') FROM generate_series(1, 60) n",
    ) as driver:
        driver.start(sort_by="v", where=where)
        driver.run()
        assert len(moved) < 40
        assert {m.record["id"] for m in driver.reads()} >= set(range(51, 61))


def test_a_value_to_start_at_leaves_nulls_out(database: Database) -> None:
    with backfilling(database, *SORTED) as driver:
        driver.start(sort_by="at", start="2024-01-05 00:00:00+00", where="v <> 7")
        driver.run()
        order = database.execute(
            "SELECT id FROM t WHERE at >= '2024-01-05+00' AND v <> 7 ORDER BY at, id"
        )
        assert [m.record["id"] for m in driver.reads()] == [row[0] for row in order]
        driver.start(sort_by="at", start="'; DROP TABLE t")
        assert driver.failed().code == "postgres"


def test_sorting_by_a_part_of_the_key(database: Database) -> None:
    with backfilling(
        database,
        "CREATE TABLE t (a int, b text, PRIMARY KEY (a, b))",
        "INSERT INTO t SELECT n % 4, n FROM generate_series(1, 30) n",
    ) as driver:
        for where in (None, "a <> 9"):
            before = len(driver.reads())
            driver.start(sort_by="b", where=where)
            driver.run()
            order = database.execute("SELECT a, b FROM t ORDER BY b, a")
            assert [(m.record["a"], m.record["b"]) for m in driver.reads()[before:]] == order


GROUPED = ("CREATE TABLE t (id int PRIMARY KEY, customer text, v int)",)


@pytest.mark.parametrize("full", [False, True])
def test_groups_are_those_of_the_wal(database: Database, full: bool) -> None:
    """Also where a delete lacks its group, so that the row's key ties its messages."""
    grouping = {"grouping": lambda *_: (["customer"], None)}
    identity = ["ALTER TABLE t REPLICA IDENTITY FULL"] if full else []
    with backfilling(database, *GROUPED, *identity, **grouping) as driver:
        database.execute(
            "INSERT INTO t SELECT n, CASE WHEN n % 4 > 0 THEN 'c' || n % 3 END, n"
            " FROM generate_series(1, 20) n"
        )
        assert_as_inserted(driver)


def test_a_row_that_moved_is_tied_to_its_first_key(database: Database) -> None:
    grouping = {"grouping": lambda *_: (["customer"], None)}
    with backfilling(database, *GROUPED, **grouping) as driver:
        database.execute("INSERT INTO t VALUES (1, 'c', 1)")
        database.execute("UPDATE t SET id = 2")
        driver.start()
        driver.run()
        (read,) = driver.reads()
        assert {m.old_group for m in driver.received} == {read.old_group}


@pytest.mark.parametrize(
    ("statements", "table", "code"),
    [
        ((), "public.nowhere", "table_missing"),
        (("CREATE VIEW v AS SELECT 1 AS id",), "public.v", "table_missing"),
        (("CREATE TABLE t (id int)",), "public.t", "no_primary_key"),
        (("CREATE SCHEMA o", "CREATE TABLE o.t (id int PRIMARY KEY)"), "o.t", "not_published"),
        (
            (
                "CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)",
                "CREATE TABLE t1 (id int NOT NULL)",
                "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (0) TO (9)",
                "CREATE UNIQUE INDEX i ON t1 (id)",
                "ALTER TABLE t1 REPLICA IDENTITY USING INDEX i",
            ),
            "public.t",
            "replica_identity",
        ),
    ],
)
def test_tables_that_are_refused(
    database: Database, statements: tuple[str, ...], table: str, code: str
) -> None:
    with backfilling(database, *statements) as driver:
        driver.start(table)
        failed = driver.failed()
        assert failed.code == code
        assert failed.remedy or table.endswith((".nowhere", ".v"))


def test_columns_that_are_refused(database: Database) -> None:
    with backfilling(
        database, "CREATE TABLE t (id int PRIMARY KEY, p point, updated int)"
    ) as driver:
        driver.start(sort_by="p")
        assert driver.failed().code == "not_ordered"
        driver.start(sort_by="update")
        failed = driver.failed()
        assert failed.code == "column_missing"
        assert "updated" in failed.message
        driver.start(start="3")
        assert driver.failed().code == "no_sort_by"


def test_what_a_role_may_not_see_is_refused(database: Database) -> None:
    role = f"r{database.name}"
    prepare(
        database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE POLICY few ON t USING (id > 3)"
    )
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    url = database.url.replace("postgres@", f"{role}@")
    try:
        with Backfilling(url) as driver:
            driver.start()
            failed = driver.failed()
            assert failed.code == "permission_denied"
            assert "GRANT" in failed.remedy
            database.execute(f"GRANT SELECT ON t TO {role}")
            database.execute("INSERT INTO t VALUES (1)")
            driver.start()
            driver.run()
            assert len(driver.reads()) == 1
            database.execute("ALTER TABLE t ENABLE ROW LEVEL SECURITY")
            driver.start()
            assert driver.failed().code == "row_security"
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_the_url_is_shown_nowhere(database: Database) -> None:
    with backfilling(database, *SORTED) as driver:
        driver.start()
        driver.run()
        assert database.url not in repr(driver.chunks)
        assert pickle.loads(pickle.dumps(driver.chunks)) == driver.chunks
        (spec,) = {chunk.spec for chunk in driver.chunks}
        assert BackfillSpec.from_json(orjson.loads(orjson.dumps(spec))) == spec
        assert orjson.dumps(driver.events)
        assert [cursor_from_json(orjson.loads(orjson.dumps(driver.cursor)))] == [driver.cursor]
