"""The thread that hands a capture's rounds to the lanes of long batches, and confirms what they report.

A batch's tasks take rounds until it ends: after a set time, when the run drains, when a table of the
sinks' expressions was altered, when all is read that was to be read, or when the capture has failed.

docs/performance.md has what a round of one message costs, process by process.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from penstock.backfill.read.chunk import with_messages
from penstock.core.errors import CaptureError
from penstock.core.message import Position
from penstock.postgres.capture import Capture
from penstock.postgres.chunk import Chunk
from penstock.postgres.reads import Reads
from penstock.spark.lane_server import Event, Joined, LaneServer, Lost, await_open
from penstock.spark.lanes import LAST, MORE
from penstock.spark.rounds import PendingPart, Rounds
from penstock.spark.settled import Settled, Settlement

_INTERVAL: Final = 0.003
"""Between two rounds, in seconds: what comes within it shares what a round costs."""
_STREAMS_INTERVAL: Final = 0.005
"""The same where streams are written: a round costs a transaction, and each of its consumers a step."""
_FULL_ROWS: Final = 500
"""A round of so many messages needs no pause behind it, and may wait in its lane for the one before."""
_IDLE_SECONDS: Final = 1.0

log = structlog.get_logger("penstock.rounds")


class RoundLoop:
    """Runs from `start` until `close`; `open` begins a batch, `attach` gives it what to hand out.

    Args:
        host: Where executors reach this process.
        max_rows: The most messages in a round.
        in_step: See `Rounds`.
        seconds: How long a batch lasts, about.
        on_settled: Called from the thread before what is done is confirmed to the server.
        on_failed_reads: Called from the thread where no messages could be made of a backfill's reads.
        on_joined: Called from the thread when a lane has joined, with how many are there.
        on_drained: Called from the thread once nothing is handed out any more and all that was is done.
        reported: Whether the tasks report what they have delivered; otherwise a batch is done when Spark
            reports it, and has at most `batch_rows` messages.
        batch_rows: See `reported`.
    """

    def __init__(
        self,
        *,
        host: str,
        max_rows: int,
        in_step: bool,
        seconds: float,
        on_settled: Callable[[Settled], None],
        on_failed_reads: Callable[[Reads, Exception], None],
        on_joined: Callable[[int], None] = lambda _: None,
        on_drained: Callable[[], None] = lambda: None,
        reported: bool = True,
        batch_rows: int = 0,
    ) -> None:
        self._capture: Capture | None = None
        self._attached: tuple[Capture, int | None] | None = None
        self._server = LaneServer(host, reports=reported)
        self._rounds = Rounds(in_step=in_step)
        self._interval = _STREAMS_INTERVAL if in_step else _INTERVAL
        self._is_small = True  # the last round
        self._max_rows = max_rows
        self._seconds = seconds
        self._settlement = Settlement(on_settled)
        self._on_failed_reads = on_failed_reads
        self._on_joined = on_joined
        self._on_drained = on_drained
        self._until_lsn: int | None = None
        self._reported = reported
        self._batch_rows = batch_rows
        self._ends_by_itself = batch_rows > 0
        self._position = self._rounds.confirmed  # the end of what is handed out
        self._joined: set[int] = set()
        self._drained = False
        self._linger = self._lingers_until = 0.0
        self._not_before = 0.0
        self._sent: list[PendingPart] = []
        self._opened: tuple[int, float] | None = None  # the batch, and when its first lane came
        self._rows = 0  # of this batch
        self._ends: dict[int, Position] = {}  # of the last batches
        self._ending = False
        self._armed = False
        self._unread = True  # the capture may have read something since the last hand-out
        self._more = True  # that one may have left something
        self._closed = False
        self.joined = False
        """Whether a lane's task has connected to its sinks."""
        self.draining = False
        """Set to hand nothing more out."""
        self.finished = False
        """Whether there is nothing more to hand out, for ever."""
        self.failure: CaptureError | None = None
        """What ended the capture, or the loop."""
        self._requests: list[tuple[int, threading.Event]] = []
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)

    @property
    def address(self) -> str:
        """Where lanes connect."""
        return self._server.address

    @property
    def done(self) -> Position | None:
        """Up to where all is in the sinks, and counted: the next query goes on behind it."""
        return self._settlement.settled

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def attach(self, capture: Capture, until_lsn: int | None = None) -> None:
        """Hand out what a capture reads, up to the WAL's end `until_lsn`, if that is given; once."""
        self._attached = capture, until_lsn
        capture.on_read = self._wake
        self._server.wake()

    def open(self, batch: int) -> None:
        """Begin a batch; its lanes come by themselves, once this returns."""
        opened = threading.Event()
        self._requests.append((batch, opened))
        self._server.wake()
        await_open(opened, self._thread)

    def drain(self, linger: float = 0.0) -> None:
        """Hand nothing more out; when all that was is done, the batch ends, so many seconds later."""
        if not linger:
            self._lingers_until = 0.0
        elif not self.draining:  # else it is asked for again
            self._linger, self._lingers_until = linger, math.inf
        self.draining = True
        self._server.wake()

    def fail(self, error: CaptureError) -> None:
        """End with an error."""
        self.failure = error
        self._server.wake()

    def confirm(self, batch: int) -> None:
        """Note that Spark is done with a batch that has ended, where tasks report nothing."""
        if (end := self._ends.get(batch)) is not None and self._capture is not None:
            self._capture.confirm(end)

    def close(self) -> None:
        """End the thread, and hang up on the lanes."""
        self._closed = True
        self._server.wake()
        self._thread.join(5)
        self._server.close()

    def _wake(self) -> None:
        self._unread = True
        if self._armed:
            self._armed = False
            self._server.wake()

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._armed = True
                if self._attached is not None and self._capture is None:
                    self._begin(*self._attached)
                self._hand_out()
                self._settle()
                self._end()
                for event in self._server.poll(self._pause()):
                    self._handle(event)
                while self._requests:
                    batch, opened = self._requests.pop(0)
                    self._open(batch)
                    opened.set()
        except Exception as error:
            log.exception("rounds failed")
            self.failure = CaptureError(
                "internal",
                f"The hand-out of rounds failed: {type(error).__name__}: {error}.",
                remedy="This is a defect of penstock; the log has its trace. Nothing was confirmed"
                " wrongly.",
            )
            self._server.close()  # so that the tasks end, and the query with them

    def _begin(self, capture: Capture, until_lsn: int | None) -> None:
        self._capture, self._until_lsn = capture, until_lsn
        self._ends_by_itself = self._ends_by_itself or until_lsn is not None
        self._rounds.begin(capture.start)
        self._position = capture.start
        self._settlement.begin(capture.start, capture.confirm)
        if self._opened is not None and self._joined:
            self._opened = self._opened[0], time.monotonic()

    def _open(self, batch: int) -> None:
        self._opened = batch, math.inf
        self._rows = 0
        self._ending = False
        self._server.open(batch)

    def _pause(self) -> float:
        if self._sent and not self._server.unsent:
            return 0.0
        now, until = time.monotonic(), _IDLE_SECONDS
        if self._reported:
            until = min(until, self._settlement.due_in(self._rounds.confirmed, now))
        if self._lingers:
            until = min(until, self._lingers_until - now)
        # A wake for nothing costs as much as a report. So what is read wakes this thread only where it
        # can be handed out now, and the end of an interval does where there is something.
        self._armed = self._may_hand_out()
        looks = self._unread or self._more or self._ends_by_itself
        if looks and self._not_before > now and self._armed:
            self._armed = False
            until = min(until, self._not_before - now)
        return max(until, 0.0)

    def _may_hand_out(self) -> bool:
        is_open = self._capture is not None and self._opened is not None
        return is_open and not self._ending and self._has_room

    @property
    def _has_room(self) -> bool:
        """Whether a round may be handed out: where they are small, what would queue shares the next."""
        return self._rounds.has_room and not (self._is_small and self._rounds.would_queue)

    def _handle(self, event: Event) -> None:
        match event:
            case Joined(lane):
                self.joined = True
                if self._opened is not None and self._opened[1] == math.inf:
                    # Its tasks may have waited for slots longer than a batch lasts.
                    self._opened = self._opened[0], time.monotonic()
                self._send(self._rounds.join(lane))
                self._joined.add(lane)
                self._on_joined(len(self._joined))
            case Lost(lane):
                self._joined.discard(lane)
                self._send(self._rounds.lose(lane))
            case _:
                self._note(*event.report)

    def _note(
        self,
        id_: int,
        counts: dict[str, list[int]],
        outcomes: dict[str, tuple[int, int]],
        behind: bool | None,
    ) -> None:
        """Take a task's report of a part."""
        end = self._rounds.end_of(id_)
        more = self._rounds.done(id_, behind)
        if end is None:
            return
        self._settlement.add(end, counts, outcomes)
        self._send(more)

    def _hand_out(self) -> None:
        """Hand out what there is, as far as there is room."""
        self._check_sent()
        capture = self._capture
        while capture is not None and self._may_hand_out() and time.monotonic() >= self._not_before:
            if self.draining or self._is_over():
                self._ending = not self._lingers
                return
            try:
                self._unread = False
                end, chunks, self._more = capture.hand_out(self._position, self._max_rows)
            except CaptureError as error:
                self.failure, self._ending = error, True
                return
            if not chunks:
                self._ending = self._has_all(capture)
                return
            chunks = [self._whole(chunk, capture.options.splits) for chunk in chunks]
            start, self._position = self._position, end
            rows = sum(chunk.rows for chunk in chunks)
            self._rows += rows
            self._is_small = rows < _FULL_ROWS
            if self._is_small:
                self._not_before = time.monotonic() + self._interval
            self._send(self._rounds.offer(start, end, chunks))

    def _whole(self, chunk: Chunk, splits: int) -> Chunk:
        """Return a chunk with its messages; one of a backfill has them from here on."""
        reads = chunk.reads
        if reads is None:
            return chunk
        try:
            return with_messages(chunk, splits)
        except Exception as error:  # whatever it is, the live messages go on
            log.exception("no messages could be made of a backfill's rows")
            self._on_failed_reads(reads, error)
            return chunk.emptied()

    @property
    def _lingers(self) -> bool:
        return self.draining and time.monotonic() < self._lingers_until

    def _is_over(self) -> bool:
        assert self._opened is not None  # noqa: S101 - a batch is open
        over = time.monotonic() - self._opened[1] >= self._seconds
        return over or bool(self._batch_rows and self._rows >= self._batch_rows)

    def _has_all(self, capture: Capture) -> bool:
        """Return whether nothing more is to be handed out, for ever."""
        if capture.altered() is not None or (
            self._until_lsn is not None and capture.has_read(self._until_lsn)
        ):
            self.finished = True
        return self.finished

    def _send(self, parts: Sequence[PendingPart]) -> None:
        for part in parts:
            *values, last = part.packed()
            for value in values:
                self._server.send(part.lane, MORE, value)
            self._server.send(part.lane, LAST, last)
        if not self._reported:
            self._sent += parts

    def _check_sent(self) -> None:
        """Where tasks report nothing: what they have taken is done, as far as the lanes know."""
        if self._sent and not self._server.unsent:
            sent, self._sent = self._sent, []
            for part in sent:
                self._send(self._rounds.done(part.meta.id))

    def _settle(self, *, now: bool = False) -> None:
        if not self._reported:
            return
        now = now or self._rounds.was_awaited
        if self._settlement.settle(self._rounds.confirmed, now=now):
            self._rounds.was_awaited = False

    def _end(self) -> None:
        """End the batch, where it is to end and all of it is done."""
        stuck = self._capture is None or not self._has_room
        if not self._ending and self._opened is not None and stuck:
            # Nothing can be handed out, perhaps for long: a sink that hangs, or a lane that starts.
            ends = (self.draining and not self._lingers) or self.failure is not None
            self._ending = ends or (self._is_over() and self._rounds.is_idle)
        if self._opened is not None and self._ending and self._rounds.is_idle:
            self._end_batch(self._opened[0])
        over = self._opened is None or self._lingers
        if self.draining and not self._drained and over and self._rounds.is_idle:
            self._settle(now=True)
            self._drained = True
            self._on_drained()
            self._lingers_until = time.monotonic() + self._linger

    def _end_batch(self, batch: int) -> None:
        self._settle(now=True)
        self._ends = {
            **dict(list(self._ends.items())[-1:]),
            batch: self._rounds.confirmed,
        }
        self._opened = None
        self._rounds.close()
        self._joined.clear()
        self._server.end()
