"""A run's part in its consumers of type nats: it registers them, and knows what waits for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog

from penstock.config.nats_consumers import NatsConsumer
from penstock.config.settings import Config
from penstock.core.record_forms import form_of
from penstock.runtime.state import RunState
from penstock.sinks.backlog.consumer import ConsumerBacklog, ConsumerStream
from penstock.spark.consumer_steps import ConsumerRoute
from penstock.streams import nats_consumers_filter as sql_filter
from penstock.streams.nats_consumers import NatsConsumers
from penstock.streams.records import SourceRecord
from penstock.streams.store import Store

log = structlog.get_logger("penstock")


class ConsumerDrainers:
    """The consumers of type nats that a configuration has, in a run's store."""

    def __init__(self, config: Config, store: Store) -> None:
        self.config = config
        self._store = store
        self._streams: Mapping[str, int] = {}
        self._sources: Mapping[str, SourceRecord] = {}

    def register(
        self,
        sources: Mapping[str, SourceRecord],
        streams: Mapping[str, int],
        *,
        beside: bool = False,
    ) -> None:
        """Register the consumers of the run's `streams`, given with their ids, and remove others.

        What was removed and comes again is another consumer. `beside` another run the others stay: it
        may publish for them. Raises `StoreError`.
        """
        self._sources, self._streams = sources, streams
        if not beside:
            self.remove_others()
        known, records = NatsConsumers(self._store), {s.name: s for s in self._store.streams()}
        for name, consumer in self._wanted().items():
            known.register(records[consumer.stream], name, consumer.shown(), consumer.start)

    def remove_others(self) -> None:
        """Remove the consumers of the run's streams that are not configured; raises `StoreError`."""
        stays = {name: self._streams[consumer.stream] for name, consumer in self._wanted().items()}
        known = NatsConsumers(self._store)
        for name in known.remove_others(set(self._streams.values()), stays):
            log.warning(
                "a NATS consumer that is gone, or of another stream now, was removed",
                consumer=name,
            )

    def _wanted(self) -> dict[str, NatsConsumer]:
        consumers = self.config.nats_consumers
        return {name: of for name, of in consumers.items() if of.stream in self._streams}

    def backlog(self, name: str) -> ConsumerBacklog:
        """Return what waits for a consumer."""
        consumer = self.config.nats_consumers[name]
        stream = self.config.streams[consumer.stream]
        of = ConsumerStream(
            self._streams[consumer.stream], form_of(stream.source, stream.kind), consumer.filters,
            consumer.detach_after,
            sql_filter.function_of(consumer.stream, consumer.filters.sql),
        )  # fmt: skip
        return ConsumerBacklog(self._sources[stream.source].id, name, of)


def refuse_filters(store: Store, config: Config, streams: Mapping[str, int]) -> None:
    """Raise `StoreError` for a consumer's filter in SQL that the tables of its stream refuse.

    `streams` are the ids of streams by name.
    """
    with store.connection() as connection:
        for name, consumer in config.nats_consumers.items():
            if consumer.filters.sql is not None and consumer.stream in streams:
                text = consumer.filters.sql
                sql_filter.planned(connection, streams[consumer.stream], name, text)


def consumer_routes_of(
    config: Config, source: str, uuids: Mapping[str, str]
) -> list[ConsumerRoute]:
    """Return the routes of the NATS consumers of a source's streams; `uuids` are their ids by name."""
    consumers = config.nats_consumers
    return [
        ConsumerRoute(name, consumers[name].stream, sink, consumers[name].filters, uuids.get(name))
        for name, sink in config.nats_consumers_of(source).items()
    ]


def state_of(config: Config, sources: Iterable[str]) -> RunState:
    """Return the state of a run of a configuration that has reported nothing."""
    return RunState(
        sources,
        {name: (sink.type, sink.source) for name, sink in config.sinks.items()},
        {n: (of.stream, config.sinks[of.stream].source) for n, of in config.nats_consumers.items()},
    )
