"""`penstock run` follows the desired state: what changes is restarted, and nothing else is touched."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.desired.entities import Change
from penstock.desired.state import DesiredState
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.streams.store import Store

from ..pipeline import PATIENCE, Penstock

CONFIG = """\
sources:
  shop:
    type: postgres
    url: ${SHOP_URL}
  stock:
    type: postgres
    url: ${STOCK_URL}
sinks:
  orders:
    type: nats
    source: shop
    url: ${NATS_URL}
    subject: "follow.orders"
  stock:
    type: nats
    source: stock
    url: ${NATS_URL}
    subject: "follow.stock"
store: ${STORE_URL}
spark:
  master: local[2]
"""


@dataclass
class Following:
    """A run that follows a store's desired state, and its servers."""

    shop: Database
    stock: Database
    streams: JetStream
    pipeline: Penstock
    store: Store
    state: DesiredState

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        self.pipeline.wait_for(condition, PATIENCE, what)

    def write(self, name: str, spec: dict[str, Any] | None, kind: str = "sink") -> None:
        self.state.write([Change(kind, name, None, spec)], by="test", door="api")

    def records(self, subject: str) -> list[dict[str, Any]]:
        stream = "FOLLOW_NEW" if "new" in subject else "FOLLOW"
        found = [m for m in self.streams.messages(stream) if m.subject == subject]
        return [json.loads(m.data)["record"] for m in found]

    def ids(self, subject: str) -> list[int]:
        """The rows that came, but for the one that is changed all the time."""
        return sorted(r["id"] for r in self.records(subject) if r["id"])

    def changes(self, subject: str) -> list[int]:
        """The states of that one, in the order in which they came."""
        return [int(r["price"]) for r in self.records(subject) if not r["id"]]

    def events(self, event: str, **fields: str) -> list[dict[str, Any]]:
        found = [e for e in self.pipeline.events() if e["event"] == event]
        return [e for e in found if all(e.get(k) == v for k, v in fields.items())]

    def replaced(self, count: int) -> bool:
        steps = self.events("started", step="sinks", source="shop")
        return len(steps) > count and self.pipeline.get("/readyz")[0] == 200


@pytest.fixture(scope="module")
def following(
    postgres: EmbeddedPostgres,
    nats_server: EmbeddedNats,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Following]:
    folder = tmp_path_factory.mktemp("follow")
    with ExitStack() as stack:
        databases = []
        for name in ("follow_shop", "follow_stock", "follow_store"):
            databases.append(Database(name, postgres.create_database(name)))
            stack.callback(databases[-1].drop, postgres.url)
        for database in databases[:2]:
            database.execute("CREATE TABLE items (id bigint PRIMARY KEY, price numeric)")
        streams = stack.enter_context(JetStream(nats_server.url))
        streams.add_stream("FOLLOW", "follow.>", duplicate_window=3600)
        stack.callback(streams.delete_stream, "FOLLOW")
        streams.add_stream("FOLLOW_NEW", "following.new", duplicate_window=3600)
        stack.callback(streams.delete_stream, "FOLLOW_NEW")
        (folder / "penstock.yaml").write_text(CONFIG)
        urls = dict(
            zip(("SHOP_URL", "STOCK_URL", "STORE_URL"), (d.url for d in databases), strict=True)
        )
        environment = {**urls, "NATS_URL": nats_server.url}
        pipeline = stack.enter_context(Penstock(folder, environment=environment))
        pipeline.start().wait_ready()
        store = stack.enter_context(Store(databases[2].url))
        yield Following(
            databases[0], databases[1], streams, pipeline, store, DesiredState(store, environment)
        )


class Load(threading.Thread):
    """Inserts one row after the other until it is stopped, and changes the row 0 each time."""

    def __init__(self, database: Database, first: int) -> None:
        super().__init__(daemon=True)
        self._database, self._first = database, first
        self._stopping = threading.Event()
        self.last = first
        self.start()

    def run(self) -> None:
        with self._database.connect(autocommit=True) as connection:
            while not self._stopping.wait(0.01):
                connection.execute("INSERT INTO items VALUES (%s, 5)", [self.last])
                connection.execute("UPDATE items SET price = %s WHERE id = 0", [self.last])
                self.last += 1

    def stop(self) -> list[int]:
        self._stopping.set()
        self.join()
        return list(range(self._first, self.last))


