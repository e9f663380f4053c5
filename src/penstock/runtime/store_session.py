"""A run's part in its store: what it registers there, and the threads that work on it meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, Self

import structlog

from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.core.delivery import DeadLetter
from penstock.core.errors import Concern, SetupError, SinkError, StoreError
from penstock.core.message import Position, format_lsn
from penstock.core.monitor import Report
from penstock.desired import consumers
from penstock.postgres.admin import open_catalog
from penstock.postgres.replication import identify
from penstock.runtime.catalog_watch import CatalogWatch
from penstock.runtime.nats_consumers import (
    ConsumerDrainers,
    consumer_routes_of,
    refuse_filters,
)
from penstock.runtime.paused_sinks import NONE_PAUSED, PausedSinks
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.drainers import Drainers
from penstock.sinks.backlog.sink import SinkBacklog
from penstock.sinks.nats.login import login_of
from penstock.sinks.nats.sink import NatsSink
from penstock.spark.consumer_steps import ConsumerRoute
from penstock.spark.planning import source_columns
from penstock.spark.routes import Route
from penstock.spark.store_writer import StoreTarget
from penstock.streams.claim import PATIENCE, Claim, Claims, claimed_by_another
from penstock.streams.maintenance import Maintenance
from penstock.streams.probe import Probe
from penstock.streams.records import SourceRecord
from penstock.streams.store import Store

_CLAIM_PATIENCE: Final = PATIENCE

_RESUMED: Final = SinkError(backlog.STARTED, "What came in while it started goes first.")

log = structlog.get_logger("penstock")


class StoreSession:
    """One run's part in the store at `url`; a context manager.

    Its methods raise `StoreError`. `on_report` gets the reports of the drainers. The messages of the
    `paused` sinks wait in their backlogs until `resume`. With a `claim` on its source, which its owner
    keeps, it makes none itself.
    """

    def __init__(
        self,
        config: Config,
        url: str,
        on_report: Callable[[Report], object],
        paused: PausedSinks = NONE_PAUSED,
        claim: Claim | None = None,
    ) -> None:
        self.url = url
        self._given = claim
        self._epochs: dict[str, int | None] = {}
        self._config = config
        self._on_report = on_report
        self._paused = dict(paused.reasons)
        self._starting = paused.starting
        self._store = Store.open(url)
        self._sources: dict[str, SourceRecord] = {}
        self._streams: dict[str, int] = {}
        self._uuids: dict[str, str] = {}
        self._consumers = ConsumerDrainers(config, self._store)
        self._drainers = Drainers(url, on_report)
        self._claims = Claims(self._on_taken)
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._claims.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._store.close()

    def register(self, name: str, stopping: threading.Event) -> None:
        """Register a source and its streams, and keep every other run from writing them.

        Returns before that where `stopping` is set.
        """
        settings = self._config.sources[name]
        tag, wal_end = identify(settings.address, settings.slot)
        found = self._store.make_source(name, tag)
        if self._given is not None:
            self._epochs[name] = self._given.epoch
        elif not self._claim(found, stopping):
            return
        source = self._sources[name] = self._store.register_source(
            name, tag, lambda: identify(settings.address, settings.slot).wal_end
        )
        if source.tag == found.tag and source.base != found.base:
            log.warning(
                "the source's WAL ends before what was read of it: it was restored, or lost its end;"
                " its streams go on behind what they hold, backfill what is missing",
                source=name, wal_end=format_lsn(wal_end or 0),
            )  # fmt: skip
        self._note_catalog(name)
        self._uuids |= self.uuids(self._config, name)
        self._streams |= register_streams(self._store, self._config, source)

    def _note_catalog(self, name: str) -> None:
        """Note a source's tables in the store, for the filters of consumers."""
        if not any(sink.source == name for sink in self._config.streams.values()):
            return
        try:
            with open_catalog(self._config.sources[name]) as catalog:
                columns = source_columns(catalog)
        except SetupError as error:
            log.warning("the tables can't be noted for the filters of consumers", source=name,
                        error=str(error))  # fmt: skip
            return
        self._store.save_catalog(name, columns)

    def uuids(self, config: Config, source: str) -> dict[str, str]:
        """Return the ids of a source's sinks and NATS consumers; see `uuids_of`."""
        return uuids_of(self._store, config, source)

    def _claim(self, source: SourceRecord, stopping: threading.Event) -> bool:
        """Claim a source, waiting for a while; return False where `stopping` came first."""
        deadline, logged = time.monotonic() + _CLAIM_PATIENCE, False
        claim = Claim(self.url, source.id, beats=True)
        while not stopping.is_set():
            if claim.acquire():
                self._claims.add(source.name, claim)
                self._epochs[source.name] = claim.epoch
                return True
            if time.monotonic() > deadline:
                raise claimed_by_another(source.name, claim.holder)
            if not logged:
                logged = True
                log.warning("waiting for another run to end", source=source.name)
            stopping.wait(0.5)
        return False

    def _on_taken(self, source: str, error: StoreError) -> None:
        self._on_report(
            {"claim": source, "code": error.code, "error": error.message, "remedy": error.remedy}
        )

    def refuse_filters(self, config: Config) -> None:
        """Raise `StoreError` for a NATS consumer's filter in SQL that the tables refuse."""
        refuse_filters(self._store, config, self._streams)

    def register_consumers(self, *, beside: bool = False) -> None:
        """Register the consumers of the run's streams; a run `beside` this one may have others."""
        consumers.register(self._store, self._config.consumers)
        self._consumers.register(self._sources, self._streams, beside=beside)
        self._check_backlogs()

    def start(self) -> None:
        """Start the maintenance and the drainers; no other run has any meanwhile."""
        self._consumers.remove_others()
        self._stack.enter_context(Probe(self.url, self._on_report))
        self._stack.enter_context(Maintenance(self.url))
        with_streams = {
            sink.source for sink in self._config.streams.values()
        } & self._sources.keys()
        sources = {name: self._config.sources[name] for name in with_streams}
        self._stack.enter_context(CatalogWatch(self.url, sources))
        self._stack.callback(self._drainers.stop)
        for name, sink in self._config.sinks.items():
            if isinstance(sink, NatsSinkSettings):
                source_id = self._sources[sink.source].id
                with self._store.connection() as connection:
                    why = self._paused.get(name) or backlog.pause_of(connection, source_id, name)
                    if why is not None:
                        backlog.put_behind(connection, source_id, name, why)
                if name not in self._paused:
                    self._drain(name, sink)

        for source in self._sources:
            for name, sink in self._config.nats_consumers_of(source).items():
                self._drain(name, sink, self._consumers.backlog(name))
        self._drainers.start()

    def _drain(self, name: str, sink: NatsSinkSettings, of: SinkBacklog | None = None) -> None:
        def make() -> NatsSink:
            return NatsSink(sink, name=name, source=sink.source, uuid=self._uuids.get(name))

        of = of or SinkBacklog(self._sources[sink.source].id, name)
        self._drainers.add(of, make, sink.detach_after, login_of(sink))

    def resume(self, name: str) -> None:
        """Deliver a paused sink's messages from now on."""
        sink = self._config.sinks[name]
        if name in self._paused and isinstance(sink, NatsSinkSettings):
            with self._store.connection() as connection:
                backlog.put_behind(connection, self._sources[sink.source].id, name, _RESUMED)
            self._drain(name, sink)
            del self._paused[name]

    def end_drainers(self) -> None:
        """End all drainers at once; what waits stays in the backlogs until the next run."""
        self._drainers.stop()

    def _check_backlogs(self) -> None:
        with self._store.connection() as connection:
            behind = backlog.all_behind(connection)
        for of in behind:
            if of.source not in self._sources:
                continue  # another pipeline's
            if of.sink in self._config.nats_consumers:
                continue
            sink = self._config.sinks.get(of.sink)
            if not isinstance(sink, NatsSinkSettings):
                log.warning("a sink that is not configured any more has a backlog",
                            sink=of.sink, source=of.source, error=of.error)  # fmt: skip
            elif sink.source != of.source:
                raise StoreError(
                    "source_changed",
                    f"Sink {of.sink} takes from source {sink.source} now, and has a backlog of"
                    f" source {of.source} in the store.",
                    remedy=f"Let it drain with `source: {of.source}`, or give the sink another name.",
                    concerns=Concern("sink", of.sink, "source"),
                )

    def source(self, name: str) -> SourceRecord:
        """Return the store's record of a registered source."""
        return self._sources[name]

    @property
    def streams(self) -> Mapping[str, int]:
        """The ids of the registered sources' streams, by name."""
        return self._streams

    def target(self, source: str) -> StoreTarget:
        """Return the store as the executors write to it."""
        record = self._sources[source]
        return StoreTarget(self.url, record.id, record.base, self._epochs.get(source))

    def routes(self, source: str) -> list[Route]:
        """Return the routes of a source."""
        return routes_of(self._config, source, self._streams, self._starting, self._uuids)

    def consumer_routes(self, source: str) -> list[ConsumerRoute]:
        """Return the routes of the consumers of type nats of a source's streams."""
        return consumer_routes_of(self._config, source, self._uuids)

    # -- what the processes of the run report

    def handle(self, report: Report) -> Report | None:
        """Do what a report asks for; return an error as the answer to its sender."""
        if report.get("dead") and not report.get("kept"):
            name, letters = report["sink"], [DeadLetter(**letter) for letter in report["dead"]]
            try:
                is_consumer = name in self._config.nats_consumers
                self._store.letters.add(name, letters, "consumer" if is_consumer else "sink")
            except StoreError as error:
                return {"error": str(error)}
        if report.get("behind"):
            self._drainers.wake(report["sink"])
        if (source := report.get("capture")) is not None and report.get("done") is not None:
            record = self._sources[source]
            self._drainers.done(record.id, record.position(Position(*report["done"])))
        return None

    def look(self) -> None:
        """Have it read whether sinks are behind; `is_drained` is true when it has."""
        self._drainers.look()

    def is_drained(self) -> bool:
        """Whether none has a backlog but those that are paused."""
        return self._drainers.is_drained()


