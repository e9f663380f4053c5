"""The drainer of a sink: delivers its backlog in order, and lets it join the live flow again.

It works in `penstock run`, in a thread for each NATS sink, and reads the store alone: a sink has a
row in `penstock.backlogs` while it is behind. What it delivers lies within what the capture has
reported as wholly done: a task that is under way, or comes again, may still add messages before
others that are there. So one position holds all that was delivered, and outlives any crash.

To join it keeps the source's writers out, delivers the few messages that are left, and takes the row
away: the next writer delivers directly. It does so only with a sink that has just taken messages, and
with no more of them than that takes soon; a sink that soon falls behind again joins later each time.
What a failed try to join has delivered lies beyond what is wholly done, so no position holds it; it is
known here, and a run that ends meanwhile repeats it.

A consumer of type nats is drained like a sink: what it has not had lies in its stream, or in blocks
(`penstock.sinks.backlog.consumer`).
"""

from __future__ import annotations

import contextlib
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
from penstock.sinks.backlog.store import Behind, Connection
from penstock.streams.nats_consumers import ON_PURPOSE
from penstock.streams.segments import lock_writers
from penstock.streams.store import Store

_POLL_SECONDS: Final = 2.0
"""How often it reads whether the sink is behind, or checks that a sink that is not answers."""
_FAILED_SECONDS: Final = 5.0
_TICK_SECONDS: Final = 0.2
_PATIENCE: Final = 2.0
_JOIN_SECONDS: Final = 1.0
"""How long a join may keep the writers out; it begins if half of that is likely to do."""
_JOIN_MESSAGES: Final = (1_000, backlog.ROWS)
_PIECE: Final = 1_000
_BACKOFF_SECONDS: Final = (0.1, 2.0)
_SOON_SECONDS: Final = 60.0
_WAIT_SECONDS: Final = (1.0, 60.0)
_NOTHING: Final = pa.RecordBatch.from_pylist([], schema=WIRE_SCHEMA)

log = structlog.get_logger("penstock")


