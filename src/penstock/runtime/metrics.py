"""The metrics of `/metrics`: the state of a run's parts as Prometheus expects it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.core.health import Health, Level

_Table = tuple[tuple[type[Metric], str, str, str], ...]
"""Of each metric: its kind, the attribute of a state, its name, and its help."""


def of_health(health: Health) -> Metric:
    """Return the gauge of how each part is."""
    family = GaugeMetricFamily(
        "penstock_health",
        "How a part is: 0 failed, 1 starting, 2 degraded, 3 ready",
        labels=["part"],
    )
    for part in health.parts:
        family.add_metric([part.subject], float(Level.FAILED - part.level))
    return family


def of_sources(sources: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of sources, whose states are given by name."""
    return _families("source", sources, _SOURCES)


def of_sinks(sinks: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of sinks, whose states are given by name; a stream has no backlog."""
    yield from _families("sink", sinks, _SINKS)
    backlogs = {name: sink for name, sink in sinks.items() if sink.type != "stream"}
    yield from _families("sink", backlogs, _BACKLOGS)


def of_store(health: Health) -> Metric:
    """Return the gauge of the store."""
    up = GaugeMetricFamily("penstock_store_up", "0 while the store does not answer")
    up.add_metric([], float(not health.part("store").problems))
    return up


def of_backfills(backfills: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the metrics of backfills, each as `/status` has it."""
    labels = ["number", "sink", "table", "state"]
    done = GaugeMetricFamily(
        "penstock_backfill_rows_done",
        "Rows that a backfill has delivered; open and failed ones",
        labels=labels,
    )
    total = GaugeMetricFamily(
        "penstock_backfill_rows_estimated", "About how many there will be", labels=labels
    )
    for backfill in backfills:
        values = [str(backfill[label]) for label in labels]
        done.add_metric(values, backfill["rows_done"])
        if backfill["rows_total"] is not None:
            total.add_metric(values, backfill["rows_total"])
    yield done
    yield total


def _families(label: str, states: Mapping[str, Any], table: _Table) -> Iterator[Metric]:
    for kind, attribute, name, text in table:
        family: Any = kind(f"penstock_{name}", text, labels=[label])  # type: ignore[call-arg]
        for key, state in states.items():
            value = getattr(state, attribute)
            up = attribute in ("state", "error")
            # A source whose query ends again and again streams in between, and is not well.
            ok = state.error is None and (attribute == "error" or value == "streaming")
            family.add_metric([key], float(ok) if up else float(value))
        yield family


_SOURCES: Final = (
    (GaugeMetricFamily, "state", "source_streaming", "1 while the slot's stream is being read"),
    (CounterMetricFamily, "captured", "captured_messages", "Messages read from the slot"),
    (CounterMetricFamily, "truncates_skipped", "truncates_skipped", "Truncates no sink lists"),
    (CounterMetricFamily, "reconnects", "reconnects", "Replication connections made again"),
    (CounterMetricFamily, "restarts", "restarts", "Queries started again after an error"),
    (GaugeMetricFamily, "received_lsn", "received_lsn", "LSN up to which the WAL was read"),
    (GaugeMetricFamily, "confirmed_lsn", "confirmed_lsn", "LSN confirmed to the server"),
    (GaugeMetricFamily, "waiting", "waiting_messages", "Messages captured and not yet delivered"),
    (GaugeMetricFamily, "waited", "oldest_waiting_seconds", "How long the oldest has waited"),
    (
        GaugeMetricFamily,
        "unread_bytes",
        "unread_bytes",
        "WAL bytes captured and not yet in a batch",
    ),
)
_SINKS: Final = (
    (GaugeMetricFamily, "error", "sink_up", "0 while an error holds the sink up"),
    (CounterMetricFamily, "delivered", "delivered_messages", "Messages that it has, each once"),
    (CounterMetricFamily, "duplicates", "duplicate_messages", "Messages it was sent again and had"),
    (CounterMetricFamily, "bytes", "delivered_bytes", "Bytes of the delivered bodies"),
    (CounterMetricFamily, "dead_lettered", "dead_letters", "Messages that can never be delivered"),
    (CounterMetricFamily, "filtered", "filtered_messages", "Messages left out by its expressions"),
    (CounterMetricFamily, "retries", "sink_retries", "Waits after an error"),
    (GaugeMetricFamily, "delivered_at", "last_delivery_seconds", "Unix time of the last delivery"),
)
_BACKLOGS: Final = (
    (GaugeMetricFamily, "behind", "sink_behind", "1 while its messages go to its backlog"),
    (GaugeMetricFamily, "detached", "sink_detached", "1 once that has lasted for detach_after"),
    (GaugeMetricFamily, "backlog", "backlog_messages", "Messages that wait in the store"),
    (GaugeMetricFamily, "backlog_bytes", "backlog_bytes", "Their bytes there"),
)
