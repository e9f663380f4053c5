"""The capture: one slot's WAL into chunks of messages, in a thread of its own.

The thread reads the replication stream, decodes, and answers keepalives, whatever Spark does. Three
things cross to Spark's thread, all under one lock: chunks of messages (`available`, `take`), the
position up to which they are durable (`confirm`), and the error that ended the capture.

Memory is bounded by what is unread: past `MAX_UNREAD` the thread stops reading, and TCP holds the
server back. Chunks that were handed out stay until they are confirmed, so that a task can be retried.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import structlog

from penstock.core.backoff import Backoff
from penstock.core.errors import CaptureError
from penstock.core.message import Position, source_tag
from penstock.expressions.planned import Planned
from penstock.postgres.catalog import Catalog
from penstock.postgres.chunk import Chunk
from penstock.postgres.decoder import Decoder, Grouping, Wants
from penstock.postgres.pgoutput import ProtocolError, Relation
from penstock.postgres.reads import Reads
from penstock.postgres.replication import Keepalive, Known, ReplicationStream

MAX_UNREAD: Final = 16 << 20  # bytes of WAL; in memory a message takes about four times that
_ROUND: Final = 500  # messages decoded before the lock is given up
_ROUND_BYTES: Final = 1 << 20
_STATUS_SECONDS: Final = 10.0
_HURRIED_SECONDS: Final = 1.0
_CONFIRM_SECONDS: Final = 0.2
_BACKOFF_SECONDS: Final = (0.1, 10.0)

ReadsEvent = Literal["taken", "delivered"]

log = structlog.get_logger("penstock.capture")


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture needs to know.

    `wants(schema, table)` tells whether a table is captured, `grouping(schema, table)` gives its
    `group_by` and `split_by` (see `Table`); `splits` is the number of parallel tasks. `planned` is what
    the query's plan was made for: no batch has rows of tables that were altered since.
    """

    url: str
    slot: str
    publication: str
    splits: int
    wants: Wants
    grouping: Grouping
    truncates: bool = True
    planned: Planned = field(default_factory=Planned)
    recover: str | None = None
    """The command that recovers the source, for errors that name a gap."""


@dataclass
class CaptureStats:
    """Counted since the capture started, for status and metrics."""

    captured: int = 0
    confirmed: int = 0
    truncates_skipped: int = 0
    reconnects: int = 0
    received_lsn: int = 0
    confirmed_lsn: int = 0
    confirmed_time: int = 0
    """When the newest transaction that is confirmed was committed, as `Begin.timestamp`."""
    unread_bytes: int = 0
    state: str = "connecting"
    error: CaptureError | None = field(default=None, repr=False)


