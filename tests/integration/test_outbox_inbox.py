"""Streams into inboxes: once each, acked after the commit, whatever fails in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest
from pydantic import SecretStr
from tests.integration.outbox_sql import installed, lease, pipeline, value
from tests.waits import await_true

from penstock.config.settings import Config
from penstock.config.sources import OutboxSource
from penstock.core.errors import SetupError
from penstock.core.health import Failure, Health, Level
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.outbox.inbox.inboxes import Inboxes
from penstock.outbox.inbox.reader import InboxReader
from penstock.outbox.inbox.settings import durable_name
from penstock.outbox.pipelines import InboxPipeline, find_inboxes
from penstock.outbox.relay.group import Group
from penstock.outbox.relay.relay import Relay

STREAM = "ORDERS"


@pytest.fixture
def tide(database: Database) -> Database:
    database.execute("SELECT tide.inbox_create('i', max_retries => 2)")
    lease(database)
    return database


@pytest.fixture
def stream(nats: JetStream) -> Iterator[JetStream]:
    nats.add_stream(STREAM, "orders.>")
    yield nats
    nats.delete_stream(STREAM)


def configure(tide: Database, server: str, *, name: str = "in", **config: Any) -> None:
    given = {"source_type": "nats", "url": server, "stream": STREAM, "batch_size": 10} | config
    given = {key: item for key, item in given.items() if item is not None}
    tide.execute("SELECT tide.relay_set_inbox(%s, 'i', 'g', %s)", [name, json.dumps(given)])
    tide.execute("SELECT tide.relay_enable(%s)", [name])


def pipelines(tide: Database) -> list[InboxPipeline]:
    with tide.connect(autocommit=True) as connection:
        return find_inboxes(connection)


@contextlib.contextmanager
def filling(tide: Database) -> Iterator[Inboxes]:
    """Run what is set up, as the relay does that has the group's lock."""
    inboxes = Inboxes(tide.url, tide.name)
    inboxes.set_desired(pipelines(tide))
    inboxes.activate(True)
    try:
        yield inboxes
    finally:
        inboxes.activate(False)
        inboxes.join()


def status(tide: Database, name: str = "in") -> dict[str, Any]:
    found: dict[str, Any] = value(tide, "SELECT tide.relay_status(%s)", name)
    return found


def await_state(tide: Database, state: str, code: str | None = None) -> dict[str, Any]:
    await_true(lambda: (status(tide)["state"], status(tide)["code"]) == (state, code))
    return status(tide)


def rows(tide: Database) -> list[tuple[Any, ...]]:
    return tide.execute("SELECT message_id, payload, body FROM tide.inbox_i ORDER BY id")


def payloads(tide: Database) -> list[Any]:
    return [row[1] for row in rows(tide)]


def durable(tide: Database, name: str = "in") -> str:
    system = value(tide, "SELECT system_identifier FROM pg_control_system()")
    return durable_name(system, tide.name, name)


def consumer(stream: JetStream, tide: Database, name: str = "in") -> dict[str, Any]:
    return stream.api(f"CONSUMER.INFO.{STREAM}.{durable(tide, name)}", {})


def await_none_asking(stream: JetStream, tide: Database) -> None:
    """Wait until the server has no request of a session any more, which would get what comes next."""
    await_true(lambda: not consumer(stream, tide)["num_waiting"])


def acked(stream: JetStream, tide: Database) -> int:
    found = consumer(stream, tide)
    if "ack_floor" not in found or found["num_ack_pending"]:
        return -1
    return int(found["ack_floor"]["stream_seq"])


def publish(stream: JetStream, *numbers: int) -> None:
    for number in numbers:
        stream.publish("orders.new", str(number).encode(), {"Nats-Msg-Id": f"o-{number}"})


