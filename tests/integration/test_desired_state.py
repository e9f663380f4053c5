"""The desired state in a real store: change sets, the audit log, who follows it, and a file applied."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.waits import Later, await_true

from penstock.config.settings import Config
from penstock.config.sinks import StreamSinkSettings
from penstock.core.errors import CaptureError, ConfigError, StoreError
from penstock.desired import feed as feed_module
from penstock.desired.consumers import register
from penstock.desired.entities import Change
from penstock.desired.feed import Feed
from penstock.desired.from_file import apply_file
from penstock.desired.removals import finish, pending
from penstock.desired.state import DesiredState, StateMoved
from penstock.desired.streams import register as register_streams
from penstock.embedded.handles import Database
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerSpec
from penstock.streams.store import Store

SOURCE = {"type": "postgres", "url": "postgres://app:s3cret@db/shop"}
STREAM = {"type": "stream", "source": "shop"}
HOOK = {"type": "webhook", "stream": "orders", "url": "https://hook.example/in?k=s3cret"}
BASE = Config(sources={}, sinks={})


def shop(**consumers: Mapping[str, object]) -> list[Change]:
    return [
        Change("source", "shop", None, SOURCE),
        Change("sink", "orders", None, STREAM),
        *(Change("consumer", name, None, spec) for name, spec in consumers.items()),
    ]


def make_stream(store: Store) -> None:
    store.register_stream("orders", store.make_source("shop", "tag"), "changes", None)


def served(store: Store) -> dict[str, object]:
    return {c.name: c.settings for c in store.consumers() if not c.own}


def kept(store: Store) -> tuple[object, ...]:
    """Return the retention of the stream, and the settings of its own consumer."""
    (own,) = (consumer.settings for consumer in store.consumers() if consumer.own)
    return store.streams()[0].retention, own


def test_changes_are_versioned_audited_and_masked(store: Store) -> None:
    state = DesiredState(store, {})
    assert state.read().version == 0
    first = state.write(shop(hook=HOOK), by="ann", door="api")
    assert first.version == 1
    assert first.entities["source", "shop"].spec == SOURCE
    update = Change("sink", "orders", STREAM, {**STREAM, "tables": ["public.orders"]})
    second = state.write([update], by="ben", door="file", expected={("sink", "orders"): 1})
    orders = second.entities["sink", "orders"]
    assert (orders.version, orders.managed_by) == (2, "file")
    assert orders.id == first.entities["sink", "orders"].id
    assert second.entities["source", "shop"].version == 1
    few = state.read(["sink", "target"])
    assert (few.version, [*few.entities]) == (2, [("sink", "orders")])
    with pytest.raises(StateMoved, match="sink orders"):
        state.write([update], by="cy", door="api", expected={("sink", "orders"): 1})
    with pytest.raises(StateMoved, match="source shop"):
        state.write(shop(), by="cy", door="api", expected={("source", "shop"): 0})
    assert state.read() == second
    with pytest.raises(StateMoved, match="consumer hook needs the sink orders"):
        state.write([Change("sink", "orders", STREAM, None)], by="cy", door="api")
    log = state.history()
    newest = log[0]
    assert (newest.who, newest.action, newest.name, newest.version) == (
        "ben",
        "update",
        "orders",
        2,
    )
    assert {e.name for e in state.history(kind="consumer")} == {"hook"}
    assert state.history(before=log[0].id, limit=1) == [log[1]]
    assert "s3cret" not in repr(log)
    assert "hook.example/in" in repr(log)
    both = [Change("sink", "orders", STREAM, None), Change("consumer", "hook", HOOK, None)]
    gone = state.write(both, by="ann", door="api")
    again = state.write([Change("sink", "orders", None, STREAM)], by="ann", door="api")
    assert ("sink", "orders") not in gone.entities
    assert again.entities["sink", "orders"].id != orders.id


def test_a_stream_has_at_once_what_its_sink_says_of_it(store: Store) -> None:
    state = DesiredState(store, {})
    state.write(shop(), by="ann", door="api")
    make_stream(store)

    def change(**settings: object) -> tuple[object, ...]:
        sink = {**STREAM, **settings}
        state.write([Change("sink", "orders", None, sink)], by="ann", door="api")
        return kept(store)

    assert change(retention="1d", ack_wait_ms=5) == (timedelta(days=1), {"ack_wait_ms": 5})
    assert change(max_deliver=2) == (timedelta(days=7), {"max_deliver": 2})
    # What another process has variables for is set by that one.
    assert change(retention="${KEEP}", ack_wait_ms=5) == (timedelta(days=7), {"max_deliver": 2})
    register_streams(
        store, {"orders": StreamSinkSettings(type="stream", source="shop", max_waiting=3)}
    )
    assert kept(store) == (timedelta(days=7), {"max_waiting": 3})
    # A run makes one of another kind anew.
    assert change(kind="rows", ack_wait_ms=5) == (timedelta(days=7), {"max_waiting": 3})


def test_consumers_are_served_once_their_stream_is_there(store: Store) -> None:
    state = DesiredState(store, {"HOOK": "https://hook.example"})
    specs = {"a": {"stream": "orders"}, "b": {**HOOK, "url": "${HOOK}/b"}}
    state.write(shop(**specs), by="x", door="file")
    assert served(store) == {}  # the run makes them with the stream
    make_stream(store)
    again = [Change("consumer", name, spec, spec) for name, spec in specs.items()]
    state.write(again, by="x", door="file")
    assert served(store) == {"a": {}, "b": {"url": "https://hook.example/b"}}
    state.write(
        [
            Change("consumer", "a", specs["a"], {"stream": "orders", "max_deliver": 3}),
            Change("consumer", "b", specs["b"], None),
        ],
        by="x",
        door="file",
    )
    assert served(store) == {"a": {"max_deliver": 3}}


def test_consumers_that_would_use_up_all_locks_are_refused_at_once(
    store: Store, database: Database
) -> None:
    """In the middle, every other session would be out of locks: no worker would get a message."""
    state = DesiredState(store, {})
    make_stream(store)
    locks = "SELECT current_setting('max_locks_per_transaction')::int"
    ((each,),) = database.execute(locks)
    most = each * 100 // 2 // 4
    too_many = {f"c{number}": {"stream": "orders"} for number in range(most + 1)}
    with pytest.raises(StoreError, match=f"has locks for {most}") as caught:
        state.write(shop(**too_many), by="x", door="api")
    assert f"at most {most}" in caught.value.remedy
    assert state.read().entities == {}


def test_the_apis_consumers_are_entities_too(store: Store) -> None:
    make_stream(store)
    state = DesiredState(store, {})

    async def work() -> None:
        consumers = Consumers(store.url)
        settings = {"url": "https://hook.example/${x}?k=s3cret", "max_deliver": 3}
        await consumers.create(ConsumerSpec("hook", "orders", "webhook", settings), by="ops")
        await consumers.create(ConsumerSpec("pull", "orders"))
        await consumers.update("hook", {"timeout_ms": 5, "max_deliver": None})
        await consumers.delete("pull")
        await consumers.close()

    asyncio.run(work())
    (hook,) = state.read().entities.values()
    assert hook.managed_by == "api"
    assert hook.spec == {
        "type": "webhook", "stream": "orders", "timeout_ms": 5,
        "url": "https://hook.example/$${x}?k=s3cret",
    }  # fmt: skip
    assert [(e.action, e.name, e.who) for e in reversed(state.history())] == [
        ("create", "hook", "ops"), ("create", "pull", "api"),
        ("update", "hook", "api"), ("delete", "pull", "api"),
    ]  # fmt: skip
    assert served(store)["hook"] == {
        "url": "https://hook.example/${x}?k=s3cret", "timeout_ms": 5
    }  # fmt: skip


def test_a_feed_gives_each_new_configuration(store: Store) -> None:
    state = DesiredState(store, {})
    state.write(shop(), by="x", door="api")
    with Feed(store.url, BASE, {}) as feed:
        assert list(feed.current().sinks) == ["orders"]
        assert feed.wait(0) is None
        state.write([Change("sink", "more", None, STREAM)], by="x", door="api")
        config = feed.wait(30)
        assert config is not None
        assert set(config.sinks) == {"orders", "more"}
        # A lost connection is made again, and what was missed is found.
        with store.connection() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        secret = {**SOURCE, "url": "${SHOP}"}
        state.write([Change("source", "shop", SOURCE, secret)], by="x", door="api")
        config = feed.wait(30)
        assert config is not None
        assert (config.sources, config.sinks) == ({}, {})
        assert set(feed.refusals) == {("source", "shop"), ("sink", "orders"), ("sink", "more")}
        assert "SHOP is not set" in state.refusals()[-1].reason
        state.write([Change("source", "shop", secret, SOURCE)], by="x", door="api")
        config = feed.wait(30)
        assert config is not None
        assert len(config.sinks) == 2
        assert feed.refusals == {}


def test_a_notice_is_enough(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_LOOK_SECONDS", 3600.0)
    state = DesiredState(store, {})
    state.write(shop(), by="x", door="api")
    with Feed(store.url, BASE, {}) as feed:
        feed.current()
        assert feed.wait(0) is None
        state.write([Change("sink", "more", None, STREAM)], by="x", door="api")
        config = feed.wait(30)
        assert config is not None
        assert set(config.sinks) == {"orders", "more"}


def test_a_file_is_applied_and_then_nothing_differs(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(
        "sources: {shop: {type: postgres, url: '${SHOP}'}}\n"
        "sinks: {orders: {type: stream, source: shop}, more: {type: stream, source: shop}}\n"
        "consumers: {a: {stream: orders}}\n"
    )
    environ = {"SHOP": "postgres://db/shop"}
    first = apply_file(store, file, environ)
    assert first.entities["source", "shop"].spec == {"type": "postgres", "url": "${SHOP}"}
    assert {e.managed_by for e in first.entities.values()} == {"file"}
    assert apply_file(store, file, environ) == first
    shorter = file.read_text().replace(", more: {type: stream, source: shop}", "")
    file.write_text(shorter)
    assert apply_file(store, file, environ) == first  # nothing is deleted by that
    make_stream(store)
    file.write_text(shorter.replace("source: shop}", "source: shop, kind: rows}"))
    with pytest.raises(ConfigError, match="kind: the stream orders of the store has the kind"):
        apply_file(store, file, environ)
    assert DesiredState(store, {}).read() == first
    file.write_text(shorter.replace("stream: orders", "stream: other"))
    with pytest.raises(ConfigError, match=r":3: consumers\.a\.stream: there is no stream 'other'"):
        apply_file(store, file, environ)


def test_a_deleted_sink_leaves_its_stream_until_it_is_unused(store: Store) -> None:
    make_stream(store)
    state = DesiredState(store, {})
    state.write(shop(a={"stream": "orders"}), by="x", door="file")
    gone = [Change("sink", "orders", STREAM, None), Change("consumer", "a", {}, None)]
    state.write(gone, by="x", door="file")
    assert served(store) == {}
    assert [s.name for s in store.streams()] == ["orders"]
    (removal,) = pending(store)
    assert (removal.kind, removal.name, removal.spec) == ("sink", "orders", STREAM)
    finish(store, removal, BASE, {})
    assert (pending(store), store.streams(), store.consumers()) == ([], [], [])
    with store.connection() as connection:
        query = "SELECT relname FROM pg_class WHERE relname ~ '^(segment|consumer)_[0-9]'"
        assert connection.execute(query).fetchall() == []


def test_a_deleted_source_loses_its_slot_unless_another_has_it(
    store: Store, database: Database
) -> None:
    state = DesiredState(store, {})
    url = {"SHOP": database.url}
    shop = {"type": "postgres", "url": "${SHOP}", "slot": f"s_{database.name}"}
    database.execute(f"SELECT pg_create_logical_replication_slot('{shop['slot']}', 'pgoutput')")
    slots = f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{shop['slot']}'"
    state.write([Change("source", "shop", None, shop)], by="x", door="api")
    renamed = [Change("source", "shop", shop, None), Change("source", "new", None, shop)]
    state.write(renamed, by="x", door="api")
    (removal,) = pending(store)
    with pytest.raises(CaptureError, match="SHOP is not set"):
        finish(store, removal, BASE, {})
    finish(store, removal, BASE, url)
    assert database.execute(slots) == [(1,)]
    state.write([Change("source", "new", shop, None)], by="x", door="api")
    (removal,) = pending(store)
    finish(store, removal, BASE, url)
    assert database.execute(slots) == [(0,)]
    assert pending(store) == []
    # One that can't be reached any more doesn't hold up what has its name now.
    away = {**shop, "url": "postgres://127.0.0.1:1/x"}
    state.write([Change("source", "shop", None, away)], by="x", door="api")
    state.write([Change("source", "shop", away, None)], by="x", door="api")
    (removal,) = pending(store)
    with pytest.raises(CaptureError, match="Connection refused"):
        finish(store, removal, BASE, url)
    state.write([Change("source", "shop", None, shop)], by="x", door="api")
    finish(store, removal, BASE, url)
    assert pending(store) == []


def test_a_stream_of_a_sink_that_changed_its_type_goes_too(store: Store) -> None:
    make_stream(store)
    state = DesiredState(store, {})
    state.write(shop(), by="x", door="api")
    nats = {"type": "nats", "source": "shop", "url": "nats://n", "subject": "a"}
    state.write([Change("sink", "orders", STREAM, nats)], by="x", door="api")
    state.write([Change("sink", "orders", nats, None)], by="x", door="api")
    (removal,) = pending(store)
    finish(store, removal, BASE, {})
    assert (pending(store), store.streams(), store.consumers()) == ([], [], [])
    finish(store, removal, BASE, {})  # what another thread has done meanwhile


def test_what_was_removed_meanwhile_is_not_removed_again(store: Store) -> None:
    """What has the name by then is new."""
    make_stream(store)
    state = DesiredState(store, {})
    state.write(shop(), by="x", door="api")
    state.write([Change("sink", "orders", STREAM, None)], by="x", door="api")
    (removal,) = pending(store)
    finish(store, removal, BASE, {})
    make_stream(store)
    finish(store, removal, BASE, {})
    assert [s.name for s in store.streams()] == ["orders"]


def test_a_deleted_source_with_unset_variables_holds_up_no_new_one(
    store: Store, database: Database
) -> None:
    state = DesiredState(store, {})
    old = {"type": "postgres", "url": "postgres://app:s3cret@${HOST}/shop"}
    state.write([Change("source", "shop", None, old)], by="x", door="api")
    state.write([Change("source", "shop", old, None)], by="x", door="api")
    (removal,) = pending(store)
    with pytest.raises(CaptureError, match="HOST is not set"):
        finish(store, removal, BASE, {})
    state.write([Change("source", "shop", None, SOURCE)], by="x", door="api")
    with capture_logs() as logs:
        finish(store, removal, BASE, {})
    (warning,) = logs
    assert warning["event"] == "the slot of a deleted source is left behind; drop it there"
    assert "penstock_shop" in warning["statement"]
    assert "s3cret" not in repr(logs)
    assert pending(store) == []


def test_a_deleted_stream_is_served_until_it_is_removed(store: Store) -> None:
    make_stream(store)
    state = DesiredState(store, {})
    state.write(shop(a={"stream": "orders"}), by="x", door="api")
    first = ids_of(store)
    assert set(first) == {"orders", "a"}
    gone = [Change("sink", "orders", STREAM, None), Change("consumer", "a", {}, None)]
    state.write(gone, by="x", door="api")
    assert ids_of(store) == {"orders": first["orders"]}
    again = state.write([Change("sink", "orders", None, STREAM)], by="x", door="api")
    second = ids_of(store)
    assert second["orders"][1] == str(again.entities["sink", "orders"].id) != first["orders"][1]
    (removal,) = pending(store)
    finish(store, removal, BASE, {})
    assert ids_of(store) == {}
    make_stream(store)
    third = ids_of(store)["orders"]
    assert third[1] == second["orders"][1]
    assert third[0] not in (first["orders"][0], second["orders"][0])  # its own consumer is another
    state.write([Change("sink", "orders", STREAM, None)], by="x", door="api")
    (removal,) = pending(store)
    finish(store, removal, BASE, {})
    with store.connection() as connection:
        left = connection.execute("SELECT kind, name FROM penstock.ids").fetchall()
    assert left == [("source", "shop")]


def ids_of(store: Store) -> dict[str, tuple[str, str]]:
    """The ids of each consumer and of its stream, as workers see them."""

    async def work() -> dict[str, tuple[str, str]]:
        consumers = Consumers(store.url)
        streams = {info.name: info.uuid for info in await consumers.streams()}
        found = {c.name: (c.uuid, streams[c.stream]) for c in await consumers.list()}
        await consumers.close()
        return found

    return asyncio.run(work())


def test_a_start_leaves_the_refusals_of_other_processes(store: Store) -> None:
    state = DesiredState(store, {})
    secret = {**SOURCE, "url": "${SHOP}"}
    changes = [Change("source", "shop", None, secret), Change("sink", "orders", None, STREAM)]
    state.write(changes, by="x", door="api")

    def refused() -> set[str]:
        return {f"{r.name}: {r.reason}" for r in state.refusals()}

    with Feed(store.url, BASE, {}) as first:
        first.current()
        found = refused()
        assert len(found) == 2
        with Feed(store.url, BASE, {"SHOP": "postgres://db/shop"}) as second:
            second.current()
            assert refused() == found
            second.refused("sink", "orders", "It does not plan.")
            assert "orders: It does not plan." in refused()
            second.accepted("sink", "orders")
            assert refused() == found
    # A process that has ended refuses nothing any more; its session ends soon after.
    await_true(lambda: refused() == set())
    with Feed(store.url, BASE, {}) as first:
        first.current()
        assert refused() == found
        state.write([Change("source", "shop", secret, SOURCE)], by="x", door="api")
        assert first.wait(30) is not None
        assert refused() == set()
    with store.connection() as connection:
        assert connection.execute("SELECT count(*) FROM penstock.refusals").fetchone() == (0,)


def test_a_feed_is_woken(store: Store) -> None:
    with Feed(store.url, BASE, {}) as feed:
        feed.current()
        feed.wake()
        assert feed.wait(3600) is None
        found = Later(lambda: feed.wait(3600))
        feed.wake()
        assert found.result(60) is None
    feed.wake()  # a runner may end later


def test_a_run_registers_consumers_as_their_entities_are_by_then(store: Store) -> None:
    """Its configuration is of before it was prepared."""
    state = DesiredState(store, {})
    state.write(
        shop(a={"stream": "orders"}, b={"stream": "orders"}, c={"stream": "orders"}),
        by="x",
        door="api",
    )
    make_stream(store)
    changed = {"stream": "orders", "max_deliver": 7}
    state.write([Change("consumer", "b", {}, changed)], by="x", door="api")
    state.write([Change("consumer", "c", {}, None)], by="x", door="api")
    register(store, ["a", "b", "c"], {})
    assert served(store) == {"a": {}, "b": {"max_deliver": 7}}
    assert {e.name for e in state.read().entities.values() if e.kind == "consumer"} == {"a", "b"}
    register(store, [], {})
    register(store, None, {})
    assert served(store) == {"a": {}, "b": {"max_deliver": 7}}
