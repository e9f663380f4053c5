"""The PySpark data source `postgres-changes`: a slot's changes as a streaming DataFrame.

    spark.dataSource.register(PostgresChanges)
    spark.readStream.format("postgres-changes").options(url=…, tables="public.orders").load()

Spark makes a reader in three places: where it plans the read (once), in a process beside the driver
that lives as long as the query (`CaptureProcess`), and in the executors (`PartitionReader`). Only the
second one connects to Postgres.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.core.blocks import BLOCK_DDL
from penstock.expressions import fields
from penstock.spark.message_schema import MESSAGE_DDL
from penstock.spark.options import SourceOptions
from penstock.spark.partitions import PartitionReader

if TYPE_CHECKING:
    from penstock.spark.capture_process import CaptureProcess, Offset

_loading: Final = threading.Lock()


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
        return f"fields array<{fields.ddl(options.fields)}>, {BLOCK_DDL}"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002 - pyspark's
        """Return the reader; its `read` runs in the executors."""
        return PostgresChangesReader(SourceOptions.parse(self.options))


class PostgresChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark's reader: it hands each call on to the part that its process needs."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._executor = PartitionReader(options.blocks, options.fields)

    def __getstate__(self) -> dict[str, Any]:
        # Executors get no secret, only the shape of what `read` returns.
        return {"_executor": self._executor}

    # -- beside the driver

    @cached_property
    def _process(self) -> CaptureProcess:
        # Where Spark plans the read it is not needed, and takes half a second to import.
        from penstock.spark.capture_process import CaptureProcess  # noqa: PLC0415 - see above

        return CaptureProcess(self._options)

    def initialOffset(self) -> Offset:
        """Return where the slot stands; makes publication and slot if they are missing."""
        return self._process.initial_offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the option `maxRowsPerBatch` as Spark's limit."""
        return ReadMaxRows(self._options.maxrowsperbatch)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the end of the next batch, waiting up to a second for there to be one."""
        most = self._options.maxrowsperbatch
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else most
        return self._process.latest_offset(start, rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """Note that the query ends when all that is committed when it starts is delivered."""
        self._process.end_when_read()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of a batch; a group's messages are all in one of them, in order."""
        return self._process.partitions(start, end)

    def commit(self, end: Offset) -> None:
        """Confirm a batch."""
        self._process.confirm(end)

    def stop(self) -> None:
        """Confirm to the server what is delivered, and end the capture."""
        self._process.stop()

    # -- in the executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a partition's messages, or blocks of them."""
        return self._executor.read(partition)
