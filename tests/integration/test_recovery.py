"""A source that lost its slot or publication: what is printed, followed to the letter, mends it."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.api_help import refuse_lines
from typer.testing import CliRunner, Result

from penstock.backfill.request import BackfillRequest, Backfills
from penstock.check import config as check
from penstock.cli import status
from penstock.cli.main import app
from penstock.config.file import load
from penstock.config.settings import Config
from penstock.core.errors import CaptureError
from penstock.core.message import parse_lsn
from penstock.desired.with_file import configured
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.postgres import setup
from penstock.postgres.replication import identify
from penstock.runtime import recovery
from penstock.streams.positions import Positions, Recorder
from penstock.streams.store import Store

SLOT = "penstock_rec"


@pytest.fixture(scope="module")
def small(server_dir: Path) -> Iterator[EmbeddedPostgres]:
    """A server that gives up slots soon."""
    with EmbeddedPostgres(server_dir / "recovery", {"max_slot_wal_keep_size": "1MB"}) as server:
        yield server


@pytest.fixture
def origin(small: EmbeddedPostgres, request: pytest.FixtureRequest) -> Iterator[Database]:
    name = request.node.name.partition("[")[0][-40:] + str(abs(hash(request.node.name)) % 10**6)
    database = Database(name, small.create_database(name))
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, a text)")
    yield database
    database.drop(small.url)


@pytest.fixture
def file(tmp_path: Path, origin: Database, database: Database) -> Path:
    """A configuration whose source has run: it has a slot, a folder and a position in the store."""
    path = tmp_path / "my pipelines.yaml"
    path.write_text(
        json.dumps(
            {
                "sources": {
                    "rec": {
                        "type": "postgres",
                        "url": origin.url,
                        "slot": SLOT,
                        "publication": "penstock",
                    }
                },
                "sinks": {"orders": {"type": "stream", "source": "rec"}},
                "store": database.url,
                "spark": {"checkpoint": str(tmp_path / "checkpoints")},
            }
        )
    )
    config = load(path, {})
    setup.ensure(config.sources["rec"])
    made = tmp_path / "checkpoints" / "rec" / "17"
    made.mkdir(parents=True)
    (made / "metadata").write_text("{}")
    with Store.open(database.url) as store:
        tag = identify(origin.url, SLOT).tag
        Positions(store).record("rec", tag, confirmed(origin), 848_000_000_000_000)
    return path


def confirmed(origin: Database) -> int:
    query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    ((lsn,),) = origin.execute(query, [SLOT])
    return parse_lsn(lsn)


def refused(config: Config, database: Database) -> CaptureError:
    """Return the error with which a run of the source is refused."""
    with Store.open(database.url) as store, pytest.raises(CaptureError) as caught:
        recovery.refuse_gap(config, "rec", store)
    return caught.value


def follow(text: str, *more: str, answer: str | None = None) -> Result:
    """Run the command that an error prints, as it stands there."""
    program, *words = shlex.split(text[text.rindex("Run: ") + 5 :])
    assert program == "penstock"
    return CliRunner().invoke(app, [*words, *more], input=answer)


def invalidate(origin: Database) -> None:
    for _ in range(4):
        origin.execute("SELECT pg_switch_wal() FROM pg_logical_emit_message(true, 'x', 'y')")
        origin.execute("CHECKPOINT")


BREAKS: dict[str, Any] = {
    "slot_invalidated": invalidate,
    "slot_missing": lambda origin: origin.execute(f"SELECT pg_drop_replication_slot('{SLOT}')"),
    "publication_missing": lambda origin: origin.execute("DROP PUBLICATION penstock"),
}


@pytest.mark.parametrize("code", BREAKS)
def test_the_printed_command_recovers(
    file: Path, origin: Database, database: Database, code: str
) -> None:
    config = load(file, {})
    before = confirmed(origin)
    BREAKS[code](origin)
    origin.execute("INSERT INTO orders VALUES (1, 'missed')")
    error = refused(config, database)
    assert error.code == code
    # All places print the same command.
    (found,) = [f for f in check.inspect(file).findings if f.level == "error"]
    assert found.fix == error.remedy
    report = status.collect(configured(file, environ={}), "127.0.0.1:9")
    assert report["slots"]["rec"]["error"] == str(error)
    (problem,) = (p for p in report["problems"] if p["subject"] == f"slot {SLOT}")
    assert (problem["code"], problem["remedy"]) == (code, error.remedy)
    assert not status.is_ready(report)
    # Nothing is changed without a yes.
    with Store.open(database.url) as store:  # one is under way, and has read rows before the gap
        Backfills(store).create([BackfillRequest("rec", "orders", "public", "orders")])
    asked = follow(str(error), answer="n\n")
    assert asked.exit_code == 1, asked.output
    assert refused(config, database).code == code
    done = follow(str(error), "--yes", "--backfill")
    assert done.exit_code == 0, done.output
    assert f"after {before >> 32:X}/{before & 0xFFFFFFFF:X}" in done.output
    assert "2026-11-14 19:33:20Z" in done.output  # when the last change before was committed
    assert not (file.parent / "checkpoints" / "rec").exists()
    with Store.open(database.url) as store:
        recovery.refuse_gap(config, "rec", store)
        backfills = Backfills(store).find()
        assert {(found.sink, found.table) for found in backfills} == {("orders", "public.orders")}
        assert [found.state for found in backfills] == ["cancelled", "waiting"]
    setup.ensure(config.sources["rec"])
    assert confirmed(origin) > before
    # The second time there is nothing to do.
    again = CliRunner().invoke(app, ["recover", "rec", "-c", str(file)])
    assert again.exit_code == 0, again.output
    assert "needs no recovery" in again.output


def test_the_backfills_that_are_printed_can_be_run(
    file: Path, origin: Database, database: Database
) -> None:
    BREAKS["slot_missing"](origin)
    done = follow(str(refused(load(file, {}), database)), answer="y\n")
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.output.splitlines() if "penstock backfill start" in line]
    started = CliRunner().invoke(app, shlex.split(line)[1:])
    assert started.exit_code == 0, started.output
    assert "Started backfill 1 of public.orders" in started.output


@pytest.mark.parametrize("step", ["renew", "_clear_checkpoints", "close_gap"])
def test_killed_in_the_middle_it_ends_right_when_it_is_run_again(
    file: Path, origin: Database, database: Database, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    config = load(file, {})
    before = confirmed(origin)
    BREAKS["slot_invalidated"](origin)
    place: Any = {"renew": setup, "close_gap": recovery}.get(step, recovery.Recovery)
    with monkeypatch.context() as patch, Store.open(database.url) as store:
        patch.setattr(place, step, kill)
        with recovery.Recovery(config, "rec", store) as begun, pytest.raises(Killed):
            begun.run(begun.requests()[0])
    error = refused(config, database)
    done = follow(str(error), "--yes", "--backfill")
    assert done.exit_code == 0, done.output
    assert f"after {before >> 32:X}/{before & 0xFFFFFFFF:X}" in done.output
    with Store.open(database.url) as store:
        recovery.refuse_gap(config, "rec", store)
        assert len(Backfills(store).find()) == 1
    setup.ensure(config.sources["rec"])
    _logged_once(database)


def _logged_once(database: Database) -> None:
    log = database.execute("SELECT kind, name, after FROM penstock.audit WHERE action = 'recover'")
    ((kind, name, after),) = log
    asked = [id_ for (id_,) in database.execute("SELECT id FROM penstock.backfills")]
    assert (kind, name, after["slot"], after["backfills"]) == ("source", "rec", SLOT, asked)


def test_it_has_not_ended_without_its_line_in_the_log(
    file: Path, origin: Database, database: Database
) -> None:
    BREAKS["slot_missing"](origin)
    error = refused(load(file, {}), database)
    refuse_lines(database)
    done = follow(str(error), "--yes", "--backfill")
    assert (done.exit_code, "no line" in done.output) == (1, True), done.output
    error = refused(load(file, {}), database)
    assert error.code == recovery.UNFINISHED
    with Store.open(database.url) as store:
        assert Backfills(store).find() == []
    database.execute("DROP TRIGGER refuse ON penstock.audit")
    assert follow(str(error), "--yes", "--backfill").exit_code == 0
    _logged_once(database)


def test_it_is_refused_while_a_run_has_the_source(
    file: Path, origin: Database, database: Database
) -> None:
    command = ["recover", "rec", "-c", str(file), "--yes"]
    with Store.open(database.url) as store:
        tag = identify(origin.url, SLOT).tag
        with store.claim_source(store.make_source("rec", tag).id) as claimed:
            assert claimed
            BREAKS["slot_missing"](origin)
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 1
            assert "A penstock run has source rec now. Stop it first." in done.output
    BREAKS["publication_missing"](origin)
    setup.ensure(load(file, {}).sources["rec"])
    with contextlib.closing(
        psycopg.connect(origin.url, autocommit=True, replication="database")
    ) as reader:
        reader.pgconn.exec_(
            f"START_REPLICATION SLOT {SLOT} LOGICAL 0/0 "
            "(proto_version '1', publication_names 'penstock')".encode()
        )
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 1
        assert "is in use by the server process" in done.output


def test_what_a_capture_saw_is_remembered(file: Path, origin: Database, database: Database) -> None:
    """A position that another reader confirmed shows nowhere but in the run's error."""
    config = load(file, {})
    before = confirmed(origin)
    tag = identify(origin.url, SLOT).tag
    with Store.open(database.url) as store:
        recovery.refuse_gap(config, "rec", store)
        Positions(store).note_gap("rec", tag, "position_behind_slot")
        Positions(store).record("rec", tag, before + 1000, 0)  # a run that ends: too late
    origin.execute("INSERT INTO orders VALUES (1, 'read by another')")
    origin.execute(f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())")
    error = refused(config, database)
    assert error.code == "position_behind_slot"
    done = follow(str(error), "--yes")
    assert done.exit_code == 0, done.output
    assert f"after {before >> 32:X}/{before & 0xFFFFFFFF:X}" in done.output


def test_the_recorder_keeps_the_newest(origin: Database, database: Database) -> None:
    with Store.open(database.url) as store:
        recorder = Recorder(database.url)
        recorder.note("s", "t", 0, 0)
        recorder.note("s", "t", 7, 1_000_000)
        recorder.note("s", "t", 9, 0)
        recorder.close()
        found = Positions(store).get("s")
        assert found is not None
        assert (found.tag, found.lsn, found.gap) == ("t", 9, None)


def test_names(file: Path) -> None:
    done = CliRunner().invoke(app, ["recover", "rce", "-c", str(file)])
    assert done.exit_code == 1
    assert "there is no source 'rce': expected one of rec; did you mean rec?" in done.output
