"""How the outbox's database reports relays: alive, standing by, stopped, dead; and of their slots."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests.integration.outbox_sql import delivered, lease, pipeline, value
from tests.waits import await_true
from typer.testing import CliRunner, Result

from penstock.cli.main import app
from penstock.embedded.handles import Database
from penstock.outbox.pipelines import PUBLICATION, slot_of
from penstock.outbox.relay.lease import GroupLease, Leases
from penstock.outbox.relay.lock import GroupLock
from penstock.postgres.replication import ReplicationStream


@pytest.fixture
def tide(database: Database) -> Database:
    """A pipeline that a relay has run, whose one message waits."""
    database.execute("SELECT tide.outbox_create('o'), tide.inbox_create('i')")
    pipeline(database, "p", "o")
    database.execute("SELECT tide.relay_enable('p')")
    delivered(database, "p")
    database.execute("SELECT tide.outbox_publish('o', '1')")
    return database


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def status(database: Database, name: str = "p") -> dict[str, Any]:
    found: dict[str, Any] = value(database, "SELECT tide.relay_status(%s)", name)
    return found


def held(database: Database) -> tuple[str, str]:
    (found,) = value(database, "SELECT tide.outbox_status('o')")["held_by"]
    return found["reason"], found["remedy"]


def test_a_relay_that_dies_is_dead_since_its_last_heartbeat(tide: Database) -> None:
    lease(tide, age=1)
    assert (status(tide)["state"], status(tide)["error"]) == ("running", None)
    assert 1 <= status(tide)["relay"]["heartbeat_age"] < 10
    assert invoke("outbox", "status", "--url", tide.url).exit_code == 0
    tide.execute("UPDATE tide.leases SET heartbeat = heartbeat - interval '10 s'")
    found = status(tide)
    assert (found["state"], found["code"]) == ("dead", "relay_dead")
    at = value(
        tide,
        "SELECT to_char(heartbeat AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')"
        " FROM tide.leases",
    )
    assert found["error"] == (
        f"The relay of group g is dead since {at}: no heartbeat of process 4711 on h1."
    )
    assert found["remedy"] == "Start it again: penstock relay --url … --group g"
    assert found["relay"]["heartbeat_age"] > 10
    assert held(tide) == (found["error"], found["remedy"])
    assert value(tide, "SELECT state FROM tide.relay_list()") == "dead"
    shown = invoke("outbox", "status", "--url", tide.url)
    assert shown.exit_code == 1
    assert "dead since 20" in shown.output
    assert f"✗ pipeline p: {found['error']} {found['remedy']}" in shown.output


def test_a_dead_relay_whose_session_has_the_lock(tide: Database) -> None:
    """It hangs, or is stopped by a signal: no standby can take over, and the status reports it."""
    lock = GroupLock(tide.url, "g")
    assert lock.acquire()
    try:
        lease(tide, age=60, lock_pid=lock.pid)
        assert "It hangs: its session still holds the group's lock." in status(tide)["error"]
        assert "On h1: kill -9 4711. Then: penstock relay" in status(tide)["remedy"]
        lease(tide, "standby", instance="two", age=0)
        assert "so that the standby cannot take over" in status(tide)["error"]
        assert status(tide)["remedy"] == "On h1: kill -9 4711. The standby then takes over."
    finally:
        lock.close()
    # The server's process of the session ends a moment later.
    await_true(lambda: status(tide)["remedy"] == "A standby takes over within seconds.")
    assert (status(tide)["state"], status(tide)["relay"]["standbys"]) == ("dead", 1)


def test_a_relay_that_was_stopped(tide: Database) -> None:
    lease(tide, "stopped", age=3600)
    found = status(tide)
    assert (found["state"], found["code"]) == ("stopped", "relay_stopped")
    assert found["error"].startswith("The relay of group g was stopped at 20")
    assert held(tide) == (found["error"], "Start it again: penstock relay --url … --group g")
    assert invoke("outbox", "status", "--url", tide.url).exit_code == 1
    lease(tide, "standby", instance="two", age=0)
    assert (status(tide)["state"], status(tide)["remedy"]) == (
        "standby",
        "It takes over within seconds.",
    )
    lease(tide, instance="two", age=0)
    assert (status(tide)["state"], status(tide)["error"]) == ("running", None)


def test_a_standby_that_another_session_keeps_out(tide: Database) -> None:
    lock = GroupLock(tide.url, "g")
    assert lock.acquire()
    try:
        lease(tide, "standby", age=0)
        remedy = f"If that lasts: select pg_terminate_backend({lock.pid})"
        assert (status(tide)["state"], status(tide)["remedy"]) == ("standby", remedy)
        tide.execute(f"SELECT pg_terminate_backend({lock.pid})")
        assert not lock.check()
    finally:
        lock.close()


def test_disabled_reads_disabled_and_never_run_no_relay_yet(tide: Database) -> None:
    for state, age in (("running", 60.0), ("stopped", 60.0)):
        lease(tide, state, age=age)
        tide.execute("SELECT tide.relay_disable('p')")
        assert (status(tide)["state"], status(tide)["error"]) == ("disabled", None)
        assert invoke("outbox", "status", "--url", tide.url).exit_code == 0
        tide.execute("SELECT tide.relay_enable('p')")
    pipeline(tide, "q", "o", group="other")
    tide.execute("SELECT tide.relay_enable('q')")
    assert (status(tide, "q")["state"], status(tide, "q")["relay"]) == ("no relay yet", None)


def test_a_change_that_the_relay_has_not_made_yet(tide: Database) -> None:
    lease(tide)
    tide.execute("UPDATE tide.checkpoints SET lsn = '0/1'")
    tide.execute("SELECT tide.relay_disable('p')")
    assert status(tide)["state"] == "stopping"
    tide.execute("UPDATE tide.checkpoints SET state = 'disabled'")
    assert status(tide)["state"] == "disabled"
    tide.execute("SELECT tide.relay_enable('p')")
    assert status(tide)["state"] == "starting"


def test_what_keeps_a_whole_group_from_moving_is_an_error_of_each_pipeline(tide: Database) -> None:
    lease(tide, code="store", error="The store does not answer.", remedy="Start it.")
    found = status(tide)
    assert (found["state"], found["code"], found["remedy"]) == ("error", "store", "Start it.")
    assert held(tide) == ("The store does not answer.", "Start it.")


def test_the_processes_of_a_group(tide: Database) -> None:
    lease(tide, age=0)
    lease(tide, "standby", instance="two", age=0, host="h2", warm=True)
    lease(tide, "standby", instance="three", age=0, host="h3", warm=False)
    lease(tide, "standby", instance="four", age=30, host="h4")
    lease(tide, group="no-pipelines")
    report = json.loads(invoke("outbox", "status", "--url", tide.url, "--json").output)
    assert {(r["host"], r["state"], r["warm"]) for r in report["relays"]} == {
        ("h1", "running", True), ("h2", "standby", True), ("h3", "standby", False),
        ("h4", "dead", True),
    }  # fmt: skip
    relay = status(tide)["relay"]
    assert (relay["standbys"], relay["warm_standbys"]) == (2, 1)
    shown = invoke("outbox", "status", "--url", tide.url).output
    assert "standby, warm" in shown
    assert "standby, cold" in shown


def test_penstock_status_fails_too(tide: Database, tmp_path: Path) -> None:
    lease(tide, age=60)
    config = tmp_path / "penstock.yaml"
    config.write_text(f"sources: {{app: {{type: outbox, url: '{tide.url}'}}}}\n")
    result = invoke("status", "-c", config, "--listen", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "The relay of group g is dead since" in result.output


def beats(tide: Database, leases: list[GroupLease], until: Callable[[], bool]) -> None:
    keeper = Leases(tide.url, lambda: leases)
    keeper.start()
    try:
        await_true(until)
    finally:
        keeper.stop()


def test_the_process_renews_its_leases_and_notes_its_end(tide: Database) -> None:
    """It takes away what another that ran the group has left, but no standby's."""
    lease(tide, age=60)
    lease(tide, "standby", instance="two", age=60)
    lease(tide, "standby", instance="old", age=7200)
    lease(tide, group="other", age=60)
    leases = [GroupLease("g", "running", warm=True, lock_pid=1)]
    beats(tide, leases, lambda: status(tide)["state"] == "running")
    rows = tide.execute("SELECT relay_group, state, instance FROM tide.leases ORDER BY 1, 2, 3")
    assert [row[:2] for row in rows] == [
        ("g", "standby"), ("g", "stopped"), ("other", "running")
    ]  # fmt: skip
    assert rows[0][2] == "two"
    assert status(tide)["state"] == "stopped"


