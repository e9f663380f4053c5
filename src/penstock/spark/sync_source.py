"""The PySpark data source `penstock-syncs`: one query that runs all syncs.

Its driver-side process hosts the scheduler, its tasks run jobs until their batch ends. A row is a lane's
count of jobs: what is read goes to the records table, page by page, and not through the query.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from penstock.core import log as logging
from penstock.core.errors import PenstockError
from penstock.core.monitor import Report, Reporter
from penstock.spark.sync_lanes import DDL, SyncLane, work

if TYPE_CHECKING:
    from penstock.syncs.shown import Shown
    from penstock.syncs.sync import Key

NAME: Final = "syncs"
"""What the process calls itself in its reports."""
_IDLE_SECONDS: Final = 0.2
_ALIVE_SECONDS: Final = 1.0

Offset = dict[str, Any]
_loading: Final = threading.Lock()


def start(
    spark: SparkSession, options: Mapping[str, str], checkpoint: str, name: str
) -> StreamingQuery:
    """Start the query; `options` are those of `SyncSource`."""
    with _loading:  # each query has a registration of its own: see `penstock.spark.source`
        spark.dataSource.register(SyncSource)
        frame = spark.readStream.format(SyncSource.name()).options(**options).load()
    return (
        frame.writeStream.format("noop")
        .queryName(name)
        .option("checkpointLocation", checkpoint)
        .option("asyncProgressTrackingEnabled", "true")
        .option("_asyncProgressTrackingOverrideSinkSupportCheck", "true")
        .trigger(processingTime="0 seconds")
        .start()
    )


class SyncSource(DataSource):
    """All syncs.

    Options: `url` (the store), `records` (that of the records table), `host` (where executors reach the
    driver), `lanes` (how many tasks a batch has at first), `monitor` (the run's), `batchseconds`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "penstock-syncs"

    def schema(self) -> str:
        """Return the columns as DDL."""
        return DDL

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002 - pyspark's
        """Return the reader; its `read` runs in the executors."""
        return SyncReader(dict(self.options))


class SyncReader(DataSourceStreamReader):
    """Spark's reader: the scheduler beside the driver, a lane in each task."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def __getstate__(self) -> dict[str, Any]:
        return {}  # executors get no secret by it

    @cached_property
    def _process(self) -> SyncProcess:
        return SyncProcess(self._options)

    def initialOffset(self) -> Offset:
        """Return the number of no batch."""
        return {"batch": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return no limit: a batch is as long as it lasts."""
        return ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: ARG002 - pyspark's
        """Return the end of the next batch, `start` where the run drains."""
        return self._process.latest_offset(start)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # noqa: ARG002 - pyspark's
        """Return the lanes of a batch."""
        return self._process.partitions(end)

    def commit(self, end: Offset) -> None:
        """Do nothing: progress is in the store."""

    def stop(self) -> None:
        """Store what is not stored, and end."""
        self._process.stop()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Run a lane's jobs until its end."""
        assert isinstance(partition, SyncLane)  # noqa: S101 - as planned
        return work(partition)


class SyncProcess:
    """The query's process beside the driver; the run configures it over its monitor."""

    def __init__(self, options: Mapping[str, str]) -> None:
        from penstock.spark.sync_loop import SyncLoop  # noqa: PLC0415 - beside the driver alone

        logging.configure()
        self._lanes = int(options["lanes"])
        self._stopped = threading.Event()
        self._reporter = Reporter(options.get("monitor"))
        self._loop = SyncLoop(
            host=options["host"], store_url=options["url"], records_url=options["records"],
            seconds=float(options["batchseconds"]), on_shown=self._show,
        )  # fmt: skip
        self._loop.start()
        self._reporter.listen(self._command)
        threading.Thread(target=self._report, name="reports", daemon=True).start()

    def latest_offset(self, start: Offset) -> Offset:
        """Return the end of the next batch."""
        loop = self._loop
        if loop.failure is not None:
            raise loop.failure
        if loop.draining:
            self._stopped.wait(_IDLE_SECONDS)
            return start
        return {"batch": int(start.get("batch", 0)) + 1}

    def partitions(self, end: Offset) -> Sequence[InputPartition]:
        """Return the lanes of a batch."""
        batch = int(end.get("batch", 0))
        self._loop.open(batch)
        return [SyncLane(self._loop.address, batch, number) for number in range(self._lanes)]

    def stop(self) -> None:
        """End the scheduler."""
        self._stopped.set()
        self._loop.close()

    def _command(self, command: Report) -> None:
        if command.get("command") == "drain":
            self._loop.drain()
        elif command.get("command") == "configure":
            # The run has proved that it has the monitor's key.
            setup = pickle.loads(base64.b64decode(command["setup"]))  # noqa: S301 - see above
            self._spread(command["lanes"])
            try:
                self._loop.configure(setup)
            except PenstockError as error:
                self._send({"error": str(error), "code": error.code, "remedy": error.remedy})
            else:
                self._send({"configured": command["number"]})

    def _spread(self, lanes: int) -> None:
        """Have batches so many lanes; one that has fewer ends."""
        before, self._lanes = self._lanes, lanes
        if lanes > before:
            self._loop.renew()

    def _show(self, shown: Mapping[Key, Shown]) -> None:
        self._send({"shown": [[*key, of] for key, of in shown.items()]})

    def _report(self) -> None:
        """Report while there is nothing to show: the run configures whoever reports."""
        while not self._stopped.wait(_ALIVE_SECONDS if self._loop.configured else _IDLE_SECONDS):
            self._send({"drained": self._loop.drained, "budgets": self._loop.budgets})

    def _send(self, report: Report) -> None:
        with contextlib.suppress(OSError):
            self._reporter.send({"capture": NAME, **report})
