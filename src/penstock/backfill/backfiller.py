"""Runs backfills in a thread beside the capture: chunk after chunk, until a table is read.

The thread alone owns the state. Whoever calls, and the capture, put what they have to say into its
queue, so that no lock is held while another is waited for.
"""

from __future__ import annotations

import queue
import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

import orjson
import psycopg
import structlog

from penstock.backfill import cursors, inspect, ranges
from penstock.backfill.course import Again, Flight, Kept, Run, Start, Told
from penstock.backfill.events import (  # fmt: skip
    Delivered,
    Done,
    Event,
    Failed,
    Planned,
    Started,
    Troubled,
)
from penstock.backfill.planner import KEYS, Interrupted, Planner, Seen, is_near
from penstock.backfill.pool import Pool
from penstock.backfill.session import FEW_TIMES, SQL, backfill_error, internal_error, known
from penstock.backfill.sizing import REST, Sizing
from penstock.core.errors import BackfillError, CaptureError
from penstock.postgres.capture import Capture, ReadsEvent
from penstock.postgres.reads import BackfillSpec, Cursor, Place, Reads, Source
from penstock.postgres.watermarks import Watch, Watermark

_LONGEST_REST: Final = 2.0
_AHEAD: Final = 2  # chunks, and so snapshots, at a time
_BACKOFF_SECONDS: Final = (0.2, 15.0)
_SNAPSHOT_SECONDS: Final = 60.0
_ALONE_SECONDS: Final = 1.0  # for which a chunk's lock may keep others waiting
_STILL_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_PLAN_SECONDS: Final = 1.0
_TELL_SECONDS: Final = 10.0
_NEAR_PAUSE: Final = 0.2
_KEPT_SECONDS: Final = 900.0
_CONNECTED_SECONDS: Final = 0.05

log = structlog.get_logger("penstock.backfill")


_Item = Start | Again | Told | None


