"""What is left of removed entities goes once no run uses it, and holds up nobody meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from tests.waits import Later, await_true

from penstock.config.settings import Config
from penstock.core.errors import StoreError
from penstock.core.health import Level
from penstock.desired.configured import config_of
from penstock.desired.entities import Change
from penstock.desired.feed import Feed
from penstock.desired.removals import pending
from penstock.desired.state import DesiredState
from penstock.embedded.handles import Database
from penstock.postgres.replication import ReplicationStream
from penstock.runtime.removing import Remover, Sources
from penstock.runtime.runners import Runners
from penstock.runtime.source_runner import SourceRunner
from penstock.streams.nats_consumers import NatsConsumers
from penstock.streams.store import Store

BASE = Config(sources={}, sinks={})
GONE = "postgres://127.0.0.1:1/x"
"""Nothing listens there."""


def source(url: str = GONE, **keys: str) -> dict[str, Any]:
    return {"type": "postgres", "url": url, **keys}


def stream(of: str, **keys: Any) -> dict[str, Any]:
    return {"type": "stream", "source": of, **keys}


@dataclass
class Runner:
    """Stands for a runner that has its source's lease, and runs `running`."""

    name: str
    running: Config | None
    alive: bool = True
    ready: bool = True
    holds_lease: bool = True
    refuses: bool = False
    renewed: list[str] = field(default_factory=list)

    def renew(self) -> None:
        self.renewed.append(self.name)


class Bed:
    """A state whose sources `a` and `b` are registered in the store, with their sinks' streams."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.state = DesiredState(store, {})
        self.runners: list[Runner] = []
        self.remover = Remover(store.url, BASE, self.sources)

    def write(self, *changes: tuple[str, str, dict[str, Any] | None]) -> Config:
        found = [Change(kind, name, None, spec) for kind, name, spec in changes]
        self.state.write(found, by="x", door="api")
        return self.config()

    def config(self) -> Config:
        return config_of(self.state.read(), {}, BASE)

    def register(self, config: Config) -> None:
        for name, sink in config.streams.items():
            of = self.store.make_source(sink.source, sink.source)
            self.store.register_stream(name, of, sink.kind, sink.retention)

    def sources(self) -> Sources:
        runners = cast("list[SourceRunner]", self.runners)
        return Sources(self.config(), runners, ())

    def left(self) -> list[str]:
        return [removal.name for removal in pending(self.store)]

    def streams(self) -> dict[str, str]:
        return {record.name: record.source for record in self.store.streams()}


@pytest.fixture
def bed(store: Store) -> Bed:
    return Bed(store)


def test_a_run_keeps_what_was_removed_after_its_configuration(bed: Bed) -> None:
    """Such as the last good one, where the one that removed a sink is refused."""
    good = bed.write(
        ("source", "a", source()), ("sink", "one", stream("a")), ("sink", "two", stream("a"))
    )
    bed.register(good)
    newest = bed.write(("sink", "two", None))
    assert bed.remover.before_run("a", good.only("a")) is None
    assert not bed.remover.left("a", good.only("a"))
    assert (bed.left(), set(bed.streams())) == (["two"], {"one", "two"})
    assert bed.remover.before_run("a", newest.only("a")) is None
    assert (bed.left(), set(bed.streams())) == ([], {"one"})


def test_a_run_that_goes_on_beside_a_refused_change_is_not_begun_anew(bed: Bed) -> None:
    good = bed.write(("source", "a", source()), ("sink", "one", stream("a")))
    bed.register(good)
    bed.write(("sink", "one", None))
    newest = bed.write(("sink", "one", stream("a")))
    runner = Runner("a", good.only("a"), refuses=True)
    bed.runners = [runner]
    bed.remover.sweep()
    assert (runner.renewed, bed.left()) == ([], ["one"])
    runner.refuses = False
    bed.remover.sweep()
    assert (runner.renewed, bed.left()) == (["a"], ["one"])
    assert bed.remover.left("a", newest.only("a")) == {("sink", "one")}
    assert bed.remover.before_run("a", newest.only("a")) is None
    assert (bed.left(), bed.streams()) == ([], {})


def test_a_nats_consumer_that_is_made_again_begins_anew(bed: Bed) -> None:
    """However little time lies between: else it would go on where the one before it was."""
    mail = {"type": "nats", "stream": "one"}
    good = bed.write(
        ("source", "a", source()), ("sink", "one", stream("a")), ("consumer", "mail", mail)
    )
    bed.register(good)
    known = NatsConsumers(bed.store)
    (of,) = bed.store.streams()
    known.register(of, "mail", {}, "all")
    known.pause("mail", paused=True)
    bed.write(("consumer", "mail", None))
    newest = bed.write(("consumer", "mail", mail))
    runner = Runner("a", good.only("a"))
    bed.runners = [runner]
    bed.remover.sweep()
    assert (runner.renewed, bed.left(), len(known.all())) == (["a"], ["mail"], 1)
    assert bed.remover.left("a", newest.only("a")) == {("consumer", "mail")}
    assert bed.remover.before_run("a", newest.only("a")) is None
    assert (bed.left(), known.all()) == ([], [])
    # One that changes its type goes as well, once no run publishes for it.
    known.register(of, "mail", {}, "all")
    bed.write(("consumer", "mail", {"type": "pull", "stream": "one"}))
    runner.running = newest.only("a")
    bed.remover.sweep()
    assert (bed.left(), len(known.all())) == (["mail"], 1)
    runner.running = bed.config().only("a")
    bed.remover.sweep()
    assert (bed.left(), known.all()) == ([], [])


def test_a_nats_consumer_of_another_stream_is_let_go_first(bed: Bed) -> None:
    """Also where that stream is another source's, whose run removes the consumer."""
    mail = {"type": "nats", "stream": "one"}
    before = bed.write(
        ("source", "a", source(slot="a")), ("source", "b", source(slot="b")),
        ("sink", "one", stream("a")), ("sink", "two", stream("b")), ("consumer", "mail", mail),
    )  # fmt: skip
    bed.register(before)
    known, (one, two) = NatsConsumers(bed.store), bed.store.streams()
    known.register(one, "mail", {}, "all")
    assert known.streams() == {"mail": "one"}
    assert not bed.remover.left("a", before.only("a"))
    after = bed.write(("consumer", "mail", mail | {"stream": "two"}))
    assert not bed.remover.left("a", after.only("a"))
    assert bed.remover.left("b", after.only("b")) == {("consumer", "mail")}
    with pytest.raises(StoreError) as raised:
        known.register(two, "mail", {}, "all")
    assert (raised.value.code, raised.value.transient) == ("name_taken", True)
    known.remove_others({one.id}, {})
    assert not bed.remover.left("b", after.only("b"))
    known.register(two, "mail", {}, "all")


