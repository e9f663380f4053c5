"""`penstock run` follows the desired state: what changes is restarted, and nothing else is touched.

The tests share a run and its sink `new`. Each brings that into the state that it begins with, so that
they may run alone and in any order.
"""

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
from ..waits import await_end

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
HANDED_OVER = "the slot is handed over"
NEW = {"type": "nats", "source": "shop", "url": "${NATS_URL}", "subject": "following.new"}


@dataclass
class Following:
    """A run that follows a store's desired state, and its servers."""

    shop: Database
    stock: Database
    streams: JetStream
    pipeline: Penstock
    state: DesiredState
    new: dict[str, Any] | None = None
    """The settings of the sink `new`, if it is there."""

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        self.pipeline.wait_for(condition, PATIENCE, what)

    def write_new(self, spec: dict[str, Any] | None) -> None:
        self.state.write([Change("sink", "new", None, spec)], by="test", door="api")
        self.new = spec

    def without_new(self) -> None:
        """Have no sink `new`."""
        if self.new is not None:
            before = len(self.events("removed"))
            self.write_new(None)
            self.wait_for(lambda: len(self.events("removed")) > before, "removed")

    def with_new(self, **settings: str) -> None:
        """Have the sink `new`, with these settings."""
        spec = NEW | settings
        if self.new != spec:
            before = self.starts("shop")
            self.write_new(spec)
            self.wait_for(lambda: self.starts("shop") > before, "started")
            self.wait_for(lambda: self.pipeline.get("/readyz")[0] == 200, "ready again")

    def records(self, subject: str) -> list[dict[str, Any]]:
        stream = "FOLLOW_NEW" if "new" in subject else "FOLLOW"
        found = [m for m in self.streams.messages(stream) if m.subject == subject]
        return [json.loads(m.data)["record"] for m in found]

    def ids(self, subject: str, rows: range) -> list[int]:
        """Those of a test's rows that came."""
        return sorted(r["id"] for r in self.records(subject) if r["id"] in rows)

    def changes(self, subject: str) -> list[int]:
        """The states of row 0, in the order in which they came."""
        return [int(r["price"]) for r in self.records(subject) if not r["id"]]

    def events(self, event: str, **fields: str) -> list[dict[str, Any]]:
        found = [e for e in self.pipeline.events() if e["event"] == event]
        return [e for e in found if all(e.get(k) == v for k, v in fields.items())]

    def starts(self, source: str) -> int:
        """How often a source's run was started."""
        return len(self.events("started", step="sinks", source=source))


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
        state = DesiredState(store, environment)
        assert {e.managed_by for e in state.read().entities.values()} == {"file"}
        yield Following(databases[0], databases[1], streams, pipeline, state)
        assert pipeline.stop() == 0
        assert [e for e in pipeline.events() if e["level"] == "warning"] == []


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
        await_end(self)
        return list(range(self._first, self.last))


def test_a_new_sink_joins_and_others_miss_nothing(following: Following) -> None:
    following.without_new()
    stock = following.starts("stock")
    handed_over = len(following.events(HANDED_OVER))
    following.shop.execute("INSERT INTO items VALUES (0, 0)")
    load = Load(following.shop, 1)
    following.wait_for(lambda: load.last > 50, "writing")
    began, rows = time.monotonic(), range(1, 10_000)
    following.write_new(NEW)
    following.wait_for(
        lambda: bool(following.ids("following.new", rows)), "delivering to the new sink"
    )
    print(f"the new sink has its first message after {time.monotonic() - began:.1f} s")
    written = load.stop()
    for subject in ("follow.orders", "following.new"):
        following.wait_for(lambda s=subject: written[-1] in following.changes(s), "at the end")  # type: ignore[misc]  # mypy infers no lambda with a default
        following.wait_for(lambda s=subject: written[-1] in following.ids(s, rows), "at the end")  # type: ignore[misc]  # mypy infers no lambda with a default
    assert following.ids("follow.orders", rows) == written
    assert following.changes("follow.orders") == [0, *written]
    new = following.changes("following.new")
    assert new == list(range(new[0], written[-1] + 1))
    # One run has followed the other with no pause in between, and nothing else was begun anew.
    assert following.starts("stock") == stock
    (handed,) = following.events(HANDED_OVER)[handed_over:]
    assert (handed["source"], handed["in_order"]) == ("shop", True)
    sources = following.pipeline.status()["sources"]
    assert [of["restarts"] for of in sources.values()] == [0] * len(sources)
    count = len(following.records("follow.orders"))
    following.wait_for(
        lambda: following.pipeline.status()["sinks"]["orders"]["delivered"] >= count, "counted"
    )
    assert following.pipeline.status()["sinks"]["orders"]["delivered"] == count


def test_a_changed_filter_counts(following: Following) -> None:
    following.with_new()
    following.with_new(filter="record.price > 100")
    following.shop.execute("INSERT INTO items VALUES (10001, 5), (10002, 500)")
    rows = range(10_001, 10_003)
    following.wait_for(lambda: 10002 in following.ids("following.new", rows), "delivering")
    following.wait_for(lambda: 10002 in following.ids("follow.orders", rows), "delivering")
    assert 10001 not in following.ids("following.new", rows)
    assert 10001 in following.ids("follow.orders", rows)


def test_a_filter_that_does_not_plan_is_refused_whole(following: Following) -> None:
    following.with_new(filter="record.price > 100")
    runs = following.starts("shop")
    following.write_new(NEW | {"filter": "record.prize > 100"})
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
    rows = range(10_003, 10_005)
    following.wait_for(
        lambda: 10004 in following.ids("following.new", rows), "delivering as before"
    )
    assert 10003 not in following.ids("following.new", rows)
    assert following.starts("shop") == runs
    following.write_new(NEW | {"filter": "record.price > 100"})
    following.wait_for(lambda: not following.pipeline.status()["problems"], "well again")
    assert following.state.refusals() == []
    assert following.starts("shop") == runs


def test_a_removed_source_leaves_nothing(following: Following) -> None:
    runs, removed = following.starts("shop"), len(following.events("removed"))
    following.state.write(
        [Change("sink", "stock", None, None), Change("source", "stock", None, None)],
        by="test", door="api",
    )  # fmt: skip
    slot = "SELECT FROM pg_replication_slots WHERE slot_name = 'penstock_stock'"
    following.wait_for(lambda: following.stock.execute(slot) == [], "dropping the slot")
    following.wait_for(lambda: len(following.events("removed")) == removed + 2, "removed")
    assert set(following.pipeline.status()["sources"]) == {"shop"}
    assert following.starts("shop") == runs
