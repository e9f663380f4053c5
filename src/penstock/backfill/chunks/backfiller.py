"""Runs backfills in a thread beside the capture: chunk after chunk, until a table is read."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

import psycopg
import structlog

from penstock.backfill import source_table
from penstock.backfill.chunks import cursors
from penstock.backfill.chunks.attempt import Attempt
from penstock.backfill.chunks.commands import ChunkReport, Commands, Interrupted, Replan, Start
from penstock.backfill.chunks.next_chunk import Context, NextChunk, Target
from penstock.backfill.chunks.planner import ChunkPlanner
from penstock.backfill.chunks.pool import SessionPool
from penstock.backfill.chunks.retries import Retries
from penstock.backfill.chunks.snapshots import Visible
from penstock.backfill.chunks.watches import Watches
from penstock.backfill.events import Event, Failed, Started
from penstock.backfill.session import backfill_error, internal_error, known
from penstock.core.errors import BackfillError, CaptureError
from penstock.postgres.capture import Capture
from penstock.postgres.reads import BackfillSpec, Reads, SavedCursor

_CONNECTED_SECONDS: Final = 0.05
_IDLE_SECONDS: Final = 60.0

log = structlog.get_logger("penstock.backfill")


class Backfiller:
    """Runs backfills, one at a time, through `capture`, in a thread of its own.

    `Capture.take` and `hand_out` return a chunk alone, with `Chunk.reads`: `with_messages` makes
    messages of these. When they are confirmed, the chunk counts as delivered.

    Args:
        capture: The source's capture; it gives the URL and the publication.
        on_event: Called from the backfiller's thread with each event, in order; must not block for
            long and must not raise.
    """

    def __init__(self, capture: Capture, on_event: Callable[[Event], None]) -> None:
        self._capture = capture
        self._on_event = on_event
        self._pool = SessionPool(capture.options.url)
        self._commands = Commands(self._pool.interrupt)
        self._retries = Retries(self._send)
        self._context = Context(capture, self._pool, self._commands, self._retries, Visible())
        self._watches = Watches(capture)
        self._name = secrets.token_hex(16)
        self._waiting: Start | None = None
        self._attempt: Attempt | None = None
        capture.on_reads = self._commands.report
        self._thread = threading.Thread(target=self._main, name="backfill", daemon=True)
        self._thread.start()

    # -- from any thread

    def start(self, spec: BackfillSpec, cursor: SavedCursor = None) -> int:
        """Begin a backfill behind `cursor`, in the place of the one under way, if there is one.

        Returns the attempt's number, which all its events and chunks carry; where the backfiller
        goes back by itself (`Started` reports it), it takes a higher one. Does not wait: what is wrong
        with the table comes as `Failed`. A paused backfiller runs again.
        """
        return self._commands.start(spec, cursor)

    def pause(self) -> None:
        """Read no more chunks; those that are read are delivered, and reported."""
        self._commands.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._commands.resume()

    def cancel(self) -> None:
        """Give up what is under way, without an event."""
        self._commands.cancel()

    def failed(self, reads: Reads, error: Exception) -> None:
        """Note that no messages could be made of a chunk: the backfill goes back, or ends."""
        known_error = error if isinstance(error, BackfillError) else internal_error(error)
        self._commands.failed(reads, known_error)

    def close(self) -> None:
        """Cancel, and end the thread."""
        self._commands.cancel(close=True)
        self._thread.join(timeout=15)

    # -- the thread

    def _main(self) -> None:
        while True:
            try:
                if self._take_commands():
                    return
                self._step()
            except Interrupted:
                continue
            except BackfillError as error:
                self._fail(error)
            except CaptureError as error:
                self._fail(known(error))
            except psycopg.Error as error:
                if not self._commands.changed:  # else what ran was to end
                    self._fail(backfill_error(error))
            except Exception as error:
                log.exception("backfill failed")
                self._fail(internal_error(error))

    def _take_commands(self) -> bool:
        """Handle all that waits, blocking if there is nothing to do; return whether to end."""
        timeout = self._idle_seconds()
        while True:
            try:
                item = self._commands.get(min(timeout, _IDLE_SECONDS))
            except queue.Empty:
                return False
            timeout = 0.0
            newest = self._commands.newest()
            if self._commands.closing:
                self._end()
                return True
            if self._attempt is not None and self._attempt.number < newest:
                self._give_up()
                self._pool.close()
            if self._waiting is not None and self._waiting.attempt < newest:
                self._waiting = None
                self._pool.close()
            attempt = self._attempt
            if isinstance(item, Start) and item.attempt == newest:
                self._waiting = item
                self._retries.start()
            elif isinstance(item, Replan) and attempt and attempt.number == item.attempt:
                self._go_back(attempt)
            elif isinstance(item, ChunkReport) and attempt:
                attempt.take_report(item)

    def _idle_seconds(self) -> float:
        """Return for how long there is nothing to do unless an item comes."""
        if self._waiting is not None:
            return max(self._retries.retry_at - time.monotonic(), _CONNECTED_SECONDS)
        return _IDLE_SECONDS if self._attempt is None else self._attempt.idle_seconds()

    def _step(self) -> None:
        """Do the next thing: begin an attempt, go on with it, or end."""
        if self._waiting is not None and time.monotonic() >= self._retries.retry_at:
            self._begin(self._waiting)
        attempt = self._attempt
        if attempt is None:
            if self._waiting is None:
                self._watches.expire()
        elif attempt.is_done:
            self._send(attempt.done())
            self._end()
        else:
            attempt.step()

    def _begin(self, start: Start) -> None:
        with self._capture.decoder() as decoder:
            database, tag = decoder.source
        if not tag:
            return  # the capture has not connected yet
        spec, options = start.spec, self._capture.options
        holder = self._pool.holder()
        self._pool.free(holder)
        # First, so that a change in between shows: nothing is locked yet.
        fingerprint = source_table.fingerprint(holder.connection, options, spec)
        source = source_table.inspect(holder.connection, options, spec, database, tag)
        self._commands.raise_if_changed()
        cursor = cursors.from_saved(start.cursor, source, spec)
        planner = ChunkPlanner(source, spec, cursor)
        target = Target(start, source, fingerprint, self._watches.begin(start, source))
        self._waiting = None
        chunks = NextChunk(self._context, target, planner)
        self._attempt = Attempt(self._context, target, chunks, self._name, self._send)
        self._send(Started(spec.id, start.attempt))

    def _fail(self, error: BackfillError) -> None:
        """Go back and try again later, or end the backfill."""
        start = self._waiting
        if start is None and self._attempt is not None:
            start = self._attempt.restart
        if start is None:
            return
        if not self._retries.failed(start, error):
            self._waiting = None
            self._end()
            failed = error.code, error.message, error.remedy
            self._send(Failed(start.spec.id, start.attempt, *failed))
            return
        self._pool.close()
        if self._waiting is None and self._attempt is not None:
            self._go_back(self._attempt)

    def _go_back(self, attempt: Attempt) -> None:
        """Begin again behind what was reported last, as another attempt."""
        restart = attempt.restart
        self._give_up()
        number = self._commands.next_attempt(restart.attempt)
        if number is not None:  # else another start was asked for
            self._waiting = Start(restart.spec, restart.cursor, number)

    def _give_up(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._watches.keep(attempt.spec, attempt.watch)
            attempt.close()

    def _end(self) -> None:
        self._give_up()
        self._watches.stop()
        self._pool.close()

    def _send(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:  # a listener must not end the backfill
            log.exception("a backfill's event could not be reported")