class Backfiller:
    """Runs backfills, one at a time, through `capture`, in a thread of its own.

    A chunk comes out of `Capture.take` as the only one of its batch, with `Chunk.reads`; the batch
    has one task for each of `reads.ranges`, which calls `read_range`. When the batch is confirmed,
    the chunk counts as delivered.

    Args:
        capture: The source's capture; it gives the URL, the publication and the number of splits.
        on_event: Called from the backfiller's thread with each event, in order; must not block for
            long and must not raise.
    """

    def __init__(self, capture: Capture, on_event: Callable[[Event], None]) -> None:
        self._capture = capture
        self._on_event = on_event
        self._url = capture.options.url
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._attempts = 0
        self._paused = threading.Event()
        self._commanded = threading.Event()
        self._closing = False
        # The thread's own:
        self._run: Run | None = None
        self._waiting: Start | None = None
        self._kept: Kept | None = None
        self._pool = Pool(self._url)
        self._tried: dict[str, int] = {}
        self._seen = Seen()
        self._sizing = Sizing()
        self._live = True
        self._rest_until = 0.0
        self._captured = 0
        self._delay = self._not_before = 0.0
        self._troubled = False
        self._run_name = secrets.token_hex(16)
        capture.on_reads = self._tell
        self._thread = threading.Thread(target=self._main, name="backfill", daemon=True)
        self._thread.start()

    # -- for whoever runs it, from any thread

    def start(self, spec: BackfillSpec, cursor: Place = None) -> int:
        """Begin a backfill behind `cursor`, in the place of the one under way, if there is one.

        Returns the attempt's number, which all its events and chunks carry; where the backfiller
        goes back by itself (`Started` tells), it takes a higher one. Does not wait: what is wrong
        with the table comes as `Failed`. A paused backfiller runs again.
        """
        with self._lock:
            attempt = self._next_attempt()
            self._paused.clear()
            self._put(Start(spec, cursor, attempt))
        return attempt

    def pause(self) -> None:
        """Plan no more chunks; those that are planned are delivered, and told."""
        self._paused.set()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused.clear()
        self._queue.put(None)

    def cancel(self) -> None:
        """Give up what is under way, without an event; its tasks will find no snapshot."""
        with self._lock:
            self._next_attempt()
            self._put(None)

    def close(self) -> None:
        """Cancel, and end the thread."""
        with self._lock:
            self._closing = True
            self._next_attempt()
            self._put(None)
        self._thread.join(timeout=15)

    def _next_attempt(self) -> int:
        self._attempts += 1
        return self._attempts

    def _put(self, command: Start | None) -> None:
        self._commanded.set()
        self._queue.put(command)
        self._pool.interrupt()

    # -- for the capture, which holds its lock

    def _tell(self, what: ReadsEvent, reads: Reads) -> None:
        self._queue.put(Told(what, reads.attempt, reads.chunk))

    def _passed(self, mark: Watermark) -> None:
        if mark.reads is None:
            self._queue.put(Again(mark.attempt))

    # -- the thread

    def _main(self) -> None:
        while True:
            try:
                if self._take_orders():
                    return
                self._step()
            except Interrupted:
                continue
            except BackfillError as error:
                self._trouble(error)
            except CaptureError as error:
                self._trouble(known(error))
            except psycopg.Error as error:
                if not self._commanded.is_set():  # else what ran was to end
                    self._trouble(backfill_error(error))
            except Exception as error:
                log.exception("backfill failed")
                self._trouble(internal_error(error))

    def _take_orders(self) -> bool:
        """Handle all that waits, blocking if there is nothing to do; return whether to end."""
        timeout = self._idle_seconds()
        while True:
            try:
                item = self._queue.get(timeout > 0, min(timeout, 60.0))
            except queue.Empty:
                return False
            timeout = 0.0
            with self._lock:
                self._commanded.clear()
                newest = self._attempts
            if self._closing:
                self._end()
                return True
            if self._run is not None and self._run.attempt < newest:
                self._give_up()
                self._pool.close()
            if self._waiting is not None and self._waiting.attempt < newest:
                self._waiting = None
                self._pool.close()
            if isinstance(item, Start) and item.attempt == newest:
                self._waiting = item
                self._delay = self._not_before = 0.0
                self._tried.clear()
            elif isinstance(item, Again):
                if self._run is not None and self._run.attempt == item.attempt:
                    self._go_back()
            elif isinstance(item, Told):
                self._told(item)

    def _idle_seconds(self) -> float:
        """Return for how long there is nothing to do unless somebody says so."""
        if self._waiting is not None:
            return max(self._not_before - time.monotonic(), _CONNECTED_SECONDS)
        run = self._run
        if run is None:
            return 60.0
        if self._is_done(run):
            return 0.0
        if run.planned is not None and not run.flights:
            return max(self._rest_until - time.monotonic(), 0.0)
        return max(run.retry_at - time.monotonic(), 0.0) if self._may_plan(run) else _LOOK_SECONDS

    def _step(self) -> None:
        """Do the next thing: begin, plan, or end."""
        if self._waiting is not None and time.monotonic() >= self._not_before:
            self._begin(self._waiting)
        run = self._run
        if run is None:
            kept = self._kept
            if kept is not None and self._waiting is None and time.monotonic() > kept.until:
                self._forget()
            return
        if self._is_done(run):
            self._send(Done(run.spec.id, run.attempt, run.chunks))
            self._end()
        elif self._may_plan(run) and time.monotonic() >= run.retry_at:
            self._plan(run)
        else:
            self._emit_if_due(run)
            self._expire(run)

    def _begin(self, start: Start) -> None:
        with self._capture.decoder() as decoder:
            database, tag = decoder.source
        if not tag:
            return  # the capture has not connected yet
        spec = start.spec
        holder = self._pool.holder()
        self._pool.free(holder)
        # First, so that a change in between shows: nothing is locked yet.
        fingerprint = inspect.fingerprint(holder.connection, self._capture.options, spec)
        source = inspect.look(holder.connection, self._capture.options, spec, database, tag)
        self._go_on_unless_commanded()
        cursor = cursors.restored(start.cursor, source, spec)
        planner = Planner(source, spec, cursor, self._capture.options.splits)
        self._go_on_unless_commanded()
        watch = self._watch(start, source)
        self._waiting = None
        self._run = Run(spec, start.attempt, start.cursor, source, fingerprint, planner, watch)
        self._sizing = Sizing()
        self._live, self._captured = True, self._capture.stats.captured
        self._rest_until = 0.0
        self._send(Started(spec.id, start.attempt))

    def _go_on_unless_commanded(self) -> None:
        if self._commanded.is_set():
            raise Interrupted

    def _watch(self, start: Start, source: Source) -> Watch:
        """Have the decoder note what changes; it goes on with what it noted for the last attempt."""
        spec, kept = start.spec, self._kept
        watch = Watch(spec.schema, spec.table, source.sort is not None)
        with self._capture.decoder() as decoder:
            # From the start on all is read anyway.
            if kept is not None and kept.spec == spec and start.cursor is not None:
                watch = kept.watch
            watch.expected = inspect.table_of(source)
            decoder.watch = watch
        self._kept = None
        return watch

    def _end(self) -> None:
        self._give_up()
        self._forget()
        self._pool.close()

    def _forget(self) -> None:
        self._kept = None
        with self._capture.decoder() as decoder:
            decoder.watch = None

    def _may_plan(self, run: Run) -> bool:
        if self._paused.is_set() or run.planned is not None or len(run.flights) >= _AHEAD:
            return False
        if run.flights and time.monotonic() - run.flights[0].made > _STILL_SECONDS:
            return False  # batches stand still: one snapshot is enough
        return not run.planner.ended or bool(run.watch.incomplete)

    def _is_done(self, run: Run) -> bool:
        under_way = run.flights or run.planned is not None
        return run.planner.ended and not run.watch.incomplete and not under_way

    def _plan(self, run: Run) -> None:
        """Plan the next chunk, and write its watermark unless live changes go first."""
        if run.taking is None:
            holder = self._pool.holder()
            if not is_near(holder.connection, self._capture.stats):
                self._pool.free(holder)
                self._wait(run, _NEAR_PAUSE, "behind", "Live changes wait, and go first.")
                return
            run.taking = holder
            run.taking.note(self._capture, run.watch, self._seen)
        holder = run.taking
        wait = holder.take(self._capture, ranges.table(run.source), self._seen)
        if wait:
            self._wait(run, wait, "invisible", holder.waits_for)
            return
        run.waits_since = None
        inspect.compare(holder.connection, self._capture.options, run.spec, run.fingerprint)
        weight = run.planner.weight(holder.connection)
        self._sizing.weighed(weight, self._capture.options.splits)
        with self._capture.decoder():
            owed = run.take_owed(min(KEYS, self._sizing.rows))
        until = time.monotonic() + _PLAN_SECONDS
        plan = run.planner.next(
            holder.connection, self._sizing.rows, run.owed,
            lambda: self._commanded.is_set() or self._paused.is_set() or time.monotonic() > until,
        )  # fmt: skip
        self._go_on_unless_commanded()
        run.taking = None
        keys, run.owed = run.owed, ()
        if self._troubled:
            self._troubled, self._delay = False, 0.0
            self._send(Troubled(run.spec.id, run.attempt, None, None))
        if not plan.ranges:
            with self._capture.decoder():
                run.watch.notings.remove(holder.noting)
            self._pool.free(holder)
            if not run.planner.ended and not run.flights:
                # It has looked for long: a chunk without a row says how far.
                run.chunks += 1
                self._deliver(run, run.chunks - 1, 0, plan.cursor)
            return
        reads = Reads(
            run.spec, run.attempt, run.chunks, plan.cursor, plan.ranges, holder.snapshot, run.source,
            self._url,
        )  # fmt: skip
        flight = Flight(
            run.chunks, plan.rows, reads, holder.noting, holder, min(owed, run.chunks), keys,
            time.monotonic(),
        )  # fmt: skip
        run.chunks += 1
        run.planned = flight
        self._emit_if_due(run)

    def _wait(self, run: Run, seconds: float, code: str, message: str) -> None:
        """Plan nothing for some time, and say why if that goes on."""
        now = time.monotonic()
        run.retry_at = now + seconds
        run.waits_since = run.waits_since or now
        if now - run.waits_since > _TELL_SECONDS and not self._troubled:
            log.warning("backfill waits", code=code, reason=message)
            self._troubled = True
            self._send(Troubled(run.spec.id, run.attempt, code, message))

    def _emit_if_due(self, run: Run) -> None:
        """Write the watermark of the chunk that is planned, unless live changes go first.

        While they come, they shall find most of the batches free.
        """
        rests = run.flights or time.monotonic() < self._rest_until
        if run.planned is not None and not (self._live and rests):
            self._emit(run)

    def _emit(self, run: Run) -> None:
        flight = run.planned
        assert flight is not None  # noqa: S101 - the callers have looked
        emitter = self._pool.emitter()
        # The lock keeps off all but changes of the publication, and of types.
        inspect.compare(emitter, self._capture.options, run.spec, run.fingerprint)
        run.planned = None
        content = orjson.dumps([self._run_name, run.attempt, flight.chunk])
        mark = Watermark(
            content, flight.noting, flight.reads, self._passed, flight.rows, run.attempt,
            flight.owed,
        )  # fmt: skip
        run.flights.append(flight)
        count = len(flight.reads.ranges)
        self._send(Planned(run.spec.id, run.attempt, flight.chunk, count, flight.rows))
        with self._capture.decoder():
            run.watch.watermarks[content] = mark
        emitter.execute(SQL["watermark"], {"content": content})

    def _told(self, told: Told) -> None:
        run = self._run
        if run is None or told.attempt != run.attempt:
            return
        now = time.monotonic()
        flight = next((f for f in run.flights if f.chunk == told.chunk), None)
        if flight is None:
            return
        if told.what == "taken":
            flight.taken = now
            return
        run.flights.remove(flight)
        if flight.holder is not None:
            self._pool.free(flight.holder)
        captured = self._capture.stats.captured
        self._live, self._captured = captured > self._captured, captured
        seconds = now - (flight.taken or flight.made)
        self._sizing.took(flight.rows, seconds, live=self._live)
        self._rest_until = now + min(REST * seconds, _LONGEST_REST)
        self._tried.clear()
        with self._capture.decoder():
            run.watch.was_read(flight.keys)
        self._deliver(run, flight.chunk, len(flight.reads.ranges), flight.reads.cursor)
        self._emit_if_due(run)

    def _deliver(self, run: Run, chunk: int, count: int, cursor: Cursor) -> None:
        """Tell of a chunk, and of the cursor behind all that are whole."""
        with self._capture.decoder():
            run.watch.delivered = chunk
            told = run.told(chunk, cursor)
        if told is not None:
            run.cursor = cursors.saved(told, run.source)
        self._send(Delivered(run.spec.id, run.attempt, chunk, count, run.cursor))

    def _expire(self, run: Run) -> None:
        """Let go of snapshots that have held back the server's clean-up for long."""
        for flight in run.under_way:
            if flight.holder is not None and time.monotonic() - flight.made > _SNAPSHOT_SECONDS:
                log.warning("a backfill's snapshot was given up", chunk=flight.chunk)
                flight.holder.close()
                flight.holder = None
        old = [f.holder for f in run.under_way if time.monotonic() - f.made > _ALONE_SECONDS]
        self._pool.let_pass([holder for holder in old if holder is not None], run.spec)

    def _trouble(self, error: BackfillError) -> None:
        """Go back and try again later, or end the backfill."""
        start = self._waiting
        if start is None and self._run is not None:
            start = Start(self._run.spec, self._run.cursor, self._run.attempt)
        if start is None:
            return
        tried = self._tried[error.code] = self._tried.get(error.code, 0) + 1
        if not error.transient and tried > FEW_TIMES.get(error.code, 0):
            self._waiting = None
            self._end()
            failed = error.code, error.message, error.remedy
            self._send(Failed(start.spec.id, start.attempt, *failed))
            return
        log.warning("backfill interrupted", code=error.code, error=str(error))
        self._troubled = True
        self._send(Troubled(start.spec.id, start.attempt, error.code, str(error)))
        self._pool.close()
        low, high = _BACKOFF_SECONDS
        self._delay = min(max(self._delay * 2, low), high) * random.uniform(0.7, 1.0)  # noqa: S311
        self._not_before = time.monotonic() + self._delay
        if self._waiting is None:
            self._go_back()

    def _go_back(self) -> None:
        """Begin again behind what was told last, as another attempt."""
        run = self._run
        assert run is not None  # noqa: S101 - the callers have looked
        self._give_up()
        with self._lock:
            if self._attempts == run.attempt:  # else somebody has another wish
                self._waiting = Start(run.spec, run.cursor, self._next_attempt())

    def _give_up(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        under_way = [key for flight in run.under_way for key in flight.keys]
        with self._capture.decoder():
            run.watch.restart([*under_way, *run.owed])
        self._kept = Kept(run.spec, run.watch, time.monotonic() + _KEPT_SECONDS)
        self._capture.withdraw(run.attempt)
        for flight in run.under_way:
            if flight.holder is not None:
                self._pool.free(flight.holder)
        if run.taking is not None:
            self._pool.free(run.taking)

    def _send(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:  # whoever listens must not end the backfill
            log.exception("a backfill's event could not be told")
