"""A query that is started before the one that it follows has ended: the slot changes hands fast.

Spark needs seconds for the processes of a query, more on a busy machine. Here they start while the
earlier query still delivers: the new one waits until its run has the slot and commands it to go.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.config.settings import Config
from penstock.core.message import Position
from penstock.core.monitor import Handler, Monitor, Report
from penstock.runtime.nats_consumers import consumer_routes_of
from penstock.runtime.reconcile import runs_alike
from penstock.runtime.store_session import StoreSession, routes_of
from penstock.spark.options import Waits
from penstock.spark.pipeline import Pipeline
from penstock.spark.store_writer import StoreTarget


def monitor_for(spark: SparkSession, config: Config, handler: Handler) -> Monitor:
    """Return a monitor that the executors of a session can reach."""
    local = config.spark.master.startswith("local")
    host = spark.sparkContext.getConf().get("spark.driver.host") or "127.0.0.1"
    return Monitor(handler, "127.0.0.1" if local else host)


class NextQuery:
    """The next query of the one source that `config` has.

    `target` is the source's in the store, `uuids` are its sinks' and NATS consumers', `streams` the ids
    of its streams, `starting` the sinks that a backfill's reads may go to first: all, where None are
    named. With `lanes` its tasks wait, too, where the session has slots for two queries of a source, and
    write to the store where a sink can't be reached: the source must be this process's. `start` it,
    `wait`, and give it to the `Run` that takes it over, or `close` it.
    """

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        target: StoreTarget,
        uuids: Mapping[str, str],
        streams: Mapping[str, int] | None = None,
        starting: Collection[str] | None = None,
        *,
        lanes: bool = False,
    ) -> None:
        (self.source,) = config.sources
        self._config = config
        self._target = target
        self.monitor = monitor_for(spark, config, self._handle)
        # A starting sink is one only while the store has it as that, too.
        starting = config.sinks if starting is None else starting
        routes = routes_of(config, self.source, streams or {}, starting, uuids)
        # A cluster has no slots for lanes that wait: they would keep out those that deliver.
        waits: Waits = "lanes" if lanes and config.spark.master.startswith("local") else "process"
        self.pipeline = Pipeline(
            spark, config, self.source, routes, target, self.monitor.address, None,
            consumer_routes_of(config, self.source, uuids), waits=waits,
        )  # fmt: skip
        self._waiting = threading.Event()
        self._handler: Handler | None = None
        self._command: Report | None = None
        self._query: StreamingQuery | None = None

    def start(self) -> None:
        """Start the query; raises Spark's errors, and `SetupError` if it can't be planned."""
        self._query = self.pipeline.start(once=False)

    def wait(self, seconds: float) -> bool:
        """Wait so many seconds for its processes; return whether they are there."""
        return self._waiting.wait(seconds)

    def fits(self, config: Config, store: StoreSession) -> bool:
        """Return whether a run of `config` in `store` would start the same query."""
        same = runs_alike(config, self._config, self.source)
        return same and store.target(self.source) == self._target

    def go(self, handler: Handler, after: Position) -> StreamingQuery:
        """Let it read the slot, which is free now; `handler` gets its reports.

        Up to `after` all is delivered, perhaps to the middle of a transaction.
        """
        assert self._query is not None  # noqa: S101 - `start` comes first
        self._handler = handler
        self._send({"command": "go", "after": [*after]})
        return self._query

    def close(self) -> None:
        """End it, in a thread: its processes may still be starting."""
        self._send({"command": "end"})
        threading.Thread(target=self._end, name="query not needed", daemon=True).start()

    def _send(self, command: Report) -> None:
        self._command = command
        self.monitor.command(self.source, command)

    def _end(self) -> None:
        with contextlib.suppress(Exception):  # the JVM may be gone
            self.pipeline.stop()
        self.monitor.close()

    def _handle(self, report: Report) -> Report | None:
        if report.get("waits"):
            self._waiting.set()
            if self._command is not None:  # the first one was lost
                self.monitor.command(self.source, self._command)
            return None
        return None if self._handler is None else self._handler(report)
