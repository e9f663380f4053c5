"""Penstock in memory beside the real one: the same changes, the same requests, the same answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID

import hypothesis.strategies as st
import psycopg
from hypothesis import HealthCheck, Phase, example, given, settings
from psycopg.types.json import Jsonb
from tests.integration.capturing import Message, capturing, messages
from tests.streams_help import START, Change, make_stream, publish, wire

from penstock.config.sources import PostgresSource
from penstock.core.message import Position
from penstock.embedded.handles import Database
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerSpec
from penstock.streams.store import Store
from penstock.testing import Clock, InMemoryConsumer, InMemorySource, InMemoryStream

T = TypeVar("T")
LONG = 600.0


# Changes

COLUMNS = {
    "id": "bigint", "flag": "boolean", "small": "smallint", "real": "real", "double": "double precision",
    "amount": "numeric(10,2)", "free": "numeric", "name": "text", "code": "varchar(20)",
    "raw": "bytea", "day": "date", "at": "timestamptz", "local": "timestamp", "clock": "time",
    "span": "interval", "uid": "uuid", "doc": "jsonb", "text": "json", "tags": "text[]",
    "numbers": "integer[]", "days": "date[]",
}  # fmt: skip
FULL: dict[str, Any] = {
    "flag": True, "small": -7, "real": 2.0, "double": 1e300, "amount": Decimal("199.9"),
    "free": Decimal("1E+3"), "name": 'a "b" \\ é\n', "code": "x", "raw": b"\x00\xff",
    "day": date(2026, 2, 28), "at": datetime(2026, 1, 2, 3, 4, 5, 600, timezone(timedelta(hours=2))),
    "local": datetime(2026, 1, 2, 3, 4, 5), "clock": time(1, 2, 3, 450_000),
    "span": timedelta(days=-1, hours=2, seconds=3, milliseconds=40),
    "uid": UUID(int=7), "doc": {"a": [1, 2.5, None], "é": "x"}, "text": [True, {"b": "c"}],
    "tags": ["a", "", None, "NULL", 'q"u\\o', "x y", "{}"], "numbers": [[1, 2], [3, None]],
    "days": [date(2026, 1, 1)],
}  # fmt: skip
OTHER: dict[str, Any] = {
    "flag": False, "double": float("nan"), "real": float("-inf"), "amount": Decimal("NaN"),
    "small": 0, "free": Decimal("0.10"), "name": "", "raw": b"", "doc": "[1.10]", "tags": [],
    "span": timedelta(), "local": None, "clock": time(0, 0), "at": datetime(2026, 1, 1, tzinfo=UTC),
}  # fmt: skip


def sent(message: Message) -> tuple[Any, ...]:
    """What must be the same: all but the time and the place in the WAL."""
    metadata = message.metadata
    same = {name: metadata[name] for name in ("table_name", "record_pks", "unavailable")}
    return (
        message.action,
        message.table,
        message.raw,
        message.changes,
        same,
        message.position.idx,
    )


def test_messages_are_those_of_the_capture(database: Database) -> None:
    created = ", ".join(f'"{name}" {type_}' for name, type_ in COLUMNS.items())
    tables = [f"CREATE TABLE {name} ({created}, PRIMARY KEY (id))" for name in ("a", "b")]
    found: list[Any] = []
    settings_of_source = PostgresSource(type="postgres", url="postgresql:///shop")
    source = InMemorySource("shop", settings_of_source, Clock(), found.append)
    a = source.table("public.a", COLUMNS)
    b = source.table("public.b", COLUMNS, replica_identity="full")
    with capturing(database, *tables, "ALTER TABLE b REPLICA IDENTITY FULL") as reader:
        for name, table in (("a", a), ("b", b)):
            insert(database.url, name, {"id": 1, **FULL})
            table.insert(id=1, **FULL)
            database.execute(f"INSERT INTO {name} (id) VALUES (2)")
            table.insert(id=2)
            update(database.url, name, 1, OTHER)
            table.update(1, **OTHER)
            database.execute(f"UPDATE {name} SET id = 3 WHERE id = 1")
            table.update(1, id=3)
            database.execute(f"DELETE FROM {name} WHERE id = 3")
            table.delete(3)
        with psycopg.connect(database.url) as connection, source.transaction():
            for name, table in (("a", a), ("b", b)):
                connection.execute(f"UPDATE {name} SET name = 'x' WHERE id = 2")
                table.update(2, name="x")
            connection.execute("TRUNCATE b")
            b.truncate()
        real = [message for message in reader.read() if message.action != "truncate"]
    memory = [message for message in messages(found) if message.action != "truncate"]
    assert [sent(message) for message in memory] == [sent(message) for message in real]
    assert messages(found)[-1].action == "truncate"
    for one, other in itertools.combinations(zip(memory, real, strict=True), 2):
        assert bool(one[0].groups & other[0].groups) == bool(one[1].groups & other[1].groups)


def insert(url: str, table: str, values: dict[str, Any]) -> None:
    names, marks = ", ".join(f'"{n}"' for n in values), ", ".join(["%s"] * len(values))
    with psycopg.connect(url) as connection:
        connection.execute(
            f"INSERT INTO {table} ({names}) VALUES ({marks})",
            [adapted(name, value) for name, value in values.items()],
        )


def update(url: str, table: str, key: int, values: dict[str, Any]) -> None:
    changes = ", ".join(f'"{name}" = %s' for name in values)
    with psycopg.connect(url) as connection:
        connection.execute(
            f"UPDATE {table} SET {changes} WHERE id = %s",
            [*(adapted(name, value) for name, value in values.items()), key],
        )


def adapted(name: str, value: Any) -> Any:
    return Jsonb(value) if name in ("doc", "text") and not isinstance(value, str) else value


# Consumers

OPERATIONS = st.one_of(
    st.tuples(
        st.just("publish"),
        st.lists(
            st.tuples(st.integers(1, 3), st.none() | st.integers(1, 3), st.booleans()),
            min_size=1,
            max_size=5,
        ),
    ),
    st.tuples(st.just("receive"), st.integers(1, 4)),
    st.tuples(
        st.sampled_from(["ack", "ack", "nack", "later", "extend", "expire", "release"]),
        st.lists(st.integers(0, 30), min_size=1, max_size=3),
    ),
    st.tuples(st.just("rewind"), st.sampled_from(["all", "new"]) | st.integers(0, 20)),
    st.tuples(st.just("replay"), st.integers(1, 5)),
    st.tuples(st.just("look"), st.just(0)),
    st.tuples(st.just("pause"), st.booleans()),
)


class Pair:
    """A consumer of the store and one in memory, which must give the same answers."""

    def __init__(
        self,
        store: Store,
        consumers: Consumers,
        loop: asyncio.AbstractEventLoop,
        name: str,
        kind: str,
        **others: Any,
    ) -> None:
        self.store, self.loop, self.kind = store, loop, kind
        self.stream = make_stream(store, name, source=name, kind=kind)
        self.positions: list[Position] = []
        self.tokens: list[str] = []
        given = {"ack_wait_ms": 600_000, "filters": {"table": "items"}, **others}
        spec = ConsumerSpec(f"{name}-w", name, settings=given)
        info = self.do(consumers.create(spec))
        self.real: Consumer = self.do(consumers.get(info.name))
        clock = Clock(datetime.now(UTC), running=True)
        self.rows = InMemoryStream(1, name, kind, name, clock.now)
        self.memory = InMemoryConsumer(info, self.rows, clock, (0, -1))

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def both(self, call: str, *args: Any, **kwargs: Any) -> None:
        real, memory = (
            self.answer(consumer, call, *args, **kwargs) for consumer in (self.real, self.memory)
        )
        assert real == memory, (call, args)

    def answer(self, consumer: Any, call: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.do(getattr(consumer, call)(*args, **kwargs))
        except Exception as error:
            return type(error), str(error)

    def replay(self, place: int) -> None:
        """Replay a letter by its place among the consumer's, as numbers are of the whole store."""
        answers = []
        for consumer in (self.real, self.memory):
            letters = self.do(consumer.dead_letters(100))
            number = letters[place - 1].id if place <= len(letters) else 0
            answers.append(self.answer(consumer, "replay", number))
        assert answers[0] == answers[1], place

    def apply(self, operation: tuple[str, Any]) -> None:
        kind, value = operation
        match kind:
            case "publish":
                self.publish(value)
            case "receive":
                self.receive(value)
            case "rewind":
                to = value
                if isinstance(value, int):
                    to = self.positions[value % len(self.positions)] if self.positions else "all"
                self.both("rewind", to)
            case "replay":
                self.replay(value)
            case "look":
                self.look()
            case "pause":
                self.both(*(("pause", "ann") if value else ("enable",)))
            case _ if self.tokens:
                self.ask(kind, [self.tokens[at % len(self.tokens)] for at in value])

    def receive(self, limit: int) -> None:
        real, memory = (self.do(c.receive(limit, 0.0)) for c in (self.real, self.memory))
        # The store's consumer counts what lies far behind once a second.
        assert real == memory._replace(num_pending=real.num_pending)
        self.tokens += [delivery.token for delivery in real.deliveries]

    def publish(self, changes: list[tuple[int, int | None, bool]]) -> None:
        after = self.positions[-1] if self.positions else START
        made = [
            Change(
                {"id": group if self.kind == "rows" else len(self.positions) * 10 + number},
                group=group,
                old_group=None if old == group else old,
                table="items" if taken else "others",
            )
            for number, (group, old, taken) in enumerate(changes)
        ]
        self.rows.write(wire(made, after))
        self.positions += publish(self.store, self.stream, made)
        self.real.head_moved()

    def ask(self, kind: str, tokens: list[str]) -> None:
        match kind:
            case "nack":
                self.both("nack", tokens, reason="no shop")
            case "later":
                self.both("nack", tokens, LONG)
            case "extend" | "expire":
                self.both("extend", tokens, LONG if kind == "extend" else 0.0)
                # A look at dead letters makes those that are due, as the store's does by itself soon.
                for consumer in (self.real, self.memory):
                    self.do(consumer.dead_letters(1))
            case _:
                self.both(kind, tokens)

    def look(self) -> None:
        for consumer_answers in zip(*(self.seen(c) for c in (self.real, self.memory)), strict=True):
            assert consumer_answers[0] == consumer_answers[1]

    def seen(self, consumer: Any) -> Iterator[Any]:
        for state in ("pending", "delivered", "dead"):
            peeked = self.do(consumer.messages(state, 100))
            yield [(*one[:3], one.until is None) for one in peeked]
        for letter in self.do(consumer.dead_letters(100)):
            yield letter.position, letter.deliver_count, letter.reason, letter.replayed_at is None
        facts = self.do(consumer.facts())
        yield {
            name: getattr(facts, name)
            for name in facts.__slots__
            if name not in ("lag_messages", "lag_seconds", "last_failure", "failing_since")
        }


