"""Many sinks over one connection, against a real nats-server: order, replays, refusals, faults."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.streams_help import Change, wire

from penstock.config.nats import NatsSinkConfig
from penstock.config.sinks import NatsSinkSettings
from penstock.core.blocks import Block
from penstock.core.errors import SinkError
from penstock.core.message import Position, RoundPart
from penstock.embedded.handles import JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.sinks.nats.frames import Encoder
from penstock.sinks.nats.parser import ServerError
from penstock.sinks.nats.task import Task
from penstock.sinks.nats.together import Together
from penstock.spark.routes import Route
from penstock.spark.store_writer import StoreTarget
from penstock.spark.writer import FanOut, Worker

from .nats_servers import batch


@pytest.fixture
def stream(nats: JetStream) -> str:
    name = f"S{uuid.uuid4().hex[:8]}"
    nats.add_stream(name, f"{name}.>")
    return name


class Shared:
    """Sinks that share a connection, each with a subject of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.together = Together(NatsSinkConfig(url=url), "shop")
        self.sinks: dict[str, tuple[NatsSinkConfig, Encoder]] = {}

    def add(self, name: str, subject: str) -> None:
        config = NatsSinkConfig(url=self.url, subject=subject)
        self.sinks[name] = config, self.together.encoder(config, name, "shop", None)

    def task(self, name: str, keys: list[int], tag: str = "a") -> Task:
        config, encoder = self.sinks[name]
        made = self.together.task(config, encoder, batch(keys, tag=f"{name}{tag}"))
        assert made is not None
        return made


@pytest.fixture
def shared(nats_server: EmbeddedNats) -> Iterator[Shared]:
    made = Shared(nats_server.url)
    yield made
    made.together.close()


def test_each_sinks_messages_arrive_once_and_in_order(
    shared: Shared, nats: JetStream, stream: str
) -> None:
    for n in range(20):
        shared.add(f"s{n}", f"{stream}.{n}")
    tasks = [shared.task(f"s{n}", [row % 3 for row in range(50 * n + 1)]) for n in range(20)]
    shared.together.publish(tasks)
    assert [task.rows.left for task in tasks] == [0] * 20
    assert [task.written.delivered for task in tasks] == [50 * n + 1 for n in range(20)]
    found: dict[tuple[str, int], list[int]] = {}
    for message in nats.messages(stream):
        record = json.loads(message.data)["record"]
        found.setdefault((message.subject, record["id"]), []).append(record["n"])
    assert sum(map(len, found.values())) == sum(50 * n + 1 for n in range(20))
    assert all(numbers == sorted(set(numbers)) for numbers in found.values())


def test_a_sink_that_is_refused_or_has_been_here_leaves_the_others_alone(
    shared: Shared, nats: JetStream, stream: str
) -> None:
    shared.add("before", f"{stream}.before")
    shared.add("nowhere", f"N{stream}.x")
    shared.add("other", f"{stream}.other")
    shared.add("fine", f"{stream}.fine")
    shared.together.publish([shared.task("before", [1, 2, 3])])
    tasks = [shared.task(name, [1, 2, 3]) for name in shared.sinks]
    shared.together.publish(tasks)
    assert [task.rows.left for task in tasks] == [3, 3, 0, 0]
    assert tasks[0].rest().num_rows == 3  # whose they are, the sink itself asks the stream
    assert nats.info(stream).state.messages == 9


def test_it_connects_again_where_the_server_has_hung_up(
    shared: Shared, nats: JetStream, stream: str
) -> None:
    shared.add("a", f"{stream}.a")
    shared.add("b", f"{stream}.b")
    shared.together.publish([shared.task("a", [1])])
    shared.together._sink.opened(1.0)._sock.shutdown(socket.SHUT_RDWR)
    tasks = [shared.task("a", [1, 1], "b"), shared.task("b", [2, 2], "b")]
    shared.together.publish(tasks)
    assert [task.rows.left for task in tasks] == [0, 0]
    assert nats.info(stream).state.messages == 5


def test_a_server_that_is_gone_leaves_all_to_the_sinks() -> None:
    shared = Shared("nats://127.0.0.1:1")
    shared.add("a", "x.a")
    task = shared.task("a", [1, 2])
    shared.together.publish([task])
    assert task.rows.left == 2


def test_what_is_left_unsent_is_never_sent_later(
    shared: Shared, nats: JetStream, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink itself publishes it, and what comes behind it."""
    shared.add("a", f"{stream}.a")
    connection = shared.together._sink.opened(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "step", lambda *_, **__: ([], [ServerError("busy")]))
        task = shared.task("a", [1, 2])
        shared.together.publish([task])
    assert task.rows.left == 2
    shared.together.publish([shared.task("a", [3], "b")])
    (message,) = nats.messages(stream)
    assert json.loads(message.data)["record"]["id"] == 3


def test_a_message_too_large_is_a_dead_letter_and_no_wait(
    shared: Shared, nats: JetStream, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.add("a", f"{stream}.a")
    connection = shared.together._sink.opened(1.0)
    monkeypatch.setitem(connection.info, "max_payload", 1)
    task = shared.task("a", [1])
    shared.together.publish([task])
    assert [letter.code for letter in task.written.dead] == ["message_too_large"]
    assert task.rows.left == 0
    assert shared.together._sink._connection is connection


def test_an_error_of_our_own_leaves_nothing_to_be_sent(
    shared: Shared, nats: JetStream, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.add("a", f"{stream}.a")
    connection = shared.together._sink.opened(1.0)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(connection, "step", fail)
    with pytest.raises(ValueError, match="a defect"):
        shared.together.publish([shared.task("a", [1])])
    shared.together.publish([shared.task("a", [2], "b")])
    (message,) = nats.messages(stream)
    assert json.loads(message.data)["record"]["id"] == 2


def test_a_part_reaches_every_sink_whatever_one_of_them_meets(
    nats_server: EmbeddedNats, nats: JetStream, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = {"a": f"{stream}.a", "b": f"{stream}.b", "nowhere": f"N{stream}.x"}
    routes = [
        Route(name, NatsSinkSettings.model_validate({
            "type": "nats", "source": "shop", "url": nats_server.url, "subject": subject,
            "tables": [f"public.{name}"],
        }))
        for name, subject in subjects.items()
    ]  # fmt: skip
    worker = Worker(FanOut("shop", routes, StoreTarget("", 1, 0), None))
    fell: dict[str, tuple[SinkError, list[pa.RecordBatch]]] = {}
    monkeypatch.setattr(worker.store, "fall_behind", lambda left, *_: fell.update(left))
    part = RoundPart(Position(0, -1), Position(9, 9), 0, 1, look=False)
    messages = wire([Change(table=name) for name in ("a", "b", "nowhere", "a", "other", "b")])
    outcome = worker.write(Block(part, messages), iter(()))
    assert outcome.written == {"a": (2, 0), "b": (2, 0)}
    assert outcome.total == 5  # one of them into a backlog
    ((error, rest),) = fell.values()
    assert (list(fell), error.code, rest[0].num_rows) == (["nowhere"], "no_stream", 1)
    assert nats.info(stream).state.messages == 4
    worker.sees_behind = False  # there is no store to ask
    again = worker.write(Block(part, messages.slice(0, 2)), iter(()))
    assert again.written == {"a": (1, 1), "b": (1, 1)}  # a replay is known for what it is
    assert nats.info(stream).state.messages == 4
    worker.close()
