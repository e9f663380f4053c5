"""What a run knows about its sources and sinks, from their reports: for `/status` and `/metrics`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.message import format_lsn
from penstock.monitor import Report
from penstock.streams.backfills import Backfill

_RATE_SECONDS: Final = 5.0


@dataclass
class SourceState:
    """A source's capture, as it last reported."""

    state: str = "connecting"
    error: str | None = None
    code: str | None = None
    captured: int = 0
    truncates_skipped: int = 0
    reconnects: int = 0
    received_lsn: int = 0
    confirmed_lsn: int = 0
    unread_bytes: int = 0
    warm: bool = False
    drained: bool = False
    restarts: int = 0
    done: list[int] | None = None


class Rate:
    """How many a second there were of late."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._marks = ((now, 0), (now, 0))

    def note(self, count: int) -> None:
        """Take the count so far."""
        now = time.monotonic()
        if now - self._marks[1][0] > _RATE_SECONDS:
            self._marks = self._marks[1], (now, count)

    def per_second(self, count: int) -> float:
        """Return the rate, `count` being the count so far."""
        now, (at, then) = time.monotonic(), self._marks[0]
        if now - self._marks[1][0] > 2 * _RATE_SECONDS:
            at, then = self._marks[1]
        return (count - then) / max(now - at, 1.0)


@dataclass
class SinkState:
    """A sink's counts since the run started, the error that holds it up now, and its backlog."""

    type: str
    source: str
    delivered: int = 0
    duplicates: int = 0
    bytes: int = 0
    dead_lettered: int = 0
    retries: int = 0
    error: str | None = None
    code: str | None = None
    remedy: str = ""
    delivered_at: float = 0.0
    state: str = "attached"
    since: float | None = None
    backlog: int = 0
    backlog_bytes: int = 0
    rate: Rate = field(default_factory=Rate)

    @property
    def behind(self) -> bool:
        """Whether its messages go to its backlog."""
        return self.state != "attached"

    @property
    def detached(self) -> bool:
        """Whether it has been behind for `detach_after`."""
        return self.state == "detached"


