"""Publication and slot, made and looked at over a real Postgres; every fault by its code."""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import structlog

from penstock.check.postgres import inspect
from penstock.config.sources import PostgresSource
from penstock.core.errors import SetupError
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.postgres.setup import ensure, slot_status

Make = Callable[..., PostgresSource]


@pytest.fixture
def make(database: Database) -> Make:
    """Give a source over the test's database; `role` logs in as another role."""

    def make(**changes: Any) -> PostgresSource:
        role = changes.pop("role", None)
        url = database.url.replace("postgres@", f"{role}:never-shown@") if role else database.url
        fields = {"slot": f"s_{database.name}", "publication": "pub", **changes}
        return PostgresSource.model_validate({"type": "postgres", "url": url, **fields})

    return make


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """Give a role that may replicate and make publications, and is no superuser."""
    name = f"role_{uuid.uuid4().hex[:8]}"
    database.execute(f"CREATE ROLE {name} LOGIN REPLICATION PASSWORD 'never-shown'")
    database.execute(f"GRANT CREATE ON DATABASE {database.name} TO {name}")
    database.execute(f"GRANT ALL ON SCHEMA public TO {name}")
    yield name
    database.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


def fails(code: str, source: PostgresSource) -> SetupError:
    with pytest.raises(SetupError) as caught:
        ensure(source)
    assert caught.value.code == code, str(caught.value)
    assert caught.value.remedy
    assert "never-shown" not in str(caught.value)
    return caught.value


def published(database: Database) -> set[str]:
    rows = database.execute("SELECT schemaname || '.' || tablename FROM pg_publication_tables")
    return {row[0] for row in rows}


def test_makes_publication_and_slot_and_is_idempotent(database: Database, make: Make) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    source = make()
    ensure(source)
    ensure(source)
    status = slot_status(source)
    assert status.confirmed_flush_lsn
    assert status.wal_status == "reserved"
    assert not status.active
    database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    assert published(database) == {"public.a", "public.later"}
    options = database.execute(
        "SELECT pubviaroot, pubgencols::text, pubtruncate FROM pg_publication"
    )
    assert options == [(True, "s", True)]


def test_named_tables_odd_names_and_schemas(database: Database, make: Make) -> None:
    database.execute('CREATE SCHEMA "Odd Name"; CREATE TABLE "Odd Name"."t.x;$" (id int)')
    database.execute("CREATE TABLE a (id int); CREATE TABLE b (id int)")
    ensure(make(tables=['"Odd Name"."t.x;$"', "public.a"], publication='p"; DROP TABLE a; --'))
    assert published(database) == {"Odd Name.t.x;$", "public.a"}


def test_overlapping_patterns(database: Database, make: Make) -> None:
    database.execute("CREATE TABLE a (id int); CREATE SCHEMA s; CREATE TABLE s.b (id int)")
    ensure(make(tables=["public.a", "public.*", "s.b", "s.b"]))
    assert published(database) == {"public.a", "s.b"}


def test_completes_a_publication(database: Database, make: Make) -> None:
    database.execute(
        "CREATE TABLE a (id int); CREATE TABLE b (id int);"
        "CREATE TABLE p (id int) PARTITION BY RANGE (id);"
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10);"
        "CREATE PUBLICATION pub FOR TABLE a"
    )
    ensure(make(tables=["public.a", "public.b", "public.p"]))
    assert published(database) == {"public.a", "public.b", "public.p"}
    ensure(make())
    assert database.execute("SELECT count(*) FROM pg_publication_namespace") == [(1,)]


@pytest.mark.parametrize("limits", ["(id) WHERE (id > 20)", "WHERE (id > 20)", "(id)"])
@pytest.mark.parametrize("tables", [["public.*"], ["public.a", "public.b", "s.c", "s.*"]])
def test_completing_a_publication_keeps_its_filters_and_column_lists(
    database: Database, make: Make, limits: str, tables: list[str]
) -> None:
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY, secret text); CREATE TABLE b (id int);"
        f"CREATE SCHEMA s; CREATE TABLE s.c (id int); CREATE PUBLICATION pub FOR TABLE a {limits}"
    )
    query = "SELECT attnames::text, rowfilter FROM pg_publication_tables WHERE tablename = 'a'"
    before = database.execute(query)
    source = make(tables=tables)
    with structlog.testing.capture_logs() as logs:
        ensure(source)
    assert database.execute(query) == before
    assert {"public.a", "public.b"} <= published(database)
    assert ("s.c" in published(database)) == ("s.*" in tables)
    (log,) = logs
    assert "a row filter or a column list for public.a" in log["event"]
    assert "new tables are not captured by themselves" in log["event"]
    database.execute("CREATE TABLE later (id int); CREATE TABLE s.later (id int)")
    ensure(source)
    added = f"{'s' if 's.*' in tables else 'public'}.later"
    assert {name for name in published(database) if name.endswith("later")} == {added}
    assert database.execute(query) == before