def test_dead_letters_stand_in_every_view(tide: Database) -> None:
    lease(tide)
    tide.execute(
        "UPDATE tide.checkpoints SET dead_letters = 2, dead_letter = 'too_large: 9 MiB',"
        " dead_letter_at = now()"
    )
    assert (status(tide)["dead_letters"], status(tide)["dead_letter"]) == (2, "too_large: 9 MiB")
    (of,) = value(tide, "SELECT tide.outbox_status('o')")["pipelines"]
    assert (of["dead_letters"], of["dead_letter"]) == (2, "too_large: 9 MiB")
    shown = invoke("outbox", "status", "--url", tide.url).output
    assert "! pipeline p: 2 dead letters, the newest of 20" in shown
    assert "too_large: 9 MiB; penstock dead-letters list --url … --sink p" in shown


# -- slots


def slot(database: Database, group: str = "g") -> str:
    name = slot_of(group, database.name)
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
    return name


def slots(database: Database) -> list[str]:
    query = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    return [row[0] for row in database.execute(query)]


def deleted(database: Database, call: str = "relay_delete('p')") -> tuple[str, str] | None:
    """Return the notice of a call, and its hint."""
    notices: list[tuple[str, str]] = []

    def note(notice: psycopg.errors.Diagnostic) -> None:
        notices.append((notice.message_primary or "", notice.message_hint or ""))

    with database.connect(autocommit=True) as connection:
        connection.add_notice_handler(note)
        connection.execute(sql.SQL("SELECT tide.{}").format(sql.SQL(call)))
    assert len(notices) <= 1
    return notices[0] if notices else None


