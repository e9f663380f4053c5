"""A source without Spark: micro-batches through real `Worker`s, into streams and NATS sinks.

Messages are numbered; a group's numbers must arrive in their order, everywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import orjson
import pyarrow as pa
from tests.drainer_help import SingleDrainer
from tests.streams_help import Change, read, wire
from tests.waits import Later, at_once, await_end

from penstock.config.nats_consumers import NatsConsumer
from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings, StreamSinkSettings
from penstock.core.blocks import Block, pack, unpack
from penstock.core.delivery import DeadLetter
from penstock.core.errors import StoreError
from penstock.core.message import Position, RoundPart
from penstock.core.monitor import Monitor, Report
from penstock.embedded.handles import JetStream
from penstock.runtime.nats_consumers import ConsumerDrainers, consumer_routes_of
from penstock.runtime.state import RunState
from penstock.sinks.backlog.sink import SinkBacklog
from penstock.sinks.nats.sink import NatsSink
from penstock.spark.part_writer import PartOutcome
from penstock.spark.routes import Route
from penstock.spark.sink_plan import SinkPlan
from penstock.spark.store_writer import StoreTarget
from penstock.spark.writer import FanOut, Worker
from penstock.streams.records import SourceRecord
from penstock.streams.store import Store

GROUPS = 37
PER_TRANSACTION = 5
SUBJECT = "shop.public.>"


def nats_settings(url: str, **settings: Any) -> NatsSinkSettings:
    return NatsSinkSettings.model_validate(
        {"type": "nats", "source": "shop", "url": url, "detach_after": "1s", **settings}
    )


def stream_settings(**settings: Any) -> StreamSinkSettings:
    return StreamSinkSettings.model_validate({"type": "stream", "source": "shop", **settings})


def position(number: int) -> Position:
    """Return the position of message `number`, counted from 0; -1 is before all."""
    return Position(1000 + 8 * (number // PER_TRANSACTION), number % PER_TRANSACTION)


def messages(first: int, end: int, size: int = 0) -> pa.RecordBatch:
    """Return messages first to end, without end."""
    return wire(
        [
            Change(
                {"id": n, "pad": "x" * size, "half": n % 2}, group=n % GROUPS, position=position(n)
            )
            for n in range(first, end)
        ]
    )


def write_part(worker: Worker, rows: pa.RecordBatch, part: RoundPart) -> PartOutcome:
    """Have a worker write a part, as it does where Spark brings it."""
    values = unpack(iter([pack(rows, part)]))
    first = next(values)
    assert isinstance(first, Block)
    return worker.write(first, values)


class Source:
    """One source, its sinks, and the processes of its run: `restart` makes all of these anew."""

    def __init__(
        self,
        url: str,
        sinks: dict[str, NatsSinkSettings | StreamSinkSettings],
        *,
        tasks: int = 2,
        plans: Mapping[str, SinkPlan] | None = None,
        consumers: Mapping[str, NatsConsumer] | None = None,
    ) -> None:
        self._plans = plans
        self.consumers = dict(consumers or {})
        self.store = Store.open(url)
        self.reports: list[Report] = []
        self.refuse_letters: str | None = None
        self.written = 0  # messages that a finished batch had
        self._sinks = sinks
        self._tasks = tasks
        self._plan_numbers = itertools.count(1)
        self._turns = threading.Lock()  # a query's tasks end before the next one's begin
        self._stack = contextlib.ExitStack()
        self.source: SourceRecord = self.store.register_source("shop", "tag")
        self.start()

    def start(self) -> None:
        """Start what `penstock run` has in its processes."""
        self._stack = contextlib.ExitStack()
        self.source = self.store.register_source("shop", "tag")
        self.state = RunState(
            ["shop"],
            {name: (s.type, "shop") for name, s in self._sinks.items()},
            {name: (consumer.stream, "shop") for name, consumer in self.consumers.items()},
        )
        routes = []
        for name, sink in self._sinks.items():
            stream = None
            if isinstance(sink, StreamSinkSettings):
                stream = self.store.register_stream(name, self.source, sink.kind, sink.retention)
            routes.append(Route(name, sink, stream.id if stream else None))
        monitor = Monitor(self._handle)
        self._stack.callback(monitor.close)
        target = StoreTarget(self.store.url, self.source.id, self.source.base)
        known = self._register_consumers()
        consumers = consumer_routes_of(known.config, "shop", {})
        fan_out = FanOut("shop", routes, target, monitor.address, self._plans, consumers)
        self._fan_out = fan_out
        self.workers = [Worker(fan_out) for _ in range(self._tasks)]
        self.drainers: dict[str, SingleDrainer] = {}
        for name, sink in self._sinks.items():
            if isinstance(sink, NatsSinkSettings):
                self._drain(name, sink)
        for route in consumers:
            self._drain(route.name, route.settings, known.backlog(route.name))

    def _register_consumers(self) -> ConsumerDrainers:
        config = Config.model_construct(
            sources={}, sinks=self._sinks, nats_consumers=self.consumers
        )
        known = ConsumerDrainers(config, self.store)
        streams = {stream.name: stream.id for stream in self.store.streams()}
        known.register({"shop": self.source}, streams)
        return known

    def _drain(self, name: str, sink: NatsSinkSettings, of: SinkBacklog | None = None) -> None:
        drainer = self.drainers[name] = SingleDrainer(
            self.store.url,
            of or SinkBacklog(self.source.id, name),
            lambda: NatsSink(sink, name=name, source="shop"),
            sink.detach_after,
            self._handle,
        )
        drainer.start()
        self._stack.callback(drainer.stop)

    def restart(self) -> None:
        """End the run as a crash would, and start it again: nothing is known of what was done."""
        self._stack.close()
        self.start()

    def restart_query(self) -> None:
        """Have another query go on, as where a task failed; the run and its drainers stay."""
        with self._turns:
            self._restart_query()

    def _restart_query(self) -> None:
        old = self._fan_out
        fan_out = self._fan_out = FanOut(
            "shop", old.routes, old.store, old.monitor, self._plans, old.consumers
        )
        for worker in self.workers:
            worker.close()
        self.workers = [Worker(fan_out) for _ in range(self._tasks)]

    def _handle(self, report: Report) -> Report | None:
        if "query" in report and "part" not in report:
            return self.state.begin_query(report)
        self.reports.append(report)
        if report.get("dead") and not report.get("kept"):
            if self.refuse_letters is not None:
                return {"error": self.refuse_letters}
            name, letters = report["sink"], [DeadLetter(**letter) for letter in report["dead"]]
            try:
                is_consumer = name in self.consumers
                self.store.letters.add(name, letters, "consumer" if is_consumer else "sink")
            except StoreError as error:
                return {"error": str(error)}
        self.state.update(report)
        if report.get("behind"):
            self.drainers[report["sink"]].wake()
        return None

    # Batches

    def parts(self, first: int, end: int, tasks: int, size: int = 0) -> list[pa.RecordBatch]:
        rows = messages(first, end, size)
        groups = rows["group_hash"].to_pylist()
        parts = [rows.filter(pa.array([g % tasks == n for g in groups])) for n in range(tasks)]
        return [part for part in parts if part.num_rows]

    def batch(
        self,
        end: int,
        *,
        only: Iterable[int] | None = None,
        tasks: int | None = None,
        size: int = 0,
    ) -> None:
        """Write the micro-batch up to message `end`; with `only` some of its parts, as in a crash."""
        with self._turns:
            self._batch(end, only, tasks or self._tasks, size)

    def _batch(self, end: int, only: Iterable[int] | None, tasks: int, size: int) -> None:
        first = self.written
        parts = self.parts(first, end, tasks, size)
        writes, plan = [], next(self._plan_numbers)
        for number, rows in enumerate(parts):
            if only is None or number in only:
                start, last = position(first - 1), position(end - 1)
                part = RoundPart(start, last, number, len(parts), plan)
                writes.append(Later(partial(self._write, self.workers[number], rows, part)))
        await_end(*writes)  # a worker writes one part at a time, also where another has failed
        for write in writes:
            self._note(write.result())
        if only is None:
            self.done(end)

    def _write(self, worker: Worker, rows: pa.RecordBatch, part: RoundPart) -> PartOutcome:
        """Write a part as a lane does, behind the question from where it counts."""
        if worker.query != self._fan_out.query:
            worker.begin(self._fan_out.query)
        return write_part(worker, rows, part)

    def _note(self, outcome: PartOutcome) -> None:
        """Report to the run as the capture does when a round is done, here part by part."""
        report = {
            "source": "shop", "query": self._fan_out.query, "part": outcome.part.to_json(),
            "counts": {name: [*counts] for name, counts in outcome.counts.items()},
            "outcomes": {name: [*of] for name, of in outcome.written.items()},
        }  # fmt: skip
        self._handle(report)

    def done(self, end: int) -> None:
        """Report that all before message `end` is done."""
        self.written = end
        for drainer in self.drainers.values():
            drainer.done(self.source.position(position(end - 1)))

    def warm(self) -> None:
        at_once(*[worker.connect for worker in self.workers])

    # What is known

    def behind(self) -> dict[str, str]:
        """Return the sinks that are behind, with the codes of their errors."""
        with self.store.connection() as connection:
            return dict(connection.execute("SELECT sink, code FROM penstock.backlogs").fetchall())

    def waiting(self, sink: str) -> int:
        with self.store.connection() as connection:
            query = b"SELECT coalesce(sum(rows), 0) FROM penstock.backlog_blocks WHERE sink = %s"
            return int(connection.execute(query, [sink]).fetchone()[0])  # type: ignore[index]  # it is there

    def streamed(self, name: str) -> list[int]:
        """Return the numbers of the messages that readers of a stream may read."""
        stream = self.store.stream(name)
        assert stream is not None
        return [stored.message["record"]["id"] for stored in read(self.store, stream)]

    def states(self, sink: str) -> list[str]:
        """Return the states that a sink's drainer has reported, each once in a row."""
        reported = [r["state"] for r in self.reports if r.get("sink") == sink and "state" in r]
        return [state for n, state in enumerate(reported) if n == 0 or reported[n - 1] != state]

    def delivered(self) -> dict[str, int]:
        """Return how many messages each sink is reported to have taken."""
        return {name: sink.delivered for name, sink in self.state.sinks.items()}

    def close(self) -> None:
        self._stack.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def published(stream: JetStream, name: str) -> list[int]:
    """Return the numbers of the messages in a JetStream stream."""
    return [orjson.loads(message.data)["record"]["id"] for message in stream.messages(name)]


