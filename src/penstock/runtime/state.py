"""The state of a run: what its captures, sinks, probes and backfills have reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.backfill.request import Backfill
from penstock.core.counting import Counts, Ledger
from penstock.core.health import Failure, Health, Level, Part, worker_part
from penstock.core.message import RoundPart
from penstock.core.monitor import Report
from penstock.core.source_health import (
    SinkFacts,
    SourceFacts,
    backfill_part,
    sources_parts,
    subject_of,
)
from penstock.runtime import metrics, status
from penstock.runtime.sink_state import SinkState
from penstock.runtime.source_state import SourceState


class RunState(Collector):
    """The state of a run. Any thread may report to it and read it.

    Args:
        sources: The names of the sources.
        sinks: Each sink's type and source, by its name.
        consumers: Each NATS consumer's stream and source, likewise; no sink has its name.
    """

    def __init__(
        self,
        sources: Iterable[str],
        sinks: Mapping[str, tuple[str, str]],
        consumers: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        self.sources = {name: SourceState() for name in sources}
        self.sinks = {name: SinkState(*sink) for name, sink in sinks.items()}
        self.sinks |= {
            name: SinkState("nats", source, stream) for name, (stream, source) in consumers.items()
        }
        self.standing_by: str | None = None
        """Who runs the sources, where this process stands by."""
        self.holder: str | None = None
        """Who this process is to others, while it runs the sources."""
        self.store_failure: Failure | None = None
        self.backfills: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], int] = {}
        self._lives: dict[str, str] = {}
        self._ledgers = {name: Ledger() for name in self.sources}

    @property
    def store_error(self) -> str | None:
        """The text of the store's failure, None without one."""
        return None if self.store_failure is None else self.store_failure.text

    def update(self, report: Report) -> None:
        """Note a report of a capture, a sink, a batch's part or the store."""
        with self._lock:
            if "part" in report:
                self._count_part(report)
            elif "capture" in report:
                self._update_source(report["capture"], report)
            elif "sink" in report:
                self._update_sink(self.sinks[report["sink"]], report)
            elif "store" in report:
                self._update_store(report)

    def _update_source(self, name: str, report: Report) -> None:
        source, now = self.sources[name], time.time()
        source.reported_at = now
        for key in _REPORTED:
            if key in report:
                setattr(source, key, report[key])
        source.note_done(report.get("done"))
        if "waited" in report:
            waited = report["waited"]
            source.waiting_since = None if waited is None else now - waited
        # Counters continue over a restart of the query; its capture counts from 0 again.
        if (life := report.get("life", "")) != self._lives.get(name, ""):
            self._lives[name] = life
            self._last = {key: last for key, last in self._last.items() if key[0] != name}
        confirmed = source.confirmed
        for key in _COUNTED:
            if key in report:
                self._count(name, source, key, report[key])
        source.started = source.started or source.warm
        if source.confirmed > confirmed:
            source.progress_at = now
            source.recover()
        if report.get("error") is not None:
            source.fail(Failure.of(report["code"], report["error"], report.get("remedy"), now))
            source.capture_failure = source.failure
        else:
            source.capture_failure = None
            source.check_recovered(now)

    def _update_sink(self, sink: SinkState, report: Report) -> None:
        if "error" in report:
            sink.fail(report["code"], report["error"], report.get("remedy"))
            sink.retries += 1
            if report.get("behind"):
                sink.reason = sink.failure
        elif "state" in report:
            sink.state, sink.since = report["state"], report["since"]
            sink.backlog = report["backlog"]
            sink.backlog_bytes = report["backlog_bytes"]
            sink.oldest = report.get("oldest")
            sink.take_reason(report.get("why_code"), report.get("why"))
        else:
            sink.duplicates += report["duplicates"]
            if report.get("counted", True):
                sink.count(Counts(report["delivered"], report["bytes"], len(report["dead"]), 0))
            sink.failure = None
            sink.delivered_at = time.time()
            if (report["delivered"] or report["dead"]) and sink.source in self.sources:
                self.sources[sink.source].progress_at = sink.delivered_at

    def begin_query(self, report: Report) -> Report:
        """Return the positions from which a worker of a query counts, by sink: `{"floors": …}`."""
        with self._lock:
            floors = self._ledgers[report["source"]].begin(report["query"])
            return {"floors": {name: [*floor] for name, floor in floors.items()}}

    def _count_part(self, report: Report) -> None:
        part = RoundPart.from_json(report["part"])
        counts = {name: Counts(*of) for name, of in report["counts"].items()}
        ledger = self._ledgers[report["source"]]
        for name, new in ledger.add(report["query"], part, counts).items():
            self.sinks[name].count(new)
        source = self.sources[report["source"]]
        source.note_done(report.get("done"))
        now = time.time()
        for name, (delivered, duplicates) in report.get("outcomes", {}).items():
            sink = self.sinks[name]
            sink.duplicates += duplicates
            sink.failure, sink.delivered_at = None, now
            if delivered:
                source.progress_at = now

    def continue_from(self, earlier: RunState) -> None:
        """Continue the counters of an earlier run of this process, for the sinks that both have."""
        with self._lock, earlier._lock:
            same = []
            for name, sink in self.sinks.items():
                before = earlier.sinks.get(name)
                if before is None or before.identity != sink.identity:
                    continue
                same.append(name)
                for key in _SINK_COUNTERS:
                    setattr(sink, key, getattr(before, key))
                sink.delivered_at, sink.rate = before.delivered_at, before.rate
            for name, source in self.sources.items():
                if (of := earlier.sources.get(name)) is not None:
                    for key in _SOURCE_COUNTERS:
                        setattr(source, key, getattr(of, key))
                    source.take_over(of, time.time())
                    self._ledgers[name] = earlier._ledgers[name]
                    self._ledgers[name].keep(same)

    def _update_store(self, report: Report) -> None:
        if report["store"] is None:
            self.store_failure = None
        else:
            since = report.get("since", time.time())
            failure = Failure.of(report["code"], report["store"], report.get("remedy"))
            self.store_failure = failure.lasting(self.store_failure, since)

    def query_failed(self, source: str, failure: Failure) -> None:
        """Note that an error ended a source's query."""
        with self._lock:
            state = self.sources[source]
            state.state, state.query_failed, state.warm = "error", True, False
            state.well_since = None
            state.fail(failure)

    def parts(self) -> list[Part]:
        """Return the store, the sources, the sinks and the failed backfills, with their problems."""
        with self._lock:
            sources = [
                SourceFacts(
                    name, s.started, s.failure, s.waiting, s.waiting_since, s.progress_at,
                    s.reported_at,
                    tuple(
                        SinkFacts(
                            n, k.state, k.failure, k.reason, k.since, k.backlog, k.refused, k.stream
                        )
                        for n, k in self.sinks.items()
                        if k.source == name
                    ),
                )
                for name, s in self.sources.items()
            ]  # fmt: skip
            store = self.store_failure
        if self.standing_by is not None:
            subjects = [f"source {name}" for name in self.sources]
            subjects += [subject_of(name, sink.stream) for name, sink in self.sinks.items()]
            return [worker_part("store", store, time.time()), *map(Part, subjects)]
        failed = [b for b in self.backfills if b["state"] == "failed"]
        return [
            *sources_parts(sources, store, time.time()),
            *(
                backfill_part(b["number"], Failure("backfill_failed", b["error"] or ""))
                for b in failed
            ),
        ]

    def health(self) -> Health:
        """Return the run's health."""
        return Health(tuple(self.parts()))

    @property
    def readiness(self) -> str:
        """The level in a word, as `/readyz` has it."""
        level = self.health().level
        return "standing by" if level is Level.READY and self.standing_by else level.word

    def _count(self, name: str, source: SourceState, key: str, value: int) -> None:
        last = self._last.get((name, key), 0)
        setattr(source, key, getattr(source, key) + (value - last if value >= last else value))
        self._last[name, key] = value

    def pause(self, sink: str, code: str, error: str | None, remedy: str = "") -> None:
        """Note that a sink's messages only wait; `error` is None where that is no failure."""
        state = self.sinks[sink]
        state.state = "paused"
        state.failure = None if error is None else Failure.of(code, error, remedy, time.time())

    def resume(self, sink: str) -> None:
        """Note that the messages of a paused sink wait no longer."""
        state = self.sinks[sink]
        if state.state == "paused":
            state.state, state.failure = "behind", None

    def as_json(self) -> dict[str, Any]:
        """Return the body of `/status`."""
        health = self.health()
        with self._lock:
            return health.as_json() | {
                "sources": status.sources_json(self.sources, health, self.holder, self.standing_by),
                "sinks": status.sinks_json(self.sinks, self.sources),
                "nats_consumers": status.nats_consumers_json(self.sinks, self.sources),
                "store": status.store_json(self.store_error, health),
                "backfills": self.backfills,
            }

    def show_backfills(self, backfills: Iterable[Backfill]) -> None:
        """Note the backfills that are open, or failed in this run."""
        self.backfills = [
            {
                "number": b.id, "source": b.source, "sink": b.sink, "table": b.table,
                "state": b.state, "rows_done": b.rows_done, "rows_total": b.rows_total,
                "error": b.error,
            }
            for b in backfills
        ]  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of `/metrics` (Prometheus's own interface)."""
        health = self.health()
        yield metrics.of_health(health)
        with self._lock:
            yield from metrics.of_sources(self.sources)
            yield from metrics.of_sinks(self.sinks)
            yield metrics.of_store(health)
            yield from metrics.of_backfills(self.backfills)


_SINK_COUNTERS: Final = (
    "delivered", "duplicates", "bytes", "dead_lettered", "filtered", "retries",
)  # fmt: skip
_COUNTED: Final = (
    "captured", "confirmed", "deliveries", "delivery_us", "truncates_skipped", "reconnects",
)  # fmt: skip
_SOURCE_COUNTERS: Final = (
    "captured", "deliveries", "delivery_us", "truncates_skipped", "reconnects", "restarts",
)  # fmt: skip
_REPORTED: Final = (
    "state", "received_lsn", "confirmed_lsn", "unread_bytes", "warm", "drained",
    "released", "waiting",
)  # fmt: skip
