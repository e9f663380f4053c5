"""What a relay does to outboxes where nothing runs, and where a transaction stays open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs
from tests.integration.outbox_sql import delivered, ids, pipeline
from tests.waits import await_true

from penstock.config.settings import Config, SparkSettings
from penstock.config.sources import OutboxSource
from penstock.embedded.handles import Database
from penstock.outbox.pipelines import find, source_name
from penstock.outbox.relay import sweep
from penstock.outbox.relay.checkpoints import Checkpoints
from penstock.outbox.relay.desired_state import GroupPlanner
from penstock.outbox.relay.lock import GroupLock
from penstock.outbox.relay.relay import Relay
from penstock.outbox.relay.sweep import Sweeper
from penstock.outbox.sessions import connect, postgres_error
from penstock.runtime.state import RunState
from penstock.streams.store import Store


@pytest.fixture
def tide(database: Database) -> Database:
    for name in ("a", "b", "c"):
        database.execute("SELECT tide.outbox_create(%s, 0)", [name])
        database.execute("SELECT tide.outbox_publish(%s, '1')", [name])
    return database


@pytest.fixture
def session(tide: Database) -> Iterator[psycopg.Connection[Any]]:
    with contextlib.closing(connect(tide.url)) as connection:
        yield connection


@pytest.fixture
def store(tide: Database) -> Iterator[Store]:
    with contextlib.closing(Store.open(tide.url)) as opened:
        yield opened


@pytest.mark.parametrize(
    "statement", ["SELECT tide.relay_delete('pb')", "SELECT tide.outbox_drop('b', true)"]
)
def test_checkpoints_are_written_but_the_one_that_is_locked(
    tide: Database, session: psycopg.Connection[Any], store: Store, statement: str
) -> None:
    for name in ("a", "b", "c"):
        pipeline(tide, f"p{name}", name)
        tide.execute("SELECT tide.relay_enable(%s)", [f"p{name}"])
        delivered(tide, f"p{name}")
    planner = GroupPlanner(tide.url, tide.name, tide.url, SparkSettings(), source_name)
    desired = planner.plan(find(session), {})["g"]
    state = RunState([desired.source], dict.fromkeys(desired.sinks, ("nats", desired.source)))
    state.sources[desired.source].confirmed_lsn = 10**15
    run: Any = SimpleNamespace(
        state=state, store=SimpleNamespace(source=lambda name: store.make_source(name, "tag"))
    )
    checkpoints = Checkpoints(session, store, desired, run, frozenset())
    query = "SELECT pipeline FROM tide.checkpoints WHERE lsn IS NOT NULL ORDER BY 1"
    with tide.connect() as forgotten, capture_logs() as logs:
        forgotten.execute(statement)
        for _ in range(2):
            checkpoints.tick()
        assert tide.execute(query) == [("pa",), ("pc",)]
        forgotten.rollback()
        checkpoints.tick()
        assert tide.execute(query) == [("pa",), ("pb",), ("pc",)]
    assert [entry["pipeline"] for entry in logs] == ["pb"]


def test_the_error_of_a_lock_has_a_remedy(tide: Database, session: psycopg.Connection[Any]) -> None:
    with tide.connect() as forgotten:
        forgotten.execute("LOCK TABLE tide.outbox_a")
        with pytest.raises(psycopg.errors.LockNotAvailable) as caught:
            session.execute("SELECT FROM tide.outbox_a")
    known = postgres_error(caught.value, tide.url)
    assert (known.code, known.transient) == ("locked", True)
    assert "pg_stat_activity" in known.remedy


def test_outboxes_without_pipelines_are_swept(
    tide: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_EVERY_SECONDS", 0.0)
    source = OutboxSource.model_validate({"type": "outbox", "url": tide.url, "relay_group": "g"})
    relay = Relay("box", source, Config(sources={}, sinks={}))
    relay.prepare()
    spark: Any = object()  # nothing runs
    relay.start(spark)
    try:
        await_true(lambda: not any(ids(tide, name) for name in "abc"), 30)
    finally:
        relay.stop()
        relay.join()


def test_a_sweep_goes_on_where_there_is_more(
    tide: Database, session: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "_AT_ONCE_SECONDS", 0.0)  # one outbox a call
    monkeypatch.setattr(sweep, "_MOST_ROWS", 1)
    sweeper = Sweeper()
    sweeps = 0
    while sweeps == 0 or sweeper.busy:
        sweeper.sweep(session)
        sweeps += 1
    assert sweeps == 6  # each outbox, and again to see that there is no more
    assert not any(ids(tide, name) for name in "abc")
    monkeypatch.undo()
    tide.execute("SELECT tide.outbox_publish('a', '2')")
    sweeper = Sweeper()
    sweeper.sweep(session)
    assert ids(tide, "a") == [2], "not before a minute is over"


def test_what_can_not_be_swept_now_keeps_up_no_other(
    tide: Database, session: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "_AT_ONCE_SECONDS", 60.0)
    sweeper = Sweeper()
    with tide.connect() as forgotten, tide.connect() as other, capture_logs() as logs:
        forgotten.execute("SELECT tide.outbox_drop('a')")
        # As another relay that is at it.
        values = {"class": sweep.LOCK_SWEEP, "outbox": "b"}
        other.execute(sweep._SQL["sweep"], values)
        for _ in range(2):
            sweeper.sweep(session)
        forgotten.rollback()
        other.rollback()
    found = [(entry["log_level"], entry["outbox"]) for entry in logs]
    assert found == [("warning", "a"), ("info", "c")]
    assert (len(ids(tide, "a")), len(ids(tide, "b")), len(ids(tide, "c"))) == (1, 1, 0)
    sweeper.sweep(session)
    assert not any(ids(tide, name) for name in "ab")
    session.close()
    with pytest.raises(psycopg.Error):
        sweeper.sweep(session)


def test_groups_whose_names_have_one_hash_have_a_lock_each(tide: Database) -> None:
    """Of 32 bits, as the first version had it."""
    query = """SELECT min(name), max(name)
               FROM (SELECT 'g' || n AS name FROM generate_series(1, 400000) AS n) AS names
               GROUP BY hashtext(name) HAVING count(*) > 1 LIMIT 1"""
    ((one, other),) = tide.execute(query)
    first, second, same = (GroupLock(tide.url, name) for name in (one, other, one))
    try:
        assert (first.acquire(), second.acquire(), same.acquire()) == (True, True, False)
    finally:
        for lock in (first, second, same):
            lock.close()
