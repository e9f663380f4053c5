"""What a capture makes of each kind of change, over a real Postgres."""

from __future__ import annotations

import time

import pytest
from tests.integration.capturing import Reader, capturing, of, prepare
from tests.waits import await_true

from penstock.embedded.handles import Database
from penstock.expressions.planned import Planned


def test_insert_update_delete(database: Database) -> None:
    with capturing(database, "CREATE TABLE t (id int PRIMARY KEY, a text)") as reader:
        database.execute("INSERT INTO t VALUES (1, 'x')")
        database.execute("UPDATE t SET a = 'y'")
        database.execute("DELETE FROM t")
        insert, update, delete = reader.read()
    assert (insert.action, insert.record, insert.changes) == ("insert", {"id": 1, "a": "x"}, None)
    assert (update.action, update.record, update.changes) == ("update", {"id": 1, "a": "y"}, {})
    assert (delete.action, delete.record, delete.changes) == ("delete", {"id": 1}, None)
    assert delete.metadata["unavailable"] == ["a"]
    assert insert.metadata["unavailable"] == update.metadata["unavailable"] == []
    assert insert.groups == update.groups == delete.groups
    metadata = insert.metadata
    assert metadata["table_schema"] == "public"
    assert metadata["table_name"] == "t"
    assert metadata["database"] == database.name
    assert metadata["record_pks"] == [1]
    assert metadata["commit_lsn"] == insert.position.lsn
    assert metadata["commit_idx"] == insert.position.idx == 0
    assert metadata["idempotency_key"] == insert.key
    assert metadata["commit_timestamp"].endswith("Z")
    assert len({message.metadata["transaction_id"] for message in (insert, update, delete)}) == 3
    assert len({message.key for message in (insert, update, delete)}) == 3


def test_what_waits_is_counted_until_it_is_confirmed(database: Database) -> None:
    began = time.monotonic()
    with capturing(database, "CREATE TABLE t (id int PRIMARY KEY)") as reader:
        stats = reader.capture.stats
        assert reader.capture.waiting() == (0, None)
        database.execute("INSERT INTO t SELECT generate_series(1, 5)")
        await_true(lambda: reader.capture.waiting()[0] == 5)  # read, and in no chunk yet
        await_true(lambda: (reader.capture.waiting()[1] or 0) > 0.2)
        first = reader.capture.waiting()[1]
        reader.batch()
        count, age = reader.capture.waiting()
        assert count == 5
        assert age is not None
        assert first is not None
        assert age >= first  # since it was captured, not since it was handed out
        database.execute("INSERT INTO t VALUES (6)")
        await_true(lambda: reader.capture.waiting()[0] == 6)
        reader.confirm()
        assert stats.confirmed == 5
        assert stats.deliveries == 1
        first_us = stats.delivery_us
        assert 200_000 < first_us < (time.monotonic() - began) * 1e6  # it has waited for 0.2 s
        count, younger = reader.capture.waiting()
        assert (count, younger is not None and younger < age) == (1, True)
        reader.batch()
        reader.confirm()
        assert reader.capture.waiting() == (0, None)
        assert (stats.confirmed, stats.deliveries) == (6, 2)
        assert first_us < stats.delivery_us < 2 * (time.monotonic() - began) * 1e6


def test_replica_identity_full_gives_old_values(database: Database) -> None:
    with capturing(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text, b int)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
    ) as reader:
        database.execute("INSERT INTO t VALUES (1, NULL, 2)")
        database.execute("UPDATE t SET a = 'y', b = NULL")
        database.execute("UPDATE t SET a = a")
        database.execute("DELETE FROM t")
        _, update, same, delete = reader.read()
    assert update.changes == {"a": None, "b": 2}
    assert same.changes == {}
    assert delete.record == {"id": 1, "a": "y", "b": None}
    assert delete.metadata["unavailable"] == []
    assert delete.metadata["record_pks"] == [1]


def test_replica_identity_index_beside_the_primary_key(database: Database) -> None:
    with capturing(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL UNIQUE, a text)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_code_key",
    ) as reader:
        database.execute("INSERT INTO t VALUES (1, 'c', 'x')")
        database.execute("UPDATE t SET a = 'y'")
        database.execute("UPDATE t SET code = 'd'")
        database.execute("DELETE FROM t")
        insert, update, moved, delete = reader.read()
    assert moved.changes == {"code": "c"}
    assert moved.metadata["record_pks"] == [1]
    assert delete.record == {"code": "d"}
    assert delete.metadata["unavailable"] == ["id", "a"]
    # The row is followed by what its deletes have.
    assert insert.groups == update.groups
    assert update.groups < moved.groups
    assert delete.groups < moved.groups


