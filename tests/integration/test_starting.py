"""A sink that is starting: what a backfill reads for it comes before all live messages."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from tests.drainer_help import SingleDrainer
from tests.isolation_help import nats_settings, published, write_part
from tests.streams_help import Change, wire
from tests.waits import await_true

from penstock.config.sinks import NatsSinkSettings
from penstock.core.errors import SinkError
from penstock.core.message import Position, RoundPart
from penstock.core.monitor import Monitor
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.sink import SinkBacklog
from penstock.sinks.nats.sink import NatsSink
from penstock.spark.routes import Route
from penstock.spark.store_writer import StoreTarget
from penstock.spark.writer import FanOut, Worker
from penstock.streams.store import Store

SINK = "out"
STARTING = SinkError("starting", "What was kept goes first.")
RELEASED = SinkError("started", "No more of that comes.")


class Starting:
    """A sink, starting, that was behind before; messages of one group, each batch at a later LSN."""

    def __init__(self, store: Store, settings: NatsSinkSettings, monitor: Monitor) -> None:
        self.store = store
        self.source = store.register_source("shop", "tag")
        target = StoreTarget(store.url, self.source.id, self.source.base)
        route = Route(SINK, settings, starts=True)
        self.worker = Worker(FanOut("shop", [route], target, monitor.address))
        self.drainer = SingleDrainer(
            store.url,
            SinkBacklog(self.source.id, SINK),
            lambda: NatsSink(settings, name=SINK, source="shop"),
            timedelta(seconds=30),
            lambda _: None,
        )
        self._end = Position(1000, 0)
        with store.connection() as connection:
            backlog.fall_behind(connection, self.source.id, SINK, SinkError("timeout", "Late."))
            backlog.drained(connection, self.source.id, SINK, self._end)
        self.hold(STARTING)

    def hold(self, error: SinkError) -> None:
        with self.store.connection() as connection:
            backlog.put_behind(connection, self.source.id, SINK, error)

    def batch(self, first: int, end: int) -> tuple[RoundPart, pa.RecordBatch]:
        start, self._end = self._end, Position(self._end.lsn + 8, end)
        changes = [
            Change({"id": n}, group=0, position=Position(self._end.lsn, n))
            for n in range(first, end)
        ]
        return RoundPart(start, self._end, 0, 1), wire(changes)

    def live(self, first: int, end: int) -> None:
        part, rows = self.batch(first, end)
        write_part(self.worker, rows, part)

    def kept(self, first: int, end: int) -> None:
        part, rows = self.batch(first, end)
        write_part(self.worker, rows, part._replace(sink=SINK))

    def release(self) -> None:
        self.hold(RELEASED)
        self.drainer.done(self.source.position(self._end))
        self.drainer.start()

    def positions(self) -> list[tuple[int, int]]:
        """Return where the blocks begin that wait, and how many rows each has."""
        query = b"SELECT first_lsn, rows FROM penstock.backlog_blocks ORDER BY first_lsn, first_idx"
        with self.store.connection() as connection:
            return connection.execute(query).fetchall()

    def joined(self) -> bool:
        with self.store.connection() as connection:
            return backlog.behind(connection, self.source.id, SINK) is None


@pytest.fixture
def server(server_dir: Path) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(server_dir / f"starting-{uuid.uuid4().hex[:8]}") as server:
        yield server


@pytest.fixture
def streams(server: EmbeddedNats) -> Iterator[JetStream]:
    with JetStream(server.url, error_cb=_ignore_error) as streams:
        streams.add_stream("KEPT", "kept")
        yield streams


@pytest.fixture
def it(database: Database, server: EmbeddedNats) -> Iterator[Starting]:
    with (
        Store.open(database.url) as store,
        contextlib.closing(Monitor(lambda _: None)) as monitor,
    ):
        it = Starting(store, nats_settings(server.url, subject="kept"), monitor)
        yield it
        it.worker.close()
        it.drainer.stop()


async def _ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that is down."""


def test_nats_is_gone_for_a_while(it: Starting, server: EmbeddedNats, streams: JetStream) -> None:
    it.live(100, 110)
    it.kept(0, 10)
    assert published(streams, "KEPT") == list(range(10))
    it.live(110, 120)
    server.kill()
    it.kept(10, 20)
    it.live(120, 130)
    server.start()
    it.kept(20, 30)  # behind those that it has not taken
    it.live(130, 140)
    it.release()
    await_true(it.joined)
    assert published(streams, "KEPT") == [*range(30), *range(100, 140)]


def test_what_comes_after_it_has_started_goes_behind(it: Starting, server: EmbeddedNats) -> None:
    """The drainer would take it for delivered."""
    server.kill()
    it.kept(0, 10)
    it.hold(RELEASED)
    it.kept(10, 30)
    (first, rows), (then, others) = it.positions()
    assert (rows, others) == (10, 20)
    assert first < 0 < then
