"""The executors' end of a pipeline: every batch to every sink that wants its messages.

A `FanOut` travels to the executors inside the query. Its sinks are made once in each worker process
and keep their connections from batch to batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.message import ACTIONS
from penstock.monitor import Reporter
from penstock.settings import NatsSinkSettings
from penstock.sinks.base import Sink, SinkError, Written
from penstock.sinks.nats import NatsSink
from penstock.blocks import unpack
from penstock.tables import TablePattern, matches_any

COUNT_DDL = "delivered bigint"
_COUNT_SCHEMA = pa.schema([pa.field("delivered", pa.int64())])


@dataclass(frozen=True)
class Route:
    """A sink, and which messages of its source it wants."""

    name: str
    settings: NatsSinkSettings

    def wanted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages of `batch` that the sink wants, in their order."""
        keep = None
        if set(self.settings.actions) != set(ACTIONS):
            actions = pa.array(self.settings.actions, pa.string())
            keep = pc.is_in(batch.column("action"), value_set=actions)
        if self.settings.patterns is not None:
            tables = self._tables(batch)
            keep = tables if keep is None else pc.and_(keep, tables)
        if keep is None or pc.all(keep).as_py():
            return batch
        return batch.filter(keep)

    def _tables(self, batch: pa.RecordBatch) -> pa.Array:
        patterns: tuple[TablePattern, ...] = self.settings.patterns or ()
        schemas, tables = batch.column("table_schema"), batch.column("table_name")
        names = pc.binary_join_element_wise(schemas, tables, "\0").dictionary_encode()
        wanted = [matches_any(patterns, *name.as_py().split("\0", 1)) for name in names.dictionary]
        return pa.array(wanted, pa.bool_()).take(names.indices)


class FanOut:
    """Writes blocks of messages to all routes at once; what Spark's `mapInArrow` calls in a task."""

    def __init__(self, source: str, routes: list[Route], monitor: str | None) -> None:
        self.source = source
        self.routes = routes
        self.monitor = monitor

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row: how many messages were delivered."""
        worker = _worker(self)
        total = sum(worker.write(batch) for batch in unpack(batches))
        yield pa.record_batch([pa.array([total], pa.int64())], schema=_COUNT_SCHEMA)


class _Worker:
    """What one worker process keeps of a `FanOut`."""

    def __init__(self, fan_out: FanOut) -> None:
        self._routes = fan_out.routes
        self._reporter = Reporter(fan_out.monitor)
        self._sinks: list[Sink] = [
            NatsSink(
                route.settings, name=route.name, source=fan_out.source, on_retry=self._retry(route)
            )
            for route in fan_out.routes
        ]
        self._pool = ThreadPoolExecutor(len(self._sinks), "sink") if len(self._sinks) > 1 else None

    def _retry(self, route: Route) -> Callable[[SinkError, float], None]:
        return lambda error, seconds: self._report(route.name, error, seconds)

    def _report(self, sink: str, error: SinkError, seconds: float) -> None:
        self._reporter.send(
            {"sink": sink, "error": str(error), "code": error.code, "retry_in": seconds}
        )

    def write(self, batch: pa.RecordBatch) -> int:
        """Write a batch to every sink, and return how many messages were delivered in all."""
        if self._pool is None:
            return self._write(0, batch)
        writes: list[Future[int]] = [
            self._pool.submit(self._write, index, batch) for index in range(len(self._sinks))
        ]
        return sum(write.result() for write in writes)

    def _write(self, index: int, batch: pa.RecordBatch) -> int:
        route = self._routes[index]
        sink = self._sinks[index]
        try:
            if not batch.num_rows:
                # The first batch of a query is empty: it shows whether the sink can be reached.
                sink.connect()
                written = Written()
            else:
                wanted = route.wanted(batch)
                if not wanted.num_rows:
                    return 0
                written = sink.write(wanted)
        except SinkError as error:
            self._report(route.name, error, 0)
            raise
        self._tell(route.name, written)
        return written.delivered

    def _tell(self, sink: str, written: Written) -> None:
        report = {
            "sink": sink, "delivered": written.delivered, "duplicates": written.duplicates,
            "bytes": written.bytes, "dead": [asdict(letter) for letter in written.dead],
        }  # fmt: skip
        if written.dead:
            # Not done before the dead letters are on disk.
            answer = self._reporter.ask(report)
            if "error" in answer:
                raise SinkError("dead_letters", answer["error"], transient=True)
        else:
            self._reporter.send(report)


_workers: dict[str, _Worker] = {}


def _worker(fan_out: FanOut) -> _Worker:
    # Keyed by run and source: a worker process outlives queries, and serves those of every source.
    key = f"{fan_out.monitor} {fan_out.source}"
    worker = _workers.get(key)
    if worker is None:
        worker = _workers[key] = _Worker(fan_out)
    return worker
