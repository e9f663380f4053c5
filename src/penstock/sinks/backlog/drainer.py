"""The drainer of a sink: delivers its backlog in order, and lets it join the live flow again.

It works in `penstock run`, in a thread of its own while the sink is behind (`Drainers` has it begin),
and reads the store alone: a sink has a row in `penstock.backlogs` while it is behind. What it delivers
lies within what the capture has reported as wholly done: a task that is under way, or comes again, may
still add messages before others that are there. So one position holds all that was delivered, and
outlives any crash.

To join it keeps the source's writers out, delivers the few messages that are left, and takes the row
away: the next writer delivers directly. It does so only with a sink that has just taken messages, and
with no more of them than that takes soon; a sink that soon falls behind again joins later each time.
What a failed try to join has delivered lies beyond what is wholly done, so no position holds it; it is
known here, and a run that ends meanwhile repeats it.

A consumer of type nats is drained like a sink: what it has not had lies in its stream, or in blocks
(`penstock.sinks.backlog.consumer`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Final

import pyarrow as pa
import structlog

from penstock.core.backoff import Backoff
from penstock.core.delivery import Sink, Unfinished, Written
from penstock.core.errors import SinkError, StoreError
from penstock.core.message import WIRE_SCHEMA, Position
from penstock.core.monitor import Report
from penstock.sinks import reports
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.delivered import Delivered
from penstock.sinks.backlog.reported_state import ReportedState
from penstock.sinks.backlog.sink import SinkBacklog
from penstock.sinks.backlog.store import Behind, Connection, Taken
from penstock.streams.nats_consumers import ON_PURPOSE
from penstock.streams.pool import StorePool
from penstock.streams.segments import lock_writers

_FAILED_SECONDS: Final = 5.0
_TICK_SECONDS: Final = 0.2
_PAUSED_SECONDS: Final = 1.0
PATIENCE: Final = 2.0
"""How long a sink may take for an ack, or for an answer to a check."""
_JOIN_SECONDS: Final = 1.0
"""How long a join may keep the writers out; it begins if half of that is likely to do."""
_JOIN_MESSAGES: Final = (1_000, backlog.ROWS)
_PIECE: Final = 1_000
_BACKOFF_SECONDS: Final = (0.1, 2.0)
_SOON_SECONDS: Final = 60.0
_WAIT_SECONDS: Final = (1.0, 60.0)
_ON_PURPOSE: Final = ON_PURPOSE | {backlog.RESUMED.code}
_NOTHING: Final = pa.RecordBatch.from_pylist([], schema=WIRE_SCHEMA)

log = structlog.get_logger("penstock")


class Drainer:
    """Drains the backlog of one sink, in a thread, from `begin` until the sink has none.

    Args:
        store: Connections to the store.
        target: The sink itself, for the drainer alone.
        detach_after: How long it may be behind before it is reported as detached.
        on_report: Called from the drainer's thread with reports for `/status` and `/metrics`.
        of: What waits for it, for the drainer alone.
        done: Returns up to where all parts of all rounds, of the stream, have ended; None: none has.
        on_idle: Called at the end of the thread.
    """

    def __init__(
        self,
        store: StorePool,
        target: Sink,
        detach_after: timedelta,
        on_report: Callable[[Report], object],
        of: SinkBacklog,
        done: Callable[[], Position | None],
        on_idle: Callable[[], object],
    ) -> None:
        self._store = store
        self._backlog = of
        self._rewinds = of.rewinds
        self.source_id = of.source_id
        self.sink = of.name
        self._target = target
        self._on_report = on_report
        self._done = done
        self._on_idle = on_idle
        self._stopping = threading.Event()
        self._poked = threading.Event()
        self._state = ReportedState(store, of, detach_after, on_report)
        self._answers = False
        self._at_once, _ = _JOIN_MESSAGES
        self._delivered = Delivered()
        self._joined_at = float("-inf")
        self._wait = 0.0
        self._store_failed = False
        self._thread: threading.Thread | None = None
        self.is_busy = False
        """Whether its thread is at work."""

    # -- for `Drainers`

    def begin(self) -> None:
        """Begin to drain: the sink is behind, or a consumer is asked for something."""
        self.is_busy = True
        self._thread = threading.Thread(target=self._run, name=f"drain {self.sink}", daemon=True)
        self._thread.start()

    def ask_to_end(self) -> None:
        """Have the thread end, without waiting for it; what it is about to deliver stays."""
        self._stopping.set()
        self._poked.set()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """Close the sink."""
        self._target.close()

    def poke(self) -> None:
        """Have the thread read at once what there is to do."""
        self._poked.set()

    def note_attached(self, done: Position | None) -> None:
        """Note that the sink was not behind when all up to `done` had ended; it is not busy."""
        if done is not None:
            self._delivered.note_counted(done)

    @property
    def is_paused(self) -> bool:
        """Whether someone has paused it."""
        return self._backlog.paused

    # -- the thread

    def _run(self) -> None:
        try:
            self._drain()
        finally:
            self._target.close()
            self.is_busy = False
            self._on_idle()

    def _drain(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS)
        while not self._stopping.is_set():
            try:
                busy = self._step()
                if self._store_failed:
                    self._store_failed = False
                    self._on_report(reports.STORE_WORKS)
                backoff.reset()
            except StoreError as error:
                if self._stopping.is_set():
                    return
                self._store_failed = True
                self._on_report(reports.store_failure(error))
                self._stopping.wait(backoff.after_failure())
                continue
            except _Stopped:
                return
            except _Changed:
                continue
            except Exception:
                log.exception("the backlog is not drained", sink=self.sink)
                self._stopping.wait(_FAILED_SECONDS)
                continue
            if self._state.is_attached:
                return
            if not busy:
                self._poked.wait(_PAUSED_SECONDS if self._backlog.paused else _TICK_SECONDS)
                self._poked.clear()

    def _step(self) -> bool:
        """Do the next thing; return whether there is more to do at once."""
        done, taken = self._done(), None
        with self._store.lend() as connection:
            behind = self._backlog.attend(connection, done)
            if behind is not None and done is not None and not self._backlog.paused:
                taken = self._backlog.take(connection, behind, done)
        self._note_rewind()
        self._update_state(behind)
        if behind is None:
            if done is not None:
                self._delivered.note_counted(done)
            return False
        if taken is not None:
            self._note_oldest(taken, 0)
            self._deliver(self._delivered.missing(taken.messages))
            self._report_delivered(_NOTHING, _NOTHING, Written(dead=[*taken.dead]))
            self._delivered.note_counted(taken.end)
            with self._store.lend() as connection:
                backlog.drained(connection, self.source_id, self.sink, taken.end)
            self._delivered.forget(taken.end)
            self._note_oldest(taken, -1)
            behind = behind._replace(drained=taken.end)
            # A stream always has more, under a steady load.
            left = done is not None and taken.end < done
            if behind.stream_id is None or left or taken.messages.num_rows > _PIECE:
                return True
        if (
            self._backlog.paused
            or done is None
            or time.monotonic() < self._state.since + self._wait
        ):
            return False
        return self._join(behind)

    def _deliver(self, messages: pa.RecordBatch) -> None:
        """Deliver all of `messages`, however long it takes; raises `_Stopped`."""
        backoff = Backoff(*_BACKOFF_SECONDS)
        while messages.num_rows:
            try:
                started = time.monotonic()
                self._report_delivered(messages, _NOTHING, self._target.write(messages, PATIENCE))
                self._answers = True
                per_second = messages.num_rows / max(time.monotonic() - started, 1e-6)
                least, most = _JOIN_MESSAGES
                self._at_once = min(max(least, int(per_second * _JOIN_SECONDS / 2)), most)
                return
            except Unfinished as unfinished:
                self._answers = False
                self._report_delivered(messages, unfinished.rest, unfinished.written)
                if unfinished.written.delivered:  # it may be taken again, where the store fails
                    self._delivered.note_ahead(messages, unfinished.rest, unfinished.written)
                messages = unfinished.rest
                delay = backoff.after_failure(messages.num_rows)
                self._report_error(unfinished.error, delay)
            if self._stopping.wait(delay):
                raise _Stopped
            with self._store.lend() as connection:
                behind = self._backlog.attend(connection, self._done())
            self._update_state(behind)
            if self._backlog.paused or self._backlog.rewinds != self._rewinds:
                raise _Changed

    def _join(self, behind: Behind) -> bool:
        """Deliver what is left with the writers out, and join; return whether that went well."""
        if not self._answers:
            # It has delivered nothing, and has nothing left that it may deliver: does the sink live?
            try:
                self._target.check(PATIENCE)
            except Unfinished as unfinished:
                self._report_error(unfinished.error, _TICK_SECONDS)
                return False
        with self._store.lend() as connection:
            # A replay may have brought again what was delivered before.
            backlog.drop(connection, self.source_id, self.sink, behind.drained)
            waiting, _ = self._backlog.size(connection)
            if waiting > self._at_once or (waiting and not self._answers):
                return False
        try:
            with self._store.lend() as connection, connection.transaction():
                lock_writers(connection, self.source_id)
                row = backlog.behind(connection, self.source_id, self.sink)
                if not self._deliver_rest(connection, row):
                    return False  # reports sent in here stay as they are
                backlog.join(connection, self.source_id, self.sink)
        except StoreError as error:
            if error.code == "locked":
                return False
            raise
        self._delivered.forget()
        self._joined_at = time.monotonic()
        self._update_state(None)
        self._target.close()
        return True

    def _deliver_rest(self, connection: Connection, behind: Behind | None) -> bool:
        """Deliver all that waits, the writers being out, and return whether that went well and soon."""
        deadline = time.monotonic() + _JOIN_SECONDS
        # More may have come before the writers were out.
        waiting, _ = self._backlog.size(connection)
        if waiting > self._at_once:
            return False
        while behind is not None and (taken := self._backlog.take(connection, behind)) is not None:
            messages = self._delivered.missing(taken.messages)
            for first in range(0, messages.num_rows, _PIECE):
                piece, left = messages.slice(first, _PIECE), deadline - time.monotonic()
                if left <= 0:
                    return False
                try:
                    written = self._target.write(piece, left)
                except Unfinished as unfinished:
                    self._answers = False
                    self._delivered.note_ahead(piece, unfinished.rest, unfinished.written)
                    self._report_delivered(piece, unfinished.rest, unfinished.written)
                    self._report_error(unfinished.error, _TICK_SECONDS)
                    return False
                self._delivered.note_ahead(piece, _NOTHING, written)
                self._report_delivered(piece, _NOTHING, written)
            self._report_delivered(_NOTHING, _NOTHING, Written(dead=[*taken.dead]))
            behind = behind._replace(drained=taken.end)
        return True

    # -- reports

    def _note_oldest(self, taken: Taken, row: int) -> None:
        """Note that no message which waits was committed before this one."""
        if taken.messages.num_rows:
            self._state.oldest = backlog.commit_time(taken.messages, row)

    def _note_rewind(self) -> None:
        """Forget what was delivered before a rewind: it is to be delivered again."""
        if self._backlog.rewinds != self._rewinds:
            self._rewinds = self._backlog.rewinds
            self._delivered.forget()

    def _update_state(self, behind: Behind | None) -> None:
        if not self._state.update(behind):
            return
        self._answers = False
        self._target.close()  # what was idle may have lost its server
        failed = behind is not None and behind.code not in _ON_PURPOSE
        soon = failed and time.monotonic() - self._joined_at < _SOON_SECONDS
        first, most = _WAIT_SECONDS
        self._wait = min(max(first, 2 * self._wait), most) if soon else 0.0

    def _report_delivered(
        self, messages: pa.RecordBatch, rest: pa.RecordBatch, written: Written
    ) -> None:
        """Report the outcome of `messages`, of which `rest` is left."""
        if not written.delivered and not written.dead:
            return
        again = self._delivered.counted(messages) - self._delivered.counted(rest)
        if written.dead:
            self._store.letters.add(self.sink, written.dead, self._backlog.kind)
        written = replace(written, delivered=max(written.delivered - again, 0))
        self._on_report(reports.outcome(self.sink, written, kept=True))

    def _report_error(self, error: SinkError, seconds: float) -> None:
        self._on_report(reports.retry(self.sink, error, seconds))


class _Stopped(Exception):  # noqa: N818 - no error
    """The drainer was asked to end."""


class _Changed(Exception):  # noqa: N818 - no error
    """What is to be delivered has changed."""
