"""`penstock outbox install`: once, twice, at the same time, without rights, by a migration tool."""

from __future__ import annotations

import re
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.cli import SECRET, fails, run
from tests.integration.outbox_sql import installed, role, value
from tests.waits import await_end

from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.outbox.errors import InstallError
from penstock.outbox.sql import install as installation
from penstock.outbox.sql.install import VERSION, install, script


@pytest.fixture
def other(postgres: EmbeddedPostgres) -> Iterator[Database]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    database = Database(name, postgres.create_database(name))
    yield database
    database.drop(postgres.url)


def schema(postgres: EmbeddedPostgres, database: Database) -> str:
    """Return the whole schema as pg_dump prints it, with the publication and all grants."""
    done = subprocess.run(
        [str(postgres.bin_dir / "pg_dump"), "--schema-only", database.url],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return re.sub(r"(?m)^(\\(un)?restrict .*|--.*)\n", "", done.stdout)


def test_the_command_installs_once_and_then_does_nothing(
    database: Database, tmp_path: Path
) -> None:
    arguments = ("--url", database.url)
    assert "Created the schema tide" in run(tmp_path, "outbox install", *arguments)
    before = value(database, "SELECT at FROM tide.migrations")
    assert "up to date" in run(tmp_path, "outbox install", *arguments)
    assert value(database, "SELECT at FROM tide.migrations") == before
    database.execute("SELECT tide.outbox_create('orders')")
    assert "orders" in run(tmp_path, "outbox status", *arguments)
    assert '"retention_hours": 24' in run(tmp_path, "outbox status", "--json", *arguments)


def test_the_printed_script_gives_the_same_schema(
    database: Database, other: Database, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    installed(database)
    printed = run(tmp_path, "outbox install", "--print")
    file = tmp_path / "tide.sql"
    file.write_text(printed)
    psql = [str(postgres.bin_dir / "psql"), "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1"]
    command = [*psql, "-f", str(file), other.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = schema(postgres, database)
    assert "tide.outbox_publish" in found
    assert schema(postgres, other) == found
    with other.connect(autocommit=True) as connection:
        assert not install(connection).changed


def test_psycopg_runs_the_script_in_a_transaction_that_can_be_undone(
    database: Database, other: Database, postgres: EmbeddedPostgres
) -> None:
    empty = schema(postgres, other)
    with other.connect() as connection:
        connection.execute(script().encode())
        connection.rollback()
        assert schema(postgres, other) == empty
        connection.execute(script().encode())
        connection.commit()
    assert schema(postgres, other) == schema(postgres, installed(database))


def test_the_script_refuses_a_database_that_has_another_version(database: Database) -> None:
    installed(database)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has version"):
        database.execute(script())
    database.execute(script(VERSION))
    with pytest.raises(InstallError, match="no version"):
        script(VERSION + 1)


def test_functions_that_differ_are_replaced_and_keep_grants_and_switches(
    database: Database, postgres: EmbeddedPostgres
) -> None:
    installed(database)
    database.execute("SELECT tide.outbox_create('a'), tide.outbox_create('b')")
    database.execute("SELECT tide.outbox_disable('b')")
    with role(database) as (name, session):
        database.execute("SELECT tide.outbox_grant_publish('a', %s)", [name])
        database.execute("UPDATE tide.migrations SET functions = 'of an older build'")
        before = schema(postgres, database)
        database.execute(
            "CREATE OR REPLACE FUNCTION tide.outbox_sweep(name text) RETURNS bigint LANGUAGE sql"
            " AS 'SELECT -1::bigint'"
        )
        with database.connect(autocommit=True) as connection:
            done = install(connection)
        assert (done.before, done.changed) == (VERSION, True)
        assert schema(postgres, database) == before
        assert session.execute("SELECT tide.outbox_publish('a', '{}')") == [(1,)]
    with pytest.raises(psycopg.Error, match="disabled"):
        database.execute("SELECT tide.outbox_publish('b', '{}')")


def test_two_at_once_are_one_after_the_other(database: Database) -> None:
    done: list[bool] = []

    def run_one() -> None:
        with database.connect(autocommit=True) as connection:
            done.append(install(connection).changed)

    threads = [threading.Thread(target=run_one, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    await_end(*threads)
    assert sorted(done) == [False, False, False, True]


def test_a_newer_schema_is_refused_and_left_alone(database: Database, tmp_path: Path) -> None:
    installed(database)
    database.execute("INSERT INTO tide.migrations (version, functions) VALUES (99, '')")
    error = fails(tmp_path, 1, "outbox install", "--url", database.url)
    assert "version 99" in error
    assert "newer Penstock" in error


def test_a_schema_of_another_program_is_refused(database: Database) -> None:
    database.execute("CREATE SCHEMA tide; CREATE TABLE tide.waves ()")
    with (
        database.connect(autocommit=True) as connection,
        pytest.raises(InstallError) as caught,
    ):
        install(connection)
    assert caught.value.code == "schema_taken"
    with pytest.raises(psycopg.errors.DuplicateSchema):
        database.execute(script())


def test_the_error_names_the_right_that_the_role_lacks(database: Database) -> None:
    with role(database) as (name, session):
        connection = session._connection
        assert connection is not None
        with pytest.raises(InstallError) as caught:
            install(connection)
        assert caught.value.code == "permission_denied"
        assert f'GRANT CREATE ON DATABASE "{database.name}" TO "{name}"' in caught.value.remedy
        database.execute(f'GRANT CREATE ON DATABASE "{database.name}" TO {name}')
        assert install(connection).changed
        session.execute("SELECT tide.outbox_create('mine')")
        assert session.execute("SELECT tide.outbox_publish('mine', '{}')") == [(1,)]
        # A superuser that brings it up to date leaves it to its owner.
        database.execute("UPDATE tide.migrations SET functions = ''")
        with database.connect(autocommit=True) as admin:
            assert install(admin).changed
        owners = "SELECT DISTINCT proowner::regrole::text FROM pg_proc"
        assert database.execute(f"{owners} WHERE pronamespace = 'tide'::regnamespace") == [(name,)]


def test_the_error_names_the_owner_of_the_schema(database: Database) -> None:
    installed(database)
    with role(database) as (name, session):
        connection = session._connection
        assert connection is not None
        with pytest.raises(InstallError, match=f"belongs to the role postgres, and {name}"):
            install(connection)


def test_a_schema_that_was_made_for_the_role_is_enough(database: Database) -> None:
    with role(database) as (name, session):
        connection = session._connection
        assert connection is not None
        database.execute(f"CREATE SCHEMA tide AUTHORIZATION {name}")
        database.execute(f"CREATE PUBLICATION tide; ALTER PUBLICATION tide OWNER TO {name}")
        with pytest.raises(InstallError, match="GRANT CREATE ON DATABASE"):
            install(connection)
        session.execute(script())
        session.execute("SELECT tide.outbox_create('mine')")


def test_errors_of_the_commands_show_no_password(database: Database, tmp_path: Path) -> None:
    assert "--url" in fails(tmp_path, 1, "outbox install")
    url = f"postgresql://someone:{SECRET}@localhost:1/x"
    assert "connection" in fails(tmp_path, 1, "outbox install", "--url", url).lower()
    assert "connection" in fails(tmp_path, 1, "outbox status", "--url", url).lower()
    assert "outbox install" in fails(tmp_path, 1, "outbox status", "--url", database.url)


def test_it_warns_where_no_relay_could_read_the_wal(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "postgres", settings={"wal_level": "replica"}) as server:
        url = server.create_database("app")
        with psycopg.connect(url, autocommit=True) as connection:
            (warning,) = install(connection).warnings
    assert "ALTER SYSTEM SET wal_level = 'logical'" in warning


def test_no_server_that_is_too_old(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "OLDEST_SERVER", 99)
    with (
        database.connect(autocommit=True) as connection,
        pytest.raises(InstallError, match="Use 99 or newer"),
    ):
        install(connection)
