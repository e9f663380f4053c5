"""What a task reads of a backfill: a range of a chunk, and reports how it went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError

import pyarrow as pa

from penstock.backfill.events import RangeRead
from penstock.backfill.read.rows import read_range
from penstock.core.errors import CaptureError
from penstock.core.health import Failure
from penstock.core.message import RoundPart
from penstock.core.monitor import Report, Reporter
from penstock.postgres.reads import Reads


@dataclass
class ReadRange:
    """A range of a backfill's chunk: read from Postgres by the task itself.

    `part` is where its messages are in the round, and for which sink they are.
    """

    reads: Reads
    index: int
    part: RoundPart
    token: int
    monitor: str | None = field(repr=False)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the range's messages, and report to the run how it went.

        A range that can't be read does not fail the query: the run has the backfill go back to its
        cursor.
        """
        rows, failure, transient = 0, None, False
        try:
            for batch in read_range(self.reads, self.index):
                rows += batch.num_rows
                yield batch
        except CaptureError as error:
            failure, transient = Failure.by(error), error.transient
        except Exception as error:  # whatever it is, the live messages go on
            failure = Failure("internal", f"{type(error).__name__}: {error}")
        reads = self.reads
        report = RangeRead(reads.attempt, reads.chunk, self.index, rows, failure, transient)
        _report(self.monitor, {"backfill_range": {"token": self.token, **report.to_json()}})


_reporters: dict[str, Reporter] = {}


def _report(monitor: str | None, report: Report) -> None:
    """Send the run a report, and wait until it has it; a run that is gone needs none."""
    if monitor is None:
        return
    try:
        # A worker process outlives queries; a connection for each range would cost milliseconds.
        if (reporter := _reporters.get(monitor)) is None:
            _reporters.clear()
            reporter = _reporters[monitor] = Reporter(monitor)
        reporter.request(report)
    except (OSError, EOFError, AuthenticationError):
        _reporters.pop(monitor, None)