@pytest.mark.parametrize("via_root", [True, False])
@pytest.mark.parametrize("also", ["", "p, "])
def test_a_filter_of_a_partition_is_not_lost_to_its_root(
    database: Database, make: Make, also: str, via_root: bool
) -> None:
    database.execute(
        "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10);"
        f"CREATE PUBLICATION pub FOR TABLE {also}p1 WHERE (id > 3)"
        f" WITH (publish_via_partition_root = {via_root})"
    )
    source = make()
    if also and via_root:
        ensure(source)  # the table is published as a whole already, whatever its partitions say
        return
    query = "SELECT tablename::text, rowfilter FROM pg_publication_tables"
    before = database.execute(query)
    error = fails("publication_limited", source)
    assert "public.p1, a partition of public.p" in error.message
    assert database.execute(query) == before
    findings = inspect("shop", source, {})
    assert [f.message for f in findings if f.level == "error"] == [error.message]
    database.execute("ALTER PUBLICATION pub DROP TABLE p1")
    ensure(source)


def test_a_plain_role_with_its_own_tables(database: Database, make: Make, role: str) -> None:
    database.execute(f"CREATE TABLE a (id int); ALTER TABLE a OWNER TO {role}")
    ensure(make(role=role, tables=["public.a"]))
    assert published(database) == {"public.a"}


def test_a_plain_role_adds_its_tables_to_a_publication(
    database: Database, make: Make, role: str
) -> None:
    database.execute(
        "CREATE TABLE a (id int); CREATE TABLE b (id int); CREATE PUBLICATION pub FOR TABLE a;"
        f"ALTER TABLE a OWNER TO {role}; ALTER TABLE b OWNER TO {role};"
        f"ALTER PUBLICATION pub OWNER TO {role}"
    )
    ensure(make(role=role))
    assert published(database) == {"public.a", "public.b"}
    ensure(make(role=role))


def test_a_schema_needs_a_superuser(database: Database, make: Make, role: str) -> None:
    error = fails("publication_missing", make(role=role))
    assert "CREATE PUBLICATION pub FOR TABLES IN SCHEMA" in error.remedy.replace('"', "")
    statement = error.remedy[error.remedy.index("CREATE PUB") :]
    database.execute(statement)
    ensure(make(role=role))


def test_not_the_owner(database: Database, make: Make, role: str) -> None:
    database.execute("CREATE TABLE a (id int)")
    error = fails("publication_missing", make(role=role, tables=["public.a"]))
    assert "must be owner of table a" in error.message
    database.execute("CREATE PUBLICATION pub")
    assert (
        'ADD TABLE "public"."a"'
        in fails("no_privilege", make(role=role, tables=["public.a"])).remedy
    )


def test_may_not_replicate(database: Database, make: Make, role: str) -> None:
    database.execute(f"ALTER ROLE {role} NOREPLICATION")
    error = fails("no_privilege", make(role=role))
    database.execute(error.remedy)


def test_unknown_table(database: Database, make: Make) -> None:
    database.execute("CREATE TABLE orders (id int); CREATE VIEW v AS SELECT 1")
    error = fails("table_missing", make(tables=["public.ordres", "public.v"]))
    assert "did you mean public.orders?" in error.message
    assert "public.v is a view" in error.message


def test_slot_of_another_plugin(database: Database, make: Make) -> None:
    source = make()
    create = "SELECT pg_create_logical_replication_slot(%s, 'test_decoding')"
    try:
        database.execute(create, [source.slot])
    except psycopg.errors.UndefinedFile:
        database.execute("SELECT pg_create_physical_replication_slot(%s)", [source.slot])
    try:
        fails("slot_wrong_plugin", source)
    finally:
        database.execute("SELECT pg_drop_replication_slot(%s)", [source.slot])


def test_slot_of_another_database(
    database: Database, make: Make, postgres: EmbeddedPostgres
) -> None:
    ensure(make())
    other = make().model_copy(update={"url": type(make().url)(postgres.url)})
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION pub FOR TABLES IN SCHEMA public")
        try:
            assert database.name in fails("slot_wrong_database", other).message
        finally:
            connection.execute("DROP PUBLICATION pub")


