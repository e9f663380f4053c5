"""The capture: one slot's WAL into chunks of messages, in a thread of its own.

The thread (`CaptureLoop`) reads the replication stream, decodes, and answers keepalives, whatever
Spark does. Three things cross to Spark's thread, all under one lock: chunks of messages (`available`,
`take`), the position up to which they are durable (`confirm`), and the error that ended the capture.

Memory is bounded by what is unread: past `MAX_UNREAD` the thread stops reading, and TCP holds the
server back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

from penstock.core.message import Position
from penstock.postgres.capture_loop import CaptureLoop, CaptureOptions, Opened
from penstock.postgres.capture_stats import CaptureStats
from penstock.postgres.chunk import Chunk
from penstock.postgres.chunk_queue import MAX_UNREAD, ChunkQueue
from penstock.postgres.confirmations import Confirmations
from penstock.postgres.decoder import Decoder
from penstock.postgres.fair_lock import FairLock
from penstock.postgres.pgoutput import ProtocolError
from penstock.postgres.reads import Reads

__all__ = ["MAX_UNREAD", "Capture", "CaptureOptions", "CaptureStats", "Opened", "ReadsEvent"]

ReadsEvent = Literal["taken", "delivered"]


class Capture:
    """Reads a slot from `start` on until `close`.

    Args:
        options: What to read.
        start: Messages up to and with this position are known to be delivered, and are passed by.
        on_change: Called from the capture's thread when `stats.state` or its error changes.
        opened: The connections that it begins with, if they are made already.
    """

    def __init__(
        self,
        options: CaptureOptions,
        start: Position,
        on_change: Callable[[CaptureStats], None] = lambda _: None,
        opened: Opened | None = None,
    ) -> None:
        self.options = options
        self.start = start
        self.stats = CaptureStats()
        self.on_reads: Callable[[ReadsEvent, Reads], None] = lambda *_: None
        """Called, with the lock held, when a backfill's chunk is taken and when it is confirmed."""
        self._lock = FairLock()
        self._queue = ChunkQueue(start, self.stats)
        self._decoder = Decoder(
            start, splits=options.splits, includes=options.includes, grouping=options.grouping,
            truncates=options.truncates, emit=self._queue.add,
            is_altered=options.planned.is_altered,
        )  # fmt: skip
        self._progress = self._decoder.progress
        self._confirmations = Confirmations()
        self._altered_reported = False
        self.on_read: Callable[[], None] = lambda: None
        """Called from the capture's thread when it has read something."""
        self._loop = CaptureLoop(
            options, self._decoder, self._queue, self._confirmations, self._lock, self.stats,
            on_change, self._notify_read, opened,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._loop.run, name="capture", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def decoder(self) -> Iterator[Decoder]:
        """Hold the capture's thread while a backfill reads or changes the decoder; not for long."""
        with self._lock.entered():
            yield self._decoder

    def withdraw(self, attempt: int) -> None:
        """Empty the chunks of a backfill's attempt that are not taken yet."""
        with self._lock.entered():
            self._queue.withdraw(attempt)

    # -- chunks

    def available(
        self, after: Position, max_rows: int, wait: float, until_lsn: int | None = None
    ) -> Position:
        """Return the end of the messages behind `after` that fit into one batch.

        Blocks up to `wait` seconds until there are any; returns `after` if there are none. With
        `until_lsn` it waits for as long as it takes to read all that was committed before that LSN.
        Raises the capture's `CaptureError` if it has ended.
        """
        deadline = time.monotonic() + wait
        with self._lock.entered():
            while True:
                self._raise_if_ended()
                self._decoder.seal()
                altered = self._decoder.altered
                last = None if altered is None else altered[0]
                end = self._queue.fitting(after, max_rows, last)
                if end > after or self._loop.closing:
                    return end
                if altered is not None and not self._altered_reported:
                    self._altered_reported = True
                    return after
                if until_lsn is not None and altered is None:
                    if self._progress.received_lsn >= until_lsn:
                        return after
                    self._lock.pause(1.0)
                    continue
                left = deadline - time.monotonic()
                if left <= 0:
                    return after
                self._lock.pause(left)

    def hand_out(self, after: Position, max_rows: int) -> tuple[Position, list[Chunk], bool]:
        """Return the chunks behind `after` that fit into one round, and their end; none: `after`.

        And whether there may be more of them. They are handed out once: their messages are not kept
        here. Raises the capture's `CaptureError` if it has ended.
        """
        with self._making_messages():
            with self._lock.entered():
                self._raise_if_ended()
                self._decoder.seal()
                altered = self._decoder.altered
                end = self._queue.fitting(after, max_rows, None if altered is None else altered[0])
                more = altered is not None or self._decoder.read > end
                taken = self._take(after, end)
                self._queue.empty(after, end)
            # Without the lock: the capture reads on meanwhile.
            return end, [chunk.made() for chunk in taken], more

    def has_read(self, until_lsn: int) -> bool:
        """Return whether all is handed out that was committed before an LSN."""
        with self._lock.entered():
            self._decoder.seal()
            read = self._progress.received_lsn >= until_lsn
            return read and self._queue.handed_out >= self._decoder.read

    def altered(self) -> tuple[Position, tuple[str, str]] | None:
        """Return the table that was altered, once all messages from before were handed out.

        The query is to be planned anew for what comes after the position.
        """
        with self._lock.entered():
            found = self._decoder.altered
            return found if found is not None and self._queue.handed_out >= found[0] else None

    def _notify_read(self) -> None:
        self.on_read()

    def _raise_if_ended(self) -> None:
        # What was handed out is kept no more: nothing may follow what could not be made a message.
        if self._loop.failure is not None:
            raise self._loop.failure
        error = self.stats.error
        if error is not None and not error.transient:
            raise error

    def take(self, start: Position, end: Position) -> list[Chunk]:
        """Return the chunks of `(start, end]`, after a restart waiting until they are read again.

        Raises the capture's `CaptureError` if it ended before.
        """
        with self._making_messages():
            with self._lock.entered():
                self._queue.need(end)
                self._lock.notify()
                while self._decoder.read < end and self._progress.received_lsn <= end.lsn:
                    self._raise_if_ended()
                    if self._loop.closing:
                        return []
                    self._lock.pause(1.0)
                self._decoder.seal()
                taken = self._take(start, end)
            return [chunk.made() for chunk in taken]

    def _take(self, start: Position, end: Position) -> list[Chunk]:
        taken = self._queue.between(start, end)
        for chunk in taken:
            if chunk.reads is not None:
                self.on_reads("taken", chunk.reads)
        if self._queue.hand_out(end):
            self._lock.notify()
        return taken

    @contextlib.contextmanager
    def _making_messages(self) -> Iterator[None]:
        """End the capture where the server has sent a row that is none of its table."""
        try:
            yield
        except ProtocolError as error:
            raise self._loop.fail(error) from None

    def waiting(self) -> tuple[int, float | None]:
        """Return how many messages are captured and not confirmed, and the oldest one's age.

        In seconds since it was captured. What a backfill reads is not counted.
        """
        with self._lock.entered():
            return self._queue.waiting(self._decoder.unsealed_rows)

    # -- confirmations

    def confirm(self, position: Position) -> None:
        """Note that every message up to and with `position` is durable in every sink."""
        with self._lock.entered():
            self.stats.count_deliveries(*self._progress.confirm(position))
            for reads in self._queue.confirm(position):
                self.on_reads("delivered", reads)

    def flush(self, timeout: float) -> bool:
        """Wait until what is confirmed is sent to the server; False if that took too long."""
        with self._lock.held():
            target = self._progress.flush_lsn
            if self._confirmations.sent_lsn >= target or timeout <= 0:
                return self._confirmations.sent_lsn >= target
            self._confirmations.hasten()
            self._loop.wake()
            return self._lock.wait_for(
                lambda: self._confirmations.sent_lsn >= target or self.stats.state == "stopped",
                timeout,
            )

    def poll_server(self) -> None:
        """Ask the server often how far its WAL is, for a run that ends when all is read."""
        with self._lock.held():
            self._confirmations.polls = True
            self._confirmations.hasten()
            self._loop.wake()

    def close(self) -> None:
        """Send the server what is confirmed, and end the thread."""
        with self._lock.held():
            if self._loop.closing:
                return
            self._loop.closing = True
            self._loop.wake()
        self._thread.join(timeout=15)
        if not self._thread.is_alive():  # else it is stuck in a connection attempt, and a daemon
            self._loop.close()
