"""Reads the next chunk of an attempt: takes its snapshot, chooses its size, finds its ranges."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from penstock.backfill import ranges, source_table
from penstock.backfill.chunks.commands import Commands, Start
from penstock.backfill.chunks.planner import ChunkPlanner
from penstock.backfill.chunks.pool import SessionPool
from penstock.backfill.chunks.retries import Retries
from penstock.backfill.chunks.sizing import Sizing
from penstock.backfill.chunks.snapshots import SnapshotHolder, Visible, is_near
from penstock.backfill.read.rows import read_rows
from penstock.backfill.session import Connection
from penstock.core.errors import BackfillError
from penstock.postgres.capture import Capture
from penstock.postgres.reads import Reads, SourceTable
from penstock.postgres.watermarks import NONE, Watch, Window

KEYS: Final = 1_000
"""How many rows one chunk reads by their keys."""
_PLAN_SECONDS: Final = 1.0
_REPORT_SECONDS: Final = 10.0
_NEAR_PAUSE: Final = 0.2


@dataclass(frozen=True)
class Context:
    """What all attempts of a backfiller share."""

    capture: Capture
    pool: SessionPool
    commands: Commands
    retries: Retries
    visible: Visible


@dataclass(frozen=True)
class Target:
    """What an attempt reads: `fingerprint` is what `source` was made from."""

    start: Start
    source: SourceTable
    fingerprint: tuple[Any, ...] | None
    watch: Watch

    def raise_if_altered(self, connection: Connection, capture: Capture) -> None:
        """Raise `BackfillError` where the table was altered since, `psycopg.Error` otherwise."""
        source_table.compare(connection, capture.options, self.start.spec, self.fingerprint)


@dataclass
class ReadChunk:
    """A chunk of so many rows, between its snapshot and its delivery."""

    reads: Reads
    rows: int
    window: Window
    completes: int
    """The oldest chunk that is whole only with this one."""
    reread: tuple[tuple[str, ...], ...]
    """Keys of the rows that it reads again."""
    taken_at: float = 0.0
    """When it was handed out, by `time.monotonic`."""

    @property
    def number(self) -> int:
        """Its number in its attempt, from 0."""
        return self.reads.chunk


class NextChunk:
    """Reads one attempt's chunks, one after the other.

    Between `read` and `release`, the snapshot's transaction keeps the table as it is.
    """

    def __init__(self, context: Context, target: Target, planner: ChunkPlanner) -> None:
        self._context = context
        self._target = target
        self._planner = planner
        self._holder: SnapshotHolder | None = None
        self._waits_since: float | None = None
        self.sizing = Sizing()
        self.reread: tuple[tuple[str, ...], ...] = ()
        """Keys that the chunk that is being read has."""
        self.retry_at = 0.0
        """When `read` can do something."""

    @property
    def ended(self) -> bool:
        """Whether no row is behind the last chunk; rows may still have to be read again."""
        return self._planner.ended

    def read(self, number: int) -> ReadChunk | None:
        """Return the next chunk, or None where there is no snapshot before `retry_at`.

        The chunk has no ranges, and its snapshot is released, where no row was found: at the table's
        end, or within a second. Raises `BackfillError`, `psycopg.Error`, and `Interrupted` where a
        command came.
        """
        context, target = self._context, self._target
        holder = self._take_snapshot()
        if holder is None:
            return None
        connection = holder.connection
        target.raise_if_altered(connection, context.capture)
        self.sizing.weighed(self._planner.weight(connection))
        with context.capture.decoder():
            completes = self._take_incomplete(min(KEYS, self.sizing.rows))
        until = time.monotonic() + _PLAN_SECONDS
        commands = context.commands
        plan = self._planner.next(
            connection, self.sizing.rows, self.reread,
            lambda: commands.changed or commands.paused or time.monotonic() > until,
            last=self.sizing.last,
        )  # fmt: skip
        commands.raise_if_changed()
        spec, source = target.start.spec, target.source
        found = [read_rows(connection, ranges.copy(source, spec, each)) for each in plan.ranges]
        reread, self.reread = self.reread, ()
        context.retries.planned(target.start)
        rows = sum(each.rows for each in found)
        texts = tuple(each.text for each in found) if rows or reread else ()
        reads = Reads(spec, target.start.attempt, number, plan.cursor, texts, source)
        if not texts:
            with context.capture.decoder():
                target.watch.windows.remove(holder.window)
            self.release()
        return ReadChunk(reads, rows, holder.window, min(completes, number), reread)

    def release(self) -> None:
        """End the snapshot's transaction."""
        if self._holder is not None:
            self._context.pool.free(self._holder)
            self._holder = None

    def _take_snapshot(self) -> SnapshotHolder | None:
        """Return a holder with a snapshot; None where live changes or transactions go first."""
        context, target = self._context, self._target
        holder = self._holder
        if holder is None:
            holder = self._holder = context.pool.holder()
            if not is_near(holder.connection, context.capture.stats):
                self.release()
                self._wait(_NEAR_PAUSE, "behind", "Live changes wait, and go first.")
                return None
            holder.open_window(context.capture, target.watch, context.visible)
        pause = holder.take(context.capture, ranges.table(target.source), context.visible)
        if pause:
            self._wait(pause, "invisible", holder.waits_for)
            return None
        self._waits_since = None
        return holder

    def _wait(self, seconds: float, code: str, reason: str) -> None:
        """Plan nothing for some time, and report why if that goes on."""
        now = time.monotonic()
        self.retry_at = now + seconds
        self._waits_since = self._waits_since or now
        if now - self._waits_since > _REPORT_SECONDS:
            self._context.retries.waits(self._target.start, code, reason)

    def _take_incomplete(self, most: int) -> int:
        """Move keys of incomplete rows into `reread`; return the oldest chunk that waits for them.

        Raises `BackfillError` if some could not be remembered. The capture's lock is held.
        """
        watch, spec = self._target.watch, self._target.start.spec
        if watch.overflowed:
            raise BackfillError(
                "too_many_incomplete",
                f"More rows of {spec.schema}.{spec.table} were updated without their unchanged large"
                " values than can be read again.",
                remedy="Pause for less time, or ALTER TABLE … REPLICA IDENTITY FULL; then start"
                " another backfill.",
            )
        self.reread = tuple(watch.incomplete)[:most]
        return min((watch.incomplete.pop(key) for key in self.reread), default=NONE)
