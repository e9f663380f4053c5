"""Filters in SQL of consumers of type nats, drained from a stream and from blocks."""

from __future__ import annotations

from typing import Any

import orjson
import psycopg
import pytest
from tests.integration.test_drainer import ERROR
from tests.integration.test_nats_consumers import NAME, Consuming, consuming, key, keys
from tests.streams_help import inserted, make_stream, publish, wire

from penstock.config.consumers import Filters
from penstock.core.errors import StoreError
from penstock.core.message import Position
from penstock.embedded.handles import Database
from penstock.expressions import load_columns
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.consumer import ConsumerBacklog
from penstock.streams.maintenance import close_segment
from penstock.streams.nats_consumers import NatsConsumers
from penstock.streams.store import Store


@pytest.fixture
def known(database: Database, store: Store) -> Store:
    """The store, which knows the columns of the table that the streams are of."""
    database.execute("CREATE TABLE public.items (id int PRIMARY KEY, n int, text text)")
    with psycopg.connect(database.url) as connection:
        store.save_catalog("shop", load_columns(connection, [("public", "items")]))
    return store


SQL = Filters(sql="record.n / (record.id - 4) > 1")  # of row 4 it can't be evaluated


def test_a_condition_in_sql_filters_what_the_stream_and_blocks_have(known: Store) -> None:
    stream = make_stream(known)
    rows = [inserted(n, n=100 if n % 2 else 0) for n in range(10)]
    first = publish(known, stream, rows)
    with consuming(known, stream, filters=SQL) as it:
        assert it.record.waiting == 4, "5, 7 and 9 pass, and of 4 it is not known"
        it.done(first[-1])
        it.await_state("attached")
        assert it.keys() == keys([first[n] for n in (5, 7, 9)])
        (letter,) = known.letters.page(consumer=NAME)
        assert (letter.code, letter.idempotency_key) == ("filter_failed", key(first[4]))
        assert letter.reason == "the filter can't be evaluated: division by zero"
        assert orjson.loads(letter.message)["record"] == {"id": 4, "n": 0}
        # The same of blocks, which have what the filter has not seen.
        again = [inserted(n, n=100) for n in (3, 4, 5)]
        with known.connection() as connection:
            backlog.fall_behind(connection, stream.source_id, NAME, ERROR, first[-1])
            more = wire(again, first[-1])
            backlog.spill(connection, stream.source_id, NAME, more, 0)
        publish(known, stream, again)
        it.done(Position(first[-1].lsn + 1, 2))
        it.await_state("attached")
        assert it.keys()[3:] == more.column("idempotency_key").to_pylist()[2:]
        assert len(known.letters.page(consumer=NAME)) == 2
        delivered = [of for of in reported(it) if "delivered" in of]
        assert sum(of["delivered"] for of in delivered) == 4
        assert sum(len(of["dead"]) for of in delivered) == 2


def reported(it: Consuming) -> list[dict[str, Any]]:
    return [it.reports.get() for _ in range(it.reports.qsize())]


def test_a_condition_that_lets_little_through_does_not_hold_it_up(
    known: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a segment holds is done with when none of it passes: a restart does not read it again."""
    stream = make_stream(known)
    for _ in range(3):
        publish(known, stream, [inserted(n, n=0) for n in range(5, 9)])
        with known.connection() as connection:
            close_segment(connection, stream)
    (last,) = publish(known, stream, [inserted(9, n=100)])
    taken: list[int] = []
    take = ConsumerBacklog.take

    def noted(self: ConsumerBacklog, *given: Any) -> Any:
        found = take(self, *given)
        taken.append(-1 if found is None else found.messages.num_rows)
        return found

    monkeypatch.setattr(ConsumerBacklog, "take", noted)
    with consuming(known, stream, filters=SQL) as it:
        it.done(last)
        it.await_state("attached")
    assert taken[:4] == [0, 0, 0, 1]
    assert it.keys() == [key(last)]


def test_functions_of_filters_go_with_the_last_that_has_them(known: Store) -> None:
    stream, consumers = make_stream(known), NatsConsumers(known)

    def functions() -> int:
        query = "SELECT count(*) FROM pg_proc WHERE proname LIKE 'filter\\_nats\\_%'"
        with known.connection() as connection:
            ((found,),) = connection.execute(query.encode())
        return int(found)

    def settings(text: str) -> dict[str, Any]:
        return {"filters": Filters(sql=text).model_dump(mode="json")}

    for name in ("a", "b"):
        consumers.register(stream, name, settings("record.n > 1"), "all")
    assert functions() == 1
    consumers.register(stream, "b", settings("record.n > 2"), "all")
    assert functions() == 2
    consumers.register(stream, "a", settings("record.n > 2"), "all")
    assert functions() == 2, "a run may use the one before, until the next one has its place"
    with pytest.raises(StoreError, match=r"consumers.b.filters.sql: .*record.m"):
        consumers.register(stream, "b", settings("record.m > 2"), "all")
    consumers.remove_others({stream.id}, {"b": stream.id})
    assert functions() == 1
    consumers.remove_others({stream.id}, {})
    assert functions() == 0
