"""A sink in memory: what it would be sent, by the steps that a pipeline's sinks take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import orjson
import pyarrow as pa

from penstock.config.sinks import NatsSinkSettings, Sink
from penstock.core.blocks import Block
from penstock.core.delivery import DeadLetter
from penstock.core.errors import PenstockError
from penstock.sinks.nats.frames import BLOCK_ROWS, Encoder
from penstock.spark.plan import plan
from penstock.spark.routes import Route
from penstock.spark.steps import Steps
from penstock.testing.stream import InMemoryStream
from penstock.testing.uuids import uuid_of

_LINE: Final = "\r\n"


class UnsupportedError(PenstockError):
    """A sink has something that only Spark evaluates."""

    def __init__(self, message: str) -> None:
        super().__init__(
            "needs_spark", message, remedy="Try it with `penstock try`, which starts Spark."
        )


class Sent(NamedTuple):
    """A message as the sink sends or stores it.

    Attributes:
        body: The message's JSON, parsed; the bytes where a body is none.
        subject: The NATS subject, None of a stream.
        headers: The NATS headers, `Nats-Msg-Id` among them; empty of a stream.
    """

    body: Any
    subject: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})


class InMemorySink:
    """A sink that keeps what it is sent.

    Args:
        name: The sink's name.
        settings: What penstock.yaml has of it.
        stream: Where a sink of type stream writes, None of a NATS sink.

    Attributes:
        messages: What was sent, in its order.
        dead_letters: What can never be sent, with the reason.
        filtered: How many messages the transform dropped.

    Raises:
        UnsupportedError: The sink has a filter, a transform or a route in SQL.
        TransformError: The Lua or Python code can't be loaded.
    """

    def __init__(self, name: str, settings: Sink, stream: InMemoryStream | None = None) -> None:
        self.name = name
        self.settings = settings
        self.messages: list[Sent] = []
        self.dead_letters: list[DeadLetter] = []
        self.filtered = 0
        self._stream = stream
        _check(name, settings)
        planned = plan({name: settings}, {})
        of_sink = None if planned is None else planned.sinks[name]
        self._steps = Steps(Route(name, settings, 0), of_sink, settings.source)
        self._steps.start()
        self._encoder = None
        if isinstance(settings, NatsSinkSettings):
            self._encoder = Encoder(settings, name, settings.source, b"_", uuid_of("sink", name))

    def write(self, batch: pa.RecordBatch) -> None:
        """Take a transaction's messages (`WIRE_SCHEMA`)."""
        prepared = self._steps(Block(None, batch))
        self.dead_letters += prepared.dead
        self.filtered += prepared.filtered
        if not prepared.messages.num_rows:
            return
        if self._encoder is not None:
            self.messages += self._published(prepared.messages, self._encoder)
        elif self._stream is not None:
            rows = self._stream.write(prepared.messages)
            self.messages += [Sent(orjson.loads(row.message)) for row in rows]

    def close(self) -> None:
        """End the transform's process, if it has one."""
        self._steps.close()

    def _published(self, messages: pa.RecordBatch, encoder: Encoder) -> Iterator[Sent]:
        for first in range(0, messages.num_rows, BLOCK_ROWS):
            frames = encoder.block(messages, first, 1)
            for row in range(first, first + frames.rows):
                sent = _parsed(bytes(frames.frame(row)))
                if row not in frames.refused:
                    yield sent
                    continue
                code, reason = frames.refused[row]
                key = messages.column("idempotency_key")[row].as_py()
                body = orjson.dumps(sent.body).decode()
                self.dead_letters.append(DeadLetter(key, sent.subject or "", code, reason, body))


def _check(name: str, settings: Sink) -> None:
    """Raise `UnsupportedError` for what only Spark evaluates."""
    transform, route = settings.transform, settings.route
    in_sql = {
        "filter": settings.filter is not None,
        "transform.sql": transform is not None and transform.sql is not None,
        "route": route is not None and (isinstance(route, str) or route[0].when is not None),
    }
    if found := [key for key, is_sql in in_sql.items() if is_sql]:
        raise UnsupportedError(
            f"sinks.{name}.{found[0]} is SQL, which Spark evaluates: there is no Spark in memory."
        )


def _parsed(frame: bytes) -> Sent:
    """Return what a frame of the NATS protocol publishes."""
    head, _, body = frame.partition(2 * _LINE.encode())
    line, _version, *lines = head.decode().split(_LINE)
    headers = dict(header.split(": ", 1) for header in lines)
    content = body.removesuffix(_LINE.encode())
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError:
        parsed = content
    return Sent(parsed, line.split(" ", 2)[1], headers)