def test_each_message_once_in_its_order(tide: Database, stream: JetStream) -> None:
    publish(stream, *range(25))
    stream.publish("orders.new", b'{"a": 1}', {"Kind": "x"})
    configure(tide, stream.url)
    with filling(tide):
        await_true(lambda: acked(stream, tide) == 26)
        publish(stream, 30)
        await_true(lambda: acked(stream, tide) == 27)
    assert payloads(tide) == [*range(25), {"a": 1}, 30]
    ids = [row[0] for row in rows(tide)]
    assert ids[23:25] + ids[26:] == ["o-23", "o-24", "o-30"]
    assert re.fullmatch(rf"{STREAM}:26:\d{{16}}", ids[25])
    assert value(tide, "SELECT headers FROM tide.inbox_i WHERE payload = '{\"a\": 1}'") == {
        "Kind": "x"
    }
    of = status(tide)
    assert (of["state"], of["delivered"], of["last_id"]) == ("running", 27, 27)


def test_what_comes_again_is_there_once(tide: Database, stream: JetStream) -> None:
    """By another consumer, as after one was deleted: all messages come once more."""
    publish(stream, *range(15))
    configure(tide, stream.url)
    with filling(tide):
        await_true(lambda: acked(stream, tide) == 15)
        deleted = stream.api(f"CONSUMER.DELETE.{STREAM}.{durable(tide)}", {})
        assert deleted["success"]
        await_true(lambda: acked(stream, tide) == 15)
        publish(stream, 15)
        await_true(lambda: acked(stream, tide) == 16)
    assert payloads(tide) == list(range(16))
    assert status(tide)["delivered"] == 16


def test_what_is_no_json_goes_to_the_body(tide: Database, stream: JetStream) -> None:
    bodies = [
        b"", b"not json", b"\xff\xfe", b"NaN", b'"\\u0000"', b'"\\ud800"', b'{"a":}', b"\xef\xbb\xbf1",
        b"1e400000",
    ]  # fmt: skip
    good = [b"1", b"null", b'{"b": [1, 2]}', b"1e400"]
    for body in [*good[:2], *bodies, *good[2:]]:
        stream.publish("orders.new", body)
    stream.publish("orders.new", b"2", {"Nats-Msg-Id": "x" * 5000})
    configure(tide, stream.url, batch_size=100)
    with filling(tide):
        await_true(lambda: acked(stream, tide) == len(bodies) + len(good) + 1)
    found = [bytes(row[2]) if row[2] is not None else None for row in rows(tide)]
    assert found == [None, None, *bodies, None, None, None]
    assert rows(tide)[-1][0].startswith("sha256:")
    assert rows(tide)[-3][1] == {"b": [1, 2]}


