"""The executors' end of a pipeline: every part of a round to the sinks of its messages.

A `FanOut` travels to the executors inside the query. Its sinks are made once in each worker process
and keep their connections from batch to batch.

All streams of the source are written in one transaction of the store, which also reads which NATS sinks
are behind: their messages go to their backlogs, in the same transaction. To the others they are
published meanwhile. What one of these does not take in time goes to its backlog in a second
transaction, and from then on it is behind; `penstock.sinks.backlog.drainer` brings it back. Where there
is no stream, and no sink that may be behind, the store is left alone.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError

import pyarrow as pa

from penstock.config.sinks import StreamSinkSettings
from penstock.core.blocks import Block, Opening, unpack
from penstock.core.counting import Floors
from penstock.core.errors import SinkError
from penstock.core.message import Position
from penstock.core.monitor import Reporter
from penstock.core.record_forms import form_of
from penstock.sinks.stream import StreamRoute
from penstock.spark.audience import Audience
from penstock.spark.consumer_steps import ConsumerRoute, ConsumerSteps
from penstock.spark.lanes import Reports
from penstock.spark.part_writer import PartOutcome, PartWriter
from penstock.spark.routes import Route
from penstock.spark.shared_sinks import shared
from penstock.spark.sink_plan import SinkPlan
from penstock.spark.sink_writer import SinkWriter
from penstock.spark.steps import Steps
from penstock.spark.store_writer import StoreTarget, StoreWriter

COUNT_DDL = "delivered bigint"
_COUNT_SCHEMA = pa.schema([pa.field("delivered", pa.int64())])


class FanOut:
    """Writes blocks of messages to all routes at once; what Spark's `mapInArrow` calls in a task."""

    def __init__(
        self,
        source: str,
        routes: list[Route],
        store: StoreTarget,
        monitor: str | None,
        plans: Mapping[str, SinkPlan] | None = None,
        consumers: Sequence[ConsumerRoute] = (),
    ) -> None:
        """`plans` are those of the sinks that have a filter, a transform or a route.

        `consumers` are those of type nats of the streams among the routes.
        """
        self.source = source
        self.routes = routes
        self.store = store
        self.monitor = monitor
        self.plans = dict(plans or {})
        self.consumers = list(consumers)
        self.query = secrets.token_hex(8)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row: how many messages were delivered, to a sink or into its backlog."""
        total = _worker(self).run(unpack(batches), self.query)
        yield pa.record_batch([pa.array([total], pa.int64())], schema=_COUNT_SCHEMA)


class Worker:
    """What one worker process keeps of a `FanOut`."""

    def __init__(self, fan_out: FanOut) -> None:
        self.fan_out = fan_out
        self.reporter = Reporter(fan_out.monitor)
        self.streams: list[Steps] = []
        self.sink_writers: dict[str, SinkWriter] = {}
        streams: list[StreamRoute] = []
        for route in fan_out.routes:
            steps = Steps(route, fan_out.plans.get(route.name), fan_out.source)
            if isinstance(route.settings, StreamSinkSettings):
                assert route.stream_id is not None  # noqa: S101 - streams are registered first
                self.streams.append(steps)
                form = form_of(fan_out.source, route.settings.kind)
                streams.append(StreamRoute(route.name, route.stream_id, form))
            else:
                self.sink_writers[route.name] = SinkWriter(
                    steps, route.settings, fan_out.source, self.reporter
                )
        self.consumer_writers: dict[str, SinkWriter] = {}
        self.consumers_of: dict[str, list[str]] = {}
        for consumer in fan_out.consumers:
            self.consumer_writers[consumer.name] = SinkWriter(
                ConsumerSteps(consumer), consumer.settings, fan_out.source, self.reporter
            )
            self.consumers_of.setdefault(consumer.stream, []).append(consumer.name)
        self.audience = Audience(
            {name: writer.steps.route.takes for name, writer in self.sink_writers.items()}
        )
        self.consumer_audience = Audience(
            {name: writer.steps.route.takes for name, writer in self.consumer_writers.items()}
        )
        self.store = StoreWriter(fan_out.store, streams, self.reporter)
        self.pool = ThreadPoolExecutor(max(len(self.publishers), 1), "sink")
        self.shared = shared(self.sink_writers, fan_out.source, self.pool, self.audience)
        self.query: str | None = None
        self.floors: Floors = {}
        self.sees_behind = False
        """Whether some sink was behind, the last time that this looked or put one there."""

    @property
    def publishers(self) -> dict[str, SinkWriter]:
        """The NATS sinks and consumers, by name."""
        return self.sink_writers | self.consumer_writers

    def run(self, values: Iterator[Block | Opening], query: str) -> int:
        """Write a task's parts, report each, and return how many messages were delivered in all."""
        total, reports = 0, None
        try:
            for value in values:
                if isinstance(value, Opening):
                    self.connect()
                    reports = Reports(value)
                else:
                    if (
                        query != self.query
                    ):  # not before: it may have waited for another query's end
                        self.begin(query)
                    outcome = self.write(value, values)
                    total += outcome.total
                    if reports is not None:
                        reports.send(outcome.report())
        finally:
            if reports is not None:
                reports.close()
        return total

    def write(self, first: Block, more: Iterator[Block | Opening]) -> PartOutcome:
        """Write the part whose blocks are `first` and the next ones of `more`."""
        assert first.part is not None  # noqa: S101 - the rounds' parts are named
        return PartWriter(self, first.part, _until_last(first, more)).write()

    def begin(self, query: str) -> None:
        """Request where a query counts from; without a run, nothing is counted."""
        self.floors = {}
        with contextlib.suppress(EOFError, OSError, AuthenticationError):
            answer = self.reporter.request({"source": self.fan_out.source, "query": query})
            self.floors = {
                name: Position(*floor) for name, floor in answer.get("floors", {}).items()
            }
        self.query = query

    def close(self) -> None:
        """End what a worker that is not used any more holds: connections, the operator's code."""
        for steps in self.streams:
            steps.close()
        for sink_writer in self.publishers.values():
            sink_writer.close()
        for of in self.shared:
            of.close()
        self.store.streams.close()
        self.pool.shutdown(wait=False)

    def connect(self) -> None:
        """Connect to everything; a sink that can't be reached is behind from now on."""
        for steps in (*self.streams, *(writer.steps for writer in self.sink_writers.values())):
            steps.start()
        behind = self.store.behind()
        self.sees_behind = bool(behind)
        wanted = self.publishers.keys() - behind
        one_by_one = wanted.difference(*(of.names for of in self.shared))
        tries = {name: self.pool.submit(self.publishers[name].connect) for name in one_by_one}
        errors = {name: error for name, t in tries.items() if (error := t.result())}
        for of in self.shared:
            if names := of.names & wanted:
                errors |= of.connect(names)
        # What was counted before is no measure of what a sink has: LSNs may have started anew since.
        fallen: dict[str, tuple[SinkError, list[pa.RecordBatch]]] = {
            name: (error, []) for name, error in errors.items()
        }
        self.store.fall_behind(fallen)
        self.sees_behind = self.sees_behind or bool(fallen)


def _until_last(first: Block, more: Iterator[Block | Opening]) -> Iterator[Block]:
    yield first
    while not first.last:
        value = next(more)
        assert isinstance(value, Block)  # noqa: S101 - a part's blocks come one after the other
        first = value
        yield first


_workers: dict[str, Worker] = {}


def _worker(fan_out: FanOut) -> Worker:
    # Keyed by source: a worker process outlives queries, and serves those of every source.
    worker = _workers.get(fan_out.source)
    if worker is not None:
        of = worker.fan_out
        mine = (of.monitor, of.plans, of.consumers)
        if mine == (fan_out.monitor, fan_out.plans, fan_out.consumers):
            return worker
        # A query that is started again may have another plan, as the tables may have changed, or be of
        # another run, with other sinks.
        worker.close()
    worker = _workers[fan_out.source] = Worker(fan_out)
    return worker
