"""The thread of a capture: reads the replication stream into the queue, and answers keepalives."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
import structlog

from penstock.core.backoff import Backoff
from penstock.core.errors import CaptureError
from penstock.core.message import source_tag
from penstock.expressions.planned import Planned
from penstock.postgres.capture_stats import CaptureStats
from penstock.postgres.catalog import CaptureCatalog
from penstock.postgres.chunk_queue import ChunkQueue
from penstock.postgres.confirmations import Confirmations
from penstock.postgres.decoder import Decoder, Grouping, Includes
from penstock.postgres.fair_lock import FairLock
from penstock.postgres.pgoutput import ProtocolError, Relation
from penstock.postgres.read_ahead import ReadAhead
from penstock.postgres.replication import Keepalive, Known, ReplicationStream

_ROUND: Final = 500  # messages decoded before the lock is given up
_ROUND_BYTES: Final = 1 << 20
_BACKOFF_SECONDS: Final = (0.1, 10.0)
_END_SECONDS: Final = 2.0
"""How long an orderly end waits for the server to take in the last confirmation."""

log = structlog.get_logger("penstock.capture")


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture reads, and how.

    `includes(schema, table)` returns whether a table is captured, `grouping(schema, table)` its
    `group_by` and `split_by` (see `Table`); `splits` is the number of parallel tasks. `planned` is what
    the query's plan was made for: no batch has rows of tables that were altered since.
    """

    url: str
    slot: str
    publication: str
    splits: int
    includes: Includes
    grouping: Grouping
    truncates: bool = True
    planned: Planned = field(default_factory=Planned)
    recover: str | None = None
    """The command that recovers the source, for errors that name a gap."""


@dataclass(frozen=True)
class Opened:
    """The connections of a capture that are made before it may read its slot."""

    replication: psycopg.Connection[Any]
    catalog: psycopg.Connection[Any]