@pytest.mark.parametrize("group", ["g", "Nats.group-1", "g" * 56])
def test_a_groups_slot_is_called_alike_in_sql_and_python(tide: Database, group: str) -> None:
    assert value(tide, "SELECT tide._slot(%s)", group) == slot_of(group, tide.name)


@pytest.mark.parametrize("call", ["relay_delete('p')", "outbox_drop('o', force => true)"])
def test_the_last_pipeline_of_a_group_takes_the_slot_with_it(tide: Database, call: str) -> None:
    """No relay runs that could; a slot of a group that has pipelines stays."""
    tide.execute("SELECT tide.outbox_create('o2')")
    pipeline(tide, "q", "o2", group="other")
    slot(tide)
    kept = slot(tide, "other")
    assert deleted(tide, call) is None
    assert slots(tide) == [kept]


def test_a_slot_stays_while_its_group_has_a_pipeline(tide: Database) -> None:
    pipeline(tide, "q", "o")
    kept = slot(tide)
    assert deleted(tide) is None
    assert slots(tide) == [kept]
    assert deleted(tide, "relay_delete('q')") is None
    assert slots(tide) == []


def test_an_owner_that_may_not_drop_it_is_given_the_statement(tide: Database) -> None:
    """Also while a relay runs, as that may be one that may not either."""
    name = slot(tide)
    lease(tide)
    owner = f"owner_{tide.name}"
    tide.execute(
        f"CREATE ROLE {owner}; GRANT ALL ON SCHEMA tide TO {owner};"
        f" GRANT ALL ON ALL TABLES IN SCHEMA tide TO {owner};"
        f" ALTER FUNCTION tide.relay_delete(text) OWNER TO {owner};"
        f" GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tide TO {owner}"
    )
    try:
        notice = deleted(tide)
        assert notice is not None
        message, hint = notice
        assert message == (
            f"the replication slot {name} keeps WAL, and the role {owner} may not drop it"
        )
        statement = hint.removeprefix("As a role with REPLICATION: ")
        assert slots(tide) == [name]
        tide.execute(statement)
        assert slots(tide) == []
    finally:
        tide.execute("ALTER FUNCTION tide.relay_delete(text) OWNER TO CURRENT_USER")
        tide.execute(f"DROP OWNED BY {owner}; DROP ROLE {owner}")


def test_an_old_snapshot_drops_no_slot(tide: Database) -> None:
    """It may not know of a pipeline that was made since, whose slot it would be."""
    name = slot(tide)
    notices: list[str] = []
    with tide.connect() as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
        connection.execute("SELECT tide.relay_delete('p')")
    assert notices == [
        f"the replication slot {name} keeps WAL, and is not dropped in a transaction with the"
        " isolation level repeatable read"
    ]
    assert slots(tide) == [name]


def test_a_slot_that_is_still_read(tide: Database) -> None:
    """A relay that is alive drops it itself; without one the statement is given."""
    name = slot(tide)
    stream = ReplicationStream(tide.url, name, PUBLICATION)
    try:
        notice = deleted(tide)
        assert notice is not None
        assert f"the replication slot {name} is still in use, by process " in notice[0]
        pipeline(tide, "p", "o")
        lease(tide)
        assert deleted(tide) is None
    finally:
        stream.close()
    await_true(
        lambda: (
            not value(tide, "SELECT active FROM pg_replication_slots WHERE slot_name = %s", name)
        )
    )
    tide.execute(notice[1].removeprefix("Once that has ended: "))
    assert slots(tide) == []
