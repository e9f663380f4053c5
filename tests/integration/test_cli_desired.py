"""Commands over the desired state: the file's entities over those that only the API made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner, Result

from penstock.cli.main import app
from penstock.core.delivery import DeadLetter
from penstock.desired.entities import Change
from penstock.desired.state import DesiredState
from penstock.desired.with_file import configured
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.streams.store import Store


def call(*words: str) -> Result:
    done = CliRunner().invoke(app, list(words))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def output(*words: str, code: int = 0) -> str:
    done = call(*words)
    assert done.exit_code == code, done.output
    return str(done.output)


def printed(*words: str, code: int = 0) -> Any:
    done = call(*words)
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Database) -> Path:
    """An empty folder, and a store with a source and its sinks that the API has made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_STORE_URL", raising=False)
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    database.execute("INSERT INTO orders VALUES (1), (2)")
    source = {
        "type": "postgres",
        "url": database.url,
        "tables": ["public.orders"],
        "slot": "kept_slot",
    }
    with Store.open(database.url) as store:
        put(
            store,
            ("source", "kept", source),
            ("sink", "copy", {"type": "stream", "source": "kept"}),
        )
    return tmp_path


def put(store: Store, *entities: tuple[str, str, dict[str, Any]]) -> None:
    changes = [Change(kind, name, None, spec) for kind, name, spec in entities]
    DesiredState(store).write(changes, by="somebody", door="api")


def write(folder: Path, **config: Any) -> None:
    (folder / "penstock.yaml").write_text(json.dumps(config))


@pytest.fixture(params=["option", "environment", "file"])
def named(
    request: pytest.FixtureRequest,
    folder: Path,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """Name the store in each of the three ways; return the options that this takes."""
    if request.param == "option":
        return ["--store", database.url]
    if request.param == "environment":
        monkeypatch.setenv("PENSTOCK_STORE_URL", database.url)
    else:
        write(folder, store=database.url)
    return []


def test_commands_work_on_what_only_the_api_made(named: list[str]) -> None:
    (backfill,) = printed("backfill", "start", "--sink", "copy", "--json", *named)
    assert (backfill["source"], backfill["table_name"]) == ("kept", "orders")
    assert [each["sink"] for each in printed("backfill", "list", "--json", *named)] == ["copy"]
    report = printed("status", "--json", "--listen", "127.0.0.1:9", *named, code=1)
    assert report["slots"]["kept"]["slot"] == "kept_slot"
    assert {problem["code"] for problem in report["problems"]} >= {"not_running"}
    findings = printed("check", "--json", *named)["findings"]
    assert any(of["subject"].startswith("source kept") for of in findings), findings
    assert "needs no recovery" in output("recover", "kept", *named)
    assert "source kept" in output("target", "show", "kept", *named)
    listed = output("dead-letters", "list", "--sink", "copy", "--json", *named)
    assert json.loads(listed) == []
    assert "there is no sink 'none': expected one of copy" in output(
        "try", "--sink", "none", "--message", "x", *named, code=2
    )
    assert "copy:\n    type: stream" in output("export", *named)


def test_a_try_of_a_sink_of_the_api(named: list[str], tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"record": {"id": 1}, "action": "insert"}')
    (outcome,) = printed("try", "--sink", "copy", "--message", "m.json", "--json", *named)
    assert outcome["result"] == "sent"


def test_the_files_entities_count_over_the_stores(folder: Path, database: Database) -> None:
    """As they would in a run that starts with the file; nothing is written for it."""
    stream = {"type": "stream", "source": "kept"}
    write(
        folder,
        store=database.url,
        sinks={"copy": {**stream, "actions": ["insert"]}, "new": stream},
    )
    found = configured(folder / "penstock.yaml")
    assert list(found.config.sinks) == ["copy", "new"]
    assert found.config.sinks["copy"].actions == ("insert",)
    assert (found.refused, found.failure) == ({}, None)
    with Store.open(database.url) as store:
        assert "new" not in DesiredState(store).read().of_kind("sink")
    write(folder, store=database.url, sinks={"new": {**stream, "source": "nowhere"}})
    assert "penstock.yaml:1: sinks.new.source: there is no source 'nowhere'" in output(
        "try", "--sink", "new", "--message", "x", code=2
    )


def test_what_cannot_be_used_here_is_named(folder: Path, database: Database) -> None:
    write(folder, store=database.url)
    with Store.open(database.url) as store:
        far = {"type": "postgres", "url": "${FAR_URL}"}
        put(store, ("source", "far", far), ("sink", "out", {"type": "stream", "source": "far"}))
    assert "source far can't be used here: url:" in output("recover", "far", code=1)
    assert "sink out can't be used here" in output("backfill", "start", "--sink", "out", code=1)
    found = {of["subject"]: of for of in printed("check", "--json", code=1)["findings"]}
    assert "FAR_URL" in found["source far"]["message"]
    problems = printed("status", "--json", "--listen", "127.0.0.1:9", code=1)["problems"]
    assert ("source far", "refused") in [(of["subject"], of["code"]) for of in problems]


def test_a_store_that_does_not_answer(folder: Path, database: Database) -> None:
    source = {"type": "postgres", "url": database.url, "tables": ["public.orders"]}
    sinks = {"own": {"type": "stream", "source": "mine"}}
    write(folder, store="postgresql://x@127.0.0.1:1/x", sources={"mine": source}, sinks=sinks)
    report = printed("status", "--json", "--listen", "127.0.0.1:9", code=1)
    assert report["parts"]["store"] == "failed"
    assert list(report["slots"]) == ["mine"]
    refused = output("backfill", "start", "--sink", "own", code=1)
    assert "127.0.0.1:1" in refused
    (folder / "m.json").write_text('{"record": {"id": 1}, "action": "insert"}')
    tried = call("try", "--sink", "own", "--message", "m.json")
    assert tried.exit_code == 0, tried.output
    assert "the file counts alone" in tried.output


def test_no_store_is_named(folder: Path) -> None:
    text = output("status", code=2)
    assert "penstock.yaml: no such file: write one with `penstock init`, or name the store" in text
    assert "hunter6" not in output("status", "--store", "postgresql://u:hunter6@@h/x", code=2)


def test_reading_makes_no_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Database
) -> None:
    """A store that no run has used so far stays as it is; so does a folder without an embedded one."""
    monkeypatch.chdir(tmp_path)
    found = configured("penstock.yaml", database.url)
    assert (found.config.sources, found.failure) == ({}, None)
    assert database.execute("SELECT to_regnamespace('penstock')::text") == [(None,)]
    write(tmp_path, spark={"master": "local[1]"})
    assert configured("penstock.yaml").failure is None
    assert not (tmp_path / ".penstock").exists()


def test_dead_letters_of_a_sink_of_the_api_are_replayed(
    folder: Path, database: Database, nats_server: EmbeddedNats, nats: JetStream
) -> None:
    nats.add_stream("KEPT", "kept.>")
    letter = DeadLetter("k1", "kept.orders", "bad", "it was bad", '{"record":{"id":1}}')
    with Store.open(database.url) as store:
        put(store, ("sink", "out", {"type": "nats", "source": "kept", "url": nats_server.url}))
        store.letters.add("out", [letter])
    assert "Replayed" in output("dead-letters", "replay", "--all", "--store", database.url)
    assert nats.info("KEPT").state.messages == 1
    nats.delete_stream("KEPT")
    with psycopg.connect(database.url) as connection:
        rows = connection.execute(
            "SELECT replayed_at IS NULL FROM penstock.dead_letters"
        ).fetchall()
    assert rows == [(False,)]