class State(Collector):
    """The state of a run; reports come from many threads, readers take what is there.

    `sinks` gives each sink's type and source.
    """

    def __init__(self, sources: Iterable[str], sinks: Mapping[str, tuple[str, str]]) -> None:
        self.sources = {name: SourceState() for name in sources}
        self.sinks = {name: SinkState(*sink) for name, sink in sinks.items()}
        self.store_error: str | None = None
        self.backfills: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], int] = {}

    def update(self, report: Report) -> None:
        """Take in a capture's or a sink's report."""
        with self._lock:
            if "capture" in report:
                source = self.sources[report["capture"]]
                for key, value in report.items():
                    if key in ("captured", "truncates_skipped", "reconnects"):
                        continue
                    if hasattr(source, key):
                        setattr(source, key, value)
                # Counters go on over a restart of the query, whose capture counts from 0 again.
                for key in ("captured", "truncates_skipped", "reconnects"):
                    if key in report:
                        self._count(report["capture"], source, key, report[key])
            elif "sink" in report:
                sink = self.sinks[report["sink"]]
                if "error" in report:
                    sink.error, sink.code = report["error"], report["code"]
                    sink.remedy = report.get("remedy", "")
                    sink.retries += 1
                elif "state" in report:
                    sink.state, sink.since = report["state"], report["since"]
                    sink.backlog = report["backlog"]
                    sink.backlog_bytes = report["backlog_bytes"]
                    if not sink.behind:
                        sink.error = sink.code = None
                else:
                    sink.delivered += report["delivered"]
                    sink.duplicates += report["duplicates"]
                    sink.bytes += report["bytes"]
                    sink.dead_lettered += len(report["dead"])
                    sink.error = sink.code = None
                    sink.delivered_at = time.time()
                    sink.rate.note(sink.delivered)
            elif "store" in report:
                self.store_error = report["store"]

    def _count(self, name: str, source: SourceState, key: str, value: int) -> None:
        last = self._last.get((name, key), 0)
        setattr(source, key, getattr(source, key) + (value - last if value >= last else value))
        self._last[name, key] = value

    def hold(self, sink: str, code: str, error: str | None) -> None:
        """Note that a sink's messages only wait, and why; `error` is None where that is as it should."""
        state = self.sinks[sink]
        state.state, state.code, state.error = "held", code, error

    def release(self, sink: str) -> None:
        """Note that a held sink's messages wait no longer."""
        state = self.sinks[sink]
        if state.state == "held":
            state.state, state.code, state.error = "behind", None, None

    def as_json(self) -> dict[str, Any]:
        """Return the body of `/status`."""
        with self._lock:
            return {
                "sources": {
                    name: {
                        "state": s.state,
                        "error": s.error,
                        "captured": s.captured,
                        "truncates_skipped": s.truncates_skipped,
                        "reconnects": s.reconnects,
                        "restarts": s.restarts,
                        "confirmed_lsn": format_lsn(s.confirmed_lsn),
                    }
                    for name, s in self.sources.items()
                },
                "sinks": {name: self._sink(s) for name, s in self.sinks.items()},
                "store": {"error": self.store_error},
                "backfills": self.backfills,
            }

    def show_backfills(self, backfills: Iterable[Backfill]) -> None:
        """Take the backfills that are open, or failed in this run."""
        self.backfills = [
            {
                "number": b.id, "source": b.source, "sink": b.sink, "table": b.table,
                "state": b.state, "rows_done": b.rows_done, "rows_total": b.rows_total,
                "error": b.error,
            }
            for b in backfills
        ]  # fmt: skip

    def _sink(self, s: SinkState) -> dict[str, Any]:
        counts = {
            "type": s.type,
            "state": s.state,
            "delivered": s.delivered,
            "per_second": round(s.rate.per_second(s.delivered), 1),
            "duplicates": s.duplicates,
            "dead_lettered": s.dead_lettered,
            "retries": s.retries,
            "error": s.error,
        }
        if s.type == "stream":
            # All that the capture knows to be done can be read.
            done = self.sources[s.source].done
            return counts | {"head": None if done is None else format_lsn(done[0])}
        since = None if s.since is None else datetime.fromtimestamp(s.since, UTC).isoformat()
        return counts | {"since": since, "backlog": s.backlog, "backlog_bytes": s.backlog_bytes}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of `/metrics` (Prometheus's own interface)."""
        with self._lock:
            yield from self._metrics("source", self.sources, _SOURCE_METRICS)
            yield from self._metrics("sink", self.sinks, _SINK_METRICS)
            nats = {name: sink for name, sink in self.sinks.items() if sink.type != "stream"}
            yield from self._metrics("sink", nats, _BACKLOG_METRICS)
            up = GaugeMetricFamily("penstock_store_up", "0 while the store does not answer")
            up.add_metric([], float(self.store_error is None))
            yield up
            yield from self._backfill_metrics()

    def _backfill_metrics(self) -> Iterator[Metric]:
        labels = ["number", "sink", "table", "state"]
        done = GaugeMetricFamily(
            "penstock_backfill_rows_done",
            "Rows that a backfill has delivered; open and failed ones",
            labels=labels,
        )
        total = GaugeMetricFamily(
            "penstock_backfill_rows_estimated", "About how many there will be", labels=labels
        )
        for backfill in self.backfills:
            values = [str(backfill[label]) for label in labels]
            done.add_metric(values, backfill["rows_done"])
            if backfill["rows_total"] is not None:
                total.add_metric(values, backfill["rows_total"])
        yield done
        yield total

    @staticmethod
    def _metrics(
        label: str, states: dict[str, Any], metrics: tuple[tuple[type[Metric], str, str, str], ...]
    ) -> Iterator[Metric]:
        for kind, attribute, name, text in metrics:
            family: Any = kind(f"penstock_{name}", text, labels=[label])  # type: ignore[call-arg]
            for key, state in states.items():
                value = getattr(state, attribute)
                up = attribute in ("state", "error")
                ok = value == "streaming" if attribute == "state" else value is None
                family.add_metric([key], float(ok) if up else float(value))
            yield family


class States(Collector):
    """Several runs of one process as one: what `/status` and `/metrics` tell of all of them.

    `runs` gives their states, `relays` what each outbox's relay has to tell; both are asked each time.
    """

    def __init__(
        self, runs: Callable[[], Iterable[State]], relays: Callable[[], dict[str, Any]]
    ) -> None:
        self._runs = runs
        self._relays = relays

    @property
    def sinks(self) -> dict[str, SinkState]:
        """The sinks of all runs, by name."""
        return {name: sink for state in self._runs() for name, sink in state.sinks.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the body of `/status`."""
        told = [state.as_json() for state in self._runs()]
        body: dict[str, Any] = {"sources": {}, "sinks": {}}
        for of_run in told:
            body["sources"] |= of_run["sources"]
            body["sinks"] |= of_run["sinks"]
        errors = [of_run["store"]["error"] for of_run in told]
        body["store"] = {"error": next((error for error in errors if error is not None), None)}
        body["backfills"] = [backfill for of_run in told for backfill in of_run["backfills"]]
        relays = self._relays()
        return body | ({"relays": relays} if relays else {})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all runs; a name comes once (Prometheus's own interface)."""
        found: dict[str, Metric] = {}
        for state in self._runs():
            for metric in state.collect():
                if metric.name in found:
                    found[metric.name].samples.extend(metric.samples)
                else:
                    found[metric.name] = metric
        yield from found.values()


_SOURCE_METRICS = (
    (GaugeMetricFamily, "state", "source_streaming", "1 while the slot's stream is being read"),
    (CounterMetricFamily, "captured", "captured_messages", "Messages read from the slot"),
    (CounterMetricFamily, "truncates_skipped", "truncates_skipped", "Truncates no sink lists"),
    (CounterMetricFamily, "reconnects", "reconnects", "Replication connections made again"),
    (CounterMetricFamily, "restarts", "restarts", "Queries started again after an error"),
    (GaugeMetricFamily, "received_lsn", "received_lsn", "LSN up to which the WAL was read"),
    (GaugeMetricFamily, "confirmed_lsn", "confirmed_lsn", "LSN confirmed to the server"),
    (
        GaugeMetricFamily,
        "unread_bytes",
        "unread_bytes",
        "WAL bytes captured and not yet in a batch",
    ),
)
_SINK_METRICS = (
    (GaugeMetricFamily, "error", "sink_up", "0 while an error holds the sink up"),
    (CounterMetricFamily, "delivered", "delivered_messages", "Messages acked by the sink"),
    (CounterMetricFamily, "duplicates", "duplicate_messages", "Of these, already there"),
    (CounterMetricFamily, "bytes", "delivered_bytes", "Bytes of the delivered bodies"),
    (CounterMetricFamily, "dead_lettered", "dead_letters", "Messages that can never be delivered"),
    (CounterMetricFamily, "retries", "sink_retries", "Waits after an error"),
    (GaugeMetricFamily, "delivered_at", "last_delivery_seconds", "Unix time of the last delivery"),
)
_BACKLOG_METRICS = (
    (GaugeMetricFamily, "behind", "sink_behind", "1 while its messages go to its backlog"),
    (GaugeMetricFamily, "detached", "sink_detached", "1 once that has lasted for detach_after"),
    (GaugeMetricFamily, "backlog", "backlog_messages", "Messages that wait in the store"),
    (GaugeMetricFamily, "backlog_bytes", "backlog_bytes", "Their bytes there"),
)
