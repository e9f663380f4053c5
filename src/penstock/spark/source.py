"""The PySpark data source `postgres-changes`: a slot's changes as a streaming DataFrame.

    spark.dataSource.register(PostgresChanges)
    spark.readStream.format("postgres-changes").options(url=…, tables="public.orders").load()

Spark makes a reader in three places: where it plans the read (once), in a process beside the driver
that lives as long as the query (offsets and partitions: here the capture runs), and in the executors
(`read`). So a reader is cheap to make, and only the second kind ever connects.

An offset is a position, `{"lsn": "0/16B3748", "idx": 3}`. Spark asks `latestOffset(start)` when all
up to `start` is in the sink; that, not the later `commit`, is what confirms the slot.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.backfill.read.task import ReadRange, partitions
from penstock.backfill.reader import ReaderBackfills
from penstock.config.file import PostgresSource
from penstock.core import log as logging
from penstock.core.blocks import BLOCK_DDL, pack, with_fields
from penstock.core.errors import CaptureError
from penstock.core.message import WIRE_SCHEMA, BatchPart, Position, format_lsn
from penstock.core.monitor import Report, Reporter
from penstock.expressions import fields
from penstock.expressions.planned import Planned
from penstock.expressions.types import Field
from penstock.postgres import setup
from penstock.postgres.capture import Capture, CaptureOptions, CaptureStats
from penstock.postgres.catalog import Catalog
from penstock.postgres.chunk import partition
from penstock.spark.flight import BatchServer, fetch
from penstock.spark.message_schema import MESSAGE_DDL, to_messages
from penstock.spark.options import SourceOptions

_POLL_SECONDS: Final = 1.0
_REPORT_SECONDS: Final = 1.0
"""How often the capture reports while Spark asks nothing of it, as a batch that hangs may last."""
_ONE_TASK_ROWS: Final = 2_000  # a second task costs more than it saves below this
_INLINE_BYTES: Final = 256 << 10
_WAIT_SECONDS: Final = 0.5

_EMPTY: Final = pa.RecordBatch.from_pylist([], schema=WIRE_SCHEMA)

_loading: Final = threading.Lock()

Offset = dict[str, Any]


def load(spark: SparkSession, options: dict[str, str]) -> DataFrame:
    """Return the changes that `options` name, for one query of its own.

    Spark keeps a map of environment variables for each registration, and every query that uses it adds
    to that map as it starts, without a lock. Two queries that start together leave it broken, and their
    first tasks fail (`java.io.OptionalDataException`). So each query has a registration of its own.
    """
    with _loading:
        spark.dataSource.register(PostgresChanges)
        return spark.readStream.format(PostgresChanges.name()).options(**options).load()


class PostgresChanges(DataSource):
    """Changes of Postgres tables, by logical replication.

    Options: see `penstock.spark.options.SourceOptions`. Columns: see
    `penstock.spark.message_schema`. The slot is confirmed as batches complete, so what a query has
    not finished is read again after a restart, with its checkpoint or without.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "postgres-changes"

    def schema(self) -> str:
        """Return the message's columns as DDL."""
        options = SourceOptions.parse(self.options)
        if not options.blocks:
            return MESSAGE_DDL
        if not options.fields:
            return BLOCK_DDL
        return f"{BLOCK_DDL}, fields array<{fields.ddl(options.fields)}>"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        """Return the reader; its `read` runs in the executors."""
        return PostgresChangesReader(SourceOptions.parse(self.options))


@dataclass
class Inline(InputPartition):
    """A small batch, inside the task itself, as an Arrow IPC stream."""

    data: bytes


@dataclass
class Remote(InputPartition):
    """A large batch, fetched from the capture by Arrow Flight."""

    location: str
    ticket: str


class PostgresChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches from a `Capture`; see this module's docstring for where it lives."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._blocks = options.blocks
        self._fields = options.fields
        self._capture: Capture | None = None
        self._server: BatchServer | None = None
        self._reporter: Reporter | None = None
        self._backfills: ReaderBackfills | None = None
        self._ends = False
        self._until_lsn: int | None = None
        self._initial: Offset | None = None
        self._warmed = self._warm = False
        self._done: Position | None = None
        self._planned: tuple[tuple[Offset, Offset], Sequence[InputPartition]] | None = None
        self._draining = False
        self._life = secrets.token_hex(8)  # tells this capture's counts from those of others
        self._stopped = threading.Event()
        self._commanded = threading.Event()
        self._ended = False

    def __getstate__(self) -> dict[str, Any]:
        # What travels to the executors needs no secret, only the shape of what `read` returns.
        return {"_blocks": self._blocks, "_fields": self._fields}

    # -- beside the driver

    def initialOffset(self) -> Offset:  # noqa: N802
        """Return where the slot stands; makes publication and slot if they are missing."""
        # Spark asks several times until the first batch is planned, and wants the same answer.
        if self._initial is not None:
            return self._initial
        options = self._options
        with self._telling():
            if options.waits:
                self._await_slot()
            if options.monitor is None:  # else the run has seen to it, and a lost slot is an error
                setup.ensure(
                    PostgresSource(
                        type="postgres", url=options.url, tables=options.tables,
                        slot=options.slot, publication=options.publication,
                    )
                )  # fmt: skip
            confirmed, _ = self._slot()
        self._initial = max(Position(confirmed, -1), Position(*options.after)).to_offset()
        return self._initial

    def _await_slot(self) -> None:
        """Wait until the run has the slot: the query before this one still reads it."""
        parent = os.getppid()
        while not self._commanded.is_set():
            self._send({"waits": True})
            if self._commanded.wait(_WAIT_SECONDS):
                break
            self._ended |= os.getppid() != parent  # Spark's JVM is gone
            if self._ended:
                break
        if self._ended:
            raise CaptureError("superseded", "The settings have changed again.")

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the option `maxRowsPerBatch` as Spark's limit."""
        return ReadMaxRows(self._options.maxrowsperbatch)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the end of the next batch, waiting up to a second for there to be one."""
        position = Position.from_offset(start)
        capture = self._running(position)
        capture.confirm(position)
        if self._blocks and not self._warmed and not self._ends:
            # An empty batch first: it loads, forks and compiles all that the first message would
            # otherwise wait for, seconds on a small machine.
            self._warmed = True
            return {**start, "warm": 1}
        self._warm = True
        self._done = position
        self._report(capture.stats)
        if self._backfills is not None:
            self._backfills.report_ready()
        if self._draining:
            capture.settle(5.0)
            self._send({"drained": True})
            return start
        if self._until_lsn is not None and position.lsn >= self._until_lsn:
            capture.settle(5.0)
            return start
        # Even a read of all that is available goes in batches that fit into memory; under
        # availableNow Spark asks again until nothing is left.
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.maxrowsperbatch
        end = capture.available(position, rows, _POLL_SECONDS, self._until_lsn)
        if end == position and (found := capture.altered()) is not None:
            # The run ends the query, and begins another where this one has got to.
            capture.settle(5.0)
            self._ask({"altered": found[1], "after": [*found[0]]})
            return start
        if end == position:
            capture.settle(5.0 if self._until_lsn is not None else 0.0)
            return start
        return end.to_offset()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note that the query ends when all that is committed when it starts is delivered."""
        # Spark asks this before `initialOffset`, when there may be no slot yet.
        self._ends = True

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of a batch; a group's messages are all in one of them, in order."""
        # A query that uses the stream twice plans each batch twice.
        if self._planned is not None and self._planned[0] == (start, end):
            return self._planned[1]
        planned = self._plan(start, end)
        self._planned = (start, end), planned
        return planned

    def _plan(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        first, last = Position.from_offset(start), Position.from_offset(end)
        if last <= first:
            return [self._partition(_EMPTY)] * (self._options.splits if "warm" in end else 0)
        chunks = self._running(first, last).take(first, last)
        plan = secrets.randbits(63)
        if len(chunks) == 1 and (reads := chunks[0].reads) is not None:
            token = 0 if self._backfills is None else self._backfills.token(reads)
            return partitions(reads, first, last, plan, token, self._options.monitor)
        rows = sum(chunk.rows for chunk in chunks)
        batches = partition(chunks, 1 if rows < _ONE_TASK_ROWS else self._options.splits)
        if self._server is not None:
            self._server.forget()
        return [
            self._partition(batch, BatchPart(first, last, part, len(batches), plan))
            for part, batch in enumerate(batches)
        ]

    def _partition(self, batch: pa.RecordBatch, part: BatchPart | None = None) -> InputPartition:
        if self._blocks:
            batch = pack(batch, part)
        if batch.nbytes <= _INLINE_BYTES:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            return Inline(sink.getvalue().to_pybytes())
        if self._server is None:
            self._server = BatchServer(self._options.host)
        return Remote(self._server.location, self._server.offer(batch))

    def commit(self, end: Offset) -> None:
        """Confirm a batch; `latestOffset` has done so already, unless the query is ending."""
        if self._capture is not None:
            self._capture.confirm(Position.from_offset(end))

    def stop(self) -> None:
        """Tell the server what is confirmed, and end the capture."""
        self._stopped.set()
        if self._backfills is not None:
            self._backfills.close()
        if self._capture is not None:
            self._capture.close()
            self._report(self._capture.stats)
        if self._server is not None:
            self._server.shutdown()

    def _report_regularly(self, capture: Capture) -> None:
        while not self._stopped.wait(_REPORT_SECONDS):
            self._report(capture.stats)

    def _slot(self) -> tuple[int, int]:
        catalog = Catalog(self._options.url.get_secret_value())
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
        with self._telling():
            self._capture = self._start(start, end)
        if self._options.monitor is not None:
            threading.Thread(
                target=self._report_regularly, args=(self._capture,), name="reports", daemon=True
            ).start()
        if self._options.monitor is not None and not self._ends:
            self._backfills = ReaderBackfills(self._capture, self._send)
            self._backfills.report_ready()
        return self._capture

    def _start(self, start: Position, end: Position | None) -> Capture:
        options = self._options
        confirmed, written = self._slot()
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
                f" {options.slot} was confirmed up to {format_lsn(confirmed)}: it can't be read.",
                remedy="If this query itself delivered it (the checkpoint is an older copy, or lost"
                " its end in a power cut), delete the checkpoint's folder and start from the slot."
                " If something else reads the slot, give it one of its own, and backfill.",
                is_gap=True,
            )
        # Spark's calls must not wait for the capture's thread for the 5 ms that are Python's default.
        sys.setswitchinterval(0.0005)
        capture = Capture(
            CaptureOptions(
                url=options.url.get_secret_value(),
                slot=options.slot,
                publication=options.publication,
                splits=options.splits,
                wants=options.wants,
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
            capture.hurry()
        return capture

    def _command(self, command: Report) -> None:
        if command.get("command") in ("go", "end"):
            self._ended |= command["command"] == "end"
            self._commanded.set()
        elif command.get("command") == "drain":
            self._draining = True
            if self._backfills is not None:
                self._backfills.pause()
        elif self._draining:
            return  # it rests for good
        elif command.get("command") == "backfill" and self._backfills is not None:
            self._backfills.command(command["run"])

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell the run of a `CaptureError` before Spark wraps it in traces."""
        if self._reporter is None:
            logging.configure()
            self._reporter = Reporter(self._options.monitor)
            self._reporter.listen(self._command)
        try:
            yield
        except CaptureError as found:
            error = found.recovered_by(self._options.recover)
            self._send(
                {"state": "error", "error": str(error), "code": error.code, "remedy": error.remedy}
            )
            raise error from None

    def _send(self, report: Report) -> None:
        if self._reporter is not None:
            self._reporter.send({"capture": self._options.name, "life": self._life, **report})

    def _ask(self, report: Report) -> None:
        """Send a report that the run has taken when this returns, if it is there."""
        if self._options.monitor is not None:
            # Not over `_reporter`: the thread that takes its commands would read the answer.
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                asked = {"capture": self._options.name, "life": self._life, **report}
                Reporter(self._options.monitor).ask(asked)

    def _report(self, stats: CaptureStats) -> None:
        error = stats.error
        waiting, waited = (0, None) if self._capture is None else self._capture.waiting()
        self._send(
            {
                "state": stats.state,
                "error": None if error is None else str(error),
                "code": None if error is None else error.code,
                "remedy": None if error is None else error.remedy,
                "captured": stats.captured,
                "confirmed": stats.confirmed,
                "waiting": waiting,
                "waited": waited,
                "truncates_skipped": stats.truncates_skipped,
                "reconnects": stats.reconnects,
                "received_lsn": stats.received_lsn,
                "confirmed_lsn": stats.confirmed_lsn,
                "confirmed_time": stats.confirmed_time,
                "unread_bytes": stats.unread_bytes,
                "warm": self._warm,
                "done": None if self._done is None else [*self._done],
            }
        )

    # -- in the executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a partition's messages, or blocks of them."""
        batches: Iterator[pa.RecordBatch]
        if isinstance(partition, ReadRange):
            batches = (pack(batch, partition.part) for batch in partition.batches())
        elif isinstance(partition, Inline):
            batches = iter(pa.ipc.open_stream(partition.data))
        else:
            assert isinstance(partition, Remote)  # noqa: S101
            batches = fetch(partition.location, partition.ticket)
        if not self._blocks:
            return map(to_messages, batches)
        if not self._fields:
            return batches
        extract = _extractor(self._fields)
        return (with_fields(blocks, extract) for blocks in batches)


@functools.lru_cache(maxsize=16)
def _extractor(wanted: tuple[Field, ...]) -> fields.Extractor:
    # Making one takes longer than a small batch does.
    return fields.Extractor(wanted)