def test_consumers_answer_as_those_of_the_store(database: Database) -> None:
    loop = asyncio.new_event_loop()
    numbers = itertools.count()
    one: list[tuple[int, int | None, bool]] = [(1, None, True)]
    with Store.open(database.url) as store:

        @settings(
            max_examples=20,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )
        @given(
            kind=st.sampled_from(["changes", "rows"]),
            max_deliver=st.sampled_from([-1, 1, 2]),
            max_held=st.sampled_from([2, 100]),
            operations=st.lists(OPERATIONS, min_size=5, max_size=25),
        )
        @example(
            "rows", -1, 100,
            [("publish", one), ("receive", 1), ("publish", one), ("nack", [0]), ("receive", 3)],
        )  # fmt: skip
        @example(
            "changes", 1, 100,
            [("publish", one), ("receive", 1), ("nack", [0]), ("look", 0), ("replay", 1),
             ("publish", one), ("receive", 3), ("expire", [0]), ("receive", 3)],
        )  # fmt: skip
        @example(
            "changes", -1, 100,
            [("publish", one), ("receive", 1), ("publish", one * 2), ("pause", True), ("ack", [0]),
             ("receive", 3), ("look", 0), ("pause", False), ("receive", 3)],
        )  # fmt: skip
        @example("rows", 1, 2, [("publish", one), ("receive", 1), ("expire", [0]), ("look", 0)])
        def same(kind: str, max_deliver: int, max_held: int, operations: list[Any]) -> None:
            pair = Pair(
                store, consumers, loop, f"s{next(numbers)}", kind,
                max_deliver=max_deliver, max_ack_pending=max_held,
            )  # fmt: skip
            for operation in operations:
                pair.apply(operation)
            pair.look()

        consumers = Consumers(store.url, pool_size=2)
        loop.run_until_complete(consumers.open())
        try:
            same()
        finally:
            loop.run_until_complete(consumers.close())
            loop.close()
