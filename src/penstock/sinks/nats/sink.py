"""The NATS sink: a batch of messages into JetStream, in order per group, every publish acked.

Order. A cluster can lose message k and keep k + 1 at a change of leader, and a full stream can
refuse a large k and take a small k + 1. So at most one message of a group is in flight: a row waits
for the rows before it that share a group with it, and goes out as soon as they are acked. Rows that
wait for nothing fill one window, without a Python object a row until their ack comes.

With a `batch_size` that many rows of a group go at once, in one of two ways. Where all rows are one
group, as an outbox's, each names the one before it (`Nats-Expected-Last-Msg-Id`): the stream refuses
what does not follow on it. As it also refuses what follows on another publisher's message, this
pauses then, for longer each time. Meanwhile, and where there are several groups, they go as an atomic
batch, which a stream with `allow_atomic` takes whole or not at all. A batch that is refused, as where
one of its messages is there already, goes one by one, and so does all of a stream without.

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

import secrets
import time
from collections.abc import Callable
from typing import Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.nats import NatsSinkConfig
from penstock.core.backoff import Backoff
from penstock.core.delivery import OnRetry, Unfinished, Written
from penstock.core.errors import SinkError
from penstock.core.message import DELETE, TRUNCATE, WIRE_SCHEMA
from penstock.sinks.nats.check import (
    ATOMIC_DISABLED,
    ack_overdue,
    jetstream_not_enabled,
    knows_batches,
    no_stream,
    publish_denied,
    refused_by_stream,
    unanswered,
)
from penstock.sinks.nats.client import (
    CONNECT_TIMEOUT,
    Answer,
    Connection,
    Event,
    Reply,
    ServerError,
    connect_first,
)
from penstock.sinks.nats.duplicates import ASKING_SECONDS, Duplicates
from penstock.sinks.nats.errors import unresponsive
from penstock.sinks.nats.frames import Encoder
from penstock.sinks.nats.leader import Silence
from penstock.sinks.nats.retries import backoff
from penstock.sinks.nats.task import WAVE_BYTES, Task

WINDOW: Final = 4096
"""Messages in flight. A stream takes up to 10,000 (`max_buffered_msgs`) from all its publishers."""
IDLE_TICK: Final = 0.25
CONNECT_TRIES: Final = 3
"""Tries to connect after which patience is over."""
ATOMIC_RETRY: Final = 60.0
"""Seconds after which a stream that takes no atomic batches is asked again."""
LINK_PAUSE: Final = (0.1, 60.0)
"""Seconds for which messages are not linked after another client has published between two of them."""
STREAM_NAMES: Final = b"PUB $JS.API.STREAM.NAMES "
STEADY_RATE: Final = 5_000
"""Messages a second that a sink may take its time for before patience runs out."""


_NO_ROWS: Final = pa.array([DELETE, TRUNCATE], pa.string())
_NOTHING: Final = pa.RecordBatch.from_pylist([], schema=WIRE_SCHEMA)


class _Patience:
    """How long a write may last: `until` moves on with every ack, up to a bound."""

    def __init__(self, seconds: float | None, rows: int) -> None:
        self._seconds = float("inf") if seconds is None else seconds
        self._started = time.monotonic()
        self._last = self._started + self._seconds + rows / STEADY_RATE
        self.until = self._started + self._seconds
        self._spare = ASKING_SECONDS
        # A server that is gone is not waited for: others wait for this batch meanwhile.
        self.tries = float("inf") if seconds is None else CONNECT_TRIES

    def progress(self, now: float) -> None:
        self.until = min(now + self._seconds, self._last)

    def extend(self, seconds: float) -> None:
        """Add time in which a stream is asked about its messages, which is over by itself."""
        seconds = min(seconds, self._spare)
        self._spare -= seconds
        self._last += seconds
        self.until += seconds

    def left(self) -> float:
        return self.until - time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self._started


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
        on_retry: OnRetry | None = None,
        should_stop: Callable[[], bool] | None = None,
    ):
        self._config = config
        self._name = name
        self._source = source
        self._on_retry = on_retry or (lambda _error, _seconds: None)
        self._should_stop = should_stop or (lambda: False)
        # One inbox for the sink's life: acks of a lost connection's messages are as good as any.
        self._inbox = f"_INBOX.{secrets.token_hex(8)}.".encode()
        self._encoder = Encoder(config, name, source, self._inbox)
        self._connection: Connection | None = None
        self._was_connected = False
        self._next_server = 0
        self._next_number = 1  # 0 is the reply to the question whether JetStream is enabled
        self._window = WINDOW
        self._jetstream: bool | None = None
        self._asked = False
        self._silence = Silence()
        self._knows_batches = False
        self._patience = _Patience(None, 0)
        self._atomic_from = float("-inf")  # until then no stream is asked for an atomic batch
        # Messages of other groups between those of one would break its links.
        form = config.form
        self._may_link = config.batch_size > 1 and form is not None and form.group_by is None
        self._duplicates = Duplicates(name, self._inbox, config.ack_timeout, self._on_retry)
        self._link_from = float("-inf")
        self._link_pause = 0.0
        self._link_backoff = Backoff(*LINK_PAUSE)

    def write(self, batch: pa.RecordBatch, patience: float | None = None) -> Written:
        """Publish `batch`; returns when every message is acked or a dead letter.

        Of kind rows the messages that leave no row behind, deletes and truncates, are passed by.
        With `patience` it raises `Unfinished`, for any `SinkError`, and where so many seconds pass
        without an ack, or beyond what the batch takes at `STEADY_RATE`.
        """
        if self._config.kind == "rows":
            batch = batch.filter(pc.invert(pc.is_in(batch.column("action"), value_set=_NO_ROWS)))
        if not batch.num_rows:
            return Written()
        self._patience = _Patience(patience, batch.num_rows)
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
        left = task.left
        try:
            while task.left:
                lost = self._pump(self._connected(), task)
                if lost is None:
                    continue
                self.close()
                task.disconnected()
                losses = 1 if task.left < left else losses + 1
                left = task.left
                if losses > 1:  # the first time we only connect again
                    self._wait(lost, losses - 1)
        except BaseException:
            # Messages in flight get their acks on this connection; none may reach a later batch.
            self.close()
            raise
        return task.written

    def connect(self, patience: float | None = None) -> None:
        """Connect to one of the servers; raises `Unfinished` as `write` does."""
        self._patience = _Patience(patience, 0)
        try:
            self._connected()
        except SinkError as error:
            if patience is None:
                raise
            raise Unfinished(error, _NOTHING, Written()) from None

    def check(self, patience: float) -> None:
        """Check that a server answers, over a connection that stays; raises `Unfinished`."""
        self.connect(patience)
        assert self._connection is not None  # noqa: S101 - `connect` has made it
        try:
            self._connection.ping(patience)
        except SinkError as error:
            self.close()
            raise Unfinished(error, _NOTHING, Written()) from None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pump(self, connection: Connection, task: Task) -> SinkError | None:
        """Send and read until the batch is done; returns the error if the connection is lost."""
        timeout = self._config.ack_timeout
        last_ack = heard = now = time.monotonic()
        while task.left:
            left = task.left
            if task.buckets:
                task.release_due(now)
            task.linking = self._may_link and now >= self._link_from
            task.atomic = self._knows_batches and now >= self._atomic_from
            while (
                connection.unsent < WAVE_BYTES
                and task.ready
                and (room := task.room(self._window)) > 0
            ):
                connection.send(task.wave(room, connection.max_payload, now))
            try:
                acks, events = connection.step(self._pause(task, now))
            except SinkError as error:
                return error
            before, now = now, time.monotonic()
            task.acked(acks, connection.parser.copies)
            if acks or events:
                heard = now
            if events:
                self._handle(connection, task, events, now)
            if task.doubts:
                self._duplicates.ask(connection, task, now, heard)
                if not self._duplicates.silent(now, heard):
                    self._patience.extend(now - before)
                elif now - heard > timeout:
                    return unresponsive(connection.server, timeout)
            if task.left < left:
                last_ack = now
                self._patience.progress(now)
                # What a busy stream took away comes back slowly, as in any congestion control.
                self._window = min(WINDOW, self._window + 1)
            if late := task.late(now, timeout, last_ack):
                overdue = ack_overdue(task.subject(late[0]), timeout)
                task.fail(late, overdue, now, self._on_retry)
                return overdue
            if task.buckets and self._should_stop():
                raise _stopped(next(reversed(task.buckets.values())).error)
            if task.left and now > self._patience.until:
                raise self._too_slow(task)
        return None

    def _pause(self, task: Task, now: float) -> float:
        if not task.left:
            return 0.0
        due = min((bucket.due for bucket in task.buckets.values()), default=now + IDLE_TICK)
        due = min(due, self._patience.until)
        return min(IDLE_TICK, max(0.0, due - now) + 0.001)

    def _too_slow(self, task: Task) -> SinkError:
        """Return why patience is over: what rows back off for, or else that no acks come."""
        if task.buckets:
            return _stopped(next(reversed(task.buckets.values())).error)
        rows = task.left + task.written.delivered + len(task.written.dead)
        return SinkError(
            "too_slow",
            f"{self._config.safe_url} has acked {task.written.delivered} of {rows} messages in"
            f" {self._patience.elapsed():.1f} s.",
            remedy="See how busy the server and its disk are, and whether the network is.",
        )

    def _handle(self, connection: Connection, task: Task, events: list[Event], now: float) -> None:
        denied: dict[str, str] = {}
        failed: dict[str, tuple[SinkError, list[int]]] = {}
        for event in events:
            if isinstance(event, ServerError) and (subject := event.denied_subject) is not None:
                if subject == "$JS.API.STREAM.NAMES":
                    self._silence.forbidden()
                elif not self._duplicates.denied(task, subject):
                    denied[subject] = event.text
            elif isinstance(event, Answer):
                self._duplicates.judge(task, event)
            elif isinstance(event, Reply) and event.number == 0 and connection.info.get("cluster"):
                self._silence.answered(event.status, event.body, now)
            elif isinstance(event, Reply) and event.number == 0:
                self._jetstream = event.status != 503 and b'"error"' not in event.body
            elif isinstance(event, Reply) and (row := task.flies(event.number)) is not None:
                if task.in_batch(row):
                    self._handle_batch_reply(task, event, row, now)
                    continue
                error = self._verdict(connection, task, event, row)
                if error is not None and (error.code == "out_of_line" or task.is_early(row)):
                    if not task.is_early(row):
                        self._pause_links(now)
                    task.take_back(row)
                elif error is not None and error.code == "message_too_large":
                    task.bury(row, error.code, error.message)
                elif error is not None:
                    failed.setdefault(error.code, (error, []))[1].append(row)
        for error, rows in failed.values():
            if error.code == "too_many_requests" and not task.backs_off(error.code):
                self._window = max(8, self._window // 2)
            task.fail(rows, error, now, self._on_retry)
        if denied:
            error = publish_denied(next(iter(denied)), connection.server)
            task.fail(task.flying_to(set(denied)), error, now, self._on_retry)

    def _pause_links(self, now: float) -> None:
        """Link no messages for a while, longer each time: another client publishes to the stream."""
        if now >= self._link_from + 4 * self._link_pause:
            self._link_backoff.reset()
        self._link_pause = self._link_backoff.after_failure()
        self._link_from = now + self._link_pause

    def _handle_batch_reply(self, task: Task, reply: Reply, row: int, now: float) -> None:
        """Handle a reply to the first or the last message of an atomic batch."""
        if not reply.status:
            try:
                body = orjson.loads(reply.body)
            except orjson.JSONDecodeError:
                return  # empty, as the batch has begun; or of another subscriber
            if not isinstance(body, dict):
                return
            error = body.get("error")
            if error is None and task.committed(row, body.get("count")):
                return
            if isinstance(error, dict) and error.get("err_code") == ATOMIC_DISABLED:
                self._atomic_from = now + ATOMIC_RETRY
        task.dissolve(row)

    def _verdict(
        self, connection: Connection, task: Task, reply: Reply, row: int
    ) -> SinkError | None:
        """Return what is wrong by a reply that is no plain ack, or None if nothing is."""
        if reply.status == 503 and connection.info.get("cluster"):
            return self._silence_of(connection, task.subject(row))
        if reply.status == 503:
            if not self._asked:
                # The account may lack JetStream though the server has it: only the API knows.
                self._asked = True
                connection.send(b"PUB $JS.API.INFO " + self._inbox + b"0 0\r\n\r\n")
            enabled = self._jetstream
            if enabled is None:
                enabled = bool(connection.info.get("jetstream"))
            if not enabled:
                return jetstream_not_enabled(connection.server)
            return no_stream(self._config, self._source, task.subject(row))
        try:
            body = orjson.loads(reply.body)
        except orjson.JSONDecodeError:
            return None  # of another subscriber to the subject; the stream's ack may follow
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            return refused_by_stream(body, self._config, task.subject(row))
        if isinstance(body, dict) and body.get("stream") and body.get("seq"):
            number = str(reply.number).encode()
            task.acked([number], {number: reply.body} if body.get("duplicate") else {})
        return None

    def _silence_of(self, connection: Connection, subject: str) -> SinkError:
        """Return why a cluster does not answer for a subject, as far as that is known."""
        verdict, question = self._silence.seen(subject, time.monotonic())
        if question is not None:
            size = str(len(question)).encode()
            connection.send(
                STREAM_NAMES + self._inbox + b"0 " + size + b"\r\n" + question + b"\r\n"
            )
        return unanswered(verdict, self._config, self._source, subject, connection.server)

    def _connected(self) -> Connection:
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

    def _connect(self) -> Connection:
        connection = connect_first(
            self._config, self._inbox, f"penstock {self._name}", start=self._next_server,
            timeout=lambda: max(0.05, min(CONNECT_TIMEOUT, self._patience.left())),
        )  # fmt: skip
        self._next_server = self._config.servers.index(connection.server)
        self._was_connected = True
        self._jetstream, self._asked = None, False
        self._silence = Silence()
        self._duplicates.connected()
        self._knows_batches = knows_batches(connection.info)
        return connection

    def _wait(self, error: SinkError, attempt: int) -> None:
        delay = backoff(attempt)
        self._on_retry(error, delay)
        until = time.monotonic() + delay
        while (left := until - time.monotonic()) > 0:
            if self._should_stop() or self._patience.left() <= 0:
                raise _stopped(error)
            time.sleep(min(left, 0.1))


def _stopped(error: SinkError) -> SinkError:
    return SinkError(error.code, error.message, remedy=error.remedy, transient=True)
