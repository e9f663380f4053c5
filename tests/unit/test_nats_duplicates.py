"""What a stream has in the place of a message that it dropped, asked of a server that is not one."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pyarrow as pa
import pytest

from penstock.config.nats import NatsSinkConfig
from penstock.core.delivery import Unfinished
from penstock.core.errors import SinkError
from penstock.core.message import WIRE_SCHEMA
from penstock.sinks.nats.duplicates import Stored, verdict
from penstock.sinks.nats.frames import Encoder
from penstock.sinks.nats.sink import NatsSink
from penstock.sinks.nats.task import Task

WHERE = Stored("S", 9)
INBOX = b"_INBOX.x."
REFUSED = b'{"error":{"code":503,"err_code":10039,"description":"not enabled for account"}}'

_COMMAND = re.compile(rb"(PING)\r\n|(HPUB|PUB) (\S+) (\S+) ([0-9 ]+)\r\n|[A-Z]+ [^\r\n]*\r\n")


def batch(count: int, groups: list[int] | None = None) -> pa.RecordBatch:
    columns: list[list[Any]] = [
        [json.dumps({"id": n}) for n in range(count)], [None] * count, ["insert"] * count,
        ["public"] * count, ["orders"] * count, ['{"database":"db"}'] * count,
        [f"t-{n}-0" for n in range(count)], list(range(count)), [0] * count,
        groups or list(range(count)), [None] * count, [None] * count, [0] * count,
    ]  # fmt: skip
    arrays = [pa.array(c, f.type) for c, f in zip(columns, WIRE_SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=WIRE_SCHEMA)


class Server:
    """Has every message already, and answers each with what `answer` gives, until `gone` is set."""

    def __init__(self, answer: Callable[[], bytes | None]) -> None:
        self.asked = 0
        self.gone = False
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._talk(self._listener.accept()[0])

    def _talk(self, sock: socket.socket) -> None:
        sock.sendall(b'INFO {"max_payload":1000000,"headers":true,"jetstream":true}\r\n')
        data = b""
        while received := sock.recv(65536):
            data += received
            while found := _COMMAND.match(data):
                size = int(found[5].split()[-1]) + 2 if found[5] else 0
                if len(data) < found.end() + size:
                    break
                data = data[found.end() + size :]
                if (reply := self._reply(found)) and not self.gone:
                    sock.sendall(reply)

    def _reply(self, found: re.Match[bytes]) -> bytes | None:
        if found[1]:
            return b"PONG\r\n"
        if not found[2]:
            return None
        body: bytes | None = b'{"stream":"S", "seq":9,"duplicate": true}'
        if found[2] == b"PUB":
            self.asked += 1
            body = self._answer()
        return body and b"MSG %b 1 %d\r\n%b\r\n" % (found[4], len(body), body)


@pytest.fixture
def server_of() -> Iterator[Callable[[Callable[[], bytes | None]], Server]]:
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[], bytes | None]) -> Server:
            server = Server(answer)
            stack.callback(server.close)
            return server

        yield start


@pytest.mark.parametrize("answer", [REFUSED, None])
def test_one_that_can_not_be_asked_ends_a_write(
    answer: bytes | None, server_of: Callable[..., Server]
) -> None:
    """Within the patience with one write: else each write would ask again, for ever."""
    server = server_of(lambda: answer)
    reported: list[SinkError] = []
    sink = NatsSink(
        NatsSinkConfig(url=server.url), name="orders", source="shop",
        on_retry=lambda error, _: reported.append(error),
    )  # fmt: skip
    for _ in range(2):
        done = sink.write(batch(5, [0, 0, 0, 1, 1]), 1.0)
        assert (done.delivered, done.duplicates, done.dead) == (5, 5, [])
    sink.close()
    assert [error.code for error in reported] == ["duplicates_unchecked"]
    assert ("not enabled for account" in str(reported[0])) == bool(answer)


def test_one_that_is_gone_ends_a_write_too(server_of: Callable[..., Server]) -> None:
    """Nothing counts as delivered, as nobody has refused to be asked."""

    def go() -> None:
        server.gone = True

    server = server_of(go)
    sink = NatsSink(NatsSinkConfig(url=server.url), name="orders", source="shop")
    with pytest.raises(Unfinished) as caught:
        sink.write(batch(3), 0.4)
    assert caught.value.error.code == "too_slow"
    assert (caught.value.written.delivered, caught.value.rest.num_rows) == (0, 3)


def stored(key: str, owner: str | None) -> dict[str, Any]:
    head = f"NATS/1.0\r\nNats-Msg-Id:{key}\r\n" + (f"Penstock-Pipeline: {owner}\r\n" * bool(owner))
    return {"message": {"subject": "s", "seq": 9, "hdrs": base64.b64encode(f"{head}\r\n".encode())}}


def test_a_message_that_names_no_publisher_is_known_by_its_body() -> None:
    """A dead letter that is replayed twice."""
    answer = stored("k", None)
    answer["message"]["data"] = base64.b64encode(b"body").decode()
    assert verdict("mine", "k", WHERE, answer, b"body") is None
    assert verdict("mine", "k", WHERE, answer, b"other") is not None
    assert verdict("mine", "k", WHERE, answer) is not None


def test_a_message_of_another_id_proves_nothing() -> None:
    """As where the stream was made anew since."""
    assert verdict("mine", "k", WHERE, stored("other", None)) is None
    assert verdict("mine", "k", WHERE, stored("k", "mine")) is None
    assert "another publisher" in (verdict("mine", "k", WHERE, stored("k", None)) or "")
    assert "'yours'" in (verdict("mine", "k", WHERE, stored("k", "yours")) or "")


def test_those_behind_one_in_doubt_wait_for_it() -> None:
    config = NatsSinkConfig(url="nats://localhost")
    task = Task(batch(3, [0, 0, 0]), Encoder(config, "orders", "shop", INBOX), 1, None)
    task.wave(9, 1_000_000, 0.0)
    task.acked([b"1"], {b"1": orjson.dumps({"stream": "S", "seq": 9})})
    assert not task.ready
    task.believe(0)
    assert task.ready
    task.wave(9, 1_000_000, 0.0)
    task.acked([b"2"], {b"2": orjson.dumps({"stream": "S", "seq": 10})})
    task.bury(1, "duplicate_key", "another's")
    task.wave(9, 1_000_000, 0.0)
    task.acked([b"3"])
    assert (task.rows.left, task.rows.flying, task.written.delivered) == (0, 0, 2)


def test_a_chain_in_doubt_is_sent_once_and_settled_in_any_order() -> None:
    config = NatsSinkConfig(url="nats://localhost", batch_size=8)
    task = Task(batch(4, [0] * 4), Encoder(config, "orders", "shop", INBOX), 1, None, None, 8)
    task.chains.linking = True
    task.chains.note_stream("S")
    task.wave(9, 1_000_000, 0.0)
    assert task.rows.flying == 4
    numbers = [b"1", b"2", b"3"]
    task.acked(numbers, {n: orjson.dumps({"stream": "S", "seq": 9}) for n in numbers})
    assert (task.rows.flying, len(task.doubts.all())) == (1, 3)
    task.acked([b"4"])
    assert task.rows.flying == 0
    task.believe(2)
    task.believe(1)
    assert task.rows.left == 1
    task.believe(0)
    assert not task.ready
    assert (task.rows.left, task.written.delivered, task.written.duplicates) == (0, 4, 3)


def test_what_a_stream_takes_without_the_one_before_is_sent_again() -> None:
    config = NatsSinkConfig(url="nats://localhost", batch_size=8)
    task = Task(batch(3, [0] * 3), Encoder(config, "orders", "shop", INBOX), 1, None, None, 8)
    task.chains.linking = True
    task.chains.note_stream("S")
    task.wave(9, 1_000_000, 0.0)
    task.acked([b"2", b"3"], {b"2": orjson.dumps({"stream": "S", "seq": 9})})
    task.acked([b"1"])
    task.believe(1)
    assert task.ready
    task.wave(9, 1_000_000, 0.0)
    task.acked([b"3"])
    assert (task.rows.left, task.rows.flying, task.written.delivered) == (0, 0, 3)