class Capture:
    """Reads a slot from `start` on until `close`.

    Args:
        options: What to read.
        start: Messages up to and with this position are known to be delivered, and are passed by.
        on_change: Called from the capture's thread when `stats.state` or its error changes.
    """

    def __init__(
        self,
        options: CaptureOptions,
        start: Position,
        on_change: Callable[[CaptureStats], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._on_change = on_change
        self._condition = threading.Condition()
        self._turn = threading.Lock()
        self._changed = threading.Event()
        self._chunks: deque[Chunk] = deque()
        self._waiting = 0  # messages in chunks
        self._unsealed_since: float | None = None
        self._decoder = Decoder(
            start, splits=options.splits, wants=options.wants, grouping=options.grouping,
            truncates=options.truncates, emit=self._emit, is_altered=options.planned.is_altered,
        )  # fmt: skip
        self._progress = self._decoder.progress
        self.on_reads: Callable[[ReadsEvent, Reads], None] = lambda *_: None
        """Called, with the lock held, when a backfill's chunk is taken and when it is confirmed."""
        self._catalog = Catalog(options.url, lambda: self._decoder.lsn)
        self._handed = self._wanted = start
        self._sealed = 0  # bytes in chunks that were not handed out
        self._told = -1
        self._urgent = self._hurried = self._closing = self._altered_told = False
        self._relation: Relation | None = None
        self._system = ""
        self.stats = CaptureStats()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._main, name="capture", daemon=True)
        self._thread.start()

    @property
    def options(self) -> CaptureOptions:
        """What the capture was made with."""
        return self._options

    @contextlib.contextmanager
    def decoder(self) -> Iterator[Decoder]:
        """Hold the capture's thread, for what a backfill has to ask or tell it; not for long."""
        with self._entered():
            yield self._decoder

    def withdraw(self, attempt: int) -> None:
        """Empty the chunks of a backfill's attempt that nobody has taken yet."""
        with self._entered():
            for i, chunk in enumerate(self._chunks):
                if chunk.reads is not None and chunk.reads.attempt == attempt:
                    self._chunks[i] = chunk if chunk.end <= self._handed else chunk.emptied()

    # -- Spark's side

    def available(
        self, after: Position, max_rows: int, wait: float, until_lsn: int | None = None
    ) -> Position:
        """Return the end of the messages behind `after` that fit into one batch.

        Blocks up to `wait` seconds until there are any; returns `after` if there are none. With
        `until_lsn` it waits for as long as it takes to know all that was committed before that LSN.
        Raises the capture's `CaptureError` if it has ended.
        """
        deadline = time.monotonic() + wait
        with self._entered():
            while True:
                self._raise_if_ended()
                end = self._fitting(after, max_rows)
                if end > after or self._closing:
                    return end
                if self._decoder.altered is not None and not self._altered_told:
                    self._altered_told = True
                    return after
                if until_lsn is not None and self._decoder.altered is None:
                    if self._progress.received_lsn >= until_lsn:
                        return after
                    self._pause(1.0)
                    continue
                left = deadline - time.monotonic()
                if left <= 0:
                    return after
                self._pause(left)

    def altered(self) -> tuple[Position, tuple[str, str]] | None:
        """Return the table that was altered, once all messages from before were handed out.

        The query is to be planned anew for what comes after the position.
        """
        with self._entered():
            found = self._decoder.altered
            return found if found is not None and self._handed >= found[0] else None

    def _raise_if_ended(self) -> None:
        error = self.stats.error
        if error is not None and not error.transient:
            raise error

    def _fitting(self, after: Position, max_rows: int) -> Position:
        self._decoder.seal()
        end, rows, size = after, 0, 0
        last = self._decoder.altered[0] if self._decoder.altered is not None else None
        for chunk in self._chunks:
            if chunk.end <= after:
                continue
            if last is not None and chunk.end > last:
                break
            if rows and (chunk.barrier or rows + chunk.rows > max_rows or size > MAX_UNREAD // 4):
                break
            end, rows, size = chunk.end, rows + chunk.rows, size + chunk.bytes
            if chunk.barrier:
                break
        return end

    def take(self, start: Position, end: Position) -> list[Chunk]:
        """Return the chunks of `(start, end]`, after a restart waiting until they are read again.

        Raises the capture's `CaptureError` if it ended before.
        """
        with self._entered():
            # However large, what is waited for has to be read.
            self._wanted = max(self._wanted, end)
            self._notify()
            while self._decoder.read < end and self._progress.received_lsn <= end.lsn:
                self._raise_if_ended()
                if self._closing:
                    return []
                self._pause(1.0)
            self._decoder.seal()
            taken = []
            for chunk in self._chunks:
                if chunk.end <= start or chunk.start >= end:
                    continue
                part = chunk if chunk.start >= start else chunk.after(start)
                part = part if part.end <= end else part.until(end)
                taken.append(part)
                if part.reads is not None:
                    self.on_reads("taken", part.reads)
            if end > self._handed:
                self._handed = end
                self._sealed = sum(c.bytes for c in self._chunks if c.end > end)
                self._notify()
            return taken

    def confirm(self, position: Position) -> None:
        """Note that every message up to and with `position` is durable in every sink."""
        with self._entered():
            self._progress.confirm(position)
            while self._chunks and self._chunks[0].end <= position:
                chunk = self._chunks.popleft()
                self._sealed -= chunk.bytes if chunk.end > self._handed else 0
                self.stats.confirmed += chunk.rows
                if chunk.reads is not None:
                    self.on_reads("delivered", chunk.reads)
                else:
                    self._waiting -= chunk.rows

    def waiting(self) -> tuple[int, float | None]:
        """Return how many messages are captured and not confirmed, and the oldest one's age.

        In seconds since it was captured. What a backfill reads is not counted.
        """
        with self._entered():
            kept = (c.captured_at for c in self._chunks if c.reads is None and c.rows)
            since = next(kept, None)
            since = self._unsealed_since if since is None else since
            rows = self._waiting + self._decoder.unsealed_rows
        return rows, None if since is None or not rows else time.monotonic() - since

    def flush(self, timeout: float) -> bool:
        """Wait until what is confirmed has been told to the server; False if that took too long."""
        with self._condition:
            target = self._progress.flush_lsn
            if self._told >= target or timeout <= 0:
                return self._told >= target
            self._urgent = True
            self._wake()
            return self._condition.wait_for(
                lambda: self._told >= target or self.stats.state == "stopped", timeout
            )

    def poll_server(self) -> None:
        """Ask the server from now on to tell how far it is, for a run that ends when all is read."""
        with self._condition:
            self._hurried = self._urgent = True
            self._wake()

    def close(self) -> None:
        """Tell the server what is confirmed, and end the thread."""
        with self._condition:
            if self._closing:
                return
            self._closing = True
            self._wake()
        self._thread.join(timeout=15)
        if not self._thread.is_alive():  # else it is stuck in a connection attempt, and a daemon
            self._catalog.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")
        self._notify()

    # Python's locks are not fair: a thread that releases one and takes it again at once, as the
    # capture's does between rounds, keeps others out until it has nothing left to read. So Spark's
    # thread holds `_turn` while it waits for the lock, and the capture's lets it pass.

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self._turn:
            self._condition.acquire()
        try:
            yield
        finally:
            self._condition.release()

    def _pause(self, seconds: float) -> None:
        """Wait, outside the lock, until something has changed or `seconds` have passed."""
        self._changed.clear()
        self._condition.release()
        try:
            self._changed.wait(seconds)
        finally:
            with self._turn:
                self._condition.acquire()

    def _notify(self) -> None:
        self._changed.set()
        self._condition.notify_all()

    # -- the capture's thread

    def _main(self) -> None:
        try:
            self._run()
        except Exception as error:  # the log itself, say: Spark must not wait for a dead thread
            self._set_state("error", _internal(error))

    def _run(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS)
        while not self._closing:
            try:
                stream = self._connect()
                try:
                    self._set_state("streaming", None)
                    self._stream(stream)
                finally:
                    stream.close()
            except Exception as error:
                known = _known_error(error).recovered_by(self._options.recover)
                self._set_state("error", known)
                if not known.transient:
                    log.error("capture ended", code=known.code, error=str(known))
                    return
                self._catalog.close()  # what ended the one connection most often ended both
                delay = backoff.after_failure(self._progress.received_lsn)
                pause = delay * random.uniform(0.5, 1.0)  # noqa: S311
                log.warning(
                    "capture interrupted", code=known.code, error=str(known),
                    retry_in=round(pause, 1),
                )  # fmt: skip
                with self._condition:
                    self._condition.wait_for(lambda: self._closing, pause)
                    self.stats.reconnects += 1
        self._set_state("stopped", None)

    def _set_state(self, state: str, error: CaptureError | None) -> None:
        with self._condition:
            self.stats.state, self.stats.error = state, error
            self._notify()
        try:
            self._on_change(self.stats)
        except Exception:  # whoever listens must not end the capture
            log.exception("the capture's state could not be reported")

    def _connect(self) -> ReplicationStream:
        options, decoder = self._options, self._decoder
        known = None
        if self._system:
            read = max(self._progress.received_lsn, decoder.read.lsn)
            known = Known(self._system, self._progress.flush_lsn, read)
        stream = ReplicationStream(options.url, options.slot, options.publication, known)
        self._system = stream.system_identifier
        with self._condition:
            tag = source_tag(self._system, stream.database, options.slot)
            decoder.connected(stream.database, tag)
            if known is None:
                self._progress.received(stream.confirmed_lsn)
        self._relation = None
        return stream

    def _stream(self, stream: ReplicationStream) -> None:
        told_at = 0.0
        limit = min(_STATUS_SECONDS, stream.timeout / 3) if stream.timeout else _STATUS_SECONDS
        while True:
            with self._turn:
                pass  # whoever asked while the lock was held goes first
            with self._condition:
                full = self._is_full()
                idle = False if full else self._round(stream)
                closing, urgent, hurried = self._closing, self._urgent, self._hurried
                self._urgent = False
                flush = self._progress.flush_lsn
                self._count()
                self._notify()
            if self._relation is not None:
                self._learn(self._relation)
                continue
            interval = min(limit, _HURRIED_SECONDS) if hurried else limit
            due = told_at + (min(_CONFIRM_SECONDS, interval) if flush != self._told else interval)
            if time.monotonic() >= due or urgent or closing:
                stream.confirm(flush, request_reply=hurried)
                told_at = time.monotonic()
                due = told_at + interval
                with self._condition:
                    self._told = flush
                    self._notify()
            if closing:
                return
            pause = min(max(due - time.monotonic(), 0.0), 1.0)
            if full:
                with self._condition:
                    self._condition.wait_for(lambda: self._closing or not self._is_full(), pause)
            elif idle:
                stream.wait(pause, self._wake_read)

    def _is_full(self) -> bool:
        unread = self._sealed + self._decoder.unsealed
        return unread > MAX_UNREAD and self._decoder.read >= self._wanted

    def _round(self, stream: ReplicationStream) -> bool:
        """Decode some messages; return whether the server has sent no more."""
        read, handle = stream.read, self._decoder.handle
        size = 0
        for _ in range(_ROUND):
            data = read()
            if data is None:
                stream.receive()
                data = read()
                if data is None:
                    return True
            if type(data) is bytes:
                self._relation = handle(data)
                size += len(data)
                if self._relation is not None or size > _ROUND_BYTES:
                    return False
            else:
                assert isinstance(data, Keepalive)  # noqa: S101
                self._progress.received(data.wal_end)
                if data.reply_requested:
                    stream.confirm(self._progress.flush_lsn)
                    if self._progress.flush_lsn < data.wal_end:
                        stream.acknowledge(data.wal_end)
        return False

    def _learn(self, relation: Relation) -> None:
        """Look a relation up, without the lock: nobody shall wait for the catalog."""
        self._relation = None
        shape = self._catalog.shape(relation)
        for column in relation.columns:
            self._catalog.converter(column.type_oid)
        with self._condition:
            self._decoder.learn(relation, shape, self._catalog.converter)

    def _emit(self, chunk: Chunk) -> None:
        if chunk.reads is None:
            since, self._unsealed_since = self._unsealed_since, None
            chunk = replace(chunk, captured_at=time.monotonic() if since is None else since)
            self.stats.captured += chunk.rows
            self._waiting += chunk.rows
        self._chunks.append(chunk)
        self._sealed += chunk.bytes

    def _count(self) -> None:
        stats, progress = self.stats, self._progress
        stats.received_lsn, stats.confirmed_lsn = progress.received_lsn, progress.flush_lsn
        stats.confirmed_time = progress.flush_time
        stats.unread_bytes = self._sealed + self._decoder.unsealed
        if self._unsealed_since is None and self._decoder.unsealed_rows:
            self._unsealed_since = time.monotonic()
        stats.truncates_skipped = self._decoder.truncates_skipped


def _known_error(error: Exception) -> CaptureError:
    """Return an error as a capture reports it."""
    if isinstance(error, CaptureError):
        return error
    if isinstance(error, ProtocolError):
        return CaptureError(
            "protocol",
            f"The server sent what is no pgoutput of protocol 1: {error}.",
            remedy="Look for a proxy in between that changes what passes; else report this.",
        )
    log.exception("capture failed")
    return _internal(error)


def _internal(error: Exception) -> CaptureError:
    return CaptureError(
        "internal",
        f"The capture failed: {type(error).__name__}: {error}.",
        remedy="This is a defect of penstock; the log has its trace. Nothing was confirmed wrongly.",
    )
