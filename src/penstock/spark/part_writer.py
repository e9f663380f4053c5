"""One part of a round to the sinks of its messages.

Streams and backlogs are written in one transaction, which is tried again as a whole. The other sinks
get each block once, in threads of their own if there is more than one to write to, and what they do not
take in time goes to their backlogs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from penstock.core.blocks import Block
from penstock.core.counting import Counts, is_counted, split
from penstock.core.delivery import DeadLetter, Written
from penstock.core.message import RoundPart
from penstock.sinks.stream import Backlog
from penstock.spark.consumer_feeds import ConsumerFeeds
from penstock.spark.consumer_steps import ConsumerSteps
from penstock.spark.routes import size
from penstock.spark.sink_writer import Delivery, SinkWriter, keep_dead_letters
from penstock.spark.steps import Prepared, Steps

if TYPE_CHECKING:
    from penstock.spark.writer import Worker


@dataclass
class Outcome:
    """What became of a part.

    Attributes:
        part: The part.
        total: How many messages were delivered, to a sink or into its backlog.
        counts: What counts of them, by sink.
        written: How many each sink has taken, and how many of these it had already.
        behind: Whether a sink is behind; None where that was not looked up.
    """

    part: RoundPart
    total: int = 0
    counts: dict[str, Counts] = field(default_factory=dict)
    written: dict[str, tuple[int, int]] = field(default_factory=dict)
    behind: bool | None = None

    def report(self) -> list[Any]:
        """Return what `RoundLoop` is sent."""
        return [self.part.id, self.counts, self.written, self.behind]


class PartWriter:
    """Writes `part`, whose blocks come from `blocks`."""

    def __init__(self, worker: Worker, part: RoundPart, blocks: Iterator[Block]) -> None:
        self._worker = worker
        self._part = part
        self._floors = {n: f for n, f in worker.floors.items() if f > part.start}
        self._read: list[Block] = []
        self._more = blocks
        self._feeds: dict[str, SimpleQueue[Block | None]] = {}
        self._deliveries: dict[str, Future[Delivery]] = {}
        self._dead: dict[str, list[DeadLetter]] = {}
        self._first: set[str] = set()
        self._consumers = ConsumerFeeds(worker, part, self._floors)
        self._outcome = Outcome(part)

    def write(self) -> Outcome:
        """Write it all; raises `SinkError` for what needs an operator."""
        worker, outcome = self._worker, self._outcome
        sink = self._alone()
        if sink is not None:
            done = {sink.name: sink.deliver(self._blocks(), self._floors.get(sink.name))}
        else:
            done = self._in_threads()
        for name, dead in self._dead.items():
            keep_dead_letters(worker.reporter, name, Written(dead=dead))
        left = {}
        for name, delivery in done.items():
            outcome.counts[name] = delivery.counts
            outcome.total += delivery.delivered + sum(b.num_rows for b in delivery.rest)
            if delivery.delivered:
                outcome.written[name] = delivery.delivered, delivery.duplicates
            if delivery.error is not None:
                left[name] = delivery.error, delivery.rest
        if left:
            # Parts of rounds before this one may be on their way yet, in other lanes.
            worker.store.fall_behind(left, self._part.done, self._first)
            outcome.behind = worker.sees_behind = True
        return outcome

    def _alone(self) -> SinkWriter | None:
        """Return the sink that all of the part is for, where the store need not be asked for it."""
        worker = self._worker
        if self._looks or len(worker.sink_writers) != 1:
            return None
        (sink,) = worker.sink_writers.values()
        return sink if self._is_for(sink.name) else None

    @property
    def _looks(self) -> bool:
        """Whether a stream is written, or a sink may be behind: then the store is asked."""
        worker = self._worker
        return bool(worker.streams) or self._part.look or worker.sees_behind

    def _in_threads(self) -> dict[str, Delivery]:
        try:
            self._outcome.total = self._worker.store.patiently(self._attempt)
        finally:
            for feed in self._feeds.values():
                feed.put(None)
            self._consumers.end()
            # Whatever has happened, the next part finds the sinks idle.
            deliveries = self._deliveries | self._consumers.deliveries
            wait(deliveries.values())
        return {name: future.result() for name, future in deliveries.items()}

    def _attempt(self) -> int:
        """Write the part to streams and backlogs; where no sink was begun with, also to those."""
        worker, store = self._worker, self._worker.store
        looks, behind = self._looks, dict[str, Backlog]()
        if looks:
            behind.update(store.streams.begin())
            worker.sees_behind = self._outcome.behind = bool(behind)
        streams = [
            (index, steps, Written())
            for index, steps in enumerate(worker.streams)
            if self._is_for(steps.route.name)
        ]
        spilled = [(name, worker.sink_writers[name].steps) for name in self._begin(behind)]
        names = [steps.route.name for _, steps, _ in streams] + [name for name, _ in spilled]
        names += self._consumers.begin(behind)
        self._outcome.counts = {name: Counts() for name in names}
        self._dead = {}
        total = 0
        for block in self._blocks():
            for index, steps, written in streams:
                prepared = steps(block)
                stored = store.streams.write(index, prepared.messages)
                written.delivered += stored.new
                written.duplicates += stored.there - stored.new
                self._note(steps, block, prepared, stored.there, size(prepared.messages))
                self._consumers.add(steps.route.name, block, prepared.messages, stored)
            for name, its_steps in spilled:
                prepared = its_steps(block)
                self._note(its_steps, block, prepared)
                store.spill(name, prepared.messages, first=name in self._first)
                total += prepared.messages.num_rows
        if not worker.streams and not spilled:
            if looks:
                store.streams.rollback()
            return 0
        store.streams.commit(self._part if worker.streams else None)
        for _, steps, written in streams:
            if written.delivered or written.duplicates:
                self._outcome.written[steps.route.name] = written.delivered, written.duplicates
            total += written.delivered
        return total

    def _note(
        self,
        steps: Steps | ConsumerSteps,
        block: Block,
        prepared: Prepared,
        delivered: int = 0,
        bytes_: int = 0,
    ) -> None:
        name = steps.route.name
        if prepared.dead:
            self._dead.setdefault(name, []).extend(prepared.dead)
        if not is_counted(block, self._floors.get(name)):
            of = Counts(delivered, bytes_, len(prepared.dead), prepared.filtered)
            self._outcome.counts[name] = self._outcome.counts[name].plus(of)

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
            self._deliveries[name] = worker.pool.submit(
                sink_writer.deliver, iter(feed.get, None), floor
            )
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
