"""What a relay lives through: kills and restarts of what is around it, groups that come and go."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

from ..pipeline import PATIENCE, Penstock
from ..relay_help import bodies, publish, publish_at_once, relay, set_outbox, slots, status

KEPT = 20_000
WINDOW = 3600.0
"""Seconds for which JetStream knows what it has: a busy machine may take long for a restart."""


@pytest.fixture(scope="module")
def postgres(server_dir: Path) -> Iterator[EmbeddedPostgres]:
    """A server that the test may restart."""
    with EmbeddedPostgres(server_dir / "postgres-life") as server:
        yield server


@pytest.fixture
def store(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A database that is not the application's."""
    name = f"store_{uuid.uuid4().hex[:12]}"
    store = Database(name, postgres.create_database(name))
    yield store
    store.drop(postgres.url)


@dataclass
class World:
    """A relay, and what is around it."""

    app: Database
    postgres: EmbeddedPostgres
    broker: EmbeddedNats
    streams: JetStream
    process: Penstock
    last: int = 0

    def publish(self) -> None:
        """Publish ten more numbers, each in a transaction of its own."""
        publish(self.app, *range(self.last + 1, self.last + 11))
        self.last += 10

    def count(self, stream: str) -> int:
        return self.streams.info(stream).state.messages

    def await_all(self, *streams: str) -> None:
        for stream in streams:
            self.process.wait_for(
                lambda stream=stream: self.count(stream) >= self.last,  # type: ignore[misc]  # mypy infers no lambda with a default
                PATIENCE, f"with all in {stream}",
            )  # fmt: skip

    def await_counted(self, pipeline: str, stream: str) -> None:
        """Wait until the pipeline's counter is how many messages the stream has."""

        def counted() -> bool:
            sink = self.process.status().get("sinks", {}).get(pipeline, {})
            return bool(sink.get("delivered") == self.count(stream))

        self.process.wait_for(counted, PATIENCE, f"counting what {pipeline} delivered")

    def await_error(self, pipeline: str) -> None:
        def reported() -> bool:
            of = self.process.status().get("sinks", {}).get(pipeline, {})
            return of.get("error") is not None

        self.process.wait_for(reported, PATIENCE, f"reporting the error of {pipeline}")

    def await_state(self, pipeline: str, state: str) -> None:
        self.process.wait_for(
            lambda: status(self.app, pipeline)["state"] == state, PATIENCE, f"{pipeline} {state}"
        )

    def await_swept_to(self, rows: int) -> None:
        def swept() -> bool:
            self.app.execute("select tide.outbox_sweep('notifications')")
            ((left,),) = self.app.execute("select count(*) from tide.outbox_notifications")
            assert left >= rows, "swept before it was delivered"
            return bool(left == rows)

        self.process.wait_for(swept, PATIENCE, f"swept to {rows} rows")

    def held_by(self) -> list[str]:
        ((status,),) = self.app.execute("select tide.outbox_status('notifications')")
        return [holder["pipeline"] for holder in status["held_by"]]


def test_what_a_relay_lives_through(
    app: Database, postgres: EmbeddedPostgres, store: Database, broker: EmbeddedNats,
    streams: JetStream, tmp_path: Path,
) -> None:  # fmt: skip
    """Its store is elsewhere; all that happens, happens to one relay, to spare starts of Spark."""
    for stream in ("A", "B"):
        subjects = [stream.lower(), f"{stream.lower()}.>"]
        streams.add_stream(stream, subjects, duplicate_window=WINDOW)
    app.execute("select tide.outbox_create('notifications')")
    publish_at_once(app, 1, KEPT)
    set_outbox(app, "a", "A", group="one")
    app.execute("select tide.relay_enable('a')")
    with relay(tmp_path, app, streams, "--store", store.url) as process:
        world = World(app, postgres, broker, streams, process, last=KEPT)
        kept_messages_stay_first(world)
        assert bodies(streams, "A") == list(range(1, world.last + 1))
        assert store.execute("select name from penstock.sources") != []
        assert app.execute("select 1 from pg_namespace where nspname = 'penstock'") == []
        groups_are_independent(world)
        the_database_restarts(world)
        a_route_cannot_be_used(world)
        assert bodies(streams, "B") == list(range(1, world.last + 1))
        a_group_ends(world)
        assert process.stop() == 0
    assert bodies(streams, "A") == list(range(1, world.last + 1))


def kept_messages_stay_first(world: World) -> None:
    """NATS is killed while they are read, then the relay, which begins anew with NATS away."""
    process = world.process.start()
    process.wait_for(lambda: world.count("A") > 0, PATIENCE, "delivering")
    world.publish()
    world.broker.kill()
    world.publish()
    world.await_error("a")
    process.kill_tree()
    world.broker.start()
    assert world.count("A") < KEPT
    world.broker.kill()
    process.start()
    world.publish()
    world.await_error("a")
    world.broker.start()
    world.await_all("A")
    world.await_state("a", "running")


def groups_are_independent(world: World) -> None:
    """Each has all messages; one that is disabled holds what it lacks, and the other not at all."""
    set_outbox(world.app, "b", "B", group="two")
    world.app.execute("select tide.relay_enable('b')")
    world.await_all("B")
    world.await_counted("b", "B")
    world.app.execute("select tide.relay_disable('b')")
    world.await_state("b", "disabled")
    before = world.last
    world.publish()
    world.await_all("A")
    world.app.execute(
        "update tide.outbox_notifications set created_at = created_at - interval '2 days'"
    )
    # The place of a pipeline is kept now and then.
    world.process.wait_for(lambda: world.held_by() == ["b"], PATIENCE, "held by b alone")
    world.await_swept_to(10)
    assert world.count("B") == before
    world.app.execute("select tide.relay_enable('b')")
    world.await_all("B")
    world.await_counted("b", "B")  # by the next run of the group, too
    world.await_swept_to(0)


def the_database_restarts(world: World) -> None:
    world.publish()
    world.postgres.restart("immediate")
    world.app.close()
    world.publish()
    world.await_all("A", "B")


def a_route_cannot_be_used(world: World) -> None:
    """The messages stay in the outbox, and none goes out without the route."""
    before = world.count("B")
    set_outbox(world.app, "b", "B", group="two", route=[{"to": "${env:NOWHERE}"}])
    world.await_state("b", "error")
    world.process.wait_for(lambda: slots(world.app) == 1, PATIENCE, "without the slot")
    world.publish()
    set_outbox(world.app, "b", "B", group="two", route=[{"to": "b.routed"}])
    world.await_all("B")
    assert {m.subject for m in world.streams.messages("B")[before:]} == {"b.routed"}


def a_group_ends(world: World) -> None:
    """Its slot is dropped; the other one goes on."""
    had = world.last
    assert slots(world.app) == 2
    world.app.execute("select tide.relay_delete('b')")
    world.process.wait_for(lambda: slots(world.app) == 1, PATIENCE, "without the slot")
    world.publish()
    world.await_all("A")
    assert world.count("B") == had
