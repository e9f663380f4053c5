"""The executors' end of a pipeline: every part of a micro-batch to the sinks of its messages.

A `FanOut` travels to the executors inside the query. Its sinks are made once in each worker process
and keep their connections from batch to batch.

All streams of the source are written in one transaction of the store, which also reads which NATS sinks
are behind: their messages go to their backlogs, in the same transaction. To the others they are
published meanwhile. What one of these does not take in time goes to its backlog in a second
transaction, and from then on it is behind; `penstock.sinks.backlog.drainer` brings it back.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from queue import SimpleQueue
from typing import Final, TypeVar

import psycopg
import pyarrow as pa

from penstock.config.sinks import NatsSinkSettings, StreamSinkSettings
from penstock.core.backoff import Backoff
from penstock.core.blocks import Block, unpack
from penstock.core.counting import Counts, Floors, is_counted, split
from penstock.core.delivery import DeadLetter, Unfinished, Written
from penstock.core.errors import SinkError
from penstock.core.message import BatchPart, Position
from penstock.core.monitor import Reporter
from penstock.sinks.backlog import store as backlog
from penstock.sinks.nats.sink import NatsSink
from penstock.sinks.nats.window import STEADY_RATE
from penstock.sinks.stream import Backlog, StreamRoute, StreamWriter
from penstock.spark.routes import Route, size
from penstock.spark.steps import Prepared, SinkPlan, Steps
from penstock.streams.errors import store_error

COUNT_DDL = "delivered bigint"
_COUNT_SCHEMA = pa.schema([pa.field("delivered", pa.int64())])
_PATIENCE: Final = 1.0
_BACKOFF_SECONDS: Final = (0.1, 5.0)

T = TypeVar("T")


@dataclass(frozen=True)
class StoreTarget:
    """The store, and what the source is called in it; the URL, with its password, is not shown."""

    url: str
    source_id: int
    base: int

    def __repr__(self) -> str:
        return f"StoreTarget(source_id={self.source_id}, base={self.base})"


class FanOut:
    """Writes blocks of messages to all routes at once; what Spark's `mapInArrow` calls in a task."""

    def __init__(
        self,
        source: str,
        routes: list[Route],
        store: StoreTarget,
        monitor: str | None,
        plans: Mapping[str, SinkPlan] | None = None,
    ) -> None:
        """`plans` are those of the sinks that have a filter, a transform or a route."""
        self.source = source
        self.routes = routes
        self.store = store
        self.monitor = monitor
        self.plans = dict(plans or {})
        self.query = secrets.token_hex(8)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row: how many messages were delivered, to a sink or into its backlog."""
        total = _worker(self).run(unpack(batches), self.query)
        yield pa.record_batch([pa.array([total], pa.int64())], schema=_COUNT_SCHEMA)


class Worker:
    """What one worker process keeps of a `FanOut`."""

    def __init__(self, fan_out: FanOut) -> None:
        self.plans = fan_out.plans
        self.monitor = fan_out.monitor
        self.store = fan_out.store
        self.reporter = Reporter(fan_out.monitor)
        self.streams: list[Steps] = []
        self.sink_writers: dict[str, _SinkWriter] = {}
        streams: list[StreamRoute] = []
        for route in fan_out.routes:
            steps = Steps(route, fan_out.plans.get(route.name), fan_out.source)
            if isinstance(route.settings, StreamSinkSettings):
                assert route.stream_id is not None  # noqa: S101 - streams are registered first
                self.streams.append(steps)
                streams.append(StreamRoute(route.name, route.stream_id, route.settings.kind))
            else:
                self.sink_writers[route.name] = _SinkWriter(
                    steps, route.settings, fan_out.source, self.reporter
                )
        store = fan_out.store
        self.writer = StreamWriter(store.url, store.source_id, store.base, streams)
        self.pool = ThreadPoolExecutor(max(len(self.sink_writers), 1), "sink")
        # A process before this one may have ended after it reported an error of the store.
        self._store_reported = True
        self.source = fan_out.source
        self.query: str | None = None
        self.floors: Floors = {}

    def run(self, blocks: Iterator[Block], query: str = "") -> int:
        """Write the blocks of a task, and return how many messages were delivered in all."""
        first = next(blocks, None)
        if first is None:
            return 0
        if first.part is None:
            # The first batch of a query is empty: it connects to everything.
            self._connect()
            return 0
        if query != self.query:
            self._begin(query)
        return _Part(self, first.part, first, blocks).write()

    def _begin(self, query: str) -> None:
        """Request where a query counts from; without a run, nothing is counted."""
        self.floors = {}
        with contextlib.suppress(EOFError, OSError, AuthenticationError):
            answer = self.reporter.ask({"source": self.source, "query": query})
            self.floors = {
                name: Position(*floor) for name, floor in answer.get("floors", {}).items()
            }
        self.query = query

    def close(self) -> None:
        """End what a worker that is not used any more holds: connections, the operator's code."""
        for steps in self.streams:
            steps.close()
        for sink_writer in self.sink_writers.values():
            sink_writer.close()
        self.writer.close()
        self.pool.shutdown(wait=False)

    def _connect(self) -> None:
        for steps in (
            *self.streams,
            *(sink_writer.steps for sink_writer in self.sink_writers.values()),
        ):
            steps.start()
        behind = self.patiently(self._behind)
        tries = {
            name: self.pool.submit(sink_writer.connect)
            for name, sink_writer in self.sink_writers.items()
            if name not in behind
        }
        self.fall_behind({name: (error, []) for name, t in tries.items() if (error := t.result())})

    def _behind(self) -> set[str]:
        behind = set(self.writer.begin().backlogs)
        self.writer.rollback()
        return behind

    def patiently(self, step: Callable[[], T]) -> T:
        """Return what `step`, a transaction, returns; try again while the store fails it."""
        backoff = Backoff(*_BACKOFF_SECONDS)
        while True:
            try:
                result = step()
            except SinkError as error:
                self._store_reported = True
                self.reporter.send(
                    {"store": str(error), "code": error.code, "remedy": error.remedy}
                )
                if not error.transient:
                    raise
            else:
                if self._store_reported:
                    self._store_reported = False
                    self.reporter.send({"store": None})
                return result
            time.sleep(backoff.after_failure())

    @contextlib.contextmanager
    def in_store(self) -> Iterator[psycopg.Connection]:
        """Lend the open transaction; what psycopg raises ends it, and becomes a `SinkError`."""
        try:
            yield self.writer.connection
        except psycopg.Error as error:
            self.writer.rollback()
            found = store_error(error, self.store.url)
            raise SinkError(
                found.code, found.message, remedy=found.remedy, transient=found.transient
            ) from None

    def fall_behind(
        self,
        left: dict[str, tuple[SinkError, list[pa.RecordBatch]]],
        first: Collection[str] = (),
    ) -> None:
        """Put sinks behind, with the messages that they have not taken.

        Those of the sinks in `first` go before all that waits for these.
        """
        if not left:
            return

        def step() -> None:
            self.writer.begin()
            with self.in_store() as connection:
                for name, (error, batches) in sorted(left.items()):
                    backlog.fall_behind(connection, self.store.source_id, name, error)
                    for batch in batches:
                        self.spill(connection, name, batch, first=name in first)
            self.writer.commit(None)

        self.patiently(step)
        for name, (error, _) in left.items():
            self.reporter.send(
                {
                    "sink": name, "behind": True, "error": str(error), "code": error.code,
                    "remedy": error.remedy,
                }
            )  # fmt: skip

    def spill(
        self, connection: psycopg.Connection, sink: str, messages: pa.RecordBatch, *, first: bool
    ) -> None:
        """Add messages to a sink's backlog, in the open transaction."""
        store = self.store
        backlog.spill(connection, store.source_id, sink, messages, store.base, first=first)


