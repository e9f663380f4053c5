"""What a backfiller is asked for. Any thread puts it in, the backfiller's thread takes it out.

The backfiller's thread alone owns the state of a backfill. So no lock is held while another is waited
for, and the capture, which holds its own lock, never waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from penstock.core.errors import BackfillError
from penstock.postgres.capture import ReadsEvent
from penstock.postgres.reads import BackfillSpec, Reads, SavedCursor
from penstock.postgres.watermarks import Watermark


class Interrupted(Exception):  # noqa: N818 - no error
    """A command came: what is under way has to stop."""


@dataclass(frozen=True)
class Start:
    """An attempt of a backfill, behind a cursor."""

    spec: BackfillSpec
    cursor: SavedCursor
    attempt: int


@dataclass(frozen=True)
class Replan:
    """The decoder passed the watermark of an attempt's chunk, and its reads are outdated."""

    attempt: int


@dataclass(frozen=True)
class ChunkReport:
    """The capture handed a chunk out, or it was confirmed; or no messages could be made of it."""

    event: ReadsEvent
    attempt: int
    chunk: int
    error: BackfillError | None = None


Item = Start | Replan | ChunkReport


class Commands:
    """Commands and reports for one backfiller's thread, in order.

    `interrupt` is called with each command that ends what is under way; it must not block.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._attempts = 0
        self._paused = threading.Event()
        self._changed = threading.Event()
        self.closing = False

    # From any thread

    def start(self, spec: BackfillSpec, cursor: SavedCursor) -> int:
        """Ask for an attempt in place of any other, not paused; return its number."""
        with self._lock:
            attempt = self._next_attempt()
            self._paused.clear()
            self._put(Start(spec, cursor, attempt))
        return attempt

    def pause(self) -> None:
        """Ask for no more chunks."""
        self._paused.set()

    def resume(self) -> None:
        """Ask for chunks again."""
        self._paused.clear()
        self._queue.put(None)

    def cancel(self, *, close: bool = False) -> None:
        """Ask for no attempt at all; `close`: for ever."""
        with self._lock:
            self.closing |= close
            self._next_attempt()
            self._put(None)

    def _next_attempt(self) -> int:
        self._attempts += 1
        return self._attempts

    def _put(self, command: Start | None) -> None:
        self._changed.set()
        self._queue.put(command)
        self._interrupt()

    # From the capture, which holds its lock

    def report(self, event: ReadsEvent, reads: Reads) -> None:
        """Report that a chunk was handed out or confirmed."""
        self._queue.put(ChunkReport(event, reads.attempt, reads.chunk))

    def failed(self, reads: Reads, error: BackfillError) -> None:
        """Report that no messages could be made of a chunk's rows; from any thread."""
        self._queue.put(ChunkReport("taken", reads.attempt, reads.chunk, error))

    def passed(self, mark: Watermark) -> None:
        """Report that the decoder passed a watermark."""
        if mark.reads is None:
            self._queue.put(Replan(mark.attempt))

    # For the backfiller's thread

    @property
    def paused(self) -> bool:
        """Whether no more chunks are to be planned."""
        return self._paused.is_set()

    @property
    def changed(self) -> bool:
        """Whether a command came since `newest` was called."""
        return self._changed.is_set()

    def get(self, timeout: float) -> Item | None:
        """Return the next item, None for a wake-up; raises `queue.Empty` after `timeout` seconds."""
        return self._queue.get(timeout > 0, timeout)

    def newest(self) -> int:
        """Return the newest attempt that was asked for; `changed` is false from now on."""
        with self._lock:
            self._changed.clear()
            return self._attempts

    def next_attempt(self, after: int) -> int | None:
        """Return a number for an attempt that follows `after`; None where another was asked for."""
        with self._lock:
            return self._next_attempt() if self._attempts == after else None

    def raise_if_changed(self) -> None:
        """Raise `Interrupted` where a command came."""
        if self.changed:
            raise Interrupted
