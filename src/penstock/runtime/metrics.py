"""The metrics of `/metrics`: the state of a run's parts as Prometheus expects it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from penstock.core.health import Health, Level
from penstock.runtime.metric_list import (
    BACKFILLS,
    BACKLOGS,
    HEALTH,
    SINKS,
    SOURCES,
    STORE_UP,
    MetricSpec,
)


def of_health(health: Health) -> Metric:
    """Return the gauge of how each part is."""
    family = HEALTH.family()
    for part in health.parts:
        family.add_metric([part.subject], float(Level.FAILED - part.level))
    return family


def of_sources(sources: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of sources, whose states are given by name."""
    return _families(sources, SOURCES)


def of_sinks(sinks: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of sinks, whose states are given by name; a stream has no backlog."""
    yield from _families(sinks, SINKS)
    backlogs = {name: sink for name, sink in sinks.items() if sink.type != "stream"}
    yield from _families(backlogs, BACKLOGS)


def of_store(health: Health) -> Metric:
    """Return the gauge of the store."""
    up = STORE_UP.family()
    up.add_metric([], float(not health.part("store").problems))
    return up


def of_backfills(backfills: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the metrics of backfills, each as `/status` has it."""
    for key, spec in BACKFILLS.items():
        family = spec.family()
        for backfill in backfills:
            if backfill[key] is not None:
                values = [str(backfill[label]) for label in spec.labels]
                family.add_metric(values, backfill[key])
        yield family


def _families(states: Mapping[str, Any], table: Mapping[str, MetricSpec]) -> Iterator[Metric]:
    for attribute, spec in table.items():
        family = spec.family()
        for key, state in states.items():
            value = getattr(state, attribute)
            up = attribute in ("state", "error")
            # A source whose query ends again and again streams in between, and is not well.
            ok = state.error is None and (attribute == "error" or value == "streaming")
            family.add_metric([key], float(ok) if up else float(value))
        yield family
