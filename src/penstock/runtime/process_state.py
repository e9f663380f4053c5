"""The runs of one process as one: the bodies of `/status` and `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.core.health import Health, Level, Part
from penstock.runtime import metrics
from penstock.runtime.consumer_watch import ConsumerWatch
from penstock.runtime.sink_state import SinkState
from penstock.runtime.state import RunState


class SyncsShown(Protocol):
    """The syncs of a process, as `penstock.runtime.sync_runner` has them."""

    def as_json(self) -> dict[str, Any]:
        """Return what `/status` has of them."""

    def collect(self) -> Iterator[Metric]:
        """Yield their metrics."""


class ProcessState(Collector):
    """The runs of one process, merged for `/status` and `/metrics`.

    Args:
        runs: Returns the state of each run; called each time, like the next two.
        relays: Returns the JSON of each outbox's relay, by name.
        parts: Returns the process's other parts that have a health.
        consumers: The store's consumers.
        standing_by: Returns whether all sources are run by other processes.
        syncs: The process's syncs.
    """

    def __init__(
        self,
        runs: Callable[[], Iterable[RunState]],
        relays: Callable[[], dict[str, Any]],
        parts: Callable[[], Iterable[Part]] = tuple,
        consumers: ConsumerWatch | None = None,
        standing_by: Callable[[], bool] = lambda: False,
        syncs: SyncsShown | None = None,
    ) -> None:
        self._runs = runs
        self._relays = relays
        self._parts = parts
        self._consumers = consumers
        self._standing_by = standing_by
        self._syncs = syncs

    @property
    def readiness(self) -> str:
        """The level in a word, as `/readyz` has it."""
        level = self.health().level
        return "standing by" if level is Level.READY and self._standing_by() else level.word

    @property
    def sinks(self) -> dict[str, SinkState]:
        """The sinks of all runs, by name."""
        return {name: sink for state in self._runs() for name, sink in state.sinks.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the body of `/status`."""
        health = self.health()
        runs = [state.as_json() for state in self._runs()]
        body: dict[str, Any] = {
            **health.as_json(),
            "sources": {},
            "sinks": {},
            "nats_consumers": {},
        }
        for of_run in runs:
            body["sources"] |= of_run["sources"]
            body["sinks"] |= of_run["sinks"]
            body["nats_consumers"] |= of_run["nats_consumers"]
        errors = [of_run["store"]["error"] for of_run in runs]
        body["store"] = {"error": next((error for error in errors if error is not None), None)}
        body["backfills"] = [backfill for of_run in runs for backfill in of_run["backfills"]]
        if self._consumers is not None:
            body["consumers"] = self._consumers.as_json()
        if self._syncs is not None:
            body |= self._syncs.as_json()
        relays = self._relays()
        return body | ({"relays": relays} if relays else {})

    def health(self) -> Health:
        """Return the health of the runs, their store (once), and the other parts."""
        found: dict[str, Part] = {}
        for part in (*(p for state in self._runs() for p in state.parts()), *self._parts()):
            before = found.get(part.subject)
            if before is None or part.level > before.level:
                found[part.subject] = part
        return Health(tuple(found.values()))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all runs, each name once (Prometheus's own interface)."""
        metric = metrics.of_health(self.health())
        found: dict[str, Metric] = {metric.name: metric}
        for state in self._runs():
            for metric in state.collect():
                if metric.name == "penstock_health":
                    continue
                if metric.name in found:
                    found[metric.name].samples.extend(metric.samples)
                else:
                    found[metric.name] = metric
        yield from found.values()
        if self._syncs is not None:
            yield from self._syncs.collect()
        if self._consumers is not None:
            yield from self._consumers.collect()
