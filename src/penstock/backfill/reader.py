"""Backfills in Spark's processes: the reader plans their chunks, the tasks read ranges of them.

The run says what shall be: which backfill, from which cursor, paused or not. It gives each start a
token, which comes back with all that is told of it, so that what is told late is known as such.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.backfill.backfiller import Backfiller
from penstock.backfill.events import Done, Event, Failed
from penstock.backfill.read import read_range
from penstock.core.errors import CaptureError
from penstock.core.message import WIRE_SCHEMA, BatchPart, Position
from penstock.core.monitor import Report, Reporter
from penstock.postgres.capture import Capture
from penstock.postgres.reads import BackfillSpec, Reads, cursor_from_json

_EMPTY = pa.RecordBatch.from_pylist([], schema=WIRE_SCHEMA)


@dataclass
class ReadRange(InputPartition):
    """A range of a backfill's chunk: read from Postgres by the task itself.

    `part` says where its messages stand in the micro-batch, and for which sink they are.
    """

    reads: Reads
    index: int
    part: BatchPart
    token: int
    monitor: str | None = field(repr=False)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the range's messages, at least one batch of them, and tell the run how it went.

        What can't be read is told, and no reason for the query to fail: the run has the backfill go
        back to its cursor.
        """
        rows = 0
        reads = self.reads
        told: Report = {
            "token": self.token, "attempt": reads.attempt, "chunk": reads.chunk,
            "range": self.index,
        }  # fmt: skip
        # Each part of a batch is noted where it is written, so that there must be a message or none.
        yield _EMPTY
        try:
            for batch in read_range(reads, self.index):
                rows += batch.num_rows
                yield batch
        except CaptureError as error:
            told |= {"error": str(error), "code": error.code, "transient": error.transient}
        except Exception as error:  # whatever it is, the live messages go on
            said = f"{type(error).__name__}: {error}"
            told |= {"error": said, "code": "internal", "transient": False}
        _report(self.monitor, {"backfill_range": told | {"rows": rows}})


def partitions(
    reads: Reads, start: Position, end: Position, plan: int, token: int, monitor: str | None
) -> Sequence[ReadRange]:
    """Return the tasks of the micro-batch (start, end] that delivers a chunk."""
    count = len(reads.ranges)
    return [
        ReadRange(
            reads, index, BatchPart(start, end, index, count, plan, reads.sink), token, monitor
        )
        for index in range(count)
    ]


class ReaderBackfills:
    """The reader's end: does with a `Backfiller` what the run commands, and tells the run of it."""

    def __init__(self, capture: Capture, send: Callable[[Report], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._token: int | None = None
        self._attempt = 0
        self._name = secrets.token_hex(8)
        self._commanded = False
        self._ended: Report | None = None
        self._backfiller = Backfiller(capture, self._told)

    def greet(self) -> None:
        """Tell the run that this reader is there, unless it knows: a report may be lost."""
        if not self._commanded:
            self._send({"backfill": {"event": "ready", "reader": self._name}})

    def command(self, wanted: dict[str, Any] | None) -> None:
        """Have the backfill run that is wanted, in the place of any other; None: have none run."""
        self._commanded = True
        with self._lock:
            if wanted is None:
                if self._token is not None:
                    self._token = None
                    self._backfiller.cancel()
                return
            if wanted["token"] != self._token:
                spec = BackfillSpec.from_json(wanted["spec"])
                self._attempt = self._backfiller.start(spec, cursor_from_json(wanted["cursor"]))
                self._token = wanted["token"]
                self._ended = None
            ended = self._ended
            if wanted["paused"]:
                self._backfiller.pause()
            else:
                self._backfiller.resume()
        if ended is not None:  # the run does not know, or it would want something else
            self._send(ended)

    def rest(self) -> None:
        """Plan nothing more; what is planned is delivered."""
        self._backfiller.pause()

    def token(self, reads: Reads) -> int:
        """Return the token of the start that a chunk is of, 0 if it is of an earlier one."""
        with self._lock:
            return self._token_of(reads.attempt) or 0

    def _token_of(self, attempt: int) -> int | None:
        # Where the backfiller goes back by itself, its attempts have higher numbers.
        return self._token if attempt >= self._attempt else None

    def close(self) -> None:
        """End whatever is under way."""
        self._backfiller.close()

    def _told(self, event: Event) -> None:
        with self._lock:  # a start is known by its token before anything is told of it
            token = self._token_of(event.attempt)
            if token is None:
                return
            name = type(event).__name__.lower()
            report = {"backfill": {**dataclasses.asdict(event), "event": name, "token": token}}
            if isinstance(event, Done | Failed):
                self._ended = report
        self._send(report)


_reporters: dict[str, Reporter] = {}


def _report(monitor: str | None, report: Report) -> None:
    """Tell the run, and wait until it knows; one that is gone needs to know nothing."""
    if monitor is None:
        return
    try:
        # A worker process outlives queries; a connection for each range would cost milliseconds.
        if (reporter := _reporters.get(monitor)) is None:
            _reporters.clear()
            reporter = _reporters[monitor] = Reporter(monitor)
        reporter.ask(report)
    except (OSError, EOFError, AuthenticationError):
        _reporters.pop(monitor, None)
