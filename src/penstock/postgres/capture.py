"""The capture: one slot's WAL into chunks of messages, in a thread of its own.

The thread reads the replication stream, decodes, and answers keepalives, whatever Spark does. Three
things cross to Spark's thread, all under one lock: chunks of messages (`available`, `take`), the
position up to which they are durable (`confirm`), and the error that ended the capture.

Memory is bounded by what is unread: past `MAX_UNREAD` the thread stops reading, and TCP holds the
server back. Chunks that were handed out stay until they are confirmed, so that a task can be retried.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from penstock.message import Position, format_lsn, source_tag
from penstock.postgres import pgoutput
from penstock.postgres.catalog import Catalog
from penstock.postgres.chunk import Chunk, ChunkBuilder
from penstock.postgres.errors import CaptureError
from penstock.postgres.replication import Keepalive, ReplicationStream
from penstock.postgres.table import Table, Transaction

MAX_UNREAD: Final = 48 << 20  # bytes of WAL; in memory a message takes about four times that
CHUNK_ROWS: Final = 4_000
_ROUND: Final = 500  # messages decoded before the lock is given up
_STATUS_SECONDS: Final = 10.0
_BACKOFF_SECONDS: Final = (0.1, 10.0)

log = structlog.get_logger("penstock.capture")


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture needs to know.

    `wants(schema, table)` tells whether a table is captured, `grouping(schema, table)` gives its
    `group_by` and `split_by` (see `Table`); `splits` is the number of parallel tasks.
    """

    url: str
    slot: str
    publication: str
    splits: int
    wants: Callable[[str, str], bool]
    grouping: Callable[[str, str], tuple[list[str] | None, list[str] | None]]
    truncates: bool = True


