"""Consumers of type nats, drained from a stream, with a sink that a test decides about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pytest
from tests.drainer_help import SingleDrainer
from tests.integration.test_drainer import ERROR, Target
from tests.streams_help import (
    START,
    Change,
    deleted,
    in_stream,
    inserted,
    make_stream,
    moved,
    publish,
    updated,
    wire,
    write_part,
)
from tests.waits import await_true

from penstock.config.consumers import Filters
from penstock.core.delivery import Written
from penstock.core.errors import StoreError
from penstock.core.message import Position, RoundPart
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.consumer import ConsumerBacklog, ConsumerStream
from penstock.sinks.backlog.sink import SinkBacklog
from penstock.sinks.selected import selected
from penstock.streams import nats_consumers_filter as sql_filter
from penstock.streams import read
from penstock.streams.maintenance import close_segment, run_once
from penstock.streams.nats_consumers import NatsConsumerRecord, NatsConsumers, Place
from penstock.streams.read import Selection
from penstock.streams.records import StreamRecord
from penstock.streams.store import Store

NAME = "mail"


class Publishes(Target):
    """A target that keeps what it was given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch, patience: float | None = None) -> Written:
        self.batches.append(batch)
        return super().write(batch, patience)


class Consuming:
    """A consumer of a stream, and its drainer."""

    def __init__(
        self,
        store: Store,
        stream: StreamRecord,
        start: Place = "all",
        filters: Filters | None = None,
        detach_after: float = 30,
    ) -> None:
        self.store, self.stream = store, stream
        self.filters = filters or Filters()
        self.consumers = NatsConsumers(store)
        self.consumers.register(
            stream, NAME, {"filters": self.filters.model_dump(mode="json")}, start
        )
        self.target = Publishes()
        self.reports: SimpleQueue[dict[str, Any]] = SimpleQueue()
        after = timedelta(seconds=detach_after)
        function = sql_filter.function_of(stream.name, self.filters.sql)
        of = ConsumerStream(stream.id, stream.kind, self.filters, after, function)
        self.waiting = ConsumerBacklog(stream.source_id, NAME, of)
        self.drainer = SingleDrainer(
            store.url, self.waiting, lambda: self.target, after, self.reports.put
        )

    def done(self, position: Position) -> None:
        self.drainer.done(position)
        self.drainer.wake()

    def publish(self, *changes: Change) -> Position:
        return publish(self.store, self.stream, changes)[-1]

    @property
    def record(self) -> NatsConsumerRecord:
        return self.consumers.get(NAME)

    def await_state(self, state: str) -> None:
        def reached() -> bool:
            self.drainer.wake()
            with self.store.connection() as connection:
                behind = backlog.behind(connection, self.stream.source_id, NAME)
            code = None if behind is None else behind.code
            found = "attached" if code is None else "paused" if code == "paused" else "behind"
            left = behind is None or behind.stream_id is not None
            return (found, self.record.state) == (state, state) and left

        await_true(reached)

    def keys(self) -> list[str]:
        return self.target.got


@contextlib.contextmanager
def consuming(store: Store, stream: StreamRecord, **settings: Any) -> Iterator[Consuming]:
    it = Consuming(store, stream, **settings)
    try:
        it.drainer.start()
        yield it
    finally:
        it.drainer.stop()


def key(position: Position) -> str:
    return f"tag-{position.lsn}-{position.idx}"


def keys(positions: list[Position]) -> list[str]:
    return [key(position) for position in positions]


def test_it_publishes_what_the_stream_holds_and_joins(store: Store, stream: StreamRecord) -> None:
    changes = [inserted(1, text='a "quoted" \\ ü'), updated(1, n=1), deleted(1)]
    first = publish(store, stream, changes)
    with store.connection() as connection:
        close_segment(connection, stream)
    more = publish(store, stream, [inserted(n) for n in range(2_500)])
    with consuming(store, stream) as it:
        assert (it.record.state, it.record.waiting) == ("behind", 2_503)
        it.done(more[-1])
        it.await_state("attached")
        assert it.keys() == keys(first + more)
        # As the pipeline has it, but for what no sink reads.
        captured = wire(changes, START)
        for name in ("record", "changes", "action", "metadata", "group_hash", "commit_idx", "part"):
            assert it.target.batches[0].column(name)[:3].equals(captured.column(name)), name


def test_it_delivers_no_further_than_what_is_done_before_it_joins(
    store: Store, stream: StreamRecord
) -> None:
    """A part of a round that is still under way may add messages before those that are there."""
    with consuming(store, stream) as it:
        it.consumers.pause(NAME, paused=True)
        batch = wire([inserted(n) for n in range(4)])
        start, end = START, Position(START.lsn + 1, 3)
        it.done(start)
        it.await_state("paused")
        write_part(store, stream, batch.slice(2), RoundPart(start, end, 1, 2))
        write_part(store, stream, batch.slice(0, 2), RoundPart(start, end, 0, 2))
        it.done(end)
        it.consumers.pause(NAME, paused=False)
        it.await_state("attached")
        assert it.keys() == batch.column("idempotency_key").to_pylist()


