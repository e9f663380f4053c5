"""A NATS server is gone for a while, under load; a stream and a second server must not notice.

In the middle `penstock run` is killed and started again. Afterwards all three hold the same messages,
once each, every group's in order.
"""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import orjson
import psycopg
from tests.streams_help import read

from penstock.core.message import Position, parse_lsn
from penstock.embedded.handles import Database, JetStream, Msg
from penstock.embedded.nats import EmbeddedNats
from penstock.streams.store import Store

from ..pipeline import PATIENCE, Penstock, penstock

GROUPS = 50
SINK = "shaky"
STREAM = "SHOP"
CONFIG = """\
store: {store}
sources:
  shop:
    type: postgres
    url: {postgres}
    tables: [public.events]
sinks:
  events:
    type: stream
    source: shop
    group_by: [grp]
  steady:
    type: nats
    source: shop
    url: {steady}
    group_by: [grp]
  shaky:
    type: nats
    source: shop
    url: {shaky}
    group_by: [grp]
    detach_after: 2s
spark:
  master: local[2]
"""
_SLOT = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'penstock_shop'"
_WINDOW = 7200
_SETTLED = 3.0  # seconds after a start that a pipeline is given to catch up


@dataclass
class Arrivals:
    """When each message came to one sink, and how long after it was written."""

    at: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def note(self, record: dict[str, Any]) -> None:
        now = time.time()
        self.at.append(now)
        self.seconds.append(now - record["written"])

    def between(self, first: float, end: float) -> list[float]:
        return [s for at, s in zip(self.at, self.seconds, strict=True) if first <= at - s < end]


@dataclass
class Outcome:
    """What was seen: latencies in seconds by sink and phase, and what the slot did meanwhile."""

    messages: int = 0
    outage: float = 0.0
    slot_seconds: list[float] = field(default_factory=list)
    before: dict[str, list[float]] = field(default_factory=dict)
    during: dict[str, list[float]] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    caught_up: float = 0.0
    backlog: int = 0

    def lines(self) -> list[str]:
        def shown(seconds: list[float]) -> str:
            p99 = quantiles(seconds, n=100)[98]
            return f"p50 {median(seconds) * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms"

        return [
            f"{self.messages} messages, down for {self.outage:.0f} s, backlog {self.backlog},"
            f" attached {self.caught_up:.1f} s after the return; states {self.states}",
            *(
                f"{name}: before {shown(self.before[name])}; meanwhile {shown(self.during[name])}"
                for name in self.before
            ),
            f"slot confirmed within {max(self.slot_seconds):.1f} s at most",
        ]


class Writer(threading.Thread):
    """Inserts rows one after the other, at a rate; their numbers give their order."""

    def __init__(self, database: Database, rate: float) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.error: Exception | None = None
        self._database = database
        self._rate = rate
        self._stopping = threading.Event()

    def run(self) -> None:
        insert = (
            "INSERT INTO events SELECT n, n %% %s, extract(epoch FROM clock_timestamp())"
            " FROM generate_series(%s::int, %s) n"
        )
        started = time.monotonic()
        try:
            with self._database.connect(autocommit=True) as connection:
                while not self._stopping.wait(0.01):
                    due = int((time.monotonic() - started) * self._rate)
                    if due > self.count:
                        connection.execute(insert.encode(), [GROUPS, self.count, due - 1])
                        self.count = due
        except psycopg.Error as error:
            self.error = error

    def stop(self) -> None:
        self._stopping.set()
        self.join(PATIENCE)
        if self.error is not None:
            raise self.error


class Reader(threading.Thread):
    """Reads a stream of the store as its messages become visible."""

    def __init__(self, url: str, arrivals: Arrivals) -> None:
        super().__init__(daemon=True)
        self.numbers: list[int] = []
        self._url = url
        self._arrivals = arrivals
        self._stopping = threading.Event()

    def run(self) -> None:
        after = Position(0, -1)
        with Store(self._url) as store, psycopg.connect(self._url, autocommit=True) as waiting:
            waiting.execute("LISTEN penstock")
            while not self._stopping.is_set():
                for _ in waiting.notifies(timeout=0.2, stop_after=1):
                    pass
                stream = store.stream("events")
                for stored in read(store, stream, after) if stream is not None else ():
                    after = stored.position
                    record = stored.message["record"]
                    self.numbers.append(record["id"])
                    self._arrivals.note(record)

    def stop(self) -> None:
        self._stopping.set()
        self.join(PATIENCE)