def test_a_sink_that_changes_its_source_waits_for_the_former_ones_lease(bed: Bed) -> None:
    before = bed.write(
        ("source", "a", source(slot="a")),
        ("source", "b", source(slot="b")),
        ("sink", "one", stream("a")),
        ("sink", "two", stream("a")),
        ("sink", "three", stream("b")),
    )
    bed.register(before)
    bed.write(("sink", "one", None))
    after = bed.write(("sink", "one", stream("b")))
    runner = Runner("a", before.only("a"))
    bed.runners = [runner, Runner("b", before.only("b"))]
    waits = bed.remover.before_run("b", after.only("b"))
    assert waits is not None
    assert "Source b waits: sink one took from source a before" in str(waits)
    assert waits.transient
    assert bed.remover.left("b", after.only("b")) == {("sink", "one")}
    bed.remover.sweep()
    assert bed.streams()["one"] == "a"  # which is written to
    runner.running = after.only("a")
    bed.remover.sweep()
    assert (bed.left(), "one" in bed.streams()) == ([], False)
    assert bed.remover.before_run("b", after.only("b")) is None


def test_two_sources_whose_sinks_change_places_both_let_go(bed: Bed) -> None:
    bed.register(
        bed.write(
            ("source", "a", source(slot="a")),
            ("source", "b", source(slot="b")),
            ("sink", "one", stream("a")),
            ("sink", "two", stream("b")),
        )
    )
    bed.write(("sink", "one", None), ("sink", "two", None))
    after = bed.write(("sink", "one", stream("b")), ("sink", "two", stream("a")))
    assert bed.remover.left("a", after.only("a")) == {("sink", "two")}
    assert bed.remover.left("b", after.only("b")) == {("sink", "one")}
    assert bed.remover.before_run("a", after.only("a")) is not None
    assert bed.left() == ["two"]
    assert bed.remover.before_run("b", after.only("b")) is None
    assert bed.remover.before_run("a", after.only("a")) is None
    assert bed.left() == []


