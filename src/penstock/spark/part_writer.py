"""One part of a micro-batch to the sinks of its messages.

Streams and backlogs are written in one transaction, which is tried again as a whole. The other sinks
get each block once, in threads of their own, and what they do not take in time goes to their backlogs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING

from penstock.core.blocks import Block
from penstock.core.counting import Counts, is_counted, split
from penstock.core.delivery import DeadLetter, Written
from penstock.core.message import BatchPart
from penstock.sinks import reports
from penstock.sinks.stream import Backlog
from penstock.spark.routes import size
from penstock.spark.sink_writer import Delivery, send_outcome
from penstock.spark.steps import Prepared, Steps

if TYPE_CHECKING:
    from penstock.spark.writer import Worker


class PartWriter:
    """Writes `part`, whose blocks are `first` and `more`."""

    def __init__(
        self, worker: Worker, part: BatchPart, first: Block, more: Iterator[Block]
    ) -> None:
        self._worker = worker
        self._part = part
        self._floors = {n: f for n, f in worker.floors.items() if f > part.start}
        self._read = list(split(first, self._floors.values()))
        self._more = more
        self._feeds: dict[str, SimpleQueue[Block | None]] = {}
        self._deliveries: dict[str, Future[Delivery]] = {}
        self._dead: dict[str, list[DeadLetter]] = {}
        self._first: set[str] = set()
        self._counts: dict[str, Counts] = {}

    def write(self) -> int:
        """Return how many messages were delivered, to a sink or into its backlog."""
        worker = self._worker
        try:
            total = worker.store.patiently(self._attempt)
        finally:
            for feed in self._feeds.values():
                feed.put(None)
            # Whatever has happened, the next part finds the sinks idle.
            wait(self._deliveries.values())
        for name, dead in self._dead.items():
            send_outcome(worker.reporter, name, Written(dead=dead))
        left = {}
        for name, future in self._deliveries.items():
            done = future.result()
            self._counts[name] = done.counts
            total += done.delivered + sum(batch.num_rows for batch in done.rest)
            if done.error is not None:
                left[name] = done.error, done.rest
        worker.store.fall_behind(left, self._part.start, self._first)
        worker.reporter.send(
            {
                "source": worker.fan_out.source, "query": worker.query,
                "part": self._part.to_json(),
                "counts": {name: [*counts] for name, counts in self._counts.items()},
            }
        )  # fmt: skip
        return total

    def _attempt(self) -> int:
        """Write the part to streams and backlogs; where no sink was begun with, also to those."""
        worker, store = self._worker, self._worker.store
        behind = store.streams.begin()
        streams = [
            (index, steps, Written())
            for index, steps in enumerate(worker.streams)
            if self._is_for(steps.route.name)
        ]
        spilled = [(name, worker.sink_writers[name].steps) for name in self._begin(behind)]
        names = [steps.route.name for _, steps, _ in streams] + [name for name, _ in spilled]
        self._counts = {name: Counts() for name in names}
        self._dead = {}
        total = 0
        for block in self._blocks():
            for index, steps, written in streams:
                prepared = steps(block)
                there, new = store.streams.write(index, prepared.messages)
                written.delivered += new
                written.duplicates += there - new
                self._note(steps, block, prepared, there, size(prepared.messages))
            for name, steps in spilled:
                prepared = steps(block)
                self._note(steps, block, prepared)
                store.spill(name, prepared.messages, first=name in self._first)
                total += prepared.messages.num_rows
        if not worker.streams and not spilled:
            store.streams.rollback()
            return 0
        store.streams.commit(self._part if worker.streams else None)
        for _, steps, written in streams:
            if written.delivered or written.duplicates:
                report = reports.outcome(steps.route.name, written, counted=False)
                worker.reporter.send(report)
            total += written.delivered
        return total

    def _note(
        self, steps: Steps, block: Block, prepared: Prepared, delivered: int = 0, bytes_: int = 0
    ) -> None:
        name = steps.route.name
        if prepared.dead:
            self._dead.setdefault(name, []).extend(prepared.dead)
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