async def _ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that is down."""


class Outage:
    """The scenario: `run` takes it from the start to the verdict, which raises `AssertionError`."""

    def __init__(
        self, folder: Path, shop: Database, store: Database, steady: EmbeddedNats,
        shaky: EmbeddedNats, *, seconds: float, rate: float = 200,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._shop = shop
        self._store = store
        self._steady = steady
        self._shaky = shaky
        self._seconds = seconds
        self._rate = rate
        self._report = report
        self._arrivals = {"stream": Arrivals(), "nats": Arrivals()}
        self._outcome = Outcome(outage=seconds)

    def run(self) -> Outcome:
        urls = {
            "postgres": self._shop.url, "store": self._store.url, "steady": self._steady.url,
            "shaky": self._shaky.url,
        }  # fmt: skip
        (self._folder / "penstock.yaml").write_text(CONFIG.format(**urls))
        self._shop.execute(
            "CREATE TABLE events (id bigint PRIMARY KEY, grp int, written double precision)"
        )
        with contextlib.ExitStack() as stack:
            streams = [
                stack.enter_context(JetStream(url, error_cb=_ignore_error))
                for url in (self._steady.url, self._shaky.url)
            ]
            for stream in streams:
                stream.add_stream(STREAM, "shop.>", duplicate_window=_WINDOW)
            streams[0].follow(STREAM, "shop.>", self._note)
            pipeline = stack.enter_context(Penstock(self._folder, own_jvm=True))
            pipeline.start().wait_ready()
            reader = Reader(self._store.url, self._arrivals["stream"])
            reader.start()
            stack.callback(reader.stop)
            writer = Writer(self._shop, self._rate)
            writer.start()
            try:
                self._go_through(pipeline)
            finally:
                writer.stop()
            self._outcome.messages = writer.count
            self._await_steady(pipeline, reader, streams, writer.count)
            found = {
                name: _numbers(s) for name, s in zip(("steady", "shaky"), streams, strict=True)
            }
            for name, numbers in {"events": reader.numbers, **found}.items():
                assert_whole(name, numbers, writer.count)
            assert self._received(pipeline) > 0
            assert pipeline.stop() == 0
        return self._outcome

    def _received(self, pipeline: Penstock) -> int:
        """Return how many messages a worker gets from the API that runs with the pipeline."""
        made = penstock("token", "create", "worker", cwd=self._folder)
        assert made.returncode == 0, made.stderr
        request = urllib.request.Request(
            f"http://{pipeline.listen}/v1/streams/events/receive?batch_size=10",
            headers={"Authorization": f"Bearer {made.stdout.split()[-1]}"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return len(orjson.loads(answer.read())["data"])

    def _note(self, message: Msg) -> None:
        self._arrivals["nats"].note(orjson.loads(message.data)["record"])

    def _go_through(self, pipeline: Penstock) -> None:
        outcome = self._outcome
        _pause(_SETTLED)
        started = time.time()
        _pause(3)
        gone = time.time()
        self._shaky.stop()
        self._report("the server is gone")
        pipeline.wait_for(
            lambda: self._state(pipeline) == "detached", PATIENCE, "reporting the sink"
        )
        self._watch_slot(pipeline, gone + self._seconds / 2)
        self._report("penstock run is killed")
        killed = time.time()
        pipeline.kill_tree()
        pipeline.start().wait_ready()
        assert self._state(pipeline) == "detached"
        _pause(_SETTLED)
        back = time.time()
        self._watch_slot(pipeline, max(gone + self._seconds, back + 2))
        outcome.backlog = pipeline.status()["sinks"][SINK]["backlog"]
        returned = time.time()
        outcome.outage = returned - gone
        self._shaky.start()
        self._report("the server is back")
        pipeline.wait_for(lambda: self._state(pipeline) == "attached", PATIENCE, "attached again")
        outcome.caught_up = time.time() - returned
        _pause(2)
        outcome.states = [
            event["event"] for event in pipeline.events() if event.get("sink") == SINK
        ]
        for name, arrivals in self._arrivals.items():
            outcome.before[name] = arrivals.between(started, gone - 1)
            # The last second before the kill is part of that.
            outcome.during[name] = arrivals.between(gone, killed - 1) + arrivals.between(
                back, returned
            )

    def _watch_slot(self, pipeline: Penstock, until: float) -> None:
        """See how long the slot takes to be confirmed up to what is written, again and again."""
        while time.time() < until or not self._outcome.slot_seconds:
            started = time.monotonic()
            ((now,),) = self._shop.execute("SELECT pg_current_wal_lsn()")
            pipeline.wait_for(
                lambda now=now: self._confirmed() >= parse_lsn(now),  # type: ignore[misc]  # mypy infers no lambda with a default
                PATIENCE, "confirmed",
            )  # fmt: skip
            self._outcome.slot_seconds.append(time.monotonic() - started)
            _pause(0.2)

    def _confirmed(self) -> int:
        return parse_lsn(self._shop.execute(_SLOT)[0][0])

    @staticmethod
    def _state(pipeline: Penstock) -> str:
        return str(pipeline.status()["sinks"][SINK]["state"])

    @staticmethod
    def _await_steady(
        pipeline: Penstock, reader: Reader, streams: Sequence[JetStream], count: int
    ) -> None:
        pipeline.wait_for(
            lambda: (
                len(reader.numbers) >= count
                and all(s.info(STREAM).state.messages >= count for s in streams)
            ),
            PATIENCE,
            "all there",
        )


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _numbers(stream: JetStream) -> list[int]:
    return [orjson.loads(message.data)["record"]["id"] for message in stream.messages(STREAM)]


def assert_whole(name: str, numbers: Sequence[int], count: int) -> None:
    """All messages are there, once each, every group's in order."""
    doubled = [n for n, times in Counter(numbers).items() if times > 1]
    assert doubled == [], f"{name}: doubled {doubled[:10]} of {len(doubled)}"
    missing = set(range(count)) - set(numbers)
    assert not missing, f"{name}: lost {sorted(missing)[:10]} of {len(missing)}"
    groups: dict[int, list[int]] = defaultdict(list)
    for number in numbers:
        groups[number % GROUPS].append(number)
    for group, found in groups.items():
        assert found == sorted(found), f"{name}: group {group} is out of order"


@contextlib.contextmanager
def own_servers(folder: Path) -> Iterator[tuple[EmbeddedNats, EmbeddedNats]]:
    """Start the two NATS servers."""
    with EmbeddedNats(folder / "steady") as steady, EmbeddedNats(folder / "shaky") as shaky:
        yield steady, shaky
