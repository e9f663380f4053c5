"""One source's pipeline: its Structured Streaming query, started, watched and stopped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings, Sink, StreamSinkSettings
from penstock.core.blocks import ROWS_AT_ONCE
from penstock.spark.consumer_steps import ConsumerRoute
from penstock.spark.options import Waits
from penstock.spark.planning import Planner
from penstock.spark.routes import Route
from penstock.spark.settings import batch_seconds, lanes
from penstock.spark.source import load
from penstock.spark.store_writer import StoreTarget
from penstock.spark.writer import COUNT_DDL, FanOut


class Pipeline:
    """The query of one source into `routes`, and the backlogs of these in `store`.

    `consumers` are those of type nats of the streams among the routes.

    It begins at the slot, in a checkpoint folder of its own: the slot is the truth, and a checkpoint
    that is older or newer than it could only contradict it. One that `waits` lets another query go on
    reading the slot until its capture is commanded to `go`. Each is started once.
    """

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        source: str,
        routes: list[Route],
        store: StoreTarget,
        monitor: str,
        planner: Planner | None = None,
        consumers: Sequence[ConsumerRoute] = (),
        *,
        waits: Waits = "",
    ) -> None:
        self._spark = spark
        self._config = config
        self._source = source
        self._routes = routes
        self._consumers = consumers
        self._store = store
        self._monitor = monitor
        self.planner = planner or Planner(config.sources[source], config.sinks_of(source))
        self._waits = waits
        self._number = time.time_ns()
        # Spark may take a query that has ended for one that runs, and no second one of its name.
        self.name = f"{source} {self._number}"
        self._query: StreamingQuery | None = None

    def start(self, *, once: bool) -> StreamingQuery:
        """Start the query; with `once` it ends when all that is committed now is delivered.

        The sinks' expressions are planned by the tables as they are now; raises `SetupError` where
        that can't be.
        """
        spark = self._spark
        plan = self.planner.plan()
        # A row is a block of thousands of messages: each goes to the sink's worker as it is read.
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(ROWS_AT_ONCE))
        fan_out = FanOut(
            self._source, self._routes, self._store, self._monitor, plan.sinks if plan else {},
            self._consumers,
        )  # fmt: skip
        after = orjson.dumps([*self.planner.after]).decode()
        options = self._options() | {"query": fan_out.query, "after": after}
        if plan is not None and plan.fields:
            options["fields"] = orjson.dumps([f.to_json() for f in plan.fields]).decode()
        if plan is not None:
            tables = [[*table, columns] for table, columns in plan.tables.items()]
            options["planned_tables"] = orjson.dumps(tables).decode()
            options["planned_lsn"] = str(plan.lsn)
        messages = load(spark, options)
        if plan is not None:
            messages = plan.results(messages)
        delivered = map_in_arrow(messages, fan_out, COUNT_DDL)
        writer = (
            delivered.writeStream.format("noop")
            .queryName(self.name)
            .option("checkpointLocation", self._checkpoint())
        )
        if once:
            writer = writer.trigger(availableNow=True)
        else:
            # Progress is written behind the batches, not between them. Spark asks for a sink that
            # stands repeats, which every sink of ours does.
            writer = (
                writer.trigger(processingTime="0 seconds")
                .option("asyncProgressTrackingEnabled", "true")
                .option("_asyncProgressTrackingOverrideSinkSupportCheck", "true")
            )
        self._query = writer.start()
        return self._query

    def stop(self) -> None:
        """End the query, wherever it is."""
        if self._query is not None:
            self._query.stop()

    def forget_others(self) -> None:
        """Delete the checkpoints of the source's queries before this one."""
        if "://" in self._config.spark.checkpoint:
            return
        for old in self._config.checkpoint_folder(self._source).iterdir():
            # Only what an earlier start made: a number for a name, with Spark's own file in it. A newer
            # one is of a query that waits.
            if old.name.isdigit() and int(old.name) < self._number and (old / "metadata").is_file():
                shutil.rmtree(old, ignore_errors=True)

    def _splits(self, sinks: Iterable[Sink]) -> int:
        """Return how many lanes a batch may have."""
        forms = [sink.form for sink in sinks if isinstance(sink, NatsSinkSettings)]
        if any(form is not None and form.group_by != "none" for form in forms):
            # Rows of an outbox that have an order are in one split, and so are those of a backfill.
            return 1
        return lanes(self._spark, self._config.spark.master, self._config.sharing)

    def _options(self) -> dict[str, str]:
        source = self._config.sources[self._source]
        sinks = self._config.sinks_of(self._source)
        everything = list(source.tables)
        captured = [list(s.tables) if s.tables else everything for s in sinks.values()]
        groupings = [
            {"tables": tables, "group_by": group_by}
            for tables, sink in zip(captured, sinks.values(), strict=True)
            for group_by in _groupings(sink)
        ]
        conf = self._spark.sparkContext.getConf()
        recover = self._config.recover_command(self._source)
        return {
            "url": source.url.get_secret_value(),
            **({} if source.reached is None else {"bastion_secret": source.reached.to_json()}),
            "tables": orjson.dumps(sorted({t for tables in captured for t in tables})).decode(),
            "slot": source.slot,
            "publication": source.publication,
            "splits": str(self._splits(sinks.values())),
            "host": conf.get("spark.driver.host") or "127.0.0.1",
            "blocks": "true",
            "latency": "realtime",
            "batchseconds": str(batch_seconds(self._config.spark.master)),
            "in_step": str(any(isinstance(s, StreamSinkSettings) for s in sinks.values())).lower(),
            "truncates": str(any("truncate" in s.actions for s in sinks.values())).lower(),
            "groupings": orjson.dumps(groupings).decode(),
            "monitor": self._monitor,
            "name": self._source,
            **({} if recover is None else {"recover": recover}),
            "waits": self._waits,
        }

    def _checkpoint(self) -> str:
        base = self._config.spark.checkpoint
        if "://" in base:
            return f"{base.rstrip('/')}/{self._source}/{self._number}"
        folder = self._config.checkpoint_folder(self._source)
        folder.mkdir(parents=True, exist_ok=True)
        if not self._waits:
            self.forget_others()
        return str(folder / str(self._number))


def _groupings(sink: Sink) -> list[list[str] | None]:
    """Return what a sink's order means for its source (see `SourceOptions.grouping`)."""
    form = sink.form if isinstance(sink, NatsSinkSettings) else None
    if form is None:
        return [sink.group_by]
    if form.group_by is None:
        return [[]]  # the whole outbox is one group
    # Rows that share a value, which the sink reads, are to be in one split, whichever that is.
    return [None] if form.group_by == "none" else [None, []]


def map_in_arrow(frame: DataFrame, function: Any, ddl: str) -> DataFrame:
    """Return `frame.mapInArrow(function, ddl)`, which would ask for pandas though it needs none.

    pandas is left out on purpose: every Python worker would import it at its start.
    """
    udf = UserDefinedFunction(function, ddl, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column = udf(*[frame[name] for name in frame.columns])
    return DataFrame(frame._jdf.mapInArrow(column._jc, False, None), frame.sparkSession)