class _Part:
    """One part of a micro-batch on its way."""

    def __init__(
        self,
        worker: Worker,
        part: BatchPart,
        first: Block,
        more: Iterator[Block],
    ) -> None:
        self._worker = worker
        self._part = part
        self._floors = {n: f for n, f in worker.floors.items() if f > part.start}
        self._read = list(split(first, self._floors.values()))
        self._more = more
        self._feeds: dict[str, SimpleQueue[Block | None]] = {}
        self._deliveries: dict[str, Future[_Delivery]] = {}
        self._dead: dict[str, list[DeadLetter]] = {}
        self._first: set[str] = set()
        self._counts: dict[str, Counts] = {}

    def write(self) -> int:
        worker = self._worker
        try:
            total = worker.patiently(self._attempt)
        finally:
            for feed in self._feeds.values():
                feed.put(None)
            # Whatever has happened, the next part finds the sinks idle.
            wait(self._deliveries.values())
        for name, dead in self._dead.items():
            send_report(worker.reporter, name, Written(dead=dead))
        for name, future in self._deliveries.items():
            self._counts[name] = future.result().counts
        done = {name: future.result() for name, future in self._deliveries.items()}
        left = {n: (d.error, d.rest) for n, d in done.items() if d.error is not None}
        worker.fall_behind(left, self._first)
        worker.reporter.send(
            {
                "source": worker.source, "query": worker.query,
                "part": [[*self._part.start], [*self._part.end], *self._part[2:]],
                "counts": {name: [*counts] for name, counts in self._counts.items()},
            }
        )  # fmt: skip
        return total + sum(d.delivered + d.left for d in done.values())

    def _attempt(self) -> int:
        """Write the part to streams and backlogs; where no sink was begun with, also to those."""
        worker, writer = self._worker, self._worker.writer
        behind = writer.begin().backlogs
        spilled = [worker.sink_writers[name] for name in self._begin(behind)]
        written = [Written() for _ in worker.streams]
        total = 0
        self._dead = {}
        spills = {sink_writer.steps.route.name for sink_writer in spilled}
        names = spills.union(steps.route.name for steps in worker.streams)
        self._counts = {name: Counts() for name in names if self._is_for(name)}
        for block in self._blocks():
            for index, steps in enumerate(worker.streams):
                if not self._is_for(steps.route.name):
                    continue
                prepared = self._prepared(steps, block)
                there, new = writer.write(index, prepared.messages)
                written[index].delivered += new
                written[index].duplicates += there - new
                self._count(steps, block, prepared, there, size(prepared.messages))
            for sink_writer in spilled:
                prepared = self._prepared(sink_writer.steps, block)
                messages, name = prepared.messages, sink_writer.steps.route.name
                self._count(sink_writer.steps, block, prepared)
                with worker.in_store() as connection:
                    worker.spill(connection, name, messages, first=name in self._first)
                total += messages.num_rows
        if not worker.streams and not spilled:
            writer.rollback()
            return 0
        writer.commit(self._part if worker.streams else None)
        for steps, of_stream in zip(worker.streams, written, strict=True):
            if of_stream.delivered or of_stream.duplicates:
                worker.reporter.send(_body(steps.route.name, of_stream))
            total += of_stream.delivered
        return total

    def _prepared(self, steps: Steps, block: Block) -> Prepared:
        prepared = steps(block)
        if prepared.dead:
            self._dead.setdefault(steps.route.name, []).extend(prepared.dead)
        return prepared

    def _count(
        self, steps: Steps, block: Block, prepared: Prepared, delivered: int = 0, bytes_: int = 0
    ) -> None:
        name = steps.route.name
        if not is_counted(block, self._floors.get(name)):
            of = Counts(delivered, bytes_, len(prepared.dead), prepared.filtered)
            self._counts[name] = self._counts[name].plus(of)

    def _is_for(self, sink: str) -> bool:
        return self._part.sink in (None, sink)

    def _begin(self, behind: Mapping[str, Backlog]) -> list[str]:
        """Begin to publish to the sinks that are not behind, and return the names of those that are."""
        worker = self._worker
        spilled = []
        for name, sink_writer in worker.sink_writers.items():
            if name in self._feeds or not self._is_for(name):
                continue
            found = behind.get(name)
            if found is not None:
                starts = (
                    sink_writer.steps.route.starts and self._part.sink == name and found.starting
                )
                if starts:
                    self._first.add(name)
                if not starts or found.has_first:
                    spilled.append(name)
                    continue
            feed = self._feeds[name] = SimpleQueue()
            for block in self._read:
                feed.put(block)
            floor = self._floors.get(name)
            self._deliveries[name] = worker.pool.submit(sink_writer.deliver, feed, floor)
        return spilled

    def _blocks(self) -> Iterator[Block]:
        """Yield the part's messages, those again that were read before, and hand new ones on."""
        yield from self._read
        for whole in self._more:
            for block in split(whole, self._floors.values()):
                self._read.append(block)
                for feed in self._feeds.values():
                    feed.put(block)
                yield block
        for feed in self._feeds.values():
            feed.put(None)


