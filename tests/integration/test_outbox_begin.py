"""The start of a group's run, and its pipelines' checkpoints: against servers, without Spark."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from tests.integration.outbox_sql import installed, pipeline, value
from tests.streams_help import Change, wire
from tests.waits import await_end, await_true

from penstock.backfill.request import OPEN, Backfills
from penstock.config.settings import SparkSettings
from penstock.core.delivery import DeadLetter
from penstock.core.errors import CaptureError, SinkError, StoreError
from penstock.core.message import Position
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.outbox.pipelines import find, source_name
from penstock.outbox.relay.begin import begin, leave
from penstock.outbox.relay.checkpoints import Checkpoints
from penstock.outbox.relay.desired_state import DesiredPipelines, GroupPlanner
from penstock.outbox.relay.group import Group
from penstock.sinks.backlog import store as backlog
from penstock.streams.store import Store

LATE = SinkError("timeout", "Late.")
UNROUTABLE = [{"when": "record.payload.a = 1", "to": "${env:NOWHERE}"}]


class Relayed:
    """The outbox `o`, and what a relay with one store does for its group."""

    def __init__(self, app: Database, connection: psycopg.Connection[Any], store: Store) -> None:
        self.app = app
        self.connection = connection
        self.store = store

    def desired(self) -> DesiredPipelines:
        planner = GroupPlanner(
            self.app.url, self.app.name, self.store.url, SparkSettings(), source_name
        )
        return planner.plan(find(self.connection), {})["g"]

    def begin(self, desired: DesiredPipelines | None = None) -> frozenset[str]:
        return begin(self.connection, self.store, desired or self.desired())

    def deliver(self) -> None:
        """Have the relay deliver all messages, and write that."""
        desired = self.desired()
        self.store_execute("UPDATE penstock.backfills SET state = 'done'")
        end = value(self.app, "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        checkpoints = self.checkpoints(
            desired, SimpleNamespace(confirmed_lsn=0, done=[1], error=None)
        )
        checkpoints.state.confirmed_lsn = int(end)
        checkpoints.tick()
        checkpoints.state.confirmed_lsn = int(end) + 1_000_000
        checkpoints.state.done = [2]
        checkpoints.tick()

    def checkpoints(
        self, desired: DesiredPipelines, state: Any, starting: Sequence[str] = ()
    ) -> Any:
        source = self.store.register_source(desired.source, "tag")
        sinks = {
            name: SimpleNamespace(delivered=0, dead_lettered=0, failure=None, behind=False)
            for name in desired.sinks
        }
        run: Any = SimpleNamespace(
            state=SimpleNamespace(sources={desired.source: state}, sinks=sinks),
            store=SimpleNamespace(source=lambda _: source),
        )
        checkpoints: Any = Checkpoints(
            self.connection, self.store, desired, run, frozenset(starting)
        )
        checkpoints.state, checkpoints.run = state, run
        for sink in sinks.values():  # the run counts on from where it begins
            sink.delivered = 1
        return checkpoints

    def wait_with(self, name: str, messages: int = 2) -> None:
        """Have messages of a pipeline wait."""
        source = self.store.register_source("tide.g", "tag")
        rows = wire([Change({"id": n}, position=Position(8, n)) for n in range(messages)])
        with self.store.connection() as connection:
            backlog.fall_behind(connection, source.id, name, LATE)
            backlog.spill(connection, source.id, name, rows, source.base)

    def waiting(self) -> set[str]:
        with self.store.connection() as connection:
            return {of.sink for of in backlog.all_behind(connection)}

    def catching_up(self) -> set[str]:
        return {found.sink for found in Backfills(self.store).find(states=OPEN)}

    def checkpoint(self, name: str) -> tuple[Any, ...] | None:
        """Return whether it has an LSN, whether it has a snapshot, and what it has delivered."""
        query = (
            "SELECT lsn IS NOT NULL, delivered_snapshot IS NOT NULL, delivered"
            " FROM tide.checkpoints WHERE pipeline = %s"
        )
        found = self.app.execute(query, [name])
        return found[0] if found else None

    def store_execute(self, query: str) -> None:
        with self.store.connection() as connection:
            connection.execute(query.encode())


@pytest.fixture
def it(database: Database) -> Iterator[Relayed]:
    installed(database)
    database.execute("SELECT tide.outbox_create('o')")
    made(database, "p")
    with (
        database.connect(autocommit=True) as connection,
        Store.open(database.url) as store,
    ):
        yield Relayed(database, connection, store)


@pytest.fixture
def other_store(postgres: EmbeddedPostgres) -> Iterator[Store]:
    name = f"store_{uuid.uuid4().hex[:12]}"
    made = Database(name, postgres.create_database(name))
    with Store.open(made.url) as store:
        yield store
    made.drop(postgres.url)


def made(app: Database, name: str, **config: Any) -> None:
    pipeline(app, name, "o", subject="s", **config)
    app.execute("SELECT tide.relay_enable(%s)", [name])


def publish(app: Database) -> None:
    app.execute("SELECT tide.outbox_publish('o', '1')")


def test_what_was_delivered_is_not_read_again(it: Relayed) -> None:
    publish(it.app)
    assert it.begin() == {"p"}
    it.deliver()
    assert it.checkpoint("p") == (True, True, 1)
    it.wait_with("p")
    assert it.begin() == frozenset()
    assert it.waiting() == {"p"}


def test_one_that_is_made_anew_has_nothing_of_the_old_one(it: Relayed) -> None:
    publish(it.app)
    it.begin()
    it.wait_with("p")
    it.store_execute("UPDATE penstock.backfills SET state = 'failed'")
    it.app.execute("SELECT tide.relay_delete('p')")
    made(it.app, "p")
    assert it.begin() == {"p"}
    assert it.waiting() == set()
    failed = Backfills(it.store).find(states=["failed"])
    assert failed == []


def test_the_old_ones_relay_writes_nothing_for_it(it: Relayed) -> None:
    it.begin()
    old = it.desired()
    checkpoints = it.checkpoints(old, SimpleNamespace(confirmed_lsn=9, done=[1], error=None))
    checkpoints.tick()
    assert it.checkpoint("p") == (True, True, 1)
    it.app.execute("SELECT tide.relay_delete('p')")
    made(it.app, "p")
    checkpoints.run.state.sinks["p"].delivered = 2
    checkpoints.tick()
    assert it.checkpoint("p") is None
    assert not it.desired().runs_as(old)


def test_nor_where_it_waits_for_the_deletion(it: Relayed) -> None:
    it.begin()
    checkpoints = it.checkpoints(
        it.desired(), SimpleNamespace(confirmed_lsn=9, done=[1], error=None)
    )

    def tick() -> None:
        with contextlib.suppress(psycopg.Error):
            checkpoints.tick()

    keeper = threading.Thread(target=tick, daemon=True)
    with it.app.connect() as connection:
        connection.execute("SELECT tide.relay_delete('p')")
        connection.execute(
            "SELECT tide.relay_set_outbox('p', 'o', 'g', '{\"sink_type\": \"nats\", \"url\": \"n\"}')"
        )
        keeper.start()
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %s"
        await_true(lambda: value(it.app, waits, it.connection.info.backend_pid) == 1)
    await_end(keeper)
    assert it.checkpoint("p") is None


def test_what_waits_in_another_store_is_read_from_the_table(
    it: Relayed, other_store: Store
) -> None:
    it.begin()
    it.deliver()
    publish(it.app)
    it.wait_with("p")
    there = Relayed(it.app, it.connection, other_store)
    assert there.begin() == {"p"}
    assert there.catching_up() == {"p"}
    (asked,) = Backfills(other_store).find()
    assert asked.condition is not None
    assert "NOT" in asked.condition  # what was delivered is left out
    assert there.begin() == {"p"}  # as it goes on there
    assert len(Backfills(other_store).find()) == 1
    assert it.begin() == {"p"}
    assert it.waiting() == set()


def test_what_waited_in_a_store_that_is_lost_is_read_from_the_table(it: Relayed) -> None:
    it.begin()
    it.deliver()
    publish(it.app)
    it.wait_with("p")
    it.store_execute("DROP SCHEMA penstock CASCADE")
    Store.open(it.store.url).close()
    assert it.begin() == {"p"}


def test_one_that_cannot_be_routed_is_caught_up_once_it_can(it: Relayed) -> None:
    """Its messages stay in the outbox meanwhile; the others go on."""
    made(it.app, "q")
    it.begin()
    it.deliver()
    it.wait_with("p")
    it.wait_with("q")
    pipeline(it.app, "p", "o", subject="s", route=UNROUTABLE)
    assert it.begin() == frozenset()
    assert it.waiting() == {"q"}
    assert it.checkpoint("p") == (False, True, 1)
    publish(it.app)
    pipeline(it.app, "p", "o", subject="s")
    assert it.begin() == {"p"}


def test_a_group_of_nothing_else_has_no_slot(it: Relayed) -> None:
    it.begin()
    it.deliver()
    it.wait_with("p")
    pipeline(it.app, "p", "o", subject="s", route=UNROUTABLE)
    desired = it.desired()
    assert desired.begun
    leave(it.connection, it.store, desired)
    slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    assert value(it.app, slots) == 0
    assert (desired.begun, it.waiting()) == (False, set())
    publish(it.app)
    pipeline(it.app, "p", "o", subject="s")
    assert it.begin() == {"p"}


def test_checkpoints_of_another_relay_count_as_they_are(it: Relayed) -> None:
    """A standby read the pipelines some seconds before."""
    it.begin()
    it.deliver()
    stale = it.desired()
    it.wait_with("p")
    publish(it.app)
    it.app.execute("UPDATE tide.checkpoints SET lsn = NULL")
    assert it.begin(stale) == {"p"}
    assert it.waiting() == set()


def test_a_resume_that_the_store_refuses_is_tried_again(it: Relayed) -> None:
    it.begin()
    state = SimpleNamespace(confirmed_lsn=9, done=[1], error=None)
    checkpoints = it.checkpoints(it.desired(), state, ["p"])
    refused, resumed = [StoreError("gone", "It is gone.")], []

    def resume(name: str) -> None:
        if refused:
            raise refused.pop()
        resumed.append(name)

    checkpoints.run.resume = resume
    for _ in range(3):
        with contextlib.suppress(StoreError):
            checkpoints.tick()
    assert resumed == ["p"]


def test_dead_letters_of_another_databases_pipeline_are_not_counted(it: Relayed) -> None:
    """Relays of two databases may share a store, and have pipelines of one name."""
    it.begin()
    checkpoints = it.checkpoints(
        it.desired(), SimpleNamespace(confirmed_lsn=9, done=[1], error=None)
    )
    it.store.register_source("tide.g.elsewhere", "other")
    for key in ("tag-8-0", "earlier-8-0", "other-8-0", "other-8-1"):
        it.store.letters.add("p", [DeadLetter(key, "s", "too_large", f"Of {key}.", "{}")])
    checkpoints.tick()
    found = it.app.execute("SELECT dead_letters, dead_letter FROM tide.checkpoints")
    assert found == [(2, "too_large: Of earlier-8-0.")]


def test_what_a_slot_lacks_is_read_from_the_table(it: Relayed) -> None:
    """As what was published while the publication was dropped."""
    it.begin()
    it.deliver()
    it.app.execute("DROP PUBLICATION tide")
    publish(it.app)
    spark: Any = None
    group = Group("g", it.app.url, it.app.name, it.store.url, spark)
    group.set_desired(it.desired())
    with contextlib.closing(group._lock) as lock:
        assert lock.acquire()
        with pytest.raises(CaptureError) as raised:
            group._runner.turn()
    assert raised.value.code == "publication_missing"
    assert it.begin() == {"p"}
    assert it.catching_up() == {"p"}
    published = "SELECT tablename::text FROM pg_publication_tables WHERE pubname = 'tide'"
    assert it.app.execute(published) == [("outbox_o",)]
