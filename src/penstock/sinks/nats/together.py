"""One connection for many sinks: the few messages that a round has for each of them go out together.

A connection and a thread a sink cost far more than the messages, where a source has a hundred sinks. So
those that have one login share a connection, and what goes without a hitch goes here: all is sent, and
the acks of all are awaited. What is left of a batch, as its stream refuses a message or has it already,
or as no acks come, is for `NatsSink.write`, which knows what to do, over a connection of the sink's own.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa

from penstock.config.nats import NatsSinkConfig
from penstock.core.delivery import Unfinished
from penstock.core.errors import SinkError
from penstock.sinks.nats.client import NatsConnection
from penstock.sinks.nats.frames import Encoder
from penstock.sinks.nats.parser import Event, Reply, ServerError
from penstock.sinks.nats.sink import NatsSink, published
from penstock.sinks.nats.task import WAVE_BYTES, Task
from penstock.sinks.nats.window import WINDOW

_QUIET: Final = 0.25
"""Seconds without an ack after which the sinks go on by themselves."""
_CONNECT_SECONDS: Final = 0.5


def may_share(config: NatsSinkConfig) -> bool:
    """Return whether a sink's messages may go beside those of others."""
    return config.form is None and config.batch_size == 1


class Together:
    """The connection of sinks that have the login of `config`; `name` is what the server calls it."""

    def __init__(self, config: NatsSinkConfig, name: str) -> None:
        self._sink = NatsSink(config, name=name, source=name)
        self._next_number = 1

    def encoder(self, config: NatsSinkConfig, name: str, source: str, uuid: str | None) -> Encoder:
        """Return what makes a sink's frames for this connection."""
        return Encoder(config, name, source, self._sink.inbox, uuid)

    def task(self, config: NatsSinkConfig, encoder: Encoder, batch: pa.RecordBatch) -> Task | None:
        """Return what is to be published of a sink's batch; None where that is nothing."""
        batch = published(config, batch)
        if not batch.num_rows:
            return None
        task = Task(batch, encoder, self._next_number, config.group_by)
        self._next_number += batch.num_rows
        return task

    def connect(self, patience: float) -> None:
        """Connect to one of the servers; raises `Unfinished`."""
        self._sink.connect(patience)

    def close(self) -> None:
        """Close the connection."""
        self._sink.close()

    def publish(self, tasks: Sequence[Task]) -> None:
        """Publish tasks, in the order in which they were made, as far as that goes without a hitch."""
        for may_lose in (True, False):  # the first time it only connects again, as `NatsSink` does
            try:
                self._publish(self._sink.opened(_CONNECT_SECONDS), tasks)
            except Unfinished:
                return
            except SinkError:
                self.close()
                if may_lose:
                    for task in tasks:
                        task.disconnected()
            except BaseException:
                self.close()  # what is queued must not go out with a later batch
                raise
            else:
                return

    def _publish(self, connection: NatsConnection, tasks: Sequence[Task]) -> None:
        """Publish as far as it goes; raises `SinkError` where the connection is lost."""
        bases = [task.base for task in tasks]
        left = dict(enumerate(tasks))
        until = time.monotonic() + _QUIET
        while True:
            now = time.monotonic()
            ready = _send(connection, left.values(), now)
            left = _unfinished(left)  # no ack comes of what is a dead letter
            if not left:
                break
            acks, events = connection.step(max(0.0, until - now), last=not ready)
            for at, numbers in _by_task(acks, bases).items():
                if at in left:
                    left[at].acked(numbers, connection.parser.copies)
            for at in _hitched(events, bases):
                left.pop(at, None)
            if any(isinstance(event, ServerError) for event in events):
                break
            left = _unfinished(left)
            now = time.monotonic()
            if acks:
                until = now + _QUIET
            elif left and now > until:
                self.close()
                return
        connection.parser.copies.clear()
        # Sent with a later batch, it would come behind what the sinks themselves send now.
        # What answers a ping may wait.
        if connection.unsent and any(task.rows.left for task in tasks):
            self.close()


def _unfinished(tasks: Mapping[int, Task]) -> dict[int, Task]:
    """Return the tasks that have rows to send or to await, and none that the stream may have."""
    return {at: task for at, task in tasks.items() if task.rows.left and not task.doubts}


def _send(connection: NatsConnection, tasks: Collection[Task], now: float) -> bool:
    """Send what may go, in one piece; return whether there is more than the connection takes now."""
    frames: list[bytes | memoryview] = []
    size, more = connection.unsent, False
    free = WINDOW - sum(task.rows.flying for task in tasks)  # they may all go to one stream
    for task in tasks:
        while size < WAVE_BYTES and task.ready and (room := min(free, task.room(WINDOW))) > 0:
            flying = task.rows.flying
            frames.append(task.wave(room, connection.max_payload, now))
            free -= task.rows.flying - flying
            size += len(frames[-1])
        more = more or task.ready
    connection.send(b"".join(frames))
    return more


def _by_task(numbers: Iterable[bytes], bases: Sequence[int]) -> dict[int, list[bytes]]:
    """Return the numbers of acks by the place of the task; those of earlier tasks are left out."""
    found: dict[int, list[bytes]] = {}
    for number in numbers:
        at = bisect_right(bases, int(number)) - 1
        if at >= 0:
            found.setdefault(at, []).append(number)
    return found


def _hitched(events: Iterable[Event], bases: Sequence[int]) -> Iterator[int]:
    """Yield the places of the tasks to which the server has answered otherwise than by an ack."""
    for event in events:
        if isinstance(event, Reply):
            yield bisect_right(bases, event.number) - 1