@dataclass
class _Delivery:
    """What a NATS sink took of a part; `error` is why it did not take the rest."""

    delivered: int
    error: SinkError | None
    rest: list[pa.RecordBatch]
    counts: Counts = field(default_factory=Counts)

    def count(self, written: Written, filtered: int = 0) -> None:
        """Count what became of messages that were not counted before."""
        of = Counts(written.delivered, written.bytes, len(written.dead), filtered)
        self.counts = self.counts.plus(of)

    @property
    def left(self) -> int:
        """How many messages it did not take."""
        return sum(int(batch.num_rows) for batch in self.rest)


class _SinkWriter:
    """A NATS sink, and how it is written to: in a thread, and not for ever."""

    def __init__(
        self, steps: Steps, settings: NatsSinkSettings, source: str, reporter: Reporter
    ) -> None:
        self.steps = steps
        self._name = steps.route.name
        self._reporter = reporter
        self._patience = min(_PATIENCE, settings.detach_after.total_seconds())
        if steps.regroups:
            settings = settings.model_copy(update={"group_by": None})
        self._sink = NatsSink(settings, name=self._name, source=source, on_retry=self._on_retry)

    def connect(self) -> SinkError | None:
        """Connect, and return why that is not possible."""
        try:
            self._sink.connect(self._patience)
        except Unfinished as unfinished:
            return unfinished.error
        self._reporter.send(_body(self._name, Written()))
        return None

    def close(self) -> None:
        """End its connection and the operator's code."""
        self.steps.close()
        self._sink.close()

    def deliver(self, feed: SimpleQueue[Block | None], floor: Position | None) -> _Delivery:
        """Publish what comes, up to None, and give back what the sink does not take in time.

        What lies up to `floor` is counted already.
        """
        done = _Delivery(0, None, [])
        left = self._patience
        while (block := feed.get()) is not None:
            prepared = self.steps(block)
            messages = prepared.messages
            of_block = Written(dead=prepared.dead)
            if prepared.dead:
                self._report(of_block)
            counted = is_counted(block, floor)
            if not counted:
                done.count(of_block, prepared.filtered)
            if not messages.num_rows:
                continue
            if done.error is None:
                started = time.monotonic()
                try:
                    written = self._sink.write(messages, left)
                    self._report(written)
                    done.delivered += written.delivered
                    if not counted:
                        done.count(written)
                    # Slowness adds up over the blocks of a part.
                    took = time.monotonic() - started - messages.num_rows / STEADY_RATE
                    left = min(self._patience, left - took)
                    continue
                except Unfinished as unfinished:
                    self._report(unfinished.written)
                    done.delivered += unfinished.written.delivered
                    if not counted:
                        done.count(unfinished.written)
                    done.error, messages = unfinished.error, unfinished.rest
            if messages.num_rows:
                done.rest.append(messages)
        return done

    def _on_retry(self, error: SinkError, seconds: float) -> None:
        self._reporter.send(
            {
                "sink": self._name, "error": str(error), "code": error.code,
                "remedy": error.remedy, "retry_in": seconds,
            }
        )  # fmt: skip

    def _report(self, written: Written) -> None:
        send_report(self._reporter, self._name, written)