def test_replica_identity_nothing_and_no_primary_key(database: Database) -> None:
    with capturing(
        database,
        "CREATE TABLE n (id int PRIMARY KEY)",
        "ALTER TABLE n REPLICA IDENTITY NOTHING",
        "CREATE TABLE bare (a int, b text)",
        "CREATE TABLE full_bare (a int, b text)",
        "ALTER TABLE full_bare REPLICA IDENTITY FULL",
    ) as reader:
        database.execute("INSERT INTO n VALUES (1)")
        database.execute("INSERT INTO bare VALUES (1, 'x')")
        database.execute("INSERT INTO full_bare VALUES (1, 'x')")
        database.execute("UPDATE full_bare SET b = 'y'")
        database.execute("DELETE FROM full_bare")
        n, bare, insert, update, delete = reader.read()
    assert n.metadata["record_pks"] == [1]
    assert bare.metadata["record_pks"] == []
    assert bare.record == {"a": 1, "b": "x"}
    assert update.changes == {"b": "x"}
    assert delete.record == {"a": 1, "b": "y"}
    assert insert.groups < update.groups
    assert delete.groups < update.groups


def test_primary_key_update(database: Database) -> None:
    with capturing(database, "CREATE TABLE t (id int PRIMARY KEY, a text)") as reader:
        database.execute("INSERT INTO t VALUES (1, 'x')")
        database.execute("UPDATE t SET id = 2")
        database.execute("DELETE FROM t")
        insert, update, delete = reader.read()
    assert update.record == {"id": 2, "a": "x"}
    assert update.changes == {"id": 1}
    assert update.metadata["record_pks"] == [2]
    assert update.groups == insert.groups | delete.groups
    assert len(update.groups) == 2


def test_composite_keys_are_in_key_order(database: Database) -> None:
    with capturing(
        database, "CREATE TABLE t (b int, x text, a int, PRIMARY KEY (a, b) INCLUDE (x))"
    ) as reader:
        database.execute("INSERT INTO t VALUES (1, 'x', 2)")
        database.execute("UPDATE t SET b = 3")
        database.execute("DELETE FROM t")
        insert, update, delete = reader.read()
    assert insert.metadata["record_pks"] == [2, 1]
    assert update.metadata["record_pks"] == [2, 3]
    assert update.changes == {"b": 1, "a": 2} or update.changes == {"b": 1}
    assert delete.record == {"b": 3, "a": 2}


def test_quoted_and_non_ascii_names(database: Database) -> None:
    with capturing(
        database,
        'CREATE TABLE "Tür ""1"", 100%" ("Größe 100%b" int PRIMARY KEY, "a\\b" text, "😀" text)',
    ) as reader:
        database.execute('INSERT INTO "Tür ""1"", 100%" VALUES (1, \'é\', \'"\\\')')
        (message,) = reader.read()
    assert message.table == 'public.Tür "1", 100%'
    assert message.record == {"Größe 100%b": 1, "a\\b": "é", "😀": '"\\'}


def test_partitioned_table_comes_under_its_root(database: Database) -> None:
    with capturing(
        database,
        "CREATE TABLE t (id int, day int, a text, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        # Columns in another order, with a dropped one between: they come in the root's.
        "CREATE TABLE t2 (a text, gone int, day int NOT NULL, id int NOT NULL)",
        "ALTER TABLE t2 DROP COLUMN gone",
        "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20)",
    ) as reader:
        database.execute("INSERT INTO t VALUES (1, 1, 'x'), (2, 11, 'y')")
        database.execute("UPDATE t SET day = 12 WHERE id = 1")  # moves: a delete and an insert
        database.execute("DELETE FROM t WHERE id = 2")
        database.execute("CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (20) TO (30)")
        database.execute("INSERT INTO t VALUES (3, 21, 'z')")
        messages = reader.read()
    assert {message.table for message in messages} == {"public.t"}
    assert [(m.action, m.record) for m in messages] == [
        ("insert", {"id": 1, "day": 1, "a": "x"}),
        ("insert", {"id": 2, "day": 11, "a": "y"}),
        ("delete", {"id": 1, "day": 1}),
        ("insert", {"id": 1, "day": 12, "a": "x"}),
        ("delete", {"id": 2, "day": 11}),
        ("insert", {"id": 3, "day": 21, "a": "z"}),
    ]


