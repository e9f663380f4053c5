"""How the process is, for `/v1/status`, and its last hour.

`penstock run` lends its own state. Where the API runs alone there is only what the store shows, which
is read at a request. The hour is sampled from the same facts: every few seconds where the process has a
state, else at requests. It is in memory, a few figures a sample, and bounded by `SAMPLES`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
import structlog

from penstock.core.health import Failure, Health, Level, Part
from penstock.runtime.consumer_watch import ConsumerWatch
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerError

PERIOD: Final = 5.0
SAMPLES: Final = 720
"""An hour of them."""
_SHARE: Final = 60  # a look takes at most a sixtieth of the time
_SHORTEST: Final = 1.0
_PATIENCE: Final = 0.1
"""Seconds for which requests wait for a new look, from its beginning, while the last one is not old."""
_GRACE: Final = 15.0
"""Seconds after its time for which a look is returned while the next one is under way."""
_GAUGES: Final = ("lag_messages", "lag_seconds", "waiting_seconds")
_COUNTERS: Final = ("captured", "delivered")
_LATENCY: Final = "latency_seconds"

log = structlog.get_logger("penstock.api")

Look = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class History:
    """Samples of the last hour, oldest first: rates of counters, and gauges as they were."""

    at: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    series: dict[str, deque[float | None]] = field(
        default_factory=lambda: {
            name: deque(maxlen=SAMPLES)
            for name in (*(f"{each}_per_second" for each in _COUNTERS), _LATENCY, *_GAUGES)
        }
    )
    _last: tuple[float, dict[str, int]] | None = None
    _delivered: tuple[int, float] | None = None

    def note(self, status: Mapping[str, Any], now: float) -> None:
        """Add a sample of a status."""
        sinks = [*status["sinks"].values(), *status["nats_consumers"].values()]
        sources = status["sources"].values()
        counted = {
            "captured": sum(each["captured"] for each in sources),
            "delivered": sum(each["delivered"] for each in sinks),
        }
        before, self._last = self._last, (now, counted)
        for name, count in counted.items():
            # A counter that fell is that of a source or a sink that is gone, or has started again.
            known = before is not None and count >= before[1][name] and now > before[0]
            rate = (
                (count - before[1][name]) / (now - before[0])
                if before is not None and known
                else None
            )
            self.series[f"{name}_per_second"].append(rate)
        self.series[_LATENCY].append(self._latency(status))
        consumers = status.get("consumers", {}).values()
        waiting = [each["oldest_waiting_seconds"] for each in sources]
        self.series["lag_messages"].append(
            sum(each["lag_messages"] for each in consumers)
            + sum(each.get("backlog") or 0 for each in sinks)
        )
        self.series["lag_seconds"].append(max((c["lag_seconds"] for c in consumers), default=0.0))
        self.series["waiting_seconds"].append(max(waiting, default=0.0))
        self.at.append(now)

    def _latency(self, status: Mapping[str, Any]) -> float | None:
        """Return the mean latency of what was delivered since the sample before; None: nothing was."""
        sources = status["sources"].values()
        count: int = sum(each["deliveries"] for each in sources)
        seconds: float = sum(each["delivery_seconds"] for each in sources)
        before, self._delivered = self._delivered, (count, seconds)
        if before is None or count <= before[0] or seconds < before[1]:
            return None
        return round((seconds - before[1]) / (count - before[0]), 6)

    def as_json(self) -> dict[str, Any]:
        """Return the samples as `/v1/status/history` has them."""
        series = {name: list(values) for name, values in self.series.items()}
        return {"at": list(self.at), **series}


class Status:
    """The status that `look` returns, kept for a moment, and its history.

    A look at thousands of consumers takes seconds: meanwhile the last one is returned. The first look
    takes longer than those behind it, which leave out consumers at rest: it is not kept for long.

    `always` is whether it is sampled between requests, too.
    """

    def __init__(self, look: Look, *, always: bool) -> None:
        self._look = look
        self._always = always
        self._known: dict[str, Any] | None = None
        self._until = 0.0
        self._kept = 0.0
        self._looking: asyncio.Task[dict[str, Any]] | None = None
        self._began = 0.0
        self._written: bytes | None = None
        self.history = History()

    async def read(self) -> dict[str, Any]:
        """Return it: a look that is kept, or a new one, which requests at the same time share."""
        now, known = time.monotonic(), self._known
        if known is not None and now < self._until:
            return known
        if self._looking is None or self._looking.done():
            self._looking, self._began = asyncio.create_task(self._renew()), now
        looking, recent = self._looking, now < self._until + min(self._kept, _GRACE)
        patience = max(self._began + _PATIENCE - now, 0.0) if recent else None
        await asyncio.wait([looking], timeout=patience)
        return looking.result() if known is None or looking.done() else known

    async def written(self) -> bytes:
        """Return it as JSON: with thousands of consumers it is megabytes, which are written once."""
        await self.read()
        if self._written is None:
            self._written = orjson.dumps(self._known)
        return self._written

    async def _renew(self) -> dict[str, Any]:
        began, first = time.monotonic(), self._known is None
        found = self._known = await self._look()
        self._written = None
        self._kept = max(_SHORTEST, _SHARE * (time.monotonic() - began))
        if first:
            self._kept = min(self._kept, _GRACE)
        self._until = began + self._kept
        last = self.history.at[-1] if self.history.at else 0.0
        if time.time() - last >= PERIOD * 0.9:
            self.history.note(found, time.time())
        return found

    async def close(self) -> None:
        """End the look that is under way."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def run(self) -> None:
        """Sample until it is cancelled."""
        while self._always:
            try:
                await self.read()
            except Exception as error:
                log.warning("the status can't be sampled", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(PERIOD)


def alone(consumers: Consumers) -> Look:
    """Return what looks at the store, where no pipeline runs in the process."""
    watch = ConsumerWatch()

    async def look() -> dict[str, Any]:
        store = Part("store")
        try:
            await watch.look(consumers)
        except ConsumerError as error:
            failure = Failure("store_down", str(error), "Start the store's Postgres server.")
            store = Part.failing("store", Level.FAILED, failure)
        health = Health((store, *watch.parts()))
        return {
            "runs": False, **health.as_json(), "sources": {}, "sinks": {}, "nats_consumers": {},
            "consumers": watch.as_json(), "backfills": [],
        }  # fmt: skip

    return look
