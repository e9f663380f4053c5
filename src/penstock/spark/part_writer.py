"""One part of a round to the sinks of its messages.

Streams and backlogs are written in one transaction, which is tried again as a whole. The other sinks
get each block that concerns them once, in threads of their own if there is more than one to write to,
and what they do not take in time goes to their backlogs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import chain
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
from penstock.spark.sink_writer import SinkDelivery, keep_dead_letters
from penstock.spark.steps import Prepared, Steps

if TYPE_CHECKING:
    from penstock.spark.writer import Worker


@dataclass
class PartOutcome:
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
        self._read: list[tuple[Block, Set[str]]] = []
        self._more = blocks
        self._direct: set[str] = set()
        self._feeds: dict[str, SimpleQueue[Block | None]] = {}
        self._deliveries: dict[str, Future[SinkDelivery]] = {}
        self._dead: dict[str, list[DeadLetter]] = {}
        self._first: set[str] = set()
        self._consumers = ConsumerFeeds(worker, part, self._floors)
        self._outcome = PartOutcome(part)

    def write(self) -> PartOutcome:
        """Write it all; raises `SinkError` for what needs an operator."""
        worker, outcome = self._worker, self._outcome
        done = self._at_once()
        if done is None:
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

    def _at_once(self) -> dict[str, SinkDelivery] | None:
        """Deliver a part from this thread, with nothing written to the store; None where it can't be.

        That is one for a single sink, and one that is a single block for sinks that share a connection.
        """
        worker = self._worker
        if worker.streams or worker.sees_behind:
            return None
        names: Set[str] = worker.sink_writers.keys()
        if len(names) > 1:
            first = next(self._more)
            self._more = chain([first], self._more)
            if first.last:
                names = worker.audience(first.messages)
                of = next((of for of in worker.shared if names and names <= of.names), None)
                alike = not self._floors and all(map(self._is_for, names))
                if of is not None and alike and self._none_is_behind():
                    return of.deliver(first, names)
        if len(names) != 1:
            return None
        (name,) = names
        if not self._is_for(name) or not self._none_is_behind():
            return None
        blocks = (block for block, _ in self._blocks())
        return {name: worker.sink_writers[name].deliver(blocks, self._floors.get(name))}

    def _none_is_behind(self) -> bool:
        """Return whether no sink is behind, asking the store where the part says that one may be."""
        if not self._part.look:
            return True
        worker = self._worker
        worker.sees_behind = self._outcome.behind = bool(worker.store.behind())
        return not worker.sees_behind

    @property
    def _looks(self) -> bool:
        """Whether a stream is written, or a sink may be behind: then the store is asked."""
        worker = self._worker
        return bool(worker.streams) or self._part.look or worker.sees_behind

    def _in_threads(self) -> dict[str, SinkDelivery]:
        try:
            self._outcome.total = self._worker.store.patiently(self._attempt)
        finally:
            for feed in self._feeds.values():
                feed.put(None)
            self._consumers.end()
            # Whatever has happened, the next part finds the sinks idle.
            deliveries = self._deliveries | self._consumers.deliveries
            wait(deliveries.values())
        done = {name: future.result() for name, future in deliveries.items()}
        for name, filtered in self._consumers.filtered.items():
            delivery = done.setdefault(name, SinkDelivery())
            delivery.counts = delivery.counts.plus(Counts(filtered=filtered))
        return done

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
        for block, audience in self._blocks():
            for index, steps, written in streams:
                prepared = steps(block)
                stored = store.streams.write(index, prepared.messages)
                written.delivered += stored.new
                written.duplicates += stored.there - stored.new
                self._note(steps, block, prepared, stored.there, size(prepared.messages))
                self._consumers.add(steps.route.name, block, prepared.messages, stored)
            for name, its_steps in spilled:
                if name not in audience:
                    continue
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
        """Find out which sinks are published to; return the names of those that are behind."""
        worker = self._worker
        spilled = []
        self._direct = {*self._feeds}
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
            self._direct.add(name)
            for block, audience in self._read:
                if name in audience:
                    self._feed(name).put(block)
        return spilled

    def _feed(self, name: str) -> SimpleQueue[Block | None]:
        """Return what a sink's thread takes blocks from; it begins with the first one for it."""
        feed = self._feeds.get(name)
        if feed is None:
            feed = self._feeds[name] = SimpleQueue()
            self._deliveries[name] = self._worker.pool.submit(
                self._worker.sink_writers[name].deliver,
                iter(feed.get, None),
                self._floors.get(name),
            )
        return feed

    def _blocks(self) -> Iterator[tuple[Block, Set[str]]]:
        """Yield the part's messages, and the sinks that each block concerns; hand new ones on.

        Those that were read before come again.
        """
        yield from self._read
        for whole in self._more:
            pieces = [
                (block, self._worker.audience(block.messages))
                for block in split(whole, self._floors.values())
            ]
            # Before the first is written: all of them come again after a failure.
            self._read += pieces
            for block, audience in pieces:
                for name in self._direct & audience:
                    self._feed(name).put(block)
            yield from pieces
        for feed in self._feeds.values():
            feed.put(None)
