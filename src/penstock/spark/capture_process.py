"""The process beside the driver that captures a source: it plans batches out of a `Capture`.

An offset is a position, `{"lsn": "0/16B3748", "idx": 3}`. Spark asks `latestOffset(start)` when all
up to `start` is in the sink; that, not the later `commit`, is what confirms the slot.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.backfill.read.task import partitions
from penstock.backfill.reader import ReaderBackfills
from penstock.config.sources import PostgresSource
from penstock.core.errors import CaptureError
from penstock.core.message import WIRE_SCHEMA, BatchPart, Position, format_lsn
from penstock.core.monitor import Report
from penstock.expressions.planned import Planned
from penstock.postgres import setup
from penstock.postgres.capture import Capture, CaptureOptions, CaptureStats
from penstock.postgres.catalog import CaptureCatalog
from penstock.postgres.chunk import partition
from penstock.spark.capture_reports import CaptureReports
from penstock.spark.options import SourceOptions
from penstock.spark.partitions import Partitions

_POLL_SECONDS: Final = 1.0
_REPORT_SECONDS: Final = 1.0
"""How often the capture reports while Spark asks nothing of it, as a batch that hangs may last."""
_FLUSH_SECONDS: Final = 5.0
_ONE_TASK_ROWS: Final = 2_000  # a second task costs more than it saves below this
_WAIT_SECONDS: Final = 0.5

_EMPTY: Final = pa.RecordBatch.from_pylist([], schema=WIRE_SCHEMA)

Offset = dict[str, Any]


class CaptureProcess:
    """Plans the batches of one query. It is cheap to make: only a call of Spark's connects."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._partitions = Partitions(options.host, blocks=options.blocks)
        self._reports = CaptureReports(options, self._command)
        self._capture: Capture | None = None
        self._backfills: ReaderBackfills | None = None
        self._ends = False
        self._until_lsn: int | None = None
        self._initial: Offset | None = None
        self._warmed = False
        self._done: Position | None = None
        self._planned: tuple[tuple[Offset, Offset], Sequence[InputPartition]] | None = None
        self._draining = False
        self._stopped = threading.Event()
        self._commanded = threading.Event()
        self._superseded = False

    # -- what Spark asks

    def initial_offset(self) -> Offset:
        """Return where the slot stands; makes publication and slot if they are missing."""
        # Spark asks several times until the first batch is planned, and expects the same answer.
        if self._initial is not None:
            return self._initial
        options = self._options
        with self._reports.errors():
            if options.waits:
                self._await_slot()
            if options.monitor is None:  # else the run has made them, and a lost slot is an error
                setup.ensure(
                    PostgresSource(
                        type="postgres", url=options.url, tables=options.tables,
                        slot=options.slot, publication=options.publication,
                    )
                )  # fmt: skip
            confirmed, _ = self._slot()
        self._initial = max(Position(confirmed, -1), Position(*options.after)).to_offset()
        return self._initial

    def latest_offset(self, start: Offset, max_rows: int) -> Offset:
        """Return the end of the next batch, waiting up to a second for there to be one."""
        position = Position.from_offset(start)
        capture = self._running(position)
        capture.confirm(position)
        if self._options.blocks and not self._warmed and not self._ends:
            # An empty batch first: it loads, forks and compiles all that the first message would
            # otherwise wait for, seconds on a small machine.
            self._warmed = True
            return {**start, "warm": 1}
        self._done = position
        self._report(capture.stats)
        if self._backfills is not None:
            self._backfills.report_ready()
        if self._draining:
            capture.flush(_FLUSH_SECONDS)
            self._reports.send({"drained": True})
            return start
        if self._until_lsn is not None and position.lsn >= self._until_lsn:
            capture.flush(_FLUSH_SECONDS)
            return start
        # Even a read of all that is available goes in batches that fit into memory; under
        # availableNow Spark asks again until nothing is left.
        end = capture.available(position, max_rows, _POLL_SECONDS, self._until_lsn)
        if end == position and (found := capture.altered()) is not None:
            # The run ends the query, and starts another one at this position.
            capture.flush(_FLUSH_SECONDS)
            self._reports.request({"altered": found[1], "after": [*found[0]]})
            return start
        if end == position:
            capture.flush(_FLUSH_SECONDS if self._until_lsn is not None else 0.0)
            return start
        return end.to_offset()

    def end_when_read(self) -> None:
        """Note that the query ends when all that is committed when it starts is delivered."""
        # Spark asks this before `initial_offset`, when there may be no slot yet.
        self._ends = True

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of a batch; a group's messages are all in one of them, in order."""
        # A query that uses the stream twice plans each batch twice.
        if self._planned is None or self._planned[0] != (start, end):
            self._planned = (start, end), self._plan(start, end)
        return self._planned[1]

    def _plan(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        first, last = Position.from_offset(start), Position.from_offset(end)
        if last <= first:
            empty = self._options.splits if "warm" in end else 0
            return [self._partitions.make(_EMPTY)] * empty
        chunks = self._running(first, last).take(first, last)
        plan = secrets.randbits(63)
        if len(chunks) == 1 and (reads := chunks[0].reads) is not None:
            token = 0 if self._backfills is None else self._backfills.token(reads)
            return partitions(reads, first, last, plan, token, self._options.monitor)
        rows = sum(chunk.rows for chunk in chunks)
        batches = partition(chunks, 1 if rows < _ONE_TASK_ROWS else self._options.splits)
        self._partitions.forget()
        return [
            self._partitions.make(batch, BatchPart(first, last, part, len(batches), plan))
            for part, batch in enumerate(batches)
        ]

    def confirm(self, end: Offset) -> None:
        """Confirm a batch; `latest_offset` has done so already, unless the query is ending."""
        if self._capture is not None:
            self._capture.confirm(Position.from_offset(end))

    def stop(self) -> None:
        """Confirm to the server what is delivered, and end the capture."""
        self._stopped.set()
        if self._backfills is not None:
            self._backfills.close()
        if self._capture is not None:
            self._capture.close()
            self._report(self._capture.stats)
        self._partitions.close()

    # -- the capture

    def _slot(self) -> tuple[int, int]:
        catalog = CaptureCatalog(self._options.url.get_secret_value())
        try:
            return catalog.slot(self._options.slot)
        finally:
            catalog.close()

    def _running(self, start: Position, end: Position | None = None) -> Capture:
        """Return the capture, started behind `start` if this is the first call.

        `end` is given where Spark runs a batch again that it had planned before a restart.
        """
        if self._capture is not None:
            return self._capture
        with self._reports.errors():
            self._capture = self._start(start, end)
        if self._options.monitor is not None:
            threading.Thread(
                target=self._report_regularly, args=(self._capture,), name="reports", daemon=True
            ).start()
        if self._options.monitor is not None and not self._ends:
            self._backfills = ReaderBackfills(self._capture, self._reports.send)
            self._backfills.report_ready()
        return self._capture

    def _start(self, start: Position, end: Position | None) -> Capture:
        options = self._options
        confirmed, written = self._slot()
        _refuse(start, end, confirmed, written, options.slot)
        # Spark's calls must not wait for the capture's thread for the 5 ms that are Python's default.
        sys.setswitchinterval(0.0005)
        capture = Capture(
            CaptureOptions(
                url=options.url.get_secret_value(),
                slot=options.slot,
                publication=options.publication,
                splits=options.splits,
                includes=options.includes,
                grouping=options.grouping,
                truncates=options.truncates,
                planned=Planned(options.planned_tables, options.planned_lsn),
                recover=options.recover,
            ),
            start,
            self._report,
        )
        if self._ends:
            self._until_lsn = written
            capture.poll_server()
        return capture

    # -- reports and commands

    def _report(self, stats: CaptureStats) -> None:
        waiting = (0, None) if self._capture is None else self._capture.waiting()
        self._reports.send_stats(stats, waiting, self._done)

    def _report_regularly(self, capture: Capture) -> None:
        while not self._stopped.wait(_REPORT_SECONDS):
            self._report(capture.stats)

    def _await_slot(self) -> None:
        """Wait until the run has the slot: the query before this one still reads it."""
        parent = os.getppid()
        while not self._commanded.is_set():
            self._reports.send({"waits": True})
            if self._commanded.wait(_WAIT_SECONDS):
                break
            self._superseded |= os.getppid() != parent  # Spark's JVM is gone
            if self._superseded:
                break
        if self._superseded:
            raise CaptureError("superseded", "The settings have changed again.")

    def _command(self, report: Report) -> None:
        command = report.get("command")
        if command in ("go", "end"):
            self._superseded |= command == "end"
            self._commanded.set()
        elif command == "drain":
            self._draining = True
            if self._backfills is not None:
                self._backfills.pause()
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