def test_partitions_whose_identity_is_less_than_their_roots(database: Database) -> None:
    """FULL on the root reaches no partition, though the Relation message says so."""
    with capturing(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, big text, a text) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "ALTER TABLE ONLY t REPLICA IDENTITY FULL",
        "ALTER TABLE t1 ALTER big SET STORAGE EXTERNAL",
    ) as reader:
        database.execute("INSERT INTO t VALUES (1, repeat('x', 10000), 'a')")
        database.execute("UPDATE t SET id = 2")
        database.execute("DELETE FROM t")
        _, update, delete = reader.read()
    assert update.record == {"id": 2, "a": "a"}
    assert update.changes == {"id": 1}
    assert update.metadata["unavailable"] == ["big"]
    assert delete.record == {"id": 2}
    assert delete.metadata["unavailable"] == ["big", "a"]


def test_generated_columns(database: Database) -> None:
    with capturing(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, double int GENERATED ALWAYS AS (id * 2) STORED)",
    ) as reader:
        database.execute("INSERT INTO t VALUES (21)")
        (message,) = reader.read()
    assert message.record == {"id": 21, "double": 42}
    assert message.metadata["unavailable"] == []


def test_generated_columns_that_are_not_in_the_wal_are_named(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v int, twice int GENERATED ALWAYS AS (v * 2) STORED,"
        " thrice int GENERATED ALWAYS AS (v * 3) VIRTUAL, big text);"
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL;"
        "CREATE PUBLICATION p FOR ALL TABLES WITH (publish_generated_columns = none)"
    )
    database.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    absent = ["twice", "thrice"]
    with Reader(database.url) as reader:
        database.execute("INSERT INTO t VALUES (1, 2, DEFAULT, DEFAULT, repeat('x', 3000))")
        database.execute("UPDATE t SET v = 3")
        database.execute("DELETE FROM t")
        database.execute("TRUNCATE t")
        insert, update, delete, truncate = reader.read()
        assert insert.record == {"id": 1, "v": 2, "big": "x" * 3000}
        assert insert.metadata["unavailable"] == absent
        assert update.record == {"id": 1, "v": 3}
        assert update.metadata["unavailable"] == ["big", *absent]
        assert delete.metadata["unavailable"] == ["v", "big", *absent]
        assert truncate.metadata["unavailable"] == []
        database.execute("ALTER PUBLICATION p SET (publish_generated_columns = stored)")
        database.execute("INSERT INTO t VALUES (2, 2)")
        (insert,) = reader.read()
    assert insert.record == {"id": 2, "v": 2, "twice": 4, "big": None}
    assert insert.metadata["unavailable"] == ["thrice"]


def test_a_batch_ends_before_rows_that_the_plan_was_not_made_for(database: Database) -> None:
    """The next capture goes on there, in the middle of a transaction too."""
    prepare(database, "CREATE TABLE t (id int PRIMARY KEY, n int, note text)")
    number, text = (23, -1), (25, -1)
    tables = {("public", "t"): {"n": number, "gone": None}}
    with Reader(database.url, planned=Planned(tables)) as reader:
        with database.connect() as connection:
            connection.execute("INSERT INTO t VALUES (1, 1)")
            connection.execute("ALTER TABLE t ADD COLUMN other int")
            connection.execute("INSERT INTO t VALUES (2, 2)")
            connection.execute("ALTER TABLE t ALTER n TYPE text")
            connection.execute("INSERT INTO t VALUES (3, 'three')")
        database.execute("INSERT INTO t VALUES (4, 'four')")
        assert [m.record["id"] for m in reader.read()] == [1, 2]
        assert reader.capture.available(reader.position, 10, 0.01) == reader.position
        assert reader.capture.altered() == (reader.position, ("public", "t"))
        reader.confirm()
        after, planned = reader.position, reader.written()
    # Rows from before are of an older table, which the new plan need not fit.
    tables = {("public", "t"): {"n": None, "note": text}}
    with Reader(database.url, after, planned=Planned(tables, planned)) as reader:
        database.execute("ALTER TABLE t DROP n")
        database.execute("INSERT INTO t VALUES (5)")
        database.execute("CREATE TABLE later (id int PRIMARY KEY)")
        database.execute("INSERT INTO later VALUES (1)")
        assert [m.record["id"] for m in reader.read()] == [3, 4, 5]
        assert reader.capture.altered() == (reader.position, ("public", "later"))