class Drainer:
    """Drains the backlog of one sink, in a thread, from `start` to `stop`.

    Args:
        url: The store's.
        source_id: The source's in the store.
        sink: The sink's name.
        target: The sink itself, for the drainer alone.
        detach_after: How long it may be behind before it is reported as detached.
        on_report: Called from the drainer's thread with reports for `/status` and `/metrics`.
        of: What waits for it, for the drainer alone; by default its blocks.
    """

    def __init__(
        self,
        url: str,
        source_id: int,
        sink: str,
        target: Sink,
        detach_after: timedelta,
        on_report: Callable[[Report], object],
        of: SinkBacklog | None = None,
    ) -> None:
        self._store = Store(url)
        self._backlog = of = of or SinkBacklog(source_id, sink)
        self._rewinds = of.rewinds
        self._source_id = source_id
        self._sink = sink
        self._target = target
        self._on_report = on_report
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._wakes = 1
        self._wakes_read = 0  # when it last read whether the sink is behind
        self._done: Position | None = None
        self._state = ReportedState(self._store, of, detach_after, on_report)
        self._answers = False
        self._at_once, _ = _JOIN_MESSAGES
        self._delivered = Delivered()
        self._joined_at = float("-inf")
        self._wait = 0.0
        self._store_failed = False
        self._checked_at = 0.0
        self._check_failed = False
        self._thread = threading.Thread(target=self._run, name=f"drain {sink}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask_to_end(self) -> None:
        """Have the thread end, without waiting for it."""
        self._stopping.set()
        self._wake.set()

    def stop(self) -> None:
        """End the thread; what it is about to deliver stays in the backlog."""
        self.ask_to_end()
        with contextlib.suppress(RuntimeError):  # never started
            self._thread.join(2 * _PATIENCE)
            self._store.close()  # which ends what it waits for
            self._thread.join(_PATIENCE)
        self._store.close()
        self._target.close()

    def wake(self) -> None:
        """Have it read whether the sink is behind."""
        self._wakes += 1
        self._wake.set()

    def done(self, position: Position) -> None:
        """Note that all parts of all rounds up to `position`, of the stream, have ended."""
        self._done = position
        if not self._state.is_attached:
            self._wake.set()

    def is_attached(self) -> bool:
        """Whether the sink has no backlog; False where it has not read that since `wake`."""
        return self._wakes_read == self._wakes and self._state.is_attached

    @property
    def is_paused(self) -> bool:
        """Whether it is a consumer's that is paused."""
        return self._backlog.paused

    # -- the thread

    def _run(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS)
        while not self._stopping.is_set():
            try:
                busy = self._step()
                if self._store_failed:
                    self._store_failed = False
                    self._on_report(reports.STORE_WORKS)
                backoff.reset()
            except StoreError as error:
                self._store_failed = True
                self._on_report(reports.store_failure(error))
                self._stopping.wait(backoff.after_failure())
                continue
            except _Stopped:
                return
            except _Changed:
                continue
            except Exception:
                log.exception("the backlog is not drained", sink=self._sink)
                self._stopping.wait(_FAILED_SECONDS)
                continue
            if not busy:
                self._wake.wait(_POLL_SECONDS if self._state.is_attached else _TICK_SECONDS)
                self._wake.clear()

    def _step(self) -> bool:
        """Do the next thing; return whether there is more to do at once."""
        wakes, done, taken = self._wakes, self._done, None
        with self._store.connection() as connection:
            behind = self._backlog.attend(connection, done)
            if behind is not None and done is not None and not self._backlog.paused:
                taken = self._backlog.take(connection, behind, done)
        self._note_rewind()
        self._update_state(behind)
        self._wakes_read = wakes
        if behind is None:
            if done is not None:
                self._delivered.note_counted(done)
            self._check()
            return False
        if taken is not None:
            self._deliver(self._delivered.missing(taken.messages))
            self._report_delivered(_NOTHING, _NOTHING, Written(dead=[*taken.dead]))
            self._delivered.note_counted(taken.end)
            with self._store.connection() as connection:
                backlog.drained(connection, self._source_id, self._sink, taken.end)
            self._delivered.forget(taken.end)
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

    def _check(self) -> None:
        """Check that the sink answers: one that gets no messages has no other check."""
        now = time.monotonic()
        if now < self._checked_at + _POLL_SECONDS:
            return
        self._checked_at = now
        try:
            self._target.check(_PATIENCE)
        except Unfinished as unfinished:
            self._check_failed = True
            self._report_error(unfinished.error, _POLL_SECONDS)
        else:
            if self._check_failed:
                self._check_failed = False
                self._on_report(reports.outcome(self._sink, Written()))

    def _deliver(self, messages: pa.RecordBatch) -> None:
        """Deliver all of `messages`, however long it takes; raises `_Stopped`."""
        backoff = Backoff(*_BACKOFF_SECONDS)
        while messages.num_rows:
            try:
                started = time.monotonic()
                self._report_delivered(messages, _NOTHING, self._target.write(messages, _PATIENCE))
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
            with self._store.connection() as connection:
                behind = self._backlog.attend(connection, self._done)
            self._update_state(behind)
            if self._backlog.paused or self._backlog.rewinds != self._rewinds:
                raise _Changed

    def _join(self, behind: Behind) -> bool:
        """Deliver what is left with the writers out, and join; return whether that went well."""
        if not self._answers:
            # It has delivered nothing, and has nothing left that it may deliver: does the sink live?
            try:
                self._target.check(_PATIENCE)
            except Unfinished as unfinished:
                self._report_error(unfinished.error, _TICK_SECONDS)
                return False
        with self._store.connection() as connection:
            # A replay may have brought again what was delivered before.
            backlog.drop(connection, self._source_id, self._sink, behind.drained)
            waiting, _ = self._backlog.size(connection)
            if waiting > self._at_once or (waiting and not self._answers):
                return False
        try:
            with self._store.connection() as connection, connection.transaction():
                lock_writers(connection, self._source_id)
                row = backlog.behind(connection, self._source_id, self._sink)
                if not self._deliver_rest(connection, row):
                    return False  # reports sent in here stay as they are
                backlog.join(connection, self._source_id, self._sink)
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
        failed = behind is not None and behind.code not in ON_PURPOSE
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
            self._store.letters.add(self._sink, written.dead)
        written = replace(written, delivered=max(written.delivered - again, 0))
        self._on_report(reports.outcome(self._sink, written, kept=True))

    def _report_error(self, error: SinkError, seconds: float) -> None:
        self._on_report(reports.retry(self._sink, error, seconds))


class _Stopped(Exception):  # noqa: N818 - no error
    """The drainer was asked to end."""


class _Changed(Exception):  # noqa: N818 - no error
    """What is to be delivered has changed."""
