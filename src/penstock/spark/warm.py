"""Warms a session up: a tiny query of the pipeline's own kind loads, forks and compiles what that needs.

It takes seconds, which a standby spends while it has nothing else to do.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from penstock.spark.pipeline import map_in_arrow

_SECONDS: Final = 60.0
_DDL: Final = "id bigint"
_SCHEMA: Final = pa.schema([pa.field("id", pa.int64())])


class WarmUp(DataSource):
    """One row, and nothing after it."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "penstock-warm-up"

    def schema(self) -> str:
        """Return the columns as DDL."""
        return _DDL

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002 - pyspark's
        """Return the reader."""
        return WarmUpReader()


class WarmUpReader(DataSourceStreamReader):
    """Plans one batch."""

    def initialOffset(self) -> dict[str, Any]:
        """Return where it starts."""
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return a limit, as the pipeline's source does."""
        return ReadMaxRows(1)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: ARG002 - pyspark's
        """Return where it ends."""
        return {"at": 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the batch's task."""
        return [] if start == end else [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - pyspark's
        """Yield the row."""
        yield pa.RecordBatch.from_pylist([{"id": 1}], schema=_SCHEMA)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


def warm(spark: SparkSession) -> None:
    """Run the query until its batch is done; raises what Spark raises."""
    spark.dataSource.register(WarmUp)
    frame = map_in_arrow(spark.readStream.format(WarmUp.name()).load(), iter, _DDL)
    with tempfile.TemporaryDirectory(prefix="penstock-warm-", ignore_cleanup_errors=True) as folder:
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", folder)
            .option("asyncProgressTrackingEnabled", "true")
            .option("_asyncProgressTrackingOverrideSinkSupportCheck", "true")
            .trigger(processingTime="0 seconds")
            .start()
        )
        try:
            waited = 0.0
            while query.lastProgress is None and waited < _SECONDS:
                if query.awaitTermination(0.2):  # type: ignore[arg-type]  # it takes fractions, too
                    break
                waited += 0.2
        finally:
            query.stop()


def start_workers(spark: SparkSession) -> None:
    """Start the daemon that the workers of tasks are forked from, in a thread.

    Spark would start it at the first task of the first query, and plans that meanwhile.
    """
    threading.Thread(target=_run_task, args=(spark,), name="spark-workers", daemon=True).start()


def _run_task(spark: SparkSession) -> None:
    with contextlib.suppress(Exception):  # a query that needs workers reports why there are none
        tiny = map_in_arrow(spark.range(1, numPartitions=1), iter, _DDL)
        tiny.write.format("noop").mode("append").save()
