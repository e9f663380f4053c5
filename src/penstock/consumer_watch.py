"""What a run knows of its store's consumers, whichever processes serve them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.health import Part, consumer_part
from penstock.streams.consumer_facts import ConsumerFacts, facts_body, failure_of
from penstock.streams.consumer_types import ConsumerError, ConsumerInfo
from penstock.streams.engine import Consumers

_PERIOD: Final = 2.0
_LONGEST_PERIOD: Final = 15.0
_SHARE: Final = 50  # of its time, about one part in so many goes into looking, where there is much
_PATIENCE: Final = 10.0
_AT_ONCE: Final = 4

log = structlog.get_logger("penstock")


class ConsumerWatch:
    """Looks at all consumers every few seconds; what it found is read from any thread."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[ConsumerInfo, ConsumerFacts]] = {}

    async def run(self, consumers: Consumers, stop: asyncio.Event) -> None:
        """Look until `stop` is set."""
        while not stop.is_set():
            started = time.monotonic()
            try:
                await self.look(consumers)
            except ConsumerError:
                pass  # the store is away, which others report
            except Exception:
                log.exception("the consumers could not be looked at")
            wait = min(max(_PERIOD, _SHARE * (time.monotonic() - started)), _LONGEST_PERIOD)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await stop.wait()

    async def look(self, consumers: Consumers) -> None:
        """Look once at each consumer; raises `ConsumerError` where the store does not answer."""
        infos = await consumers.list()
        some = asyncio.Semaphore(_AT_ONCE)

        async def one(info: ConsumerInfo) -> None:
            async with some, asyncio.timeout(_PATIENCE):
                consumer = await consumers.get(info.name)
                self._found[info.name] = (consumer.info, await consumer.facts())

        outcomes = await asyncio.gather(*map(one, infos), return_exceptions=True)
        for info, outcome in zip(infos, outcomes, strict=True):
            if info.name in self._found:  # disabled or not is known, whatever became of the rest
                self._found[info.name] = (info, self._found[info.name][1])
            if isinstance(outcome, BaseException) and not isinstance(
                outcome, ConsumerError | TimeoutError
            ):
                raise outcome
        names = {info.name for info in infos}
        self._found = {name: found for name, found in self._found.items() if name in names}

    def parts(self) -> list[Part]:
        """Return how each consumer is."""
        return [
            consumer_part(f"{info.stream}/{info.name}", failure_of(info, facts))
            for info, facts in list(self._found.values())
        ]

    def as_json(self) -> dict[str, Any]:
        """Return what `/status` has of the consumers."""
        return {
            name: {"stream": info.stream, "type": info.type, "own": info.own}
            | {"disabled": info.disabled} | facts_body(info, facts)
            for name, (info, facts) in sorted(self._found.items())
        }  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """Yield what `/metrics` has of the consumers (Prometheus's own interface)."""
        found = sorted(self._found.items())
        labels = ["stream", "consumer"]
        for kind, attribute, name, text in _METRICS:
            family: Any = kind(f"penstock_consumer_{name}", text, labels=labels)  # type: ignore[call-arg]
            for key, (info, facts) in found:
                family.add_metric([info.stream, key], float(getattr(facts, attribute)))
            yield family
        up = GaugeMetricFamily(
            "penstock_consumer_up", "0 while it is disabled or its deliveries fail", labels=labels
        )
        for key, (info, facts) in found:
            up.add_metric([info.stream, key], float(failure_of(info, facts) is None))
        yield up


_METRICS: Final[tuple[tuple[type[Metric], str, str, str], ...]] = (
    (GaugeMetricFamily, "lag_messages", "lag_messages", "Messages not acked yet"),
    (GaugeMetricFamily, "lag_seconds", "lag_seconds", "Age of the oldest message not acked yet"),
    (GaugeMetricFamily, "in_flight", "in_flight", "Messages handed out, not acked and not nacked"),
    (GaugeMetricFamily, "waiting_for_retry", "waiting_for_retry", "Messages to be redelivered"),
    (GaugeMetricFamily, "dead_letters", "dead_letters", "Dead letters that were not replayed"),
    (CounterMetricFamily, "redeliveries", "redeliveries", "Deliveries but each message's first"),
    (CounterMetricFamily, "failures", "failures", "Deliveries nacked or not acked in time"),
)