@dataclass
class CaptureStats:
    """Counted since the capture started, for status and metrics."""

    captured: int = 0
    truncates_skipped: int = 0
    reconnects: int = 0
    received_lsn: int = 0
    confirmed_lsn: int = 0
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
        self._catalog = Catalog(options.url)
        self._condition = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._handed = start
        self._unread = 0
        self._builder = ChunkBuilder(start, options.splits)
        # Where each transaction that has messages ends: its last position, and what to confirm then.
        self._ends: deque[tuple[Position, int]] = deque()
        self._confirmed = start
        self._flush_lsn = 0
        self._closing = False
        self._flushed = threading.Event()
        self._tables: dict[int, Table | None] = {}
        self._transaction: Transaction | None = None
        self._next_idx = 0
        self._skip_idx = -1
        self._last = start
        self._tag = b""
        self._system = ""
        self.stats = CaptureStats()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

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
        with self._condition:
            while True:
                if self.stats.error is not None and not self.stats.error.transient:
                    raise self.stats.error
                end = self._fitting(after, max_rows)
                if end > after or self._closing:
                    return end
                if until_lsn is not None:
                    if self.stats.received_lsn >= until_lsn:
                        return after
                    self._condition.wait(0.1)
                    continue
                left = deadline - time.monotonic()
                if left <= 0:
                    return after
                self._condition.wait(left)

    def _fitting(self, after: Position, max_rows: int) -> Position:
        if self._builder.rows:
            self._seal()
        end, rows, size = after, 0, 0
        for chunk in self._chunks:
            if chunk.end <= after:
                continue
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
        with self._condition:
            while self._builder.end < end and self.stats.received_lsn <= end.lsn:
                if self.stats.error is not None and not self.stats.error.transient:
                    raise self.stats.error
                self._condition.wait(1.0)
            if self._builder.rows:
                self._seal()
            taken = []
            for chunk in self._chunks:
                if chunk.end <= start or chunk.start >= end:
                    continue
                part = chunk if chunk.start >= start else chunk.after(start)
                taken.append(part if part.end <= end else part.until(end))
            if end > self._handed:
                self._handed = end
                self._unread = sum(c.bytes for c in self._chunks if c.end > end)
                self._condition.notify_all()
            return taken

    def confirm(self, position: Position) -> None:
        """Note that every message up to and with `position` is durable in every sink."""
        with self._condition:
            if position <= self._confirmed:
                return
            self._confirmed = position
            while self._chunks and self._chunks[0].end <= position:
                self._chunks.popleft()
            while self._ends and self._ends[0][0] <= position:
                self._flush_lsn = self._ends.popleft()[1]
            self._flushed.clear()

    def settle(self, timeout: float) -> bool:
        """Wait until what is confirmed has been told to the server; False if that took too long."""
        return self._flushed.wait(timeout)

    def close(self) -> None:
        """Tell the server what is confirmed, and end the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout=10)
        self._catalog.close()

    # -- the capture's thread

    def _run(self) -> None:
        delay = _BACKOFF_SECONDS[0]
        while not self._closing:
            try:
                started = time.monotonic()
                stream = self._connect()
                try:
                    self._set_state("streaming", None)
                    self._stream(stream)
                finally:
                    stream.close()
            except CaptureError as error:
                self._set_state("error", error)
                if not error.transient:
                    log.error("capture ended", code=error.code, error=str(error))
                    return
                if time.monotonic() - started > 60:
                    delay = _BACKOFF_SECONDS[0]
                pause = delay * random.uniform(0.5, 1.0)  # noqa: S311
                log.warning(
                    "capture interrupted",
                    code=error.code,
                    error=str(error),
                    retry_in=round(pause, 1),
                )
                with self._condition:
                    self._condition.wait_for(lambda: self._closing, pause)
                delay = min(delay * 2, _BACKOFF_SECONDS[1])
                self.stats.reconnects += 1
            except Exception as error:
                log.exception("capture failed")
                self._set_state(
                    "error",
                    CaptureError(
                        "internal", f"The capture failed: {type(error).__name__}: {error}"
                    ),
                )
                return
        self._set_state("stopped", None)

    def _set_state(self, state: str, error: CaptureError | None) -> None:
        with self._condition:
            self.stats.state, self.stats.error = state, error
            self._condition.notify_all()
        self._on_change(self.stats)

    def _connect(self) -> ReplicationStream:
        options = self._options
        stream = ReplicationStream(options.url, options.slot, options.publication, self._flush_lsn)
        if self._system and stream.system_identifier != self._system:
            stream.close()
            raise CaptureError(
                "other_server",
                f"The server behind the source's url is another cluster now (system identifier"
                f" {stream.system_identifier}, before {self._system}).",
                remedy="Its positions mean nothing here. Point the url back, or start anew.",
            )
        self._system = stream.system_identifier
        self._tag = source_tag(self._system, stream.database, options.slot).encode()
        self._tables.clear()
        self._transaction = None
        self._database = stream.database
        return stream

    def _stream(self, stream: ReplicationStream) -> None:
        interval = min(_STATUS_SECONDS, stream.timeout / 3) if stream.timeout else _STATUS_SECONDS
        told, told_at = -1, 0.0
        while True:
            with self._condition:
                full = self._unread > MAX_UNREAD
                idle = False if full else self._round(stream)
                closing = self._closing
                if not self._ends and self._transaction is None:
                    # Nothing is under way: WAL without messages of ours may go too.
                    self._flush_lsn = max(self._flush_lsn, self.stats.received_lsn)
                flush = self._flush_lsn
                self.stats.confirmed_lsn, self.stats.unread_bytes = flush, self._unread
                self._condition.notify_all()
            now = time.monotonic()
            if now - told_at >= (0.2 if flush != told else interval) or closing:
                stream.confirm(flush, request_reply=self._asks_reply)
                told, told_at = flush, now
                with self._condition:
                    if flush == self._flush_lsn:
                        self._flushed.set()
            if closing:
                return
            if full:
                with self._condition:
                    self._condition.wait(min(1.0, interval))
            elif idle:
                stream.wait(min(0.2 if flush != told else 1.0, interval))

    _asks_reply = False

    def hurry(self) -> None:
        """Ask the server from now on to tell how far it is, for a run that ends when all is read."""
        self._asks_reply = True

    def _round(self, stream: ReplicationStream) -> bool:
        """Decode some messages; return whether the server has sent no more."""
        read = stream.read
        for _ in range(_ROUND):
            data = read()
            if data is None:
                return True
            if isinstance(data, Keepalive):
                if self._transaction is None:
                    self.stats.received_lsn = max(self.stats.received_lsn, data.wal_end)
                if data.reply_requested:
                    stream.confirm(self._flush_lsn)
            else:
                self._handle(data)
        return False

    def _handle(self, data: bytes) -> None:
        event = pgoutput.parse(data)
        if isinstance(event, pgoutput.Insert | pgoutput.Update | pgoutput.Delete):
            self._change(event, len(data))
        elif isinstance(event, pgoutput.Begin):
            lsn = event.final_lsn
            self._transaction = Transaction(lsn, event.timestamp, event.xid, self._tag)
            self._next_idx = 0
            # After a reconnect the server starts at the last transaction that it knows confirmed.
            last = self._last
            self._skip_idx = last.idx if lsn == last.lsn else -1 if lsn > last.lsn else 1 << 62
        elif isinstance(event, pgoutput.Commit):
            self._commit(event)
        elif isinstance(event, pgoutput.Relation):
            self._relation(event)
        elif isinstance(event, pgoutput.Truncate):
            self._truncate(event)
        # Origin, Type and Message say nothing that a message of ours would carry.

    def _change(
        self, event: pgoutput.Insert | pgoutput.Update | pgoutput.Delete, size: int
    ) -> None:
        idx = self._next_idx
        self._next_idx = idx + 1
        table = self._tables[event.relation]
        if table is None or idx <= self._skip_idx:
            return
        transaction = self._transaction
        assert transaction is not None  # noqa: S101 - a change stands between Begin and Commit
        if isinstance(event, pgoutput.Insert):
            row, old_split, split = table.insert(event, transaction, idx)
        elif isinstance(event, pgoutput.Update):
            row, old_split, split = table.update(event, transaction, idx)
        else:
            row, old_split, split = table.delete(event, transaction, idx)
        builder = self._builder
        builder.add(row, size, old_split, split)
        self._unread += size
        self._last = builder.end = Position(transaction.lsn, idx)
        self.stats.captured += 1
        if builder.rows >= CHUNK_ROWS:
            self._seal()

    def _seal(self, *, barrier: bool = False) -> None:
        self._chunks.append(self._builder.take(self._last, barrier=barrier))

    def _commit(self, event: pgoutput.Commit) -> None:
        transaction = self._transaction
        self._transaction = None
        if transaction is not None and self._last.lsn == transaction.lsn:
            if self._last > self._confirmed:
                self._ends.append((self._last, event.end_lsn))
            elif not self._ends:
                self._flush_lsn = max(self._flush_lsn, event.end_lsn)
        self.stats.received_lsn = max(self.stats.received_lsn, event.end_lsn)

    def _relation(self, event: pgoutput.Relation) -> None:
        # The server repeats a shape when its cache was reset, most often without any change.
        known = self._tables.get(event.oid)
        if known is not None and known.relation == event:
            return
        options = self._options
        if not options.wants(event.schema, event.name):
            self._tables[event.oid] = None
            return
        group_by, split_by = options.grouping(event.schema, event.name)
        self._tables[event.oid] = Table(
            event,
            primary_key=self._catalog.primary_key(event),
            converter=self._catalog.converter,
            database=self._database,
            tag=self._tag.decode(),
            group_by=group_by,
            split_by=split_by,
        )

    def _truncate(self, event: pgoutput.Truncate) -> None:
        transaction = self._transaction
        assert transaction is not None  # noqa: S101
        for oid in event.relations:
            idx = self._next_idx
            self._next_idx += 1
            table = self._tables[oid]
            if table is None or idx <= self._skip_idx:
                continue
            if not self._options.truncates:
                self.stats.truncates_skipped += 1
                log.warning(
                    "truncate not delivered: no sink lists the action",
                    table=f"{table.schema}.{table.name}",
                    lsn=format_lsn(transaction.lsn),
                )
                continue
            # A truncate concerns every row of its table, so nothing may overtake it.
            if self._builder.rows:
                self._seal()
            row = table.truncate(transaction, idx)
            self._builder.add(row, 100, row[9], row[9])
            self._last = self._builder.end = Position(transaction.lsn, idx)
            self._unread += 100
            self.stats.captured += 1
            self._seal(barrier=True)