def test_only_what_is_committed_is_acked(
    server_dir: Path, stream: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres is killed while a batch waits in it; what was acked is there afterwards."""
    # What is delivered again while the batch waits would use up the one request that is open.
    monkeypatch.setattr("penstock.outbox.inbox.consumer._ACK_SECONDS", 60.0)
    with EmbeddedPostgres(server_dir / "killed") as server:
        tide = installed(Database("shop", server.create_database("shop")))
        tide.execute("SELECT tide.inbox_create('i')")
        lease(tide)
        publish(stream, *range(5))
        configure(tide, stream.url)
        with filling(tide):
            await_true(lambda: acked(stream, tide) == 5)
            with tide.connect() as blocker:
                blocker.execute("LOCK TABLE tide.inbox_i IN EXCLUSIVE MODE")
                publish(stream, *range(5, 30))
                waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
                await_true(lambda: value(tide, waiting) > 0)
                # JetStream delivers what it has stored a moment later.
                await_true(lambda: consumer(stream, tide)["num_ack_pending"] == 25)
                assert consumer(stream, tide)["ack_floor"]["stream_seq"] == 5
                tide.close()
                server.kill()
                with contextlib.suppress(Exception):
                    blocker.close()
            server.start()
            await_true(lambda: acked(stream, tide) == 30)
        assert sorted(payloads(tide)) == list(range(30))
        of = status(tide)
        assert (of["state"], of["code"], of["delivered"]) == ("running", None, 30)
        tide.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not acked comes again soon."""
    monkeypatch.setattr("penstock.outbox.inbox.consumer._ACK_SECONDS", 1.0)


def take(stream: JetStream, name: str, count: int) -> list[Any]:
    """Read messages as a session does that is gone before it acks."""

    async def read() -> list[Any]:
        client = await nats.connect(stream.url)
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        request = json.dumps({"batch": count, "expires": 5_000_000_000}).encode()
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{name}", request, reply=inbox)
        found = [json.loads((await subscription.next_msg(10)).data) for _ in range(count)]
        await client.close()
        return found

    return asyncio.run(read())


@pytest.mark.usefixtures("short")
def test_what_had_no_ack_goes_before_what_is_new(tide: Database, stream: JetStream) -> None:
    configure(tide, stream.url)
    with filling(tide):
        await_state(tide, "running")
    await_none_asking(stream, tide)
    publish(stream, *range(1, 30))
    assert take(stream, durable(tide), 5) == [1, 2, 3, 4, 5]
    # One of them never comes again.
    assert stream.api(f"STREAM.MSG.DELETE.{STREAM}", {"seq": 3})["success"]
    with filling(tide):
        publish(stream, 30)
        await_true(lambda: acked(stream, tide) == 30)
    assert payloads(tide) == [1, 2, *range(4, 31)]


@pytest.mark.usefixtures("short")
def test_a_session_that_is_broken_off_keeps_the_order(tide: Database, stream: JetStream) -> None:
    """Twice: the second is broken off while it holds what the first one had not acked."""
    configure(tide, stream.url, batch_size=2)
    with filling(tide):
        await_state(tide, "running")
    await_none_asking(stream, tide)
    publish(stream, *range(1, 40))
    assert take(stream, durable(tide), 3) == [1, 2, 3]
    with filling(tide):
        await_true(lambda: consumer(stream, tide)["num_ack_pending"] > 3)
    with filling(tide):
        await_true(lambda: acked(stream, tide) == 39)
    assert payloads(tide) == list(range(1, 40))


def test_what_never_comes_again_is_not_waited_for_for_ever(
    tide: Database, stream: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.outbox.inbox.consumer._REDELIVERY_SECONDS", 1.0)
    limits = {"durable_name": "mine", "ack_policy": "explicit", "max_deliver": 1}
    request = {"stream_name": STREAM, "config": limits}
    assert "error" not in stream.api(f"CONSUMER.DURABLE.CREATE.{STREAM}.mine", request)
    publish(stream, 1, 2, 3)
    assert take(stream, "mine", 1) == [1]
    configure(tide, stream.url, durable="mine")
    with filling(tide):
        await_true(lambda: payloads(tide) == [2, 3])


def test_large_messages_and_those_without_a_body(
    tide: Database, stream: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends when its bytes are used up, and the next one goes on."""
    monkeypatch.setattr("penstock.outbox.inbox.puller._REQUEST_BYTES", 1_100_000)
    failures: list[Failure] = []

    async def fail(_: InboxReader, failure: Failure) -> None:
        failures.append(failure)

    monkeypatch.setattr(InboxReader, "_fail", fail)
    large = "x" * 900_000
    for number in range(5):
        stream.publish("orders.new", json.dumps(f"{number}{large}").encode())
    stream.publish("orders.new", b"", {"Kind": "empty", "Nats-Msg-Id": "none"})
    configure(tide, stream.url, batch_size=1)
    with filling(tide):
        await_true(lambda: acked(stream, tide) == 6)
    assert failures == []
    found = rows(tide)
    assert [row[1][0] for row in found[:5]] == list("01234")
    assert (found[5][0], found[5][1], bytes(found[5][2])) == ("none", None, b"")
    headers = value(tide, "SELECT headers FROM tide.inbox_i WHERE message_id = 'none'")
    assert headers == {"Kind": "empty", "Nats-Msg-Id": "none"}
    assert status(tide)["code"] is None


def test_a_stream_that_is_made_anew_counts_from_one_again(
    tide: Database, stream: JetStream
) -> None:
    configure(tide, stream.url)
    stream.publish("orders.new", b"1")
    with filling(tide):
        await_true(lambda: payloads(tide) == [1])
        stream.delete_stream(STREAM)
        stream.add_stream(STREAM, "orders.>")
        stream.publish("orders.new", b"2")
        await_true(lambda: payloads(tide) == [1, 2])


def _acked(stream: JetStream, name: str, upto: int) -> bool:
    found = stream.api(f"CONSUMER.INFO.{STREAM}.{name}", {})
    return "ack_floor" in found and bool(found["ack_floor"]["stream_seq"] == upto)


def test_two_clusters_with_databases_of_one_name_share_nothing(
    tide: Database, stream: JetStream
) -> None:
    configure(tide, stream.url)
    mine = pipelines(tide)
    others = [replace(pipeline, system=pipeline.system + 1) for pipeline in mine]
    publish(stream, *range(10))
    names = set()
    for pipelines_of in (mine, others):
        inboxes = Inboxes(tide.url, tide.name)
        inboxes.set_desired(pipelines_of)
        inboxes.activate(True)
        names.add(name := durable_name(pipelines_of[0].system, tide.name, "in"))
        await_true(partial(_acked, stream, name, 10))
        inboxes.activate(False)
        inboxes.join()
    assert len(names) == 2


def test_it_goes_on_where_it_was(tide: Database, stream: JetStream) -> None:
    configure(tide, stream.url)
    publish(stream, 1, 2)
    with filling(tide):
        await_true(lambda: acked(stream, tide) == 2)
    tide.execute("DELETE FROM tide.inbox_i")
    publish(stream, 3)
    with filling(tide):
        await_true(lambda: acked(stream, tide) == 3)
    assert payloads(tide) == [3]


def test_the_server_may_go_and_come(tide: Database, server_dir: Path) -> None:
    with (
        EmbeddedNats(server_dir / "nats-restarted") as server,
        JetStream(server.url) as stream,
    ):
        stream.add_stream(STREAM, "orders.>")
        configure(tide, server.url)
        with filling(tide):
            await_state(tide, "running")
            server.kill()
            found = await_state(tide, "error", "connection_refused")
            assert "Start nats-server there" in found["remedy"]
            server.start()
            await_state(tide, "running")
            with JetStream(server.url) as again:
                publish(again, 1)
            await_true(lambda: payloads(tide) == [1])


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"stream": "NOWHERE"}, "no_stream", ["'NOWHERE'", "nats stream add NOWHERE"]),
        ({"stream": None, "subject": "no.where"}, "no_stream", ["'no.where'", "nats stream add"]),
        ({"subject": "bills.*"}, "no_subject", ["'bills.*'", "orders.>"]),
        ({"token": "${env:NO_SUCH_TOKEN}"}, "unresolved_reference", ["NO_SUCH_TOKEN"]),
        ({"url": "nats://127.0.0.1:1"}, "connection_refused", ["127.0.0.1:1"]),
    ],
)
def test_a_failure_is_reported_and_ends_once_its_cause_is_gone(
    tide: Database, stream: JetStream, config: dict[str, Any], code: str, words: Sequence[str]
) -> None:
    publish(stream, 1)
    configure(tide, stream.url, **config)
    with filling(tide) as inboxes:
        found = await_state(tide, "error", code)
        assert all(word in f"{found['error']} {found['remedy']}" for word in words), found
        configure(tide, stream.url)
        inboxes.set_desired(pipelines(tide))
        await_state(tide, "running")
        await_true(lambda: payloads(tide) == [1])


def test_a_login_that_is_refused_and_one_without_rights(tide: Database, server_dir: Path) -> None:
    users = (
        "authorization { users: [\n"
        " {user: good, password: right},\n"
        ' {user: poor, password: right, permissions: {publish: "orders.>"}},\n] }\n'
    )
    with (
        EmbeddedNats(server_dir / "nats-users", users) as server,
        JetStream(server.url, user="good", password="right") as stream,
    ):
        stream.add_stream(STREAM, "orders.>")
        configure(tide, server.url, username="good", password="wr0ng-secret")
        with filling(tide) as inboxes:
            found = await_state(tide, "error", "authorization_violation")
            assert "wr0ng-secret" not in json.dumps(found)
            configure(tide, server.url, username="poor", password="right")
            inboxes.set_desired(pipelines(tide))
            found = await_state(tide, "error", "permission_denied")
            assert "'$JS.API.STREAM.INFO.>'" in found["error"]
            configure(tide, server.url, username="good", password="right")
            inboxes.set_desired(pipelines(tide))
            await_state(tide, "running")


def test_only_what_changed_begins_anew(tide: Database, stream: JetStream) -> None:
    configure(tide, stream.url, name="in", subject="orders.new")
    configure(tide, stream.url, name="other", subject="orders.old", start="end")
    stream.publish("orders.old", b'"before"')
    with filling(tide) as inboxes:
        await_state(tide, "running")
        await_true(lambda: status(tide, "other")["state"] == "running")
        kept = inboxes._readers["other"]
        configure(tide, stream.url, subject="orders.*")
        inboxes.set_desired(pipelines(tide))
        assert inboxes._readers["other"] is kept
        await_true(lambda: consumer(stream, tide)["config"]["filter_subject"] == "orders.*")
        tide.execute("SELECT tide.relay_disable('in')")
        inboxes.set_desired(pipelines(tide))
        await_state(tide, "disabled")
        stream.publish("orders.old", b'"after"')
        await_true(lambda: '"after"' in json.dumps(payloads(tide)))
        assert status(tide, "other")["delivered"] == 1


def test_messages_are_worked_through(tide: Database, stream: JetStream) -> None:
    configure(tide, stream.url, stream=None, subject="orders.*")
    with filling(tide):
        await_state(tide, "running")
        publish(stream, 1, 2, 3)
        await_true(lambda: acked(stream, tide) == 3)
        tide.execute("SELECT tide.inbox_mark_processed('i', 'o-1')")
        failed = "SELECT tide.inbox_mark_failed('i', 'o-2', 'oh')"
        assert [value(tide, failed) for _ in "12"] == ["pending", "failed"]
        of = value(tide, "SELECT tide.inbox_status('i')")
        assert (of["pending"], of["processed"], of["failed"]) == (1, 1, 1)
        assert value(tide, "SELECT tide.inbox_replay('i')") == 1
        # What was done is known when it comes again, past the stream's own window.
        stream.publish("orders.new", b"1", {"Nats-Msg-Id": "o-4"})
        await_true(lambda: acked(stream, tide) == 4)
    assert [row[0] for row in rows(tide)] == ["o-1", "o-2", "o-3", "o-4"]


def test_what_was_done_is_swept(
    tide: Database, stream: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.outbox.inbox.reader._SWEEP_SECONDS", 0.2)
    configure(tide, stream.url)
    publish(stream, 1, 2)
    with filling(tide):
        await_true(lambda: acked(stream, tide) == 2)
        tide.execute("SELECT tide.inbox_mark_processed('i', 'o-1')")
        tide.execute("UPDATE tide.inbox_i SET processed_at = processed_at - interval '8 days'")
        await_true(lambda: payloads(tide) == [2])


def test_the_group_with_the_lock_fills(
    tide: Database, stream: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that has nothing but inboxes runs them, and hands them on; Spark has no part in it."""
    monkeypatch.setattr("penstock.outbox.relay.group.warm", lambda _spark: None)
    monkeypatch.setattr("penstock.outbox.relay.group.jvm_exit_code", lambda: None)
    configure(tide, stream.url)
    spark: Any = None
    one, two = (Group("g", tide.url, tide.name, tide.url, spark) for _ in "12")
    one.set_desired(None, pipelines(tide))
    one.start()
    try:
        await_state(tide, "running")
        two.set_desired(None, pipelines(tide))
        two.start()
        await_true(lambda: two.status.as_json()["state"] == "standby")
        assert one.status.ready
        assert one.status.as_json()["inboxes"] == {"in": {"enabled": True, "state": "running"}}
        assert two.status.as_json()["inboxes"] == {}
        publish(stream, 1)
        await_true(lambda: acked(stream, tide) == 1)
        one.stop()
        one.join()
        publish(stream, 2)
        await_true(lambda: acked(stream, tide) == 2)
        assert two.status.as_json()["inboxes"]["in"]["enabled"]
    finally:
        for group in (one, two):
            group.stop()
            group.join()
    assert payloads(tide) == [1, 2]


def test_the_relay_reads_changed_pipelines(
    tide: Database, stream: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From SQL to rows and back, by the relay itself; Spark has no part in inboxes."""
    monkeypatch.setattr("penstock.outbox.relay.group.jvm_exit_code", lambda: None)
    source = OutboxSource(type="outbox", url=SecretStr(tide.url))
    relay = Relay("r", source, Config(sources={}, sinks={}, outboxes={"r": source}))
    relay.prepare()
    assert Health(tuple(relay.parts())).level is Level.STARTING
    no_spark: Any = object()
    relay.start(no_spark)
    try:
        publish(stream, 1)
        configure(tide, stream.url)
        await_true(lambda: acked(stream, tide) == 1)
        await_true(lambda: relay.ready)
        await_true(lambda: Health(tuple(relay.parts())).level is Level.READY)
        assert relay.as_json()["g"]["inboxes"]["in"]["state"] == "running"
        tide.execute("SELECT tide.relay_disable('in')")
        await_state(tide, "disabled")
        publish(stream, 2)
        tide.execute("SELECT tide.relay_enable('in')")
        await_true(lambda: acked(stream, tide) == 2)
        configure(tide, "nats://127.0.0.1:1")
        await_true(lambda: Health(tuple(relay.parts())).level is Level.DEGRADED)
        (problem,) = Health(tuple(relay.parts())).problems
        assert (problem.subject, problem.code) == ("pipeline in", "connection_refused")
        assert problem.remedy
        tide.execute("SELECT tide.inbox_drop('i', force => true)")
        await_true(lambda: relay.as_json()["g"]["inboxes"] == {})
    finally:
        relay.stop()
        relay.join()
    assert not relay.alive


def test_a_database_with_inboxes_alone_needs_no_wal_level(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "postgres", settings={"wal_level": "replica"}) as server:
        tide = installed(Database("shop", server.create_database("shop")))
        source = OutboxSource(type="outbox", url=SecretStr(tide.url))
        relay = Relay("r", source, Config(sources={}, sinks={}, outboxes={"r": source}))
        tide.execute("SELECT tide.outbox_create('o'), tide.inbox_create('i')")
        with pytest.raises(SetupError, match="must be logical"):
            relay.prepare()
        configure(tide, "nats://127.0.0.1:1")
        relay.prepare()
        pipeline(tide, "out", "o")
        with pytest.raises(SetupError, match="must be logical"):
            relay.prepare()
        tide.close()


def test_a_durable_with_a_limit_of_its_own(tide: Database, stream: JetStream) -> None:
    limits = {"durable_name": "mine", "ack_policy": "explicit", "max_batch": 5}
    request = {"stream_name": STREAM, "config": limits}
    assert "error" not in stream.api(f"CONSUMER.DURABLE.CREATE.{STREAM}.mine", request)
    configure(tide, stream.url, durable="mine")
    with filling(tide):
        found = await_state(tide, "error", "jetstream_refused")
        assert "MaxRequestBatch of 5" in found["error"]


def test_consumers_of_two_databases_differ() -> None:
    assert re.fullmatch("tide_shop_in_[0-9a-f]{8}", durable_name(7, "shop", "in"))
    assert "." not in durable_name(7, "shop", "a.b")
    assert durable_name(7, "shop", "a.b") != durable_name(7, "shop", "a_b")
    assert durable_name(7, "shop", "in") != durable_name(8, "shop", "in")
