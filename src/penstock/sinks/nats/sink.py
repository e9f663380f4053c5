"""The NATS sink: a batch of messages into JetStream, in order per group, every publish acked.

Order. A cluster can lose message k and keep k + 1 at a change of leader, and a full stream can
refuse a large k and take a small k + 1. So at most one message of a group is in flight: a row waits
for the rows before it that share a group with it, and goes out as soon as they are acked. Rows that
wait for nothing fill one window, without a Python object a row until their ack comes.

With a `batch_size` that many rows of a group go at once, in one of two ways. Where all rows are one
group, as an outbox's, each names the one before it (`Nats-Expected-Last-Msg-Id`): the stream refuses
what does not follow on it, see `penstock.sinks.nats.chains`. As it also refuses what follows on another
publisher's message, this pauses then, for longer each time. Meanwhile, in a cluster, and where there
are several groups, they go as an atomic batch, which a stream with `allow_atomic` takes whole or not at
all. A batch that is refused, as where one of its messages is there already, goes one by one, and so
does all of a stream without.

A message that the stream has already is its own after a restart, and counts as delivered; another
publisher's is not, see `penstock.sinks.nats.duplicates`.

What can be mended (no stream, stream full, not permitted, connection lost) is tried again with
backoff and holds back only its own group; what the server can never accept is a dead letter.

Where the time goes: 1.9 us of CPU a message with a body of 490 bytes, measured with nats-server and
others on the same two cores: 0.8 to encode (in Arrow kernels, half of it one copy of every byte), 0.4
to find the acks in what the server sends and 0.2 to mark their rows, 0.2 to send and receive, and 0.3
for the rest. So one core could feed half a million messages a second; the server cannot take them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.nats import NatsSinkConfig
from penstock.core.delivery import OnRetry, Unfinished, Written
from penstock.core.errors import SinkError
from penstock.core.message import DELETE, TRUNCATE, WIRE_SCHEMA
from penstock.sinks.nats.announced import servers_of
from penstock.sinks.nats.chains import Chaining
from penstock.sinks.nats.client import CONNECT_TIMEOUT, NatsConnection, connect_first, new_inbox
from penstock.sinks.nats.duplicates import Duplicates
from penstock.sinks.nats.errors import ack_overdue, unresponsive
from penstock.sinks.nats.frames import Encoder
from penstock.sinks.nats.replies import Replies
from penstock.sinks.nats.retries import backoff
from penstock.sinks.nats.task import WAVE_BYTES, Task
from penstock.sinks.nats.window import Patience, Window

_IDLE_TICK: Final = 0.25
_NO_ROWS: Final = pa.array([DELETE, TRUNCATE], pa.string())
_NOTHING: Final = pa.RecordBatch.from_pylist([], schema=WIRE_SCHEMA)


class NatsSink:
    """Publishes batches to JetStream, see the top of this file.

    `should_stop` is called while rows back off; once it returns True, `write` raises the last error
    instead of trying again.
    """

    def __init__(
        self,
        config: NatsSinkConfig,
        *,
        name: str,
        source: str,
        uuid: str | None = None,
        on_retry: OnRetry | None = None,
        should_stop: Callable[[], bool] | None = None,
    ):
        self._config = config
        self._name = name
        self._on_retry = on_retry or (lambda _error, _seconds: None)
        self._should_stop = should_stop or (lambda: False)
        # One inbox for the sink's life: acks of a lost connection's messages are as good as any.
        self.inbox = new_inbox()
        self._encoder = Encoder(config, name, source, self.inbox, uuid)
        self._connection: NatsConnection | None = None
        self._was_connected = False
        self._next_server = 0
        self._next_number = 1  # 0 is the reply to a question to JetStream's API
        self._patience = Patience(None, 0)
        self._window = Window()
        form = config.form
        one_group = config.batch_size > 1 and form is not None and form.group_by is None
        self._chaining = Chaining(may_link=one_group)
        self._duplicates = Duplicates(name, config.ack_timeout, self._on_retry)
        self._replies = Replies(
            config, source, self._duplicates, self._chaining, self._window, self._on_retry
        )

    def write(self, batch: pa.RecordBatch, patience: float | None = None) -> Written:
        """Publish `batch`; returns when every message is acked or a dead letter.

        Of kind rows the messages that leave no row behind are passed by: truncates, and deletes unless
        they are asked for.
        With `patience` it raises `Unfinished`, for any `SinkError`, and where so many seconds pass
        without an ack, or beyond what the batch takes at `STEADY_RATE`.
        """
        batch = published(self._config, batch)
        if not batch.num_rows:
            return Written()
        self._patience = Patience(patience, batch.num_rows)
        config = self._config
        task = Task(
            batch, self._encoder, self._next_number, config.group_by, config.form, config.batch_size
        )
        self._next_number += batch.num_rows
        try:
            return self._write(task)
        except SinkError as error:
            if patience is None:
                raise
            raise Unfinished(error, task.rest(), task.partly_written()) from None

    def _write(self, task: Task) -> Written:
        losses = 0
        left = task.rows.left
        try:
            while task.rows.left:
                lost = self._pump(self._connected(), task)
                if lost is None:
                    continue
                self.close()
                task.disconnected()
                losses = 1 if task.rows.left < left else losses + 1
                left = task.rows.left
                if losses > 1:  # the first time we only connect again
                    self._wait(lost, losses - 1)
        except BaseException:
            # Messages in flight get their acks on this connection; none may reach a later batch.
            self.close()
            raise
        return task.written

    def connect(self, patience: float | None = None) -> None:
        """Connect to one of the servers; raises `Unfinished` as `write` does."""
        self.opened(patience)

    def opened(self, patience: float | None = None) -> NatsConnection:
        """Return the connection, which is made where there is none; raises as `connect` does."""
        self._patience = Patience(patience, 0)
        try:
            return self._connected()
        except SinkError as error:
            if patience is None:
                raise
            raise Unfinished(error, _NOTHING, Written()) from None

    def check(self, patience: float) -> None:
        """Check that a server answers, over a connection that stays; raises `Unfinished`."""
        connection = self.opened(patience)
        try:
            connection.ping(patience)
        except SinkError as error:
            self.close()
            raise Unfinished(error, _NOTHING, Written()) from None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pump(self, connection: NatsConnection, task: Task) -> SinkError | None:
        """Send and read until the batch is done; returns the error if the connection is lost."""
        timeout = self._config.ack_timeout
        last_ack = heard = now = time.monotonic()
        while task.rows.left:
            left = task.rows.left
            buckets = task.retries.buckets
            if buckets:
                task.release_due(now)
            task.chains.linking = self._chaining.links(now)
            task.chains.atomic = self._chaining.batches(now)
            while (
                connection.unsent < WAVE_BYTES
                and task.ready
                and (room := task.room(self._window.size)) > 0
            ):
                connection.send(task.wave(room, connection.max_payload, now))
            try:
                acks, events = connection.step(self._pause(task, now), last=not task.ready)
            except SinkError as error:
                return error
            before, now = now, time.monotonic()
            task.acked(acks, connection.parser.copies)
            if acks and self._chaining.may_link:
                task.note_newest(acks[-1], connection.parser.newest)
            if acks or events:
                heard = now
            if events:
                self._replies.handle(connection, task, events, now)
            if task.doubts:
                self._duplicates.ask(connection, task, now, heard)
                if not self._duplicates.silent(now, heard):
                    self._patience.extend(now - before)
                elif now - heard > timeout:
                    return unresponsive(connection.server, timeout)
            if task.rows.left < left:
                last_ack = now
                self._patience.progress(now)
                self._window.grow()
            if late := task.late(now, timeout, last_ack):
                overdue = ack_overdue(task.subject(late[0]), timeout)
                task.fail(late, overdue, now, self._on_retry)
                return overdue
            if buckets and self._should_stop():
                raise _stopped(next(reversed(buckets.values())).error)
            if task.rows.left and now > self._patience.until:
                raise self._too_slow(task)
        return None

    def _pause(self, task: Task, now: float) -> float:
        if not task.rows.left:
            return 0.0
        due = min(
            (bucket.due for bucket in task.retries.buckets.values()), default=now + _IDLE_TICK
        )
        due = min(due, self._patience.until)
        return min(_IDLE_TICK, max(0.0, due - now) + 0.001)

    def _too_slow(self, task: Task) -> SinkError:
        """Return why patience is over: what rows back off for, or else that no acks come."""
        if buckets := task.retries.buckets:
            return _stopped(next(reversed(buckets.values())).error)
        rows = task.rows.left + task.written.delivered + len(task.written.dead)
        return SinkError(
            "too_slow",
            f"{self._config.safe_url} has acked {task.written.delivered} of {rows} messages in"
            f" {self._patience.elapsed():.1f} s.",
            remedy="See how busy the server and its disk are, and whether the network is.",
        )

    def _connected(self) -> NatsConnection:
        attempt = 0
        while self._connection is None:
            try:
                self._connection = self._connect()
            except SinkError as error:
                # Refused at the very start, it is the configuration; later, it may well be mended.
                if not error.transient and not self._was_connected:
                    raise
                attempt += 1
                if self._patience.left() <= 0 or attempt >= self._patience.tries:
                    raise _stopped(error) from None
                self._wait(error, attempt)
        return self._connection

    def _connect(self) -> NatsConnection:
        connection = connect_first(
            self._config, f"penstock {self._name}", inbox=self.inbox, start=self._next_server,
            timeout=lambda: max(0.05, min(CONNECT_TIMEOUT, self._patience.left())),
        )  # fmt: skip
        servers = servers_of(self._config)
        self._next_server = servers.index(connection.server) if connection.server in servers else 0
        self._was_connected = True
        self._replies.connected()
        self._duplicates.connected()
        self._chaining.connected(connection.info)
        return connection

    def _wait(self, error: SinkError, attempt: int) -> None:
        delay = backoff(attempt)
        self._on_retry(error, delay)
        until = time.monotonic() + delay
        while (left := until - time.monotonic()) > 0:
            if self._should_stop() or self._patience.left() <= 0:
                raise _stopped(error)
            time.sleep(min(left, 0.1))


def published(config: NatsSinkConfig, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch without the messages of kind rows that leave no row behind."""
    if config.kind != "rows":
        return batch
    gone = _NO_ROWS.slice(1) if config.deletes else _NO_ROWS
    return batch.filter(pc.invert(pc.is_in(batch.column("action"), value_set=gone)))


def _stopped(error: SinkError) -> SinkError:
    return SinkError(error.code, error.message, remedy=error.remedy, transient=True)