def test_columns_and_tables_that_change_while_it_runs(database: Database) -> None:
    with capturing(database, "CREATE TABLE t (id int PRIMARY KEY, a text)") as reader:
        database.execute("INSERT INTO t VALUES (1, 'x')")
        assert len(reader.read()) == 1
        with database.connect() as connection:
            # In one transaction with rows on both sides.
            connection.execute("INSERT INTO t VALUES (2, 'x')")
            connection.execute("ALTER TABLE t ADD COLUMN b int DEFAULT 7")
            connection.execute("INSERT INTO t VALUES (3, 'x')")
            connection.execute("ALTER TABLE t DROP COLUMN a")
            connection.execute("INSERT INTO t VALUES (4)")
            connection.execute("ALTER TABLE t RENAME b TO c")
            connection.execute("ALTER TABLE t RENAME id TO key")
            connection.execute("UPDATE t SET c = 8 WHERE key = 1")
            connection.execute("ALTER TABLE t RENAME TO u")
            connection.execute("INSERT INTO u VALUES (5)")
            connection.execute("CREATE TABLE later (id int PRIMARY KEY)")
            connection.execute("INSERT INTO later VALUES (1)")
            connection.execute("ALTER TABLE u ALTER c TYPE text")
            connection.execute("INSERT INTO u VALUES (6)")
        assert [(m.table, m.record) for m in reader.read()] == [
            ("public.t", {"id": 2, "a": "x"}),
            ("public.t", {"id": 3, "a": "x", "b": 7}),
            ("public.t", {"id": 4, "b": 7}),
            ("public.t", {"key": 1, "c": 8}),
            ("public.u", {"key": 5, "c": 7}),
            ("public.later", {"id": 1}),
            ("public.u", {"key": 6, "c": "7"}),
        ]
        database.execute("DROP TABLE u")
        database.execute("CREATE TABLE u (id text PRIMARY KEY)")
        database.execute("INSERT INTO u VALUES ('1')")
        assert [m.record for m in reader.read()] == [{"id": "1"}]


def test_wal_from_before_the_catalog_changed(database: Database) -> None:
    """All is read after the tables are gone or different: the WAL's word counts."""
    prepare(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        "CREATE TABLE full_t (id int PRIMARY KEY, a text)",
        "ALTER TABLE full_t REPLICA IDENTITY FULL",
        "CREATE TABLE dropped (b int, a int, PRIMARY KEY (a, b))",
        "CREATE TYPE pair AS (l int, r text)",
        "CREATE TABLE typed (id int PRIMARY KEY, p pair)",
    )
    database.execute("INSERT INTO t VALUES (1, 'x')")
    database.execute("INSERT INTO full_t VALUES (1, 'x')")
    database.execute("INSERT INTO dropped VALUES (1, 2)")
    database.execute("INSERT INTO typed VALUES (1, (1, 'x'))")
    database.execute("ALTER TABLE t RENAME id TO key")
    database.execute("ALTER TABLE full_t RENAME id TO key")
    database.execute("DROP TABLE dropped, typed")
    database.execute("DROP TYPE pair")
    with Reader(database.url) as reader:
        t, full, dropped, typed = reader.read()
    assert (t.record, t.metadata["record_pks"]) == ({"id": 1, "a": "x"}, [1])
    assert full.record == {"id": 1, "a": "x"}
    assert (dropped.record, sorted(dropped.metadata["record_pks"])) == ({"b": 1, "a": 2}, [1, 2])
    assert typed.record == {"id": 1, "p": "(1,x)"}


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_unchanged_toast(database: Database, identity: str) -> None:
    with capturing(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, big text, n int)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        f"ALTER TABLE t REPLICA IDENTITY {identity}",
    ) as reader:
        database.execute("INSERT INTO t VALUES (1, repeat('x', 10000), 1)")
        database.execute("UPDATE t SET n = 2")
        database.execute("UPDATE t SET id = 2")
        database.execute("UPDATE t SET big = repeat('y', 10000)")
        _, same, key, changed = reader.read()
    if identity == "FULL":
        assert same.record == {"id": 1, "big": "x" * 10000, "n": 2}
        assert same.changes == {"n": 1}
        assert same.metadata["unavailable"] == []
        assert key.changes == {"id": 1}
        assert changed.changes == {"big": "x" * 10000}
    else:
        assert same.record == {"id": 1, "n": 2}
        assert same.metadata["unavailable"] == ["big"]
        assert key.record == {"id": 2, "n": 2}
        assert key.changes == {"id": 1}
        assert changed.record["big"] == "y" * 10000