class CaptureLoop:
    """Runs in the capture's thread from `run` until `closing` is set; `lock` guards all it shares."""

    def __init__(
        self,
        options: CaptureOptions,
        decoder: Decoder,
        queue: ChunkQueue,
        confirmations: Confirmations,
        lock: FairLock,
        stats: CaptureStats,
        on_change: Callable[[CaptureStats], None],
        on_read: Callable[[], None],
        opened: Opened | None = None,
    ) -> None:
        self._options = options
        self._decoder = decoder
        self._progress = decoder.progress
        self._queue = queue
        self._confirmations = confirmations
        self._lock = lock
        self._stats = stats
        self._on_change = on_change
        self._on_read = on_read
        self._replication = None if opened is None else opened.replication
        self._catalog = CaptureCatalog(
            options.url, lambda: decoder.lsn, None if opened is None else opened.catalog
        )
        self._relation: Relation | None = None
        self._system = ""
        self.failure: CaptureError | None = None
        """What ends the capture that another thread has met."""
        self.closing = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def wake(self) -> None:
        """End the thread's wait for the server, also after `close`; the lock is held."""
        with contextlib.suppress(OSError):  # full, so it wakes; or closed
            os.write(self._wake_write, b"\0")
        self._lock.notify()

    def fail(self, error: ProtocolError) -> CaptureError:
        """Have the thread end with an error that another one met; return it as it is reported."""
        with self._lock.held():
            self.failure = failure = _known_error(error)
            self.wake()
        return failure

    def close(self) -> None:
        """Close what the thread used, which has ended."""
        self._catalog.close()
        with self._lock.held():
            ends = self._wake_read, self._wake_write
            # Another file may get the numbers: `wake` must not write to it.
            self._wake_read = self._wake_write = -1
        for end in ends:
            os.close(end)

    def run(self) -> None:
        """Read until the end, over lost connections; an error that stays is in the stats."""
        try:
            self._run()
        except Exception as error:
            # Of the log itself, for one: Spark must not wait for a thread that has ended.
            self._set_state("error", _internal(error))

    def _run(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS, jitter=0.5)
        while not self.closing:
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
                pause = backoff.after_failure(self._progress.received_lsn)
                log.warning(
                    "capture interrupted", code=known.code, error=str(known),
                    retry_in=round(pause, 1),
                )  # fmt: skip
                with self._lock.held():
                    self._lock.wait_for(lambda: self.closing, pause)
                    self._stats.reconnects += 1
        self._set_state("stopped", None)

    def _set_state(self, state: str, error: CaptureError | None) -> None:
        with self._lock.held():
            self._stats.state, self._stats.error = state, error
            self._lock.notify()
        self._on_read()
        try:
            self._on_change(self._stats)
        except Exception:  # a listener must not end the capture
            log.exception("the capture's state could not be reported")

    def _connect(self) -> ReplicationStream:
        options, decoder = self._options, self._decoder
        known = None
        if self._system:
            read = max(self._progress.received_lsn, decoder.read.lsn)
            known = Known(self._system, self._progress.flush_lsn, read)
        opened, self._replication = self._replication, None
        stream = ReplicationStream(options.url, options.slot, options.publication, known, opened)
        self._system = stream.system_identifier
        with self._lock.held():
            tag = source_tag(self._system, stream.database, options.slot)
            decoder.connected(stream.database, tag, utf8=stream.utf8)
            if known is None:
                self._progress.received(stream.confirmed_lsn)
        self._relation = None
        return stream

    def _stream(self, stream: ReplicationStream) -> None:
        confirmations = self._confirmations
        confirmations.connected(stream.timeout)
        ahead = ReadAhead(stream, self._catalog, self._options.includes)
        read: Any = None
        while True:
            self._lock.give_way()
            with self._lock.held():
                if self.failure is not None:
                    raise self.failure
                full = self._is_full()
                idle = False if full else self._round(stream, ahead)
                closing, polls = self.closing, confirmations.polls
                urgent = confirmations.take_urgent()
                flush = self._progress.flush_lsn
                self._count()
                self._lock.notify()
            if (news := self._news()) != read:
                self._on_read()
                read = news
            if self._relation is not None:
                self._learn(self._relation, ahead)
                continue
            if urgent or closing or time.monotonic() >= confirmations.due(flush):
                stream.confirm(flush, request_reply=polls)
                with self._lock.held():
                    confirmations.sent(flush)
                    self._lock.notify()
            if closing:
                stream.end(_END_SECONDS)
                return
            pause = min(max(confirmations.due(flush) - time.monotonic(), 0.0), 1.0)
            if full:
                with self._lock.held():
                    self._lock.wait_for(lambda: self.closing or not self._is_full(), pause)
            elif idle:
                stream.wait(pause, self._wake_read)

    def _news(self) -> Any:
        """Return what differs once there is more to hand out, or an end of what is read for one."""
        decoder = self._decoder
        end = self._progress.received_lsn if self._confirmations.polls else 0
        return decoder.read, decoder.altered, end

    def _is_full(self) -> bool:
        return self._queue.is_full(self._decoder.unsealed, self._decoder.read)

    def _round(self, stream: ReplicationStream, ahead: ReadAhead) -> bool:
        """Decode some messages; return whether the server has sent no more."""
        read, handle = ahead.reader(), self._decoder.handle
        size = 0
        for _ in range(_ROUND):
            data = read()
            if data is None:
                stream.receive()
                data = read()
                if data is None:
                    return True
            if type(data) is bytes:
                relation = handle(data)
                size += len(data)
                if relation is not None or size > _ROUND_BYTES:
                    self._relation = relation
                    return False
            else:
                assert isinstance(data, Keepalive)  # noqa: S101 - there is nothing else
                self._progress.received(data.wal_end)
                if data.reply_requested:
                    stream.confirm(self._progress.flush_lsn)
                    if self._progress.flush_lsn < data.wal_end:
                        stream.acknowledge(data.wal_end)
        return False

    def _learn(self, relation: Relation, ahead: ReadAhead) -> None:
        """Look a relation up, without the lock: the catalog must not block Spark's thread."""
        self._relation = None
        shape = ahead.shape(relation)
        for column in relation.columns:
            self._catalog.converter(column.type_oid)
        with self._lock.held():
            self._decoder.learn(relation, shape, self._catalog.converter)

    def _count(self) -> None:
        stats, progress = self._stats, self._progress
        stats.received_lsn, stats.confirmed_lsn = progress.received_lsn, progress.flush_lsn
        stats.confirmed_time = progress.flush_time
        stats.unread_bytes = self._queue.unread(self._decoder.unsealed)
        if self._decoder.unsealed_rows:
            self._queue.note_unsealed()
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
