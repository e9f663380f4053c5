"""The process beside the driver that captures a source: it answers what Spark asks about batches.

A micro-batch's offset is a position, `{"lsn": "0/16B3748", "idx": 3}`: `MicroBatches`. A long batch's
is its number, `{"batch": 3}`, as it is not known where it will end: `LongBatches`. Either way the slot
is the truth: it is confirmed up to where all is in the sinks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from penstock.backfill.reader import ReaderBackfills
from penstock.config.sources import PostgresSource
from penstock.core.errors import CaptureError
from penstock.core.message import Position, format_lsn
from penstock.core.monitor import Report
from penstock.expressions.planned import Planned
from penstock.postgres import setup
from penstock.postgres.capture import Capture, CaptureOptions, CaptureStats, Opened
from penstock.postgres.catalog import CaptureCatalog
from penstock.spark.capture_reports import CaptureReports
from penstock.spark.long_batches import LongBatches
from penstock.spark.micro_batches import MicroBatches
from penstock.spark.options import SourceOptions
from penstock.spark.slot_wait import SlotWait

_REPORT_SECONDS: Final = 1.0

Offset = dict[str, Any]


class CaptureProcess:
    """Answers for one query. It is cheap to make: only a call of Spark's connects."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._reports = CaptureReports(options, self._command)
        self._capture: Capture | None = None
        self._batches: MicroBatches | LongBatches | None = None
        self._backfills: ReaderBackfills | None = None
        self._ends = False
        self._initial: Offset | None = None
        self._draining = self._leaves = False
        self._stopped = threading.Event()
        self._slot_wait = SlotWait(options, self._reports)

    # -- what Spark asks

    def initial_offset(self) -> Offset:
        """Return where the slot stands; makes publication and slot if they are missing."""
        # Spark asks several times until the first batch is planned, and expects the same answer.
        if self._initial is not None:
            return self._initial
        options = self._options
        if options.waits == "lanes":  # another query reads the slot, and it has all that is known
            self._initial = {"batch": 0}
            return self._initial
        with self._reports.errors():
            if options.waits == "process":
                self._slot_wait.note_ready()
                self._slot_wait.until_go()
            if options.monitor is None:  # else the run has made them, and a lost slot is an error
                setup.ensure(
                    PostgresSource(
                        type="postgres", url=options.url, tables=options.tables,
                        slot=options.slot, publication=options.publication,
                    )
                )  # fmt: skip
            at = self._begin_at(*self._slot())
        self._initial = {"batch": 0} if options.latency == "realtime" else at.to_offset()
        return self._initial

    def latest_offset(self, start: Offset, max_rows: int) -> Offset:
        """Return the end of the next batch, waiting up to a second for there to be one."""
        batches = self._running(start)
        if self._capture is not None:  # what is done may be what a backlog waits for
            self._report(self._capture.stats)
        return batches.latest_offset(start, max_rows)

    def end_when_read(self) -> None:
        """Note that the query ends when all that is committed when it starts is delivered."""
        # Spark asks this before `initial_offset`, when there may be no slot yet.
        self._ends = True

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of a batch; a group's messages are all in one of them, in order."""
        return self._running(start, end).partitions(start, end)

    def confirm(self, end: Offset) -> None:
        """Confirm a batch; `latest_offset` has done so already, unless the query is ending."""
        if self._batches is not None:
            self._batches.confirm(end)

    def stop(self) -> None:
        """Confirm to the server what is delivered, and end the capture."""
        self._stopped.set()
        self._slot_wait.end()
        if self._backfills is not None:
            self._backfills.close()
        if self._batches is not None:
            self._batches.close()
        if self._capture is not None:
            self._capture.close()
            self._report(self._capture.stats)

    # -- the capture

    def _slot(self) -> tuple[int, int]:
        catalog = CaptureCatalog(self._options.address)
        try:
            return catalog.slot(self._options.slot)
        finally:
            catalog.close()

    def _begin_at(self, confirmed: int, written: int) -> Position:
        """Return behind which position to begin, the slot being confirmed and the WAL written so far."""
        at, after = Position(confirmed, -1), Position(*self._options.after)
        return max(at, after) if after.lsn <= written else at  # else it is another server's

    def _running(self, start: Offset, end: Offset | None = None) -> MicroBatches | LongBatches:
        """Return the batches of the capture, started behind `start` if this is the first call.

        `end` is given where Spark runs a batch again that it had planned before a restart.
        """
        if self._batches is not None:
            return self._batches
        options = self._options
        if options.latency != "realtime":
            with self._reports.errors():
                self._capture, until = self._start(start, end)
            self._batches = MicroBatches(options, self._capture, until)
            self._begin_reports(self._capture)
            return self._batches
        if options.waits == "lanes":
            with self._reports.errors():
                self._batches = batches = self._long_batches()
            threading.Thread(
                target=self._take_slot, args=(batches,), name="slot", daemon=True
            ).start()
            return batches
        with self._reports.errors():
            capture, until = self._start(start, end)
        self._batches = batches = self._long_batches()
        self._attach(batches, capture, until)
        return batches

    def _long_batches(self) -> LongBatches:
        return LongBatches(
            self._options, self._reports, self._slot_wait.note_ready, self._report_released
        )

    def _attach(self, batches: LongBatches, capture: Capture, until: int | None) -> None:
        self._capture = capture
        if self._options.monitor is not None and not self._ends:
            self._backfills = ReaderBackfills(capture, self._reports.send)
        batches.attach(capture, self._backfills, until)
        if self._draining:
            batches.drain(leave=self._leaves)
        self._begin_reports(capture)

    def _take_slot(self, batches: LongBatches) -> None:
        """Have the lanes, which are there, get what the slot has, once it is this query's."""
        try:
            with self._reports.errors():
                opened, at = self._slot_wait.opened()
            self._attach(batches, self._read(at, opened), None)
        except CaptureError as error:
            batches.fail(error)

    def _start(self, start: Offset, end: Offset | None) -> tuple[Capture, int | None]:
        """Return the capture, and where the WAL ends that it is to read, if it is to end."""
        options = self._options
        confirmed, written = self._slot()
        if "lsn" in start:
            last = None if end is None or "lsn" not in end else Position.from_offset(end)
            at = Position.from_offset(start)
            _refuse(at, last, confirmed, written, options.slot)
        else:  # a long batch's number: the slot has all that is known
            at = self._begin_at(confirmed, written)
        capture = self._read(at)
        if not self._ends:
            return capture, None
        capture.poll_server()
        return capture, written

    def _read(self, at: Position, opened: Opened | None = None) -> Capture:
        """Return a capture of what is behind a position."""
        options = self._options
        # Spark's calls must not wait for the capture's thread for the 5 ms that are Python's default.
        sys.setswitchinterval(0.0005)
        return Capture(
            CaptureOptions(
                url=options.address,
                slot=options.slot,
                publication=options.publication,
                splits=options.splits,
                includes=options.includes,
                grouping=options.grouping,
                truncates=options.truncates,
                planned=Planned(options.planned_tables, options.planned_lsn),
                recover=options.recover,
            ),
            at,
            self._report,
            opened,
        )

    # -- reports and commands

    def _report(self, stats: CaptureStats) -> None:
        waiting = (0, None) if self._capture is None else self._capture.waiting()
        done = None if self._batches is None else self._batches.done
        self._reports.send_stats(stats, waiting, done)

    def _report_released(self) -> None:
        if self._capture is not None:
            self._report(self._capture.stats)
        self._reports.send({"released": True})

    def _begin_reports(self, capture: Capture) -> None:
        if self._options.monitor is not None:
            threading.Thread(
                target=self._report_regularly, args=(capture,), name="reports", daemon=True
            ).start()

    def _report_regularly(self, capture: Capture) -> None:
        """Report while Spark asks nothing, as during a long batch."""
        while True:
            self._report(capture.stats)
            if self._backfills is not None:
                self._backfills.report_ready()
            if self._stopped.wait(_REPORT_SECONDS):
                return

    def _command(self, report: Report) -> None:
        command = report.get("command")
        if command in ("go", "end"):
            self._slot_wait.command(report)
        elif command == "drain":
            self._draining, self._leaves = True, bool(report["leave"])
            if self._backfills is not None:
                self._backfills.pause()
            if isinstance(self._batches, LongBatches):
                self._batches.drain(leave=self._leaves)
        elif self._draining:
            return  # no backfill goes on before the end
        elif command == "backfill" and self._backfills is not None:
            self._backfills.command(report["run"])


