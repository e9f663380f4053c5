"""What the NATS consumers of a source's streams get of one part of a round.

A consumer gets what its stream gets, block by block, as the stream is written. One that is attached is
published to meanwhile, in a thread of its own. Of one that is behind it goes to its backlog; where it is
left in the stream, only what that has already: a task that wrote it may have ended before it published.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.blocks import Block
from penstock.core.counting import is_counted
from penstock.core.message import Position, RoundPart
from penstock.core.record_forms import form_of
from penstock.sinks.selected import mask
from penstock.sinks.stream import Backlog, Stored
from penstock.spark import old_keys
from penstock.spark.consumer_steps import ConsumerRoute
from penstock.spark.sink_writer import SinkDelivery

if TYPE_CHECKING:
    from penstock.spark.writer import Worker


@dataclass
class _Feed:
    blocks: SimpleQueue[Block | None]
    delivery: Future[SinkDelivery]
    fed: int = 0


class ConsumerFeeds:
    """Hands the messages of one part on to the consumers of the streams that it is written to."""

    def __init__(self, worker: Worker, part: RoundPart, floors: Mapping[str, Position]) -> None:
        self._worker = worker
        self._part = part
        self._floors = floors
        self._feeds: dict[str, _Feed] = {}
        self._behind: dict[str, Backlog] = {}
        self._at: dict[str, int] = {}
        self._direct: set[str] = set()
        self.filtered: dict[str, int] = {}
        """How many messages of blocks none of which is a consumer's; those count as filtered."""

    @property
    def deliveries(self) -> dict[str, Future[SinkDelivery]]:
        """The deliveries that have begun."""
        return {name: feed.delivery for name, feed in self._feeds.items()}

    def begin(self, behind: Mapping[str, Backlog]) -> list[str]:
        """Begin an attempt to write the part; return those that are not published to."""
        worker = self._worker
        self._behind = {name: of for name, of in behind.items() if name in worker.consumer_writers}
        self._at = {}
        self.filtered = {}
        self._direct = {
            name
            for name in worker.consumer_writers
            if name in self._feeds or (name not in behind and self._is_for(name))
        }
        return [name for name in self._behind if name not in self._feeds]

    def add(self, stream: str, block: Block, messages: pa.RecordBatch, stored: Stored) -> None:
        """Hand on what a stream has got of a block, in the open transaction; `stored` is of that."""
        names = self._worker.consumers_of.get(stream, ())
        if names:
            messages = self._as_stored(names[0], messages)
        audience = self._worker.consumer_audience(messages) if names else ()
        for name in names:
            if name not in audience:
                if name in self._direct and not is_counted(block, self._floors.get(name)):
                    self.filtered[name] = self.filtered.get(name, 0) + messages.num_rows
            elif name in self._direct:
                feed = self._feed(name)
                at = self._at[name] = self._at.get(name, 0) + 1
                if at > feed.fed:
                    feed.fed = at
                    results = self._results(name, messages)
                    feed.blocks.put(Block(block.part, messages, results, block.last))
                if name in self._behind and self._behind[name].in_stream:
                    self._worker.store.note_ahead(name, messages)
            elif (of := self._behind.get(name)) is not None and (
                not of.in_stream or stored.new < stored.there
            ):
                prepared = self._worker.consumer_writers[name].steps(
                    Block(block.part, messages, None, block.last)
                )
                self._worker.store.spill(name, prepared.messages, first=False)

    def end(self) -> None:
        """End what was begun: nothing more comes."""
        for feed in self._feeds.values():
            feed.blocks.put(None)

    def _feed(self, name: str) -> _Feed:
        """Return the feed of a consumer; its thread begins with the first block for it."""
        feed = self._feeds.get(name)
        if feed is None:
            blocks: SimpleQueue[Block | None] = SimpleQueue()
            delivery = self._worker.pool.submit(
                self._worker.consumer_writers[name].deliver,
                iter(blocks.get, None),
                self._floors.get(name),
            )
            feed = self._feeds[name] = _Feed(blocks, delivery)
        return feed

    def _is_for(self, name: str) -> bool:
        return self._part.sink in (None, self._route(name).stream)

    def _route(self, name: str) -> ConsumerRoute:
        route = self._worker.consumer_writers[name].steps.route
        assert isinstance(route, ConsumerRoute)  # noqa: S101 - the worker has made it
        return route

    def _as_stored(self, name: str, messages: pa.RecordBatch) -> pa.RecordBatch:
        """Return messages with the deletes of left keys that their stream, of kind rows, has."""
        old = messages.column("old_key")
        if self._route(name).settings.kind != "rows" or old.null_count == len(old):
            return messages
        return old_keys.with_deletes(messages, messages.filter(old.is_valid()))

    def _results(self, name: str, messages: pa.RecordBatch) -> pa.StructArray | None:
        """Return what a consumer's filter in SQL makes of each message, None without one."""
        route = self._route(name)
        if route.function is None:
            return None
        named = mask(route.filters, messages)
        asked = messages if named is None else messages.filter(named)
        form = form_of(route.settings.source, route.settings.kind)
        found = self._worker.store.verdicts(route.function, form, asked)
        if named is not None:
            found = pc.replace_with_mask(pa.nulls(len(named), pa.string()), named, found)
        return pa.StructArray.from_arrays([found], ["passed"])
