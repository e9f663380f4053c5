"""Consumers of type nats in a pipeline: at the head and behind it, with no gap and no repeat between."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pyarrow as pa
import pytest
from tests.integration.test_isolation import WINDOW, _ignore_error
from tests.isolation_help import (
    Source,
    assert_whole,
    loaded,
    position,
    published,
    stream_settings,
    write_part,
)
from tests.streams_help import Change, deleted, inserted, moved, wire
from tests.waits import await_true

from penstock.config.nats_consumers import NatsConsumer
from penstock.core.message import Position, RoundPart
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.expressions import load_columns
from penstock.sinks.nats.shared import shared_streams
from penstock.spark.part_writer import PartWriter
from penstock.streams.nats_consumers import NatsConsumers
from penstock.streams.store import Store

NAME = "mail"
EVENTS = "events"


def consumer(url: str, prefix: str, **settings: Any) -> dict[str, NatsConsumer]:
    given = {
        "type": "nats", "stream": EVENTS, "url": url, "subject": prefix + ".{table}",
        "detach_after": "1s", **settings,
    }  # fmt: skip
    return {NAME: NatsConsumer.model_validate(given)}


class Consumed(Source):
    """A source with a stream and its consumer."""

    def __init__(self, url: str, consumers: dict[str, NatsConsumer], kind: str = "changes") -> None:
        super().__init__(url, {EVENTS: stream_settings(kind=kind)}, consumers=consumers)

    @property
    def known(self) -> NatsConsumers:
        return NatsConsumers(self.store)

    def pause(self, *, paused: bool) -> None:
        self.known.pause(NAME, paused=paused)
        self.drainers[NAME].wake()

    def await_written(self, more: int) -> None:
        """Wait until so many more messages are written."""
        end = self.written + more
        await_true(lambda: self.written > end)

    def await_state(self, state: str) -> None:
        def reached() -> bool:
            self.drainers[NAME].wake()
            return self.states(NAME)[-1:] == [state]

        await_true(reached)


@pytest.fixture
def nats_url(nats_server: EmbeddedNats) -> str:
    return nats_server.url


@pytest.fixture
def forgetful(nats: JetStream) -> str:
    """A stream that lets repeats through: it forgets ids at once."""
    name = f"S{uuid.uuid4().hex[:8]}"
    nats.add_stream(name, f"{name.lower()}.>", duplicate_window=0.1)
    return name


def test_it_begins_with_what_the_stream_holds_and_goes_on_at_the_head(
    database: Database, nats: JetStream, nats_url: str, forgetful: str
) -> None:
    """Also where it is paused at any time: no message is lost or repeated, and groups keep order."""
    of = consumer(nats_url, forgetful.lower())
    pace = random.Random(5)
    with Consumed(database.url, {}) as source:
        source.batch(2_000)
        source.consumers = of
        source.restart()
        source.warm()
        with loaded(source, pause=0.005):
            await_true(lambda: NAME not in source.behind())
            for _ in range(4):
                source.await_written(pace.randint(50, 300))
                source.pause(paused=True)
                source.await_state("paused")
                source.await_written(pace.randint(50, 300))
                assert source.waiting(NAME) < 200, "what waits is kept for it"
                source.pause(paused=False)
                await_true(lambda: NAME not in source.behind())
        await_true(lambda: NAME not in source.behind())
        assert_whole(source.streamed(EVENTS), source.written)
        assert_whole(published(nats, forgetful), source.written)
        assert source.delivered()[NAME] == source.written


def test_what_a_task_has_begun_to_publish_is_not_read_from_the_stream(
    database: Database, nats: JetStream, nats_url: str, forgetful: str, monkeypatch: Any
) -> None:
    """The store fails a task, and the consumer is paused before the task tries again."""
    with Consumed(database.url, consumer(nats_url, forgetful.lower(), deliver_policy="new")) as it:
        it.batch(100)
        await_true(lambda: NAME not in it.behind())
        attempt, attempts = PartWriter._attempt, []

        def failing(writer: PartWriter) -> int:
            attempts.append(writer)
            streams = writer._worker.store.streams
            if len(attempts) > 1:
                return attempt(writer)
            commit = streams.commit

            def lost(part: RoundPart | None) -> None:
                monkeypatch.setattr(streams, "commit", commit)
                streams.connection.close()
                it.pause(paused=True)
                it.await_state("paused")
                commit(part)

            monkeypatch.setattr(streams, "commit", lost)
            return attempt(writer)

        monkeypatch.setattr(PartWriter, "_attempt", failing)
        it.batch(200, tasks=1)
        monkeypatch.setattr(PartWriter, "_attempt", attempt)
        assert len(attempts) == 2
        it.batch(300)
        assert_whole(published(nats, forgetful), 200)
        it.pause(paused=False)
        await_true(lambda: NAME not in it.behind())
        assert_whole(published(nats, forgetful), 300)


def test_a_task_that_comes_again_publishes_what_it_may_not_have(
    database: Database, nats: JetStream, nats_url: str, forgetful: str
) -> None:
    """It died after it wrote the stream; the consumer was paused before it came again."""
    with Consumed(database.url, consumer(nats_url, forgetful.lower())) as it:
        it.batch(100)
        await_true(lambda: NAME not in it.behind())
        rows, part = it.parts(100, 200, 1)[0], RoundPart(position(99), position(199), 0, 1)
        streams = it.workers[0].store.streams  # as if the process ended here
        streams.begin()
        streams.write(0, rows)
        streams.commit(part)
        it.pause(paused=True)
        it.await_state("paused")
        write_part(it.workers[0], rows, part)
        it.done(200)
        it.batch(300)
        it.pause(paused=False)
        await_true(lambda: NAME not in it.behind())
        assert_whole(published(nats, forgetful), 300)


@pytest.fixture
def shaky(server_dir: Path) -> Iterator[tuple[EmbeddedNats, JetStream]]:
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedNats(server_dir / f"shaky-{uuid.uuid4().hex[:8]}"))
        streams = stack.enter_context(JetStream(server.url, error_cb=_ignore_error))
        streams.add_stream("MAIL", "mail.>", duplicate_window=WINDOW)
        yield server, streams


def test_a_server_that_is_gone_and_a_run_that_dies(
    database: Database, shaky: tuple[EmbeddedNats, JetStream]
) -> None:
    """Behind for long, nothing is kept for it but what tasks had begun with."""
    server, streams = shaky
    with Consumed(database.url, consumer(server.url, "mail")) as source:
        source.warm()
        with loaded(source):
            await_true(lambda: NAME not in source.behind() and source.written > 300)
            server.kill()
            source.await_state("detached")
            await_true(lambda: source.known.get(NAME).waiting > source.waiting(NAME) + 500)
        # Killed in the middle of a batch; the same comes again, split otherwise.
        source.batch(source.written + 100, only=[1])
        source.restart()
        source.batch(source.written + 60)
        server.start()
        with loaded(source):
            await_true(lambda: NAME not in source.behind())
            source.restart_query()
        await_true(lambda: NAME not in source.behind())
        assert_whole(source.streamed(EVENTS), source.written)
        assert_whole(published(streams, "MAIL"), source.written)


def test_changed_filters_leave_the_others_alone(
    database: Database, nats: JetStream, nats_url: str, forgetful: str
) -> None:
    prefix = forgetful.lower()
    items, none = consumer(nats_url, prefix), consumer(nats_url, prefix, filters={"table": "none"})
    with Consumed(database.url, none) as source:
        source.batch(100)
        await_true(lambda: NAME not in source.behind())
        source.pause(paused=True)
        source.await_state("paused")
        source.batch(200)
        for filters, end in ((items, 300), (none, 400), (items, 500)):
            source.consumers = filters
            source.restart()
            source.batch(end)
            source.pause(paused=False)
            await_true(lambda: NAME not in source.behind())
        numbers = published(nats, forgetful)
        assert sorted(numbers) == [*range(100, 300), *range(400, 500)]


def note_columns(database: Database, store: Store) -> None:
    database.execute("CREATE TABLE items (id int PRIMARY KEY, pad text, half int, n int)")
    with psycopg.connect(database.url) as connection:
        store.save_catalog("shop", load_columns(connection, [("public", "items")]))


def test_a_condition_in_sql_holds_at_the_head_and_behind_it(
    database: Database, nats: JetStream, nats_url: str, forgetful: str
) -> None:
    of = consumer(nats_url, forgetful.lower(), filters={"sql": "record.half = 0"})
    with Consumed(database.url, {}) as source:
        note_columns(database, source.store)
        source.batch(100)
        source.consumers = of
        source.restart()
        source.warm()
        with loaded(source, pause=0.005):
            await_true(lambda: NAME not in source.behind())
            for _ in range(3):
                source.await_written(200)
                source.pause(paused=True)
                source.await_state("paused")
                source.await_written(200)
                source.pause(paused=False)
                await_true(lambda: NAME not in source.behind())
        await_true(lambda: NAME not in source.behind())
        expected = [n for n in range(source.written) if n % 2 == 0]
        assert sorted(published(nats, forgetful)) == expected
        assert source.delivered()[NAME] == len(expected)


def test_what_a_condition_cannot_decide_at_the_head_is_a_dead_letter(
    database: Database, nats: JetStream, nats_url: str, forgetful: str
) -> None:
    filters = {"sql": "record.n / (record.half - 1) <> 5", "table": "items"}
    with Consumed(database.url, {}) as source:
        note_columns(database, source.store)
        source.consumers = consumer(nats_url, forgetful.lower(), filters=filters)
        source.restart()
        source.batch(1)
        await_true(lambda: NAME not in source.behind())
        rows = [
            Change({"id": n, "half": n % 2, "n": n}, group=n, position=position(n), table=table)
            for n, table in [(1, "items"), (2, "items"), (3, "others"), (4, "items")]
        ]
        (worker, *_) = source.workers
        write_part(worker, wire(rows), RoundPart(position(0), position(4), 0, 1))
        assert published(nats, forgetful) == [2, 4]
        letters = [of.idempotency_key for of in source.store.letters.page(consumer=NAME)]
        at = position(1)
        assert letters == [f"tag-{position(0).lsn}-0", f"tag-{at.lsn}-{at.idx}"]


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_changed_key_is_a_delete_of_the_old_one_at_the_head_too(
    database: Database, nats: JetStream, nats_url: str, forgetful: str, *, is_paused: bool
) -> None:
    of = consumer(nats_url, forgetful.lower(), deletes=True)
    with Consumed(database.url, of, kind="rows") as source:
        source.batch(1)
        await_true(lambda: NAME not in source.behind())
        if is_paused:
            source.pause(paused=True)
            source.await_state("paused")
        rows = wire([inserted(3), moved(3, 4), deleted(4)])
        last = Position(rows.column("commit_lsn")[0].as_py() + 5000, 2)
        at = rows.schema.get_field_index("commit_lsn")
        rows = rows.set_column(at, "commit_lsn", pa.array([last.lsn] * 3, pa.int64()))
        (worker, *_) = source.workers
        write_part(worker, rows, RoundPart(position(0), last, 0, 1))
        if is_paused:
            source.drainers[NAME].done(source.source.position(last))
            source.pause(paused=False)
            await_true(lambda: NAME not in source.behind())
        found = [orjson.loads(message.data) for message in nats.messages(forgetful)][1:]
        of_rows = [(body["record"]["id"], body.get("action")) for body in found]
        # Behind the head, what is superseded is left out.
        expected = (
            [(3, "delete"), (4, "delete")]
            if is_paused
            else [(3, None), (3, "delete"), (4, None), (4, "delete")]
        )
        assert of_rows == expected


def test_two_that_publish_the_same_to_one_stream_are_found(
    nats: JetStream, nats_url: str, forgetful: str
) -> None:
    """JetStream would take the messages of one of them for copies of the other's."""
    first = consumer(nats_url, forgetful.lower())[NAME]
    part = consumer(nats_url, forgetful.lower(), filters={"action": "insert"})[NAME]
    sink, filtered = first.sink(stream_settings()), part.sink(stream_settings())
    (found,) = shared_streams("shop", {"one": sink}, {"two": sink})
    assert (found.level, found.subject) == ("error", "consumer two")
    assert found.message.startswith("it and sink one put the same messages")
    (found,) = shared_streams("shop", {}, {"one": sink, "two": filtered})
    assert found.level == "warning"
    (found,) = shared_streams("shop", {}, {"one": filtered, "two": filtered})
    assert found.level == "warning", "their own filters may differ"
    of_stream = stream_settings().model_copy(update={"filter": "record.total > 10"})
    all_of_it, part_of_it = first.sink(of_stream), part.sink(of_stream)
    (found,) = shared_streams("shop", {}, {"one": all_of_it, "two": all_of_it})
    assert found.level == "error", "the stream's own filter keeps nothing apart"
    (found,) = shared_streams("shop", {}, {"one": all_of_it, "two": part_of_it})
    assert found.level == "warning"