def test_a_pause_leaves_out_what_tasks_publish_themselves(
    store: Store, stream: StreamRecord
) -> None:
    with consuming(store, stream, start="new") as it:
        it.done(START)
        it.await_state("attached")
        direct = it.publish(inserted(1), inserted(2))  # in the stream; a task publishes them
        it.consumers.pause(NAME, paused=True)
        it.await_state("paused")
        late = publish(store, stream, [inserted(3), inserted(4)])
        # Of what the task began to publish, the second did not go.
        rest = wire([inserted(1), inserted(2)]).slice(1)
        with store.connection() as connection:
            backlog.spill(connection, stream.source_id, NAME, rest, 0)
        # A task that came again has put into a block what is in the stream, too.
        with store.connection() as connection:
            again = wire([inserted(3)], Position(late[0].lsn - 1, 0))
            backlog.spill(connection, stream.source_id, NAME, again, 0)
        it.done(late[-1])
        assert it.keys() == []
        assert it.record.waiting >= 3
        it.consumers.pause(NAME, paused=False)
        it.await_state("attached")
        assert it.keys() == [key(direct), *keys(late)]


def test_one_that_is_left_in_the_stream_is_not_left_there_again(
    store: Store, stream: StreamRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two look at it at once: what came in between is in the stream alone, and nobody's to publish."""
    with consuming(store, stream, start="new") as it:
        it.done(START)
        it.await_state("attached")
        it.consumers.pause(NAME, paused=True)
        it.await_state("paused")
        late = it.publish(inserted(1))
        with monkeypatch.context() as patch, store.connection() as connection:
            patch.setattr(SinkBacklog, "attend", lambda *_: None)  # it has looked before
            it.waiting.attend(connection, START)
        it.done(late)
        it.consumers.pause(NAME, paused=False)
        it.await_state("attached")
        assert it.keys() == [key(late)]


def test_one_that_is_behind_for_long_is_left_in_the_stream(
    store: Store, stream: StreamRecord
) -> None:
    with consuming(store, stream, start="new", detach_after=0) as it:
        it.done(START)
        it.await_state("attached")
        it.target.away = ERROR
        with store.connection() as connection:
            backlog.fall_behind(connection, stream.source_id, NAME, ERROR, START)
            kept = it.publish(inserted(1))
            backlog.spill(connection, stream.source_id, NAME, wire([inserted(1)]), 0)
        it.target.fails_at = 0
        it.done(START)
        it.await_state("behind")
        later = it.publish(inserted(2))  # no block is written for it
        it.target.away = None
        it.done(later)
        it.await_state("attached")
        assert it.keys() == [key(kept), key(later)]


def test_a_rewind_publishes_again_and_a_position_begins_there(
    store: Store, stream: StreamRecord
) -> None:
    there = publish(store, stream, [inserted(n) for n in range(5)])
    with consuming(store, stream, start=there[3]) as it:
        it.done(there[-1])
        it.await_state("attached")
        assert it.keys() == keys(there[3:])
        it.consumers.rewind(NAME, "all")
        it.await_state("attached")
        assert it.keys() == keys(there[3:] + there)
        it.consumers.rewind(NAME, datetime(2100, 1, 1, tzinfo=UTC))
        it.await_state("attached")
        it.consumers.rewind(NAME, datetime(2000, 1, 1, tzinfo=UTC))
        it.await_state("attached")
        assert it.keys() == keys(there[3:] + there + there)


def test_it_begins_at_a_commit_time(store: Store, stream: StreamRecord) -> None:
    def at(hour: int) -> list[Change]:
        time = f"2026-01-01T{hour:02}:00:00.000000Z"
        return [Change(metadata={"commit_timestamp": time}) for _ in range(2)]

    there = [publish(store, stream, at(hour)) for hour in (1, 2, 3, 4)]
    with store.connection() as connection:
        close_segment(connection, stream)
    there.append(publish(store, stream, at(5)))
    for minute, first in ((0, 2), (1, 3)):
        start = datetime(2026, 1, 1, 3, minute, tzinfo=UTC)
        with consuming(store, stream, start=start) as it:
            it.done(there[-1][-1])
            it.await_state("attached")
            assert it.keys() == [key(each) for those in there[first:] for each in those]
        it.consumers.remove_others({stream.id}, {})
    assert it.consumers.all() == []


def test_of_rows_it_publishes_the_newest_versions(store: Store) -> None:
    stream = make_stream(store, kind="rows")
    publish(store, stream, [inserted(1), inserted(2), inserted(3), updated(1, v=2)])
    last = publish(store, stream, [deleted(2), moved(3, 4), updated(1, v=3)])
    with consuming(store, stream) as it:
        it.done(last[-1])
        it.await_state("attached")
        (batch,) = it.target.batches
        rows = zip(
            *(batch.column(n).to_pylist() for n in ("record", "action", "changes")), strict=True
        )
        assert list(rows) == [
            ('{"id":2}', "delete", None),
            ('{"id":3}', "delete", None),
            ('{"id":4}', "update", None),
            ('{"id":1,"v":3}', "update", None),
        ]


def test_what_retention_takes_is_counted(store: Store) -> None:
    stream = make_stream(store, retention=timedelta(milliseconds=1))
    with consuming(store, stream) as it:
        it.publish(inserted(1), inserted(2), Change(table="others"))
        with store.connection() as connection:
            close_segment(connection, stream)
        last = it.publish(inserted(3))
        run_once(store)
        assert it.record.dropped == 3
        it.done(last)
        it.await_state("attached")
        assert it.keys() == [key(last)]


def test_its_filters_are_those_of_other_consumers(store: Store, stream: StreamRecord) -> None:
    changes = [
        Change({"id": n}, action, schema=schema, table=table)
        for n, (action, schema, table) in enumerate(
            [
                ("insert", "public", "items"), ("delete", "public", "items"),
                ("insert", "crm", "items"), ("insert", "crm", "people"),
                ("read", "public", "people"),
            ]
        )
    ]  # fmt: skip
    publish(store, stream, changes)
    batch = wire(changes)
    for given, expected in (
        ({}, 5),
        ({"table": ["items"]}, 3),
        ({"collection_id": ["crm.*", "public.people"]}, 3),
        ({"table": ["people"], "resource_id": ["crm"]}, 1),
        ({"action": ["insert", "read"], "table": ["public.*"]}, 2),
        ({"table": ["none"]}, 0),
    ):
        filters = Filters.model_validate(given)
        with store.connection() as connection:
            of = Selection(stream.id, stream.kind, filters)
            found = read.read(connection, of, Position(0, -1)).messages
            assert read.count(connection, of, Position(0, -1)) == expected
        ids = found.column("idempotency_key").to_pylist()
        assert len(ids) == expected
        assert selected(filters, batch).column("idempotency_key").to_pylist() == ids


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_rewind_to_the_end_keeps_what_is_under_way(
    store: Store, stream: StreamRecord, *, is_paused: bool
) -> None:
    """Of a round the end may be in the stream, and its first half not yet."""
    with consuming(store, stream, start="new") as it:
        it.done(START)
        it.await_state("attached")
        batch = wire([inserted(n) for n in range(4)])
        end = Position(START.lsn + 1, 3)
        # A task has written, and publishes, the second half; the first one is in another lane.
        write_part(store, stream, batch.slice(2), RoundPart(START, end, 1, 2))
        if is_paused:
            it.consumers.pause(NAME, paused=True)
            it.await_state("paused")
        query = (
            b"UPDATE penstock.nats_consumers SET paused = true, rewind_lsn = %s, rewind_idx = %s"
        )
        with store.connection() as connection:
            connection.execute(query, [end.lsn, end.idx])
        it.await_state("paused")
        await_true(lambda: it.record.rewind is None)
        write_part(store, stream, batch.slice(0, 2), RoundPart(START, end, 0, 2))
        it.done(end)
        it.consumers.pause(NAME, paused=False)
        it.await_state("attached")
        assert it.keys() == batch.column("idempotency_key").to_pylist()[:2]


def test_reads_are_cut_between_captured_messages(store: Store, stream: StreamRecord) -> None:
    """A transform may have made many of one."""
    made = [Change({"id": n}, position=Position(200, 0), part=n) for n in range(900)]
    others = [Change({"id": n}, position=Position(200, 1), part=n) for n in range(900)]
    batch = wire([*made, *others])
    write_part(store, stream, batch, RoundPart(Position(100, -1), Position(200, 1), 0, 1))
    with store.connection() as connection:
        of = Selection(stream.id, stream.kind)
        found = read.read(connection, of, Position(0, -1), rows=1)
        assert (found.messages.num_rows, found.end) == (900, Position(200, 0))
        assert found.messages.column("part").to_pylist() == list(range(900))
        found = read.read(connection, of, in_stream(Position(200, 0), 899), rows=1)
        assert (found.messages.num_rows, found.end) == (900, None)


def test_names_are_the_consumers_own(store: Store, stream: StreamRecord) -> None:
    other = make_stream(store, "others")
    consumers = NatsConsumers(store)
    store.register_consumer(stream.name, "taken", "pull", {})
    for name, of in (("taken", stream), (stream.name, other)):
        with pytest.raises(StoreError, match="already"):
            consumers.register(of, name, {}, "all")
    consumers.register(stream, NAME, {}, "all")
    with pytest.raises(StoreError, match="publishes the stream"):
        consumers.register(other, NAME, {}, "all")
    with pytest.raises(StoreError, match="no consumer"):
        consumers.get("none")
    assert consumers.remove_others({stream.id}, {NAME: stream.id}) == []
    assert consumers.remove_others({stream.id, other.id}, {}) == [NAME]
    assert consumers.all() == []
