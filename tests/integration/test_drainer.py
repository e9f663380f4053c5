"""The drainer with a sink that a test decides about: how it joins, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from queue import SimpleQueue
from typing import Any

import psycopg
import pyarrow as pa
from tests.drainer_help import SingleDrainer
from tests.integration.nats_servers import freeze
from tests.isolation_help import messages, position
from tests.waits import await_true

from penstock.core.delivery import DeadLetter, Unfinished, Written
from penstock.core.errors import SinkError
from penstock.embedded.handles import Database
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.sink import SinkBacklog
from penstock.sinks.stream import StreamWriter
from penstock.streams.records import SourceRecord
from penstock.streams.store import Store

SINK = "nats"
ERROR = SinkError("timeout", "The sink does not answer.")


class Target:
    """A sink that takes `rate` messages a second, and fails at message `fails_at`, once."""

    def __init__(self, rate: float = 1e6) -> None:
        self.rate = rate
        self.got: list[str] = []
        self.fails_at: int | None = None
        self.dead: set[str] = set()
        self.failed = threading.Event()
        self.away: SinkError | None = None

    def connect(self, patience: float | None = None) -> None:
        pass

    def check(self, patience: float) -> None:
        if self.away is not None:
            raise Unfinished(self.away, messages(0, 0), Written())

    def close(self) -> None:
        pass

    def write(self, batch: pa.RecordBatch, patience: float | None = None) -> Written:
        keys = batch.column("idempotency_key").to_pylist()
        written = Written()
        if self.away is not None:
            raise Unfinished(self.away, batch, written)
        for number, key in enumerate(keys):
            if len(self.got) == self.fails_at:
                self.fails_at = None
                self.failed.set()
                raise Unfinished(ERROR, batch.slice(number), written)
            if key in self.dead:
                written.dead.append(DeadLetter("too_large", "It is.", SINK, key, "{}"))
                continue
            self.got.append(key)
            written.delivered += 1
        time.sleep(len(keys) / self.rate)
        return written


class Draining:
    """A source with one sink that is behind, its drainer and a task that writes."""

    def __init__(self, store: Store, target: Target) -> None:
        self.store = store
        self.source: SourceRecord = store.register_source("shop", "tag")
        self.target = target
        self.reports: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.drainer = SingleDrainer(
            store.url,
            SinkBacklog(self.source.id, SINK),
            lambda: target,
            timedelta(seconds=30),
            self.reports.put,
        )
        with store.connection() as connection:
            backlog.fall_behind(connection, self.source.id, SINK, ERROR)

    def spill(self, first: int, end: int, of: psycopg.Connection[Any] | None = None) -> None:
        with self.store.connection() as own:
            backlog.spill(of or own, self.source.id, SINK, messages(first, end), 0)

    def done(self, end: int) -> None:
        self.drainer.done(position(end - 1))

    def writer(self) -> StreamWriter:
        return StreamWriter(self.store.url, self.source.id, 0, [])

    def joined(self) -> bool:
        with self.store.connection() as connection:
            return backlog.behind(connection, self.source.id, SINK) is None

    def waits_for_writers(self) -> bool:
        query = b"SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        with self.store.connection() as connection:
            return connection.execute(query).fetchone() is not None


@contextlib.contextmanager
def draining(store: Store, target: Target) -> Iterator[Draining]:
    draining = Draining(store, target)
    try:
        yield draining
    finally:
        draining.drainer.stop()


def test_a_join_keeps_the_writers_out_for_a_second_at_most(store: Store) -> None:
    """Also where a task brings much while it waits for them."""
    with (
        draining(store, Target(rate=6_000)) as it,
        contextlib.closing(it.writer()) as task,
        contextlib.closing(it.writer()) as next_task,
    ):
        it.spill(0, 100)
        task.begin()
        it.done(100)
        it.drainer.start()
        await_true(it.waits_for_writers)
        for first in range(100, 40_100, 10_000):
            it.spill(first, first + 10_000, task.connection)
        task.commit(None)
        started = time.monotonic()
        next_task.begin()
        next_task.rollback()
        assert time.monotonic() - started < 1.5
        assert len(it.target.got) < 10_000
        it.target.rate = 1e6
        it.done(40_100)
        await_true(it.joined)
        assert len(it.target.got) == len(set(it.target.got)) == 40_100


def test_a_join_that_fails_delivers_nothing_twice(store: Store) -> None:
    target = Target()
    with draining(store, target) as it:
        it.spill(0, 100)
        it.spill(100, 400)
        keys = messages(0, 400).column("idempotency_key").to_pylist()
        target.dead = {keys[150]}
        target.fails_at = 300
        it.done(100)  # the others lie beyond what is done, and come with the join
        it.drainer.start()
        assert target.failed.wait(60)
        it.done(400)
        await_true(it.joined)
        assert target.got == [key for key in keys if key not in target.dead]
        assert len(store.letters.page(sink=SINK)) == 1


def test_what_comes_before_a_join_that_failed_is_not_lost(store: Store) -> None:
    """The rest of the batch, of another task, lies before what the join has delivered."""
    target = Target()
    with draining(store, target) as it:
        it.spill(0, 10)
        it.spill(20, 40)
        target.fails_at = 25
        it.done(10)
        it.drainer.start()
        assert target.failed.wait(60)
        it.spill(10, 20)
        it.done(40)
        await_true(it.joined)
        assert sorted(target.got) == sorted(messages(0, 40).column("idempotency_key").to_pylist())


def test_it_ends_where_the_store_hangs(store: Store, database: Database) -> None:
    it = Draining(store, Target())
    it.done(1)
    with contextlib.closing(it.writer()) as task:
        task.begin()
        it.drainer.start()
        await_true(it.waits_for_writers)
        pids = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        ((pid,),) = database.execute(pids)
        freeze(pid)
        try:
            started = time.monotonic()
            it.drainer.stop()
            assert time.monotonic() - started < 10
            assert not any(t.name.startswith("drain") for t in threading.enumerate())
        finally:
            os.kill(pid, signal.SIGCONT)


def test_it_reports_when_the_oldest_message_was_committed_that_waits(store: Store) -> None:
    target = Target()
    target.away = ERROR
    with draining(store, target) as it:
        it.spill(0, 10)
        it.done(10)
        it.drainer.start()
        while (report := it.reports.get(timeout=60)).get("oldest") is None:
            assert report.get("state", "behind") == "behind"
        assert report["oldest"] == datetime(2026, 1, 1, tzinfo=UTC).timestamp()
        target.away = None
        while (report := it.reports.get(timeout=60)).get("state") != "attached":
            pass
        assert report["oldest"] is None


def test_a_sink_that_gets_no_messages_is_looked_at_all_the_same(store: Store) -> None:
    target = Target()
    with draining(store, target) as it:
        it.done(1)
        it.drainer.start()
        await_true(it.joined)
        target.away = ERROR
        while (report := it.reports.get(timeout=60)).get("code") != ERROR.code:
            assert "error" not in report
        assert (report["sink"], report["error"]) == (SINK, str(ERROR))
        target.away = None
        while "delivered" not in (report := it.reports.get(timeout=60)):
            assert report.get("error") == str(ERROR)
        assert report["delivered"] == 0
