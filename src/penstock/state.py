"""What a run knows about its sources and sinks, from their reports: for `/status` and `/metrics`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.message import format_lsn
from penstock.monitor import Report


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


@dataclass
class SinkState:
    """A sink's counts since the run started, and the error that holds it up now."""

    delivered: int = 0
    duplicates: int = 0
    bytes: int = 0
    dead_lettered: int = 0
    retries: int = 0
    error: str | None = None
    code: str | None = None
    delivered_at: float = 0.0


class State(Collector):
    """The state of a run; reports come from many threads, readers take what is there."""

    def __init__(self, sources: Iterable[str], sinks: Iterable[str]) -> None:
        self.sources = {name: SourceState() for name in sources}
        self.sinks = {name: SinkState() for name in sinks}
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
                    sink.retries += 1
                else:
                    sink.delivered += report["delivered"]
                    sink.duplicates += report["duplicates"]
                    sink.bytes += report["bytes"]
                    sink.dead_lettered += len(report["dead"])
                    sink.error = sink.code = None
                    sink.delivered_at = time.time()

    def _count(self, name: str, source: SourceState, key: str, value: int) -> None:
        last = self._last.get((name, key), 0)
        setattr(source, key, getattr(source, key) + (value - last if value >= last else value))
        self._last[name, key] = value

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
                "sinks": {
                    name: {
                        "delivered": s.delivered,
                        "duplicates": s.duplicates,
                        "dead_lettered": s.dead_lettered,
                        "retries": s.retries,
                        "error": s.error,
                    }
                    for name, s in self.sinks.items()
                },
            }

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of `/metrics` (Prometheus's own interface)."""
        with self._lock:
            yield from self._metrics("source", self.sources, _SOURCE_METRICS)
            yield from self._metrics("sink", self.sinks, _SINK_METRICS)

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