def assert_whole(numbers: Sequence[int], count: int) -> None:
    """All messages are there, once each, every group's in order."""
    doubled = [n for n, times in Counter(numbers).items() if times > 1]
    assert doubled == [], f"doubled: {doubled[:10]} of {len(doubled)}"
    missing = set(range(count)) - set(numbers)
    assert not missing, f"lost: {sorted(missing)[:10]} of {len(missing)}"
    assert len(numbers) == count
    groups: dict[int, list[int]] = defaultdict(list)
    for number in numbers:
        groups[number % GROUPS].append(number)
    for group, found in groups.items():
        assert found == sorted(found), f"group {group}: {found[:50]}"


class Load(threading.Thread):
    """Writes batch after batch until it is stopped, and knows how long each of them took."""

    def __init__(self, source: Source, rows: int, pause: float, seed: int = 1) -> None:
        super().__init__(daemon=True)
        self.seconds: list[float] = []
        self.error: BaseException | None = None
        self._source = source
        self._rows = rows
        self._pause = pause
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self._stopping.wait(self._pause):
                started = time.monotonic()
                self._source.batch(self._source.written + self._random.randint(1, self._rows))
                self.seconds.append(time.monotonic() - started)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._stopping.set()
        await_end(self, timeout=60)
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def loaded(source: Source, rows: int = 60, pause: float = 0.02) -> Iterator[Load]:
    load = Load(source, rows, pause)
    try:
        yield load
    finally:
        load.stop()