def _refuse(start: Position, end: Position | None, confirmed: int, written: int, slot: str) -> None:
    """Raise `CaptureError` where a checkpoint does not go with the slot.

    The checkpoint has `start`, and `end` of a batch to run again; the slot is `confirmed` up to an
    LSN, the server's WAL `written` up to one.
    """
    if start.lsn > written:
        raise CaptureError(
            "position_ahead_of_server",
            f"The checkpoint stands at {format_lsn(start.lsn)}, but the server's WAL ends at"
            f" {format_lsn(written)}: this is another server, or one restored from a backup.",
            remedy="Delete the checkpoint folder to start from the slot, and backfill.",
            is_gap=True,
        )
    # A batch is confirmed only when it is done, so one that is not can't lie before the slot.
    if end is not None and end.lsn < confirmed:
        raise CaptureError(
            "position_behind_slot",
            f"The checkpoint has a batch up to {format_lsn(end.lsn)} to run again, but slot"
            f" {slot} was confirmed up to {format_lsn(confirmed)}: it can't be read.",
            remedy="If this query itself delivered it (the checkpoint is an older copy, or lost"
            " its end in a power cut), delete the checkpoint's folder and start from the slot."
            " If something else reads the slot, give it one of its own, and backfill.",
            is_gap=True,
        )
