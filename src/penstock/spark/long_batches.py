"""Long batches: each lasts a minute or so, and its tasks are handed rounds while they run.

A micro-batch costs Spark 30 to 70 ms of planning, scheduling and task starts, whether it carries one
message or thousands. So Spark plans one seldom, and `RoundLoop` does the rest beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from penstock.backfill.reader import ReaderBackfills
from penstock.core.errors import CaptureError
from penstock.core.message import Position
from penstock.postgres.capture import Capture
from penstock.postgres.reads import Reads
from penstock.spark.capture_reports import CaptureReports
from penstock.spark.lanes import Lane
from penstock.spark.options import SourceOptions
from penstock.spark.round_loop import RoundLoop
from penstock.spark.settled import Settled

_FLUSH_SECONDS: Final = 5.0
_LINGER_SECONDS: Final = 0.3
"""How long the batch goes on once another query has the slot: what has waited needs the cores first."""
_IDLE_SECONDS: Final = 0.2

Offset = dict[str, Any]


class LongBatches:
    """Plans long batches of what is attached; nothing is handed out before that.

    `on_waiting` is called when all lanes are there and nothing is attached, `on_released` once nothing
    more is read from the slot, which is then free.

    The tasks of a run report what they have delivered, round by round. Those of a user's own query do
    not: there a batch is confirmed when Spark has done it, and has a bounded number of messages.
    """

    def __init__(
        self,
        options: SourceOptions,
        reports: CaptureReports,
        on_waiting: Callable[[], object],
        on_released: Callable[[], object],
    ) -> None:
        self._options = options
        self._reports = reports
        self._on_waiting = on_waiting
        self._on_released = on_released
        self._capture: Capture | None = None
        self._backfills: ReaderBackfills | None = None
        self._draining = False
        self._handed_on = False
        self._stopped = threading.Event()
        self._loop = RoundLoop(
            host=options.host, max_rows=options.maxrowsperbatch, in_step=options.in_step,
            seconds=options.batchseconds, on_settled=self._on_settled,
            on_failed_reads=self._on_failed_reads, on_joined=self._on_joined,
            on_drained=self._release, reported=options.blocks,
            batch_rows=0 if options.blocks else options.maxrowsperbatch,
        )  # fmt: skip
        self._loop.start()

    def attach(
        self, capture: Capture, backfills: ReaderBackfills | None, until_lsn: int | None = None
    ) -> None:
        """Hand out what a capture reads, up to the WAL's end `until_lsn`, if that is given; once."""
        self._capture, self._backfills = capture, backfills
        self._loop.attach(capture, until_lsn)

    @property
    def done(self) -> Position | None:
        """Up to where all is in the sinks, None before a task has connected to them."""
        return self._loop.done if self._loop.joined else None

    def latest_offset(self, start: Offset, max_rows: int) -> Offset:  # noqa: ARG002 - rounds have a limit
        """Return the end of the next batch, `start` where there is none; all before is done."""
        loop = self._loop
        self.confirm(start)
        if loop.failure is not None:
            raise loop.failure
        if self._draining or loop.finished:
            self._finish()
            self._stopped.wait(_IDLE_SECONDS)  # Spark asks again at once
            return start
        return {"batch": int(start.get("batch", 0)) + 1}

    def _finish(self) -> None:
        """Confirm to the server what is done, and report that no more comes."""
        capture = self._capture
        if capture is not None:
            capture.flush(_FLUSH_SECONDS)
        if self._draining:
            self._reports.send({"drained": True})
        elif capture and not self._handed_on and (found := capture.altered()) is not None:
            # The run ends the query, and starts another one at this position.
            self._handed_on = True
            self._reports.request({"altered": found[1], "after": [*found[0]]})

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # noqa: ARG002 - pyspark's
        """Return the lanes of a batch."""
        batch = int(end.get("batch", 0))
        self._loop.open(batch)
        return [Lane(self._loop.address, batch, number) for number in range(self._options.splits)]

    def confirm(self, end: Offset) -> None:
        """Confirm a batch."""
        if not self._options.blocks:
            self._loop.confirm(int(end.get("batch", 0)))

    def drain(self, *, leave: bool = False) -> None:
        """Hand nothing more out; the batch ends when all that was handed out is done.

        With `leave` another query is to have the slot.
        """
        self._draining = True
        self._loop.drain(_LINGER_SECONDS if leave else 0.0)

    def fail(self, error: CaptureError) -> None:
        """End the query with an error."""
        self._loop.fail(error)

    def close(self) -> None:
        """End the hand-out."""
        self._stopped.set()
        self._loop.close()

    # -- from the loop's thread

    def _on_settled(self, settled: Settled) -> None:
        source, query = self._options.name, self._options.query
        self._reports.send({"source": source, "query": query, **settled.fields()})

    def _on_joined(self, lanes: int) -> None:
        if self._capture is None and lanes == self._options.splits:
            self._on_waiting()

    def _release(self) -> None:
        """Leave the slot: the batch ends later, and another query may wait for it."""
        if self._capture is not None:
            self._capture.close()
        self._on_released()

    def _on_failed_reads(self, reads: Reads, error: Exception) -> None:
        if self._backfills is not None:
            self._backfills.failed(reads, error)