@contextlib.contextmanager
def reading(source: PostgresSource) -> Iterator[None]:
    url = source.url.get_secret_value()
    with contextlib.closing(
        psycopg.connect(url, autocommit=True, replication="database")
    ) as connection:
        command = (
            f"START_REPLICATION SLOT {source.slot} LOGICAL 0/0 "
            "(proto_version '1', publication_names 'pub')"
        )
        connection.pgconn.exec_(command.encode())
        yield


def test_a_publication_that_was_dropped_is_not_made_anew_in_silence(
    make: Make, database: Database
) -> None:
    source = make()
    ensure(source)
    database.execute("DROP PUBLICATION pub")
    error = fails("publication_missing", source)
    assert published(database) == set()
    assert error.is_gap
    database.execute(error.remedy[error.remedy.index("SELECT") : error.remedy.index(";")])
    ensure(source)


def test_slot_in_use(make: Make) -> None:
    source = make()
    ensure(source)
    with reading(source):
        error = fails("slot_in_use", source)
        assert error.transient
        status = slot_status(source)
        assert status.active
        assert str(status.active_pid) in error.message


def test_slot_missing(make: Make, database: Database) -> None:
    with pytest.raises(SetupError) as caught:
        slot_status(make())
    assert caught.value.code == "slot_missing"
    ensure(make())
    assert slot_status(make()).lag_bytes is not None


def test_slot_that_must_wait_logs_it(
    make: Make, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.postgres.setup._SLOT_TIMEOUT", "300ms")
    database.execute("CREATE TABLE a (id int)")
    with database.connect() as connection:
        connection.execute("INSERT INTO a VALUES (1)")
        error = fails("slot_missing", make())
    assert error.transient
    ensure(make())


def test_lag_counts_what_is_not_confirmed(make: Make, database: Database) -> None:
    source = make()
    database.execute("CREATE TABLE a (t text)")
    ensure(source)
    database.execute("INSERT INTO a SELECT repeat('x', 1000) FROM generate_series(1, 100)")
    lag = slot_status(source).lag_bytes
    assert lag is not None
    assert lag > 100_000


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, server_dir: Any) -> Iterator[EmbeddedPostgres]:
    """Give a server that keeps little WAL, has one slot, and asks one role for a password."""
    hba = server_dir / "hba.conf"
    hba.write_text(
        "host all locked all scram-sha-256\n"
        "host all all all trust\n"
        "host replication all all trust\n"
    )
    hba.chmod(0o644)
    server_dir.chmod(0o711)  # under root the server is another user's
    settings = {
        "hba_file": str(hba),
        "max_replication_slots": "1",
        "max_slot_wal_keep_size": "1MB",
        "min_wal_size": "32MB",
        "max_wal_size": "32MB",
    }
    with EmbeddedPostgres(server_dir / "small", settings) as server:
        yield server


def small_source(server: EmbeddedPostgres, **changes: Any) -> PostgresSource:
    fields = {"type": "postgres", "url": server.url, **changes}
    return PostgresSource.model_validate(fields)


def test_authentication_failed(small: EmbeddedPostgres) -> None:
    with psycopg.connect(small.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE locked LOGIN PASSWORD 'right'")
    url = small.url.replace("postgres@", "locked:never-shown@")
    error = fails("authentication_failed", small_source(small, url=url))
    assert "locked" in error.message
    missing = small.url.replace("postgres@", "nobody_here@")
    fails("authentication_failed", small_source(small, url=missing))


def test_database_missing(small: EmbeddedPostgres) -> None:
    error = fails("database_missing", small_source(small, url=small.database_url("nope")))
    assert "There is no database nope" in error.message


def test_connection_refused() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        source = PostgresSource.model_validate(
            {"type": "postgres", "url": f"postgres://app:never-shown@127.0.0.1:{port}/shop"}
        )
        error = fails("connection_refused", source)
    assert error.transient
    assert f"127.0.0.1:{port}/shop" in error.message


def test_slots_exhausted_and_slot_invalidated(small: EmbeddedPostgres) -> None:
    source = small_source(small)
    ensure(source)
    fails("slots_exhausted", small_source(small, slot="another"))
    with psycopg.connect(small.url, autocommit=True) as connection:
        for _ in range(6):
            connection.execute(
                "SELECT pg_switch_wal() FROM pg_logical_emit_message(true, 'x', 'y')"
            )
            connection.execute("CHECKPOINT")
    error = fails("slot_invalidated", source)
    assert not error.transient
    assert "wal_removed" in error.message
    assert slot_status(source).wal_status == "lost"


def test_wal_level(small: EmbeddedPostgres) -> None:
    small.settings["wal_level"] = "replica"
    with psycopg.connect(small.url, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    small.restart()
    assert "ALTER SYSTEM SET wal_level" in fails("wal_level", small_source(small)).remedy
