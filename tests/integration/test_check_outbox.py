"""`penstock check`, `status` and `outbox status` of outboxes, as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.check import config as check
from penstock.cli.main import app
from penstock.config.settings import SparkSettings
from penstock.core.finding import Finding
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.process import free_port
from penstock.outbox.pipelines import find, source_name
from penstock.outbox.relay.desired_state import GroupPlanner
from penstock.outbox.relay.shared import SharedStreams

from ..cli import fails, run
from .outbox_sql import delivered, lease

NOBODY = "127.0.0.1:9"


@pytest.fixture
def tide(database: Database) -> Database:
    database.execute("SELECT tide.outbox_create('orders')")
    return database


@pytest.fixture
def write(tmp_path: Path, database: Database) -> Callable[..., Path]:
    def write(**source: Any) -> Path:
        path = tmp_path / "penstock.yaml"
        origin = {"type": "outbox", "url": database.url, **source}
        path.write_text(json.dumps({"sources": {"app": origin}}))
        return path

    return write


@pytest.fixture
def stream(nats: JetStream, database: Database) -> str:
    name = database.name.upper()
    nats.add_stream(name, [f"{database.name}.>"])
    return name


def pipeline(
    tide: Database, name: str, url: str, *, group: str = "g", enable: bool = True, **config: Any
) -> None:
    given = {"sink_type": "nats", "url": url, "subject": f"{tide.name}.{{op}}", **config}
    values = [name, group, json.dumps(given)]
    tide.execute("SELECT tide.relay_set_outbox(%s, 'orders', %s, %s)", values)
    if enable:
        tide.execute("SELECT tide.relay_enable(%s)", [name])


def findings(path: Path, **environ: str) -> list[Finding]:
    return check.inspect(path, environ).findings


def only(found: list[Finding], words: str) -> Finding:
    (finding,) = [f for f in found if words in f"{f.subject}: {f.message}"]
    return finding


def faults(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.level != "ok" and f.subject != "java"]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_all_well(
    tide: Database, nats_server: EmbeddedNats, stream: str, write: Callable[..., Path]
) -> None:
    pipeline(tide, "notify", "${env:URL}")
    found = findings(write(), URL=nats_server.url)
    assert faults(found) == []
    assert "may relay" in only(found, "schema tide").message
    assert stream in only(found, "captured by stream").message
    assert "empty so far" in only(found, "source app: store").message


def test_a_database_without_the_schema(database: Database, write: Callable[..., Path]) -> None:
    (finding,) = faults(findings(write()))
    assert finding.level == "error"
    assert "schema tide" in finding.subject
    assert "penstock outbox install" in finding.fix


def test_functions_of_another_penstock(
    tide: Database, write: Callable[..., Path], tmp_path: Path
) -> None:
    tide.execute("UPDATE tide.migrations SET functions = 'x'")
    assert "of another Penstock" in only(findings(write()), "schema tide").message
    tide.execute("UPDATE tide.migrations SET version = version + 1")
    assert "this Penstock knows" in only(findings(write()), "schema tide").message
    error = fails(tmp_path, 1, f"relay --url {tide.url} --listen 127.0.0.1:{free_port()}")
    assert "The schema tide" in error
    assert "run the newer Penstock that made it" in error


def test_a_group_that_can_not_be(tide: Database, tmp_path: Path) -> None:
    error = fails(tmp_path, 2, f"relay --url {tide.url} --group bad/group")
    assert "--group: 'bad/group' can't be a relay group" in error


def test_a_role_that_may_not_relay(tide: Database, write: Callable[..., Path]) -> None:
    role = f"r_{tide.name}"
    tide.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'pw'")
    tide.execute(f'GRANT CREATE ON DATABASE "{tide.name}" TO {role}')
    url = as_role(tide, role)
    try:
        finding = only(findings(write(url=url)), "schema tide")
        assert (finding.level, finding.fix.partition(": ")[2]) == (
            "error", f"select tide.relay_grant('{role}')",
        )  # fmt: skip
        tide.execute(finding.fix.partition(": ")[2])
        found = findings(write(url=url))
        assert [f.message for f in faults(found)] == ["no pipeline is enabled"]
        assert invoke("status", "-c", write(url=url), "--listen", NOBODY).exit_code == 0
        tide.execute(f"ALTER ROLE {role} NOREPLICATION")
        assert "may not replicate" in only(findings(write(url=url)), "replicate").message
    finally:
        tide.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def as_role(database: Database, role: str) -> str:
    head, _, rest = database.url.partition("://")
    return f"{head}://{role}:pw@{rest.rpartition('@')[2]}"


def test_pipelines_that_can_not_run(
    tide: Database, nats_server: EmbeddedNats, write: Callable[..., Path]
) -> None:
    """Each has its remedy; a disabled one is a warning."""
    pipeline(tide, "lacking", nats_server.url, token="${env:NOWHERE}")
    pipeline(tide, "off", nats_server.url, token="${env:NOWHERE}", enable=False)
    pipeline(tide, "refused", "nats://127.0.0.1:1")
    pipeline(tide, "nowhere", nats_server.url, subject=f"{tide.name}.{{op}}")
    pipeline(tide, "routed", nats_server.url, route=[{"when": "record.xid > '5'", "to": "x"}])
    pipeline(tide, "others", "nats://127.0.0.1:1", group="other")
    inbox = {"source_type": "nats", "url": "nats://127.0.0.1:1", "stream": "S"}
    tide.execute("SELECT tide.inbox_create('box')")
    tide.execute(
        "SELECT tide.relay_set_inbox('in', 'box', 'g', %s), tide.relay_enable('in')",
        [json.dumps(inbox)],
    )
    found = faults(findings(write(relay_group="g")))
    reported = {f.subject.removeprefix("source app: pipeline ").partition(":")[0]: f for f in found}
    assert set(reported) == {"lacking", "off", "refused", "nowhere", "routed", "in"}
    assert {name for name, f in reported.items() if f.level == "warning"} == {"off"}
    assert "(unresolved_reference)" in reported["lacking"].message
    assert "Nothing listens at 127.0.0.1:1" in reported["refused"].message
    assert reported["nowhere"].fix.startswith("Run: nats stream add ORDERS --subjects ")
    assert "= and <> alone" in reported["routed"].message  # which SQL accepts
    assert "Nothing listens" in reported["in"].message


def test_two_pipelines_into_one_stream(
    tide: Database, nats_server: EmbeddedNats, stream: str, write: Callable[..., Path]
) -> None:
    """Also of different groups; the relay reports it in its log and in `/status`."""
    pipeline(tide, "a", nats_server.url)
    pipeline(tide, "b", nats_server.url, group="other", subject=f"{tide.name}.b")
    (finding,) = faults(findings(write()))
    assert (finding.level, finding.subject) == ("warning", "source app: pipeline b")
    assert f"and pipeline a put the same messages of outbox orders into stream {stream}" in (
        finding.message
    )
    with tide.connect() as connection:
        rows = find(connection)
    planner = GroupPlanner(tide.url, tide.name, tide.url, SparkSettings(), source_name)
    shared = SharedStreams()
    shared.check(planner.plan(rows).values())
    assert shared._thread is not None
    shared._thread.join(60)
    reported = shared.with_warnings(
        {"g": {"pipelines": {"a": {}}}, "other": {"pipelines": {"b": {}}}}
    )
    assert reported["g"]["pipelines"]["a"]["warning"] is None
    assert "Nats-Msg-Id" in reported["other"]["pipelines"]["b"]["warning"]
    tide.execute("SELECT tide.relay_disable('b')")
    assert faults(findings(write())) == []


def test_status_shows_pipelines(tide: Database, write: Callable[..., Path]) -> None:
    pipeline(tide, "notify", "nats://localhost")
    pipeline(tide, "others", "nats://localhost", group="other", enable=False)
    tide.execute("SELECT tide.outbox_publish('orders', '1')")
    arguments = ("status", "-c", write(), "--listen", NOBODY)
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output  # a message waits, and no relay is there
    assert "✗ pipeline notify: No relay has run the group g yet." in result.output
    rows = [line.split() for line in result.output.splitlines() if "app" in line]
    notify, others = ([cell for cell in row if cell != "│"] for row in rows)
    assert notify[:8] == ["app", "notify", "orders", "g", "no", "relay", "yet", "0"]
    assert others[:5] == ["app", "others", "orders", "other", "disabled"]

    ((first_at,),) = tide.execute("SELECT created_at FROM tide.outbox_orders")
    assert f" {first_at.astimezone():%Y-%m-%d %H:%M:%S} " in result.output

    delivered(tide, "notify")
    lease(tide)
    tide.execute("SELECT tide.outbox_publish('orders', '2')")
    report = json.loads(invoke(*arguments, "--json").output)["outboxes"]["app"]
    assert report["error"] is None
    first = report["pipelines"][0]
    assert (first["pipeline"], first["state"], first["pending"]) == ("notify", "running", 1)
    assert first["pending_since"]

    tide.execute(
        "UPDATE tide.checkpoints SET state = 'error', error = 'Nothing listens.', remedy = 'Start it.'"
    )
    result = invoke("status", "-c", write(relay_group="g"), "--listen", NOBODY)
    assert result.exit_code == 1
    assert "! pipeline notify: Nothing listens." in result.output
    assert "Start it." in result.output
    assert "others" not in result.output


def test_status_of_a_database_that_can_not_be_asked(
    database: Database, write: Callable[..., Path]
) -> None:
    result = invoke("status", "-c", write(), "--listen", NOBODY)
    assert result.exit_code == 1
    assert "✗ source app: " in result.output
    assert "penstock outbox install" in result.output


def test_outbox_status_names_the_database_without_a_schema(database: Database) -> None:
    result = invoke("outbox", "status", "--url", database.url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"Database {database.name} at 127.0.0.1:" in result.stderr
    assert "penstock outbox install --url" in result.stderr


def test_outbox_status_dates_the_oldest_by_the_local_clock(tide: Database) -> None:
    tide.execute("SELECT tide.outbox_publish('orders', '{}')")
    ((oldest,),) = tide.execute("SELECT created_at FROM tide.outbox_orders")
    assert (
        f" {oldest.astimezone():%Y-%m-%d %H:%M:%S} "
        in invoke("outbox", "status", "--url", tide.url).stdout
    )


def test_a_pipe_gets_whole_lines(tide: Database, tmp_path: Path) -> None:
    name = "a-pipeline-with-a-long-name-that-no-narrow-column-holds"
    pipeline(tide, name, "nats://localhost", group="a-group-with-a-long-name-of-its-own")
    tide.execute("SELECT tide.outbox_create('an_outbox_whose_name_is_as_long_as_they_get_here')")
    printed = run(tmp_path, "outbox status", "--url", tide.url)
    (line,) = [line for line in printed.splitlines() if name in line and "group" in line]
    assert "a-group-with-a-long-name-of-its-own" in line
    assert "no relay yet" in line
    assert "an_outbox_whose_name_is_as_long_as_they_get_here" in printed