def test_a_new_sink_joins_and_others_miss_nothing(following: Following) -> None:
    following.shop.execute("INSERT INTO items VALUES (0, 0)")
    load = Load(following.shop, 1)
    following.wait_for(lambda: load.last > 50, "writing")
    began = time.monotonic()
    spec = {"type": "nats", "source": "shop", "url": "${NATS_URL}", "subject": "following.new"}
    following.write("new", spec)
    following.wait_for(lambda: bool(following.ids("following.new")), "delivering to the new sink")
    print(f"the new sink has its first message after {time.monotonic() - began:.1f} s")
    written = load.stop()
    for subject in ("follow.orders", "following.new"):
        following.wait_for(lambda s=subject: written[-1] in following.changes(s), "at the end")  # type: ignore[misc]
        following.wait_for(lambda s=subject: written[-1] in following.ids(s), "at the end")  # type: ignore[misc]
    assert following.ids("follow.orders") == written
    assert following.changes("follow.orders") == [0, *written]
    new = following.changes("following.new")
    assert new == list(range(new[0], written[-1] + 1))
    assert len(following.events("started", step="sinks", source="stock")) == 1
    assert following.pipeline.status()["sinks"]["orders"]["delivered"] == 2 * len(written) + 1


def test_a_changed_filter_counts(following: Following) -> None:
    before = len(following.events("started", step="sinks", source="shop"))
    spec = {"type": "nats", "source": "shop", "url": "${NATS_URL}", "subject": "following.new"}
    following.write("new", {**spec, "filter": "record.price > 100"})
    following.wait_for(lambda: following.replaced(before), "replaced")
    following.shop.execute("INSERT INTO items VALUES (10001, 5), (10002, 500)")
    following.wait_for(lambda: 10002 in following.ids("following.new"), "delivering")
    following.wait_for(lambda: 10002 in following.ids("follow.orders"), "delivering")
    assert 10001 not in following.ids("following.new")
    assert 10001 in following.ids("follow.orders")


def test_a_filter_that_does_not_plan_is_refused_whole(following: Following) -> None:
    runs = len(following.events("started", step="sinks", source="shop"))
    spec = {"type": "nats", "source": "shop", "url": "${NATS_URL}", "subject": "following.new"}
    following.write("new", {**spec, "filter": "record.prize > 100"})
    following.wait_for(lambda: bool(following.state.refusals()), "refusing")
    (refusal,) = following.state.refusals()
    assert (refusal.kind, refusal.name) == ("sink", "new")
    assert "prize" in refusal.reason
    status = following.pipeline.status()
    (problem,) = status["problems"]
    assert (problem["subject"], problem["level"]) == ("source shop", "degraded")
    assert "prize" in problem["cause"]
    assert following.pipeline.get("/readyz")[0] == 200
    following.shop.execute("INSERT INTO items VALUES (10003, 5), (10004, 500)")
    following.wait_for(lambda: 10004 in following.ids("following.new"), "delivering as before")
    assert 10003 not in following.ids("following.new")
    assert len(following.events("started", step="sinks", source="shop")) == runs
    following.write("new", {**spec, "filter": "record.price > 100"})
    following.wait_for(lambda: not following.pipeline.status()["problems"], "well again")
    assert following.state.refusals() == []
    assert len(following.events("started", step="sinks", source="shop")) == runs


def test_a_removed_source_leaves_nothing(following: Following) -> None:
    runs = len(following.events("started", step="sinks", source="shop"))
    following.state.write(
        [Change("sink", "stock", None, None), Change("source", "stock", None, None)],
        by="test", door="api",
    )  # fmt: skip
    slot = "SELECT FROM pg_replication_slots WHERE slot_name = 'penstock_stock'"
    following.wait_for(lambda: following.stock.execute(slot) == [], "dropping the slot")
    following.wait_for(lambda: len(following.events("removed")) == 2, "removed")
    assert set(following.pipeline.status()["sources"]) == {"shop"}
    assert len(following.events("started", step="sinks", source="shop")) == runs
    assert following.pipeline.stop() == 0
    assert [e for e in following.pipeline.events() if e["level"] == "warning"] == []
