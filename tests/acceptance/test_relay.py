"""`penstock relay` from outside: SQL in the application's database, messages at a NATS subscriber."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import nats
from nats.aio.msg import Msg

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.process import free_port

from ..pipeline import PATIENCE, Penstock, penstock
from ..relay_help import bodies, publish, relay, set_outbox, slots, status
from ..waits import await_end, await_true

SET_UP = """\
select tide.outbox_create('notifications', retention_hours => 24);
select tide.relay_set_outbox('notify', 'notifications', 'nats-group',
  '{"sink_type":"nats","url":"${env:NATS_URL}","subject":"notifications.{op}","stream":"NOTIFICATIONS"}'::jsonb);
"""
ENABLE = "select tide.relay_enable('notify');"
SHIPPED = """\
begin;
insert into orders values (555);
select tide.outbox_publish('notifications', '{"type":"order.shipped"}', 'ord-555-shipped');
"""


def received(url: str, subject: str, count: int, do: Callable[[], object]) -> list[Msg]:
    """Return what a plain subscriber gets while `do` is done in another thread, `count` messages."""

    async def main() -> list[Msg]:
        client = await nats.connect(url)
        subscription = await client.subscribe(subject)
        await client.flush()
        await asyncio.to_thread(do)
        found = [await subscription.next_msg(timeout=PATIENCE) for _ in range(count)]
        await client.close()
        return found

    return asyncio.run(main())


def test_the_example(app: Database, streams: JetStream, tmp_path: Path) -> None:
    """While nothing is enabled, the relay waits, and logs it; a pipeline that is enabled then runs."""
    streams.add_stream("NOTIFICATIONS", "notifications.>")
    app.execute("create table orders (id int primary key)")
    app.execute(SET_UP)
    publish(app, 1)
    with relay(tmp_path, app, streams) as process:
        process.start().wait_ready()
        process.wait_for(lambda: "no pipeline is enabled" in process.log(), PATIENCE, "a warning")
        assert slots(app) == 0
        app.execute(ENABLE)
        process.wait_for(lambda: len(bodies(streams, "NOTIFICATIONS")) == 1, PATIENCE, "relayed")

        def work() -> None:
            app.execute("begin; select tide.outbox_publish('notifications', '1'); rollback")
            app.execute(SHIPPED + "commit;")

        (message,) = received(streams.url, "notifications.>", 1, work)
        assert message.subject == "notifications.insert"
        assert json.loads(message.data) == {"type": "order.shipped"}
        assert message.headers is not None
        key = message.headers["Nats-Msg-Id"]
        assert re.fullmatch("notifications/[0-9a-f]{8}:ord-555-shipped", key)
        process.wait_for(
            lambda: status(app, "notify")["delivered"] == 2, PATIENCE, "the place kept"
        )
        of_place = "lsn is not null, delivered_snapshot is not null, state, error"
        process.wait_for(
            lambda: (
                app.execute(f"select {of_place} from tide.checkpoints")
                == [(True, True, "running", None)]
            ),
            PATIENCE,
            "the place kept",
        )
        assert status(app, "notify")["dead_letters"] == 0
        app.execute("select tide.outbox_publish('notifications', to_jsonb(repeat('x', 2000000)))")
        process.wait_for(
            lambda: status(app, "notify")["dead_letters"] == 1, PATIENCE, "with a dead letter"
        )
        assert "too_large" in status(app, "notify")["dead_letter"]
        assert process.stop() == 0
        assert not process.stray()
        assert status(app, "notify")["state"] == "stopped"
        done = penstock("outbox", "status", "--url", app.url, cwd=tmp_path)
        assert done.returncode == 1
        assert "was stopped at" in done.stdout
        assert "1 dead letter, the newest of 20" in done.stdout
    # Nothing but the two: what was rolled back is nowhere.
    assert bodies(streams, "NOTIFICATIONS") == [1, {"type": "order.shipped"}]


def test_settings_change_while_it_runs(app: Database, streams: JetStream, tmp_path: Path) -> None:
    """Kept messages first; another subject; a pipeline that can't run alone; one that is disabled.

    Then its slot is lost: the outbox still has what the slot had not. All as a source of type outbox of
    `penstock run`.
    """
    for stream in ("A", "B"):
        streams.add_stream(stream, [stream.lower(), f"{stream.lower()}.>"])
    app.execute("select tide.outbox_create('notifications')")
    publish(app, 1, 2)
    set_outbox(app, "a", "A")
    app.execute("select tide.relay_enable('a')")
    (tmp_path / "penstock.yaml").write_text("sources: {app: {type: outbox, url: '${APP_URL}'}}")
    environment = {"APP_URL": app.url, "NATS_URL": streams.url}
    with Penstock(tmp_path, environment=environment) as process:
        process.start().wait_ready()
        publish(app, 3)
        process.wait_for(lambda: streams.info("A").state.messages == 3, PATIENCE, "all in A")
        assert bodies(streams, "A") == [1, 2, 3]

        set_outbox(app, "b", "B", start="end", password="${env:NOWHERE}", username="u")
        app.execute("select tide.relay_enable('b')")
        process.wait_for(lambda: status(app, "b")["state"] == "error", PATIENCE, "b in error")
        assert status(app, "b")["code"] == "unresolved_reference"
        assert "NOWHERE" in status(app, "b")["error"]
        publish(app, 4)
        process.wait_for(lambda: streams.info("A").state.messages == 4, PATIENCE, "a goes on")

        set_outbox(app, "b", "B", start="end")
        set_outbox(app, "a", "A", subject="a.{op}")
        process.wait_for(lambda: status(app, "b")["state"] == "running", PATIENCE, "b runs")
        app.execute("select tide.relay_disable('a')")
        process.wait_for(lambda: status(app, "a")["state"] == "disabled", PATIENCE, "a disabled")
        publish(app, 5, 6)
        process.wait_for(lambda: streams.info("B").state.messages == 3, PATIENCE, "b has them")
        assert streams.info("A").state.messages == 4
        app.execute("select tide.relay_enable('a')")
        process.wait_for(lambda: streams.info("A").state.messages == 6, PATIENCE, "a has them")
        for pipeline in ("a", "b"):
            process.wait_for(
                lambda of=pipeline: status(app, of)["last_id"] == 6,  # type: ignore[misc]  # mypy infers no lambda with a default
                PATIENCE, f"{pipeline}'s place kept",
            )  # fmt: skip
        assert process.stop() == 0

        publish(app, 7)
        app.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                    " where database = current_database()")  # fmt: skip
        publish(app, 8)
        process.start().wait_ready()
        # It is ready as a standby, too, while the session before it ends.
        process.wait_for(
            lambda: "the group's slot is gone" in process.log(), PATIENCE, "the slot is missed"
        )
        publish(app, 9)
        process.wait_for(lambda: streams.info("A").state.messages == 9, PATIENCE, "all in A")
        process.wait_for(lambda: streams.info("B").state.messages == 6, PATIENCE, "all in B")
        assert process.stop() == 0
    assert bodies(streams, "A") == list(range(1, 10))
    assert [m.subject for m in streams.messages("A")] == ["a"] * 4 + ["a.insert"] * 5
    assert bodies(streams, "B") == list(range(4, 10))  # what was published since it was set up


def test_a_standby_takes_over(app: Database, streams: JetStream, tmp_path: Path) -> None:
    """Before that, a second pipeline is added, and hardly holds up the first; at the end, both die."""
    streams.add_stream("NOTIFICATIONS", "notifications")
    streams.add_stream("OTHER", "other")
    app.execute("select tide.outbox_create('notifications')")
    set_outbox(app, "notify", "NOTIFICATIONS")
    app.execute("select tide.relay_enable('notify')")
    assert status(app, "notify")["state"] == "no relay yet"
    with (
        relay(tmp_path / "one", app, streams) as one,
        relay(tmp_path / "two", app, streams) as two,
    ):
        one.start().wait_ready()
        one.wait_for(lambda: relays(app) == {("running", True)}, PATIENCE, "leased")
        last = a_pipeline_is_added(app, streams, one)
        two.start().wait_ready()
        assert two.status()["relays"]["outbox"]["nats-group"]["state"] == "standby"
        two.wait_for(lambda: "warm" in two.log(), PATIENCE, "warm")
        two.wait_for(
            lambda: relays(app) == {("running", True), ("standby", True)}, PATIENCE, "leased, too"
        )
        assert penstock("outbox", "status", "--url", app.url, cwd=tmp_path).returncode == 0
        publish(app, last + 1)
        a_relay_hangs(app, one)
        killed = time.monotonic()
        publish(app, last + 2)
        two.wait_for(
            lambda: streams.info("NOTIFICATIONS").state.messages == last + 2, PATIENCE, "taken over"
        )
        took = time.monotonic() - killed
        assert took < 10, f"{took:.1f} s"
        two.wait_for(lambda: status(app, "notify")["state"] == "running", PATIENCE, "running")
        assert relays(app) == {("running", True)}
        two.kill_tree()
        await_true(lambda: app.execute("select tide._lock_pid('nats-group')") == [(None,)])
        publish(app, last + 3)
        ten_seconds_pass(app)
        found = status(app, "notify")
        assert (found["state"], found["code"]) == ("dead", "relay_dead")
        done = penstock("outbox", "status", "--url", app.url, cwd=tmp_path)
        assert done.returncode == 1
        assert f"✗ pipeline notify: {found['error']} {found['remedy']}" in done.stdout
    assert bodies(streams, "NOTIFICATIONS") == list(range(1, last + 3))


def ten_seconds_pass(app: Database) -> None:
    """Set the age of the last heartbeats; no relay renews the one that the test reads."""
    app.execute(
        "update tide.leases set heartbeat = heartbeat - interval '10 s' where state = 'running'"
    )


def a_relay_hangs(app: Database, process: Penstock) -> None:
    """The status reports it, and that the standby cannot take over; the test follows its remedy."""
    pid = process.process.pid
    process.process.send_signal(signal.SIGSTOP)
    ten_seconds_pass(app)
    found = status(app, "notify")
    assert "its session still holds the group's lock, so that the standby cannot" in found["error"]
    assert f": kill -9 {pid}. The standby then takes over." in found["remedy"]
    os.kill(pid, signal.SIGKILL)


def relays(app: Database) -> set[tuple[str, bool]]:
    return set(app.execute("select state, warm from tide.relay_processes()"))


def a_pipeline_is_added(app: Database, streams: JetStream, process: Penstock) -> int:
    """Publish all the while, and return the last number; the group's change is no time without it."""
    added = threading.Event()
    last = 0

    def publisher() -> None:
        nonlocal last
        database = Database(app.name, app.url)
        while not added.is_set():
            last += 1
            publish(database, last)
            added.wait(0.02)
        database.close()

    thread = threading.Thread(target=publisher, daemon=True)
    thread.start()
    try:
        process.wait_for(lambda: streams.info("NOTIFICATIONS").state.messages > 20, PATIENCE, "on")
        asked = datetime.now(UTC)
        set_outbox(app, "other", "OTHER", start="end")
        app.execute("select tide.relay_enable('other')")
        process.wait_for(lambda: streams.info("OTHER").state.messages > 20, PATIENCE, "changed")
    finally:
        added.set()
        await_end(thread)
    process.wait_for(
        lambda: streams.info("NOTIFICATIONS").state.messages == last, PATIENCE, "delivered"
    )
    first = streams.messages("OTHER")[0].at
    times = [message.at for message in streams.messages("NOTIFICATIONS") if message.at > asked]
    pause = max(after - before for before, after in itertools.pairwise(times))
    # Seconds until the new one has its first message; with a restart, the pause would be as long.
    assert pause < (first - asked) * 3 / 4, f"{pause} of {first - asked}"
    return last


def test_what_it_refuses(app: Database, streams: JetStream, tmp_path: Path) -> None:
    role = f"plain_{app.name}"
    listen = ("--listen", f"127.0.0.1:{free_port()}")
    app.execute(f"create role {role} login; grant usage on schema tide to {role};"
                f" grant select on all tables in schema tide to {role}")  # fmt: skip
    url = app.url.replace("//postgres@", f"//{role}@")
    done = penstock("relay", "--url", url, *listen, cwd=tmp_path)
    assert done.returncode == 1
    assert "may not replicate" in done.stderr
    assert f"ALTER ROLE {role} REPLICATION" in done.stderr.replace('"', "")
    app.execute("drop schema tide cascade")
    app.execute(f"drop owned by {role}; drop role {role}")
    done = penstock("relay", "--url", app.url, *listen, cwd=tmp_path)
    assert done.returncode == 1
    assert "penstock outbox install" in done.stderr
    assert "Traceback" not in done.stderr