def send_report(reporter: Reporter, sink: str, written: Written) -> None:
    """Report what became of a sink's messages; returns when its dead letters are in the store."""
    report = _body(sink, written)
    if not written.dead:
        if written.delivered:
            reporter.send(report)
        return
    backoff, failed = Backoff(*_BACKOFF_SECONDS), False
    while "error" in (answer := reporter.ask(report)):
        failed = True
        reporter.send({"store": answer["error"], "code": "dead_letters"})
        time.sleep(backoff.after_failure())
    if failed:
        reporter.send({"store": None})


def _body(sink: str, written: Written) -> dict[str, object]:
    return {
        "sink": sink, "delivered": written.delivered, "duplicates": written.duplicates,
        "bytes": written.bytes, "dead": [asdict(letter) for letter in written.dead],
        "counted": False,  # but with the whole part
    }  # fmt: skip


_workers: dict[str, Worker] = {}


def _worker(fan_out: FanOut) -> Worker:
    # Keyed by source: a worker process outlives queries, and serves those of every source.
    key = fan_out.source
    worker = _workers.get(key)
    # A query that is started again may have another plan, as the tables may have changed, or be of
    # another run, with other sinks.
    if worker is None or worker.monitor != fan_out.monitor or worker.plans != fan_out.plans:
        if worker is not None:
            worker.close()
        worker = _workers[key] = Worker(fan_out)
    return worker