class Slots:
    """The slots of a database's server whose names begin with `former`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def make(self, name: str) -> None:
        self._database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])

    def names(self) -> list[str]:
        query = "SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'former%'"
        return sorted(row[0] for row in self._database.execute(query))


@pytest.fixture
def slots(database: Database) -> Iterator[Slots]:
    slots = Slots(database)
    yield slots
    for name in slots.names():
        database.execute("SELECT pg_drop_replication_slot(%s)", [name])


def test_the_former_slot_of_a_source_goes_once_it_streams_from_the_new_one(
    bed: Bed, database: Database, slots: Slots
) -> None:
    slots.make("former_a")
    slots.make("former_b")
    before = bed.write(("source", "a", source(database.url, slot="former_a")))
    after = bed.write(("source", "a", source(database.url, slot="former_b")))
    assert bed.remover.before_run("a", after.only("a")) is None
    assert not bed.remover.left("a", after.only("a"))
    runner = Runner("a", before.only("a"))
    bed.runners = [runner]
    bed.remover.sweep()
    assert slots.names() == ["former_a", "former_b"]  # it is read until the hand-over
    runner.running, runner.ready = after.only("a"), False
    bed.remover.sweep()
    assert slots.names() == ["former_a", "former_b"]
    runner.ready = True
    bed.remover.sweep()
    assert (slots.names(), bed.left(), bed.remover.parts()) == (["former_b"], [], [])
    assert bed.config().sources["a"].slot == "former_b"


def test_a_slot_that_is_read_again_or_by_another_source_stays(
    bed: Bed, database: Database, slots: Slots
) -> None:
    for name in ("former_a", "former_b", "former_c"):
        slots.make(name)
    bed.write(("source", "a", source(database.url, slot="former_a")))
    bed.write(("source", "a", source(database.url, slot="former_b")))
    bed.write(
        ("source", "a", source(database.url, slot="former_a")),
        ("source", "c", source(database.url, slot="former_c")),
    )
    after = bed.write(  # the two change places
        ("source", "a", source(database.url, slot="former_c")),
        ("source", "c", source(database.url, slot="former_a")),
    )
    bed.runners = [Runner("a", after.only("a")), Runner("c", after.only("c"))]
    bed.remover.sweep()
    assert (slots.names(), bed.left()) == (["former_a", "former_c"], [])


def test_a_former_slot_that_something_reads_stays_until_that_ends(
    bed: Bed, database: Database, slots: Slots
) -> None:
    slots.make("former_a")
    bed.write(("source", "a", source(database.url, slot="former_a")))
    after = bed.write(("source", "a", source(database.url, slot="former_b")))
    bed.runners = [Runner("a", after.only("a"))]

    def named() -> bool:
        bed.remover.sweep()
        return bool(bed.remover.parts())

    def gone() -> bool:
        bed.remover.sweep()
        return not bed.left()

    database.execute("CREATE PUBLICATION former")
    stream = ReplicationStream(database.url, "former_a", "former")
    try:
        await_true(named)
        (part,) = bed.remover.parts()
        assert (part.subject, part.level) == ("source a", Level.DEGRADED)
        (problem,) = part.problems
        assert "Its former slot former_a holds WAL of" in problem.cause
        assert "pg_drop_replication_slot('former_a')" in problem.remedy
        assert slots.names() == ["former_a"]
    finally:
        stream.close()
    await_true(gone)
    assert (slots.names(), bed.remover.parts()) == ([], [])


def test_the_former_slot_of_a_server_that_is_away_is_named(bed: Bed, database: Database) -> None:
    bed.write(("source", "a", source(GONE, slot="former_a")))
    after = bed.write(("source", "a", source(database.url, slot="former_a")))
    bed.runners = [Runner("a", after.only("a"))]

    def named() -> bool:
        bed.remover.sweep()
        return bool(bed.remover.parts())

    await_true(named)
    (part,) = bed.remover.parts()
    assert "former_a holds WAL of 127.0.0.1:1/x" in part.problems[0].cause
    assert bed.left() == ["a"]


def test_a_database_that_does_not_answer_holds_up_no_change(store: Store) -> None:
    state = DesiredState(store, {})

    def write(kind: str, name: str, spec: dict[str, Any] | None) -> None:
        state.write([Change(kind, name, None, spec)], by="x", door="api")

    with (
        socket.create_server(("127.0.0.1", 0)) as silent,  # it takes connections, and never answers
        Feed(store.url, BASE, {}) as feed,
    ):
        url = f"postgres://127.0.0.1:{silent.getsockname()[1]}/shop"
        write("source", "gone", source(url))
        runners = Runners(feed.current(), store.url, feed=feed)
        runners.prepare()
        write("source", "gone", None)
        running = Later(lambda: runners.run(cast("Any", None), lambda: None))
        try:
            silent.settimeout(30)
            waits, _ = silent.accept()
            write("source", "new", source())
            write("sink", "one", stream("new"))
            await_true(lambda: runners.names == ["new"], 5.0)
            waits.close()
        finally:
            runners.stop()
        running.result(30)
    assert [removal.name for removal in pending(store)] == ["gone"]
