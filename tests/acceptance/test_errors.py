"""What keeps `penstock run` from starting: a message, an exit code, and never a traceback."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.process import free_port

from ..pipeline import penstock, strays

CONFIG = """\
sources:
  shop:
    type: postgres
    url: ${{DATABASE_URL}}
    tables: [{tables}]
sinks:
  jetstream:
    type: nats
    source: shop
    url: {nats}
"""
SECRET = "hunter6"


def write(folder: Path, *, tables: str = "public.orders", nats: str = "nats://localhost") -> None:
    (folder / "penstock.yaml").write_text(CONFIG.format(tables=tables, nats=nats))


def fails(folder: Path, code: int, *options: str, **environment: str) -> str:
    """Run it, expect `code`, and return its output."""
    done = penstock("run", *options, cwd=folder, environment=environment, own_jvm=True)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert "Traceback" not in output
    assert SECRET not in output
    assert output.strip()
    return output


def with_password(url: str) -> str:
    return url.replace("postgres@", f"postgres:{SECRET}@")


def test_no_such_file(tmp_path: Path) -> None:
    output = fails(tmp_path, 2, "-c", "nowhere.yaml")
    assert "nowhere.yaml: no such file" in output
    assert "penstock init" in output


def test_a_file_with_mistakes(tmp_path: Path) -> None:
    write(tmp_path, nats="nats://user:hunter6@localhost:port")
    output = fails(tmp_path, 2)
    assert "penstock.yaml:4: sources.shop.url" in output
    assert "DATABASE_URL is not set" in output
    assert "sinks.jetstream.url" in output


def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    assert "cannot be read" in fails(tmp_path, 2, "-c", ".")


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:99999", "203.0.113.1:7380"])
def test_an_address_that_cannot_be_listened_on(
    tmp_path: Path, database: Database, listen: str
) -> None:
    write(tmp_path)
    output = fails(tmp_path, 1, "--listen", listen, DATABASE_URL=with_password(database.url))
    assert listen in output
    assert "--listen" in output


def test_a_port_in_use(tmp_path: Path, database: Database) -> None:
    write(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        output = fails(tmp_path, 1, "--listen", listen, DATABASE_URL=with_password(database.url))
    assert listen in output
    assert "already in use" in output
    # Nothing was made in the database by a run that could not start.
    assert database.execute("SELECT slot_name FROM pg_replication_slots"
                            " WHERE database = current_database()") == []  # fmt: skip


def test_no_postgres(tmp_path: Path) -> None:
    write(tmp_path)
    port = free_port()
    url = f"postgresql://postgres:{SECRET}@127.0.0.1:{port}/shop"
    assert str(port) in fails(tmp_path, 1, "--once", DATABASE_URL=url)


def test_no_such_database(tmp_path: Path, postgres: EmbeddedPostgres) -> None:
    write(tmp_path)
    url = with_password(postgres.database_url("nowhere"))
    assert '"nowhere" does not exist' in fails(tmp_path, 1, "--once", DATABASE_URL=url)


def test_no_such_table(tmp_path: Path, database: Database) -> None:
    database.execute("CREATE TABLE order_items (id int PRIMARY KEY)")
    write(tmp_path, tables="public.order_item")
    output = fails(tmp_path, 1, "--once", DATABASE_URL=with_password(database.url))
    assert "order_item" in output
    assert "order_items" in output


def test_a_role_that_may_not(tmp_path: Path, database: Database) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    database.execute(f"CREATE ROLE timid LOGIN PASSWORD '{SECRET}'")
    try:
        write(tmp_path)
        url = database.url.replace("postgres@", f"timid:{SECRET}@")
        assert "ALTER ROLE" in fails(tmp_path, 1, "--once", DATABASE_URL=url)
    finally:
        database.execute("DROP ROLE timid")


def test_a_slot_of_another_kind(tmp_path: Path, database: Database) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    database.execute("SELECT pg_create_physical_replication_slot('penstock_shop')")
    try:
        write(tmp_path)
        output = fails(tmp_path, 1, "--once", DATABASE_URL=with_password(database.url))
    finally:
        database.execute("SELECT pg_drop_replication_slot('penstock_shop')")
    assert "type physical" in output
    assert "pg_drop_replication_slot" in output


def test_a_source_that_has_run_before_and_lost_its_slot(tmp_path: Path, database: Database) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    write(tmp_path)
    folder = tmp_path / ".penstock" / "checkpoints" / "shop"
    folder.mkdir(parents=True)
    url = with_password(database.url)
    output = fails(tmp_path, 1, "--once", DATABASE_URL=url)
    assert "slot penstock_shop is gone" in output
    slots = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    assert database.execute(slots) == []
    # What it prints, to the letter; without an answer nothing is done.
    words = output[output.index("Run: penstock ") + 14 :].split()
    done = penstock(*words, cwd=tmp_path, environment={"DATABASE_URL": url})
    assert done.returncode == 1
    assert "Missed by all sinks of source shop" in done.stdout
    assert database.execute(slots) == []
    done = penstock(*words, "--yes", cwd=tmp_path, environment={"DATABASE_URL": url})
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert database.execute(slots) == [("penstock_shop",)]
    assert not folder.exists()


def test_two_sinks_that_would_be_each_others_duplicates(
    tmp_path: Path, database: Database, nats: JetStream, nats_server: EmbeddedNats
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    nats.add_stream("ONE_FOR_TWO", ["one.>", "two.>"])
    try:
        write(tmp_path, nats=nats_server.url + '\n    subject: "one.{table}"')
        with (tmp_path / "penstock.yaml").open("a") as file:
            file.write(
                "  second:\n    type: nats\n    source: shop\n"
                f'    url: {nats_server.url}\n    subject: "two.{{table}}"\n'
            )
        output = fails(tmp_path, 1, "--once", DATABASE_URL=with_password(database.url))
    finally:
        nats.delete_stream("ONE_FOR_TWO")
    assert "ONE_FOR_TWO" in output
    assert "duplicate" in output


def starting(
    folder: Path, database: Database, *, conf: str = "{}", **environment: str
) -> list[Any]:
    """Return the log of a start that fails, from the point at which Java is needed."""
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    write(folder)
    with (folder / "penstock.yaml").open("a") as file:
        file.write(f"spark:\n  master: local[1]\n  conf: {conf}\n")
    output = fails(folder, 1, "--once", DATABASE_URL=with_password(database.url), **environment)
    assert strays(output) == []
    events = [json.loads(line) for line in output.splitlines()]
    (java,) = [
        n for n, e in enumerate(events) if (e["event"], e.get("step")) == ("starting", "Java")
    ]
    return events[java + 1 :]


def test_no_java(tmp_path: Path, database: Database) -> None:
    (failed,) = starting(tmp_path, database, JAVA_HOME=str(tmp_path / "no-java"))
    assert (failed["event"], failed["code"]) == ("run failed", "java")
    assert f"Java: {tmp_path}/no-java/bin/java" in failed["error"]
    assert "No such file or directory" in failed["error"]
    assert "openjdk-17" in failed["error"]


def test_a_java_that_is_too_old(tmp_path: Path, database: Database) -> None:
    java = tmp_path / "old-java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        "#!/bin/sh\n"
        'case "$*" in -version) echo "openjdk version \\"11.0.2\\"" >&2; exit 0 ;; esac\n'
        "echo UnsupportedClassVersionError >&2; exit 1\n"
    )
    java.chmod(0o755)
    (failed,) = starting(tmp_path, database, JAVA_HOME=str(tmp_path / "old-java"))
    assert "is Java 11.0.2, and Spark needs 17 or later" in failed["error"]


def test_a_setting_that_java_refuses(tmp_path: Path, database: Database) -> None:
    (failed,) = starting(tmp_path, database, conf="{spark.driver.memory: lots}")
    assert (failed["event"], failed["code"]) == ("run failed", "spark")
    assert "does not start: Invalid maximum heap size: -Xmxlots." in failed["error"]
    assert "Correct the settings below `spark`" in failed["error"]


def test_python_workers_that_do_not_start(tmp_path: Path, database: Database) -> None:
    events = starting(tmp_path, database, PYSPARK_PYTHON="/bin/false")
    (failed,) = [e for e in events if e["level"] != "info"]
    assert (failed["event"], failed["code"]) == ("run failed", "no_worker")
    assert "Spark's Python workers do not start: " in failed["error"]
    assert "reading the port number from pyspark.daemon's stdout" in failed["error"]
    assert "An error occurred while calling" not in failed["error"]
    assert "spark.conf" in failed["error"]
    assert "It starts again by itself" not in failed["error"]  # with --once it does not


@pytest.mark.parametrize(("command", "code"), [("check", 1), ("status", 2)])
def test_other_commands_without_a_file(tmp_path: Path, command: str, code: int) -> None:
    done = penstock(command, cwd=tmp_path)
    assert done.returncode == code
    assert "no such file" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