def test_toasted_key(database: Database) -> None:
    """A key too long for its row is in the old tuple even where the update did not touch it."""
    key = "encode(sha512(i::text::bytea), 'hex')"
    with capturing(
        database,
        "CREATE TABLE t (id text PRIMARY KEY, n int)",
        "ALTER TABLE t ALTER id SET STORAGE EXTERNAL",
    ) as reader:
        database.execute(
            f"INSERT INTO t SELECT string_agg({key}, ''), 1 FROM generate_series(1, 20) i"
        )
        database.execute("UPDATE t SET n = 2")
        database.execute("DELETE FROM t")
        insert, update, delete = reader.read()
    assert len(insert.record["id"]) == 2560
    assert update.record == {"id": insert.record["id"], "n": 2}
    assert update.metadata["unavailable"] == []
    assert insert.groups == update.groups == delete.groups


def test_transactions(database: Database) -> None:
    with capturing(database, "CREATE TABLE t (id int PRIMARY KEY)") as reader:
        first, second = database.connect(), database.connect()
        first.execute("INSERT INTO t VALUES (1)")
        second.execute("INSERT INTO t VALUES (2)")
        first.execute("INSERT INTO t VALUES (3)")
        database.execute("INSERT INTO t VALUES (4)")
        second.commit()
        second.execute("INSERT INTO t VALUES (5)")
        second.rollback()
        first.execute("SAVEPOINT a")
        first.execute("INSERT INTO t VALUES (6)")
        first.execute("ROLLBACK TO a")
        first.execute("SAVEPOINT b")
        first.execute("INSERT INTO t VALUES (7)")
        first.execute("RELEASE b")
        first.execute("SELECT pg_logical_emit_message(true, 'x', 'passed by')")
        first.execute("SELECT pg_logical_emit_message(false, 'x', 'passed by')")
        first.execute("INSERT INTO t VALUES (8)")
        first.commit()
        first.close()
        second.close()
        messages = reader.read()
    assert [message.record["id"] for message in messages] == [4, 2, 1, 3, 7, 8]
    assert [message.position.idx for message in messages] == [0, 0, 0, 1, 2, 3]


def test_truncate(database: Database) -> None:
    with capturing(
        database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)"
    ) as reader:
        with database.connect() as connection:
            connection.execute("INSERT INTO t VALUES (1)")
            connection.execute("TRUNCATE t, u CASCADE")
            connection.execute("INSERT INTO t VALUES (1)")
        messages = []
        alone = []
        while chunks := reader.batch():
            rows = sum(chunk.rows for chunk in chunks)
            alone.append(rows == 1)
            messages += of(chunks)
    assert [m.action for m in messages] == ["insert", "truncate", "truncate", "insert"]
    assert alone == [True] * 4, "a truncate shares its batch with nothing"
    assert messages[1].record == {}
    assert messages[1].metadata["record_pks"] == []
    assert {m.table for m in messages[1:3]} == {"public.t", "public.u"}


def test_truncate_that_no_sink_selects(database: Database) -> None:
    with capturing(database, "CREATE TABLE t (id int PRIMARY KEY)", truncates=False) as reader:
        database.execute("TRUNCATE t")
        database.execute("INSERT INTO t VALUES (1)")
        (message,) = reader.read()
        assert message.action == "insert"
        assert reader.capture.stats.truncates_skipped == 1


def test_tables_that_are_not_selected_keep_their_index(database: Database) -> None:
    """What is captured may change between two runs; positions must not."""
    with capturing(
        database,
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        includes=lambda _, table: table == "t",
    ) as reader:
        with database.connect() as connection:
            for table in "utut":
                connection.execute(f"INSERT INTO {table} SELECT count(*) FROM {table}")
        assert [m.position.idx for m in reader.read()] == [1, 3]
