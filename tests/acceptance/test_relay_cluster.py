"""Leaders of a NATS cluster are killed while a relay and a table's sink publish to it."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from penstock.embedded.handles import Database, JetStream, Msg
from penstock.outbox.sql.install import install

from ..nats_cluster import Cluster, answered, await_
from ..pipeline import Penstock
from ..waits import await_end

# A stream for each way in which messages of one group go at once, and one that a table goes to.
LINKED, BATCHES, TABLE = STREAMS = ("LINKED", "BATCHES", "TABLE")
WINDOW_SECONDS = 600
RATE = 150  # messages a second of each publisher, and as many rows
CONFIG = """\
sources:
  app: {type: outbox, url: "${APP_URL}"}
  shop: {type: postgres, url: "${APP_URL}", tables: [public.events], publication: shop, slot: shop}
sinks:
  table: {type: nats, source: shop, url: "${NATS_URL}", subject: table, group_by: [publisher]}
spark: {master: "local[2]"}
"""
SQL = """\
create table events (publisher int, n int, primary key (publisher, n));
select tide.outbox_create('orders');
"""


class Publisher(threading.Thread):
    """Publishes numbered messages of one key, and inserts as many rows; some it rolls back."""

    def __init__(self, url: str, key: int) -> None:
        super().__init__(daemon=True)
        self.key = key
        self.ids: list[int] = []
        self.error: Exception | None = None
        self._url = url
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            with psycopg.connect(self._url) as connection:
                while not self._stopping.wait(5 / RATE):
                    self._publish(connection, count=2, first=-9)
                    connection.rollback()
                    found = self._publish(connection, count=5, first=len(self.ids))
                    connection.commit()
                    self.ids += found
        except psycopg.Error as error:
            self.error = error

    def _publish(self, connection: psycopg.Connection[Any], *, count: int, first: int) -> list[int]:
        values = {"key": self.key, "first": first, "end": first + count - 1}
        connection.execute(
            "insert into events select %(key)s, generate_series(%(first)s::int, %(end)s)", values
        )
        rows = connection.execute(
            "select tide.outbox_publish('orders', jsonb_build_object('key', %(key)s::int, 'n', n))"
            " from generate_series(%(first)s::int, %(end)s) n",
            values,
        )
        return [row[0] for row in rows]

    def stop(self) -> None:
        self._stopping.set()
        await_end(self)
        assert self.error is None, self.error


def add_streams(streams: JetStream) -> None:
    for name in STREAMS:
        config = {"num_replicas": 3, "duplicate_window": WINDOW_SECONDS}
        answered(partial(streams.add_stream, name, name.lower(), **config), f"the stream {name}")
    answered(partial(allow_atomic, streams), "allow_atomic")


def allow_atomic(streams: JetStream) -> None:
    config = streams.api(f"STREAM.INFO.{BATCHES}", {})["config"] | {"allow_atomic": True}
    assert streams.api(f"STREAM.UPDATE.{BATCHES}", config)["config"]["allow_atomic"]


def set_pipeline(app: Database, stream: str, **more: object) -> None:
    config = {"sink_type": "nats", "url": "${env:NATS_URL}", "subject": stream.lower(), **more}
    values = [stream.lower(), json.dumps(config)]
    app.execute("select tide.relay_set_outbox(%s, 'orders', 'g', %s)", values)
    app.execute("select tide.relay_enable(%s)", [stream.lower()])


def test_leaders_are_killed(database: Database, server_dir: Path, tmp_path: Path) -> None:
    """All is there once, each key's in order; the relay goes on by itself."""
    with database.connect(autocommit=True) as connection:
        install(connection)
    database.execute(SQL)
    set_pipeline(database, LINKED)
    set_pipeline(database, BATCHES, group_by="payload.key")
    (tmp_path / "penstock.yaml").write_text(CONFIG)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(server_dir / "cluster"))
        first = next(iter(cluster.servers.values())).url
        streams = stack.enter_context(JetStream(first, error_cb=ignore_error))
        add_streams(streams)
        environment = {"APP_URL": database.url, "NATS_URL": cluster.url}
        relay = stack.enter_context(Penstock(tmp_path, environment=environment))
        relay.start().wait_ready()
        publishers = [Publisher(database.url, key) for key in (1, 2)]
        for publisher in publishers:
            publisher.start()
        try:
            await_delivered(streams, publishers)
            for what in ("LINKED", "the cluster", "BATCHES"):
                kill_leader(cluster, streams, publishers, what)
        finally:
            for publisher in publishers:
                publisher.stop()
        await_delivered(streams, publishers)
        assert relay.stop() == 0
        for name in STREAMS:
            messages = answered(partial(streams.messages, name), f"the messages of {name}")
            assert_whole(name, messages, publishers)


def kill_leader(
    cluster: Cluster, streams: JetStream, publishers: list[Publisher], what: str
) -> None:
    """Kill the leader of a stream or of the cluster, and wait until all goes on without it."""
    name = cluster.meta_leader() if what == "the cluster" else cluster.leader(streams, what)
    cluster.kill(name)
    await_delivered(streams, publishers, f"more, without the leader of {what}")
    cluster.revive(name, streams, *STREAMS)
    await_delivered(streams, publishers)


def await_delivered(
    streams: JetStream, publishers: list[Publisher], what: str = "what was published"
) -> None:
    """Wait until all streams have what is committed now, and some more."""
    count = sum(len(publisher.ids) for publisher in publishers)
    if any(publisher.is_alive() for publisher in publishers):
        count += 100
    await_(lambda: all(streams.info(name).state.messages >= count for name in STREAMS), what)


def assert_whole(name: str, messages: Iterable[Msg], publishers: list[Publisher]) -> None:
    found: dict[int, list[int]] = defaultdict(list)
    ids: Counter[str] = Counter()
    for message in messages:
        body = json.loads(message.data)
        ids[message.headers["Nats-Msg-Id"]] += 1
        if name == TABLE:
            found[body["record"]["publisher"]].append(body["record"]["n"])
        else:
            found[body["key"]].append(body["n"])
    assert {i: n for i, n in ids.items() if n > 1} == {}, f"{name}: doubled"
    if name != TABLE:
        (outbox,) = {i.partition("#")[0] for i in ids}
        assert re.fullmatch("orders/[0-9a-f]{8}", outbox)
        published = {f"{outbox}#{i}" for publisher in publishers for i in publisher.ids}
        assert ids.keys() == published, f"{name}: not what was committed"
    for publisher in publishers:
        assert found.pop(publisher.key) == list(range(len(publisher.ids))), f"{name}: order"
    assert not found


async def ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that we killed."""