def uuids_of(store: Store, config: Config, source: str) -> dict[str, str]:
    """Return the ids of a source's sinks and NATS consumers by their names, of which no two are alike.

    They are made where there are none. Raises `StoreError`.
    """
    sinks = store.ids_of("sink", config.sinks_of(source))
    return sinks | store.ids_of("consumer", config.nats_consumers_of(source))


def register_streams(store: Store, config: Config, source: SourceRecord) -> dict[str, int]:
    """Register the streams of a source, and return their ids by name; raises `StoreError`."""
    return {
        name: store.register_stream(name, source, sink.kind, sink.retention, sink.group).id
        for name, sink in config.streams.items()
        if sink.source == source.name
    }


def routes_of(
    config: Config,
    source: str,
    streams: Mapping[str, int],
    starting: Collection[str],
    uuids: Mapping[str, str],
) -> list[Route]:
    """Return the routes of a source; where its sinks agree on the groups, the source has them.

    `streams` gives the ids of streams, `uuids` those of sinks, `starting` are the sinks that a
    backfill's reads go to first.
    """
    sinks = config.sinks_of(source)
    agree = len({repr(sink.group_by) for sink in sinks.values()}) == 1
    return [
        Route(
            name,
            sink.model_copy(update={"group_by": None}) if agree else sink,
            streams.get(name),
            name in starting,
            uuids.get(name),
        )
        for name, sink in sinks.items()
    ]
