"""Primary keys that change, from the WAL into a stream of kind rows: what is there is the table."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import orjson
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integration.capturing import Reader, capturing
from tests.streams_help import end_of, make_stream, read, writer_of

from penstock.core.message import RoundPart
from penstock.embedded.handles import Database
from penstock.postgres.chunk import partition
from penstock.streams.consumers.registry import Consumers
from penstock.streams.records import StreamRecord
from penstock.streams.store import Store


class Pipe:
    """Brings what a capture reads into a stream, in parts, as a pipeline does."""

    def __init__(self, reader: Reader, store: Store, stream: StreamRecord) -> None:
        self.reader, self.store, self.stream = reader, store, stream
        self.writer = writer_of(store, stream)

    def run(self) -> None:
        start = self.reader.position
        while chunks := self.reader.batch(max_rows=5):
            end = self.reader.position
            parts = partition(chunks, 2)
            for number, rows in enumerate(parts):
                self.writer.begin()
                self.writer.write(0, rows)
                self.writer.commit(RoundPart(start, end, number, len(parts)))
            if parts:
                assert self.store.head(self.stream.source_id) == end_of(end)
            start = end
        self.writer.close()


def folded(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows that messages come to, by their keys."""
    rows: dict[str, Any] = {}
    for message in messages:
        key = orjson.dumps(message["metadata"]["record_pks"]).decode()
        if "action" in message:
            rows.pop(key, None)
        else:
            rows[key] = message["record"]
    return rows


def received(store: Store, stream: StreamRecord) -> list[dict[str, Any]]:
    """Return what a worker gets that takes and acks a few messages at a time."""

    async def work() -> list[dict[str, Any]]:
        consumers = Consumers(store.url)
        await consumers.open()
        found = []
        try:
            consumer = await consumers.own(stream.name)
            while got := (await consumer.receive(3, 0.0)).deliveries:
                found += [orjson.loads(delivery.message) for delivery in got]
                await consumer.ack([delivery.token for delivery in got])
        finally:
            await consumers.close()
        return found

    return asyncio.run(work())


KEYS = st.integers(1, 4)
STATEMENTS = st.one_of(
    st.tuples(st.just("INSERT INTO t VALUES (%s, 1, %s) ON CONFLICT DO NOTHING"), KEYS, KEYS),
    st.tuples(st.just("UPDATE t SET id = %s WHERE id = %s"), KEYS, KEYS),
    st.tuples(st.just("UPDATE t SET part = part + 1, id = %s WHERE id = %s"), KEYS, KEYS),
    st.tuples(st.just("UPDATE t SET n = n + %s WHERE id = %s"), KEYS, KEYS),
    st.tuples(st.just("DELETE FROM t WHERE id IN (%s, %s)"), KEYS, KEYS),
    st.tuples(
        st.just(
            "WITH x AS (DELETE FROM t WHERE id = %s RETURNING id) UPDATE t SET n = -n WHERE id = %s"
        ),
        KEYS, KEYS,
    ),
)  # fmt: skip
SWAP = (
    "UPDATE t SET id = 9 WHERE id = %(a)s",
    "UPDATE t SET id = %(a)s WHERE id = %(b)s",
    "UPDATE t SET id = %(b)s WHERE id = 9",
)
TRANSACTIONS = st.lists(st.lists(STATEMENTS | st.tuples(KEYS, KEYS), max_size=4), max_size=12)


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_what_is_there_is_the_table(database: Database, identity: str) -> None:
    table = "CREATE TABLE t (id int, part int, n int, PRIMARY KEY (part, id))"
    numbers = itertools.count()
    with (
        capturing(database, table, f"ALTER TABLE t REPLICA IDENTITY {identity}") as reader,
        Store.open(database.url) as store,
        psycopg.connect(database.url) as connection,
    ):

        @settings(max_examples=15, deadline=None)
        @given(transactions=TRANSACTIONS)
        def example(transactions: list[list[tuple[Any, ...]]]) -> None:
            connection.rollback()
            connection.execute("DELETE FROM t")
            pipe = Pipe(reader, store, make_stream(store, f"s{next(numbers)}", kind="rows"))
            for statements in [[("INSERT INTO t VALUES (%s, 1, %s)", 1, 1)], *transactions]:
                for first, *rest in statements:
                    run(connection, first, *rest)
                connection.commit()
            expected = {
                f"[{part},{id_}]": {"id": id_, "part": part, "n": n}
                for id_, part, n in connection.execute("SELECT id, part, n FROM t")
            }
            pipe.run()
            assert folded([stored.message for stored in read(store, pipe.stream)]) == expected
            # A consumer gets the newest version of each key alone.
            messages = received(store, pipe.stream)
            assert folded(messages) == expected
            keys = [orjson.dumps(m["metadata"]["record_pks"]) for m in messages]
            assert len(set(keys)) == len(keys)

        example()


def run(connection: psycopg.Connection[Any], first: Any, *rest: int) -> None:
    statements = SWAP if isinstance(first, int) else (first,)
    values = {"a": first, "b": rest[0]} if isinstance(first, int) else rest
    try:
        with connection.transaction():
            for statement in statements:
                connection.execute(statement, values)
    except psycopg.errors.UniqueViolation:
        pass  # the key is another row's


def test_rows_that_exchange_a_deferrable_key_are_both_there(database: Database) -> None:
    """Between the two updates both have one key: neither may be taken for gone."""
    table = "CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, n int)"
    with (
        capturing(database, table, "ALTER TABLE t REPLICA IDENTITY FULL") as reader,
        Store.open(database.url) as store,
    ):
        pipe = Pipe(reader, store, make_stream(store, kind="rows"))
        database.execute("INSERT INTO t VALUES (1, 1), (2, 2)")
        database.execute("UPDATE t SET id = 3 - id")
        pipe.run()
        assert folded([s.message for s in read(store, pipe.stream)]) == {
            "[1]": {"id": 1, "n": 2},
            "[2]": {"id": 2, "n": 1},
        }
