"""The state of a store's consumers, whichever processes serve them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import structlog
from prometheus_client.core import Metric

from penstock.core.health import Failure, Level, Part
from penstock.runtime.metric_list import CONSUMER_UP, CONSUMERS
from penstock.streams.consumers.facts import ConsumerFacts, facts_body, failure_of
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerError, ConsumerInfo

_PERIOD: Final = 2.0
_LONGEST_PERIOD: Final = 15.0
_SHARE: Final = 50  # a look that takes long is repeated after so many times its length
_REST: Final = 300.0
"""Seconds after which a consumer at rest is looked at, though nothing was noticed of it."""

log = structlog.get_logger("penstock")


class _Watched(NamedTuple):
    """A consumer as it was found, and what is shown of it, which is made once."""

    info: ConsumerInfo
    facts: ConsumerFacts
    body: dict[str, Any]
    part: Part

    @classmethod
    def of(cls, info: ConsumerInfo, facts: ConsumerFacts) -> _Watched:
        """Return a consumer that was found so."""
        subject, failure = f"consumer {info.stream}/{info.name}", failure_of(info, facts)
        body = {
            "stream": info.stream, "type": info.type, "own": info.own, "disabled": info.disabled,
            **facts_body(info, facts),
        }  # fmt: skip
        part = Part.failing(subject, Level.DEGRADED, failure) if failure else Part(subject)
        return cls(info, facts, body, part)


class ConsumerWatch:
    """Reads the facts of all consumers every few seconds; any thread may read the newest ones."""

    def __init__(self) -> None:
        self._found: dict[str, _Watched] = {}
        self._unread: set[str] = set()
        self._all_at = 0.0
        self._refusals: Mapping[str, tuple[str, float]] = {}

    async def run(self, consumers: Consumers, stop: asyncio.Event) -> None:
        """Look until `stop` is set."""
        while not stop.is_set():
            started = time.monotonic()
            try:
                await self.look(consumers)
            except ConsumerError:
                pass  # the store is away, which others report
            except Exception:
                log.exception("the consumers' status can't be read")
            wait = min(max(_PERIOD, _SHARE * (time.monotonic() - started)), _LONGEST_PERIOD)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await stop.wait()

    async def look(self, consumers: Consumers) -> None:
        """Look once at each consumer; raises `ConsumerError` where the store does not answer.

        One that is at rest, and of which nothing was noticed, is as it was.
        """
        self._refusals = await consumers.refusals()
        infos, has_moved = await consumers.known(), consumers.moved()
        looks_at_all = time.monotonic() >= self._all_at
        if looks_at_all:
            self._all_at = time.monotonic() + _REST
        before, due = self._found, list[ConsumerInfo]()
        found: dict[str, _Watched] = {}
        for info in infos:
            old = before.get(info.name)
            if old is None or looks_at_all or has_moved(info) or not self._rests(info, old):
                due.append(info)
            else:
                found[info.name] = old
        read = await consumers.facts(due)
        self._unread = {info.name for info, facts in read if facts is None}
        for info, facts in read:
            if facts is not None:
                found[info.name] = _Watched.of(info, facts)
            elif info.name in before:
                found[info.name] = _Watched.of(info, before[info.name].facts)
        self._found = dict(sorted(found.items()))

    def _rests(self, now: ConsumerInfo, old: _Watched) -> bool:
        """Return whether a consumer has nothing that changes by itself, or without a notice."""
        at_rest = not old.facts.lag_messages and not old.facts.dead_letters
        return at_rest and now == old.info and now.name not in self._unread

    def parts(self) -> list[Part]:
        """Return the part of each consumer."""
        found, refusals = [], dict(self._refusals)
        for name, one in self._found.items():
            part, refusal = one.part, refusals.pop(name, None)
            if refusal is not None and not part.problems:
                part = Part.failing(part.subject, Level.DEGRADED, _refused(*refusal))
            found.append(part)
        for name, refusal in refusals.items():  # those that are not served at all
            found.append(Part.failing(f"consumer {name}", Level.DEGRADED, _refused(*refusal)))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the consumers as in `/status`."""
        return {name: one.body for name, one in self._found.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield the consumers' metrics (Prometheus's own interface)."""
        found = self._found.values()
        for attribute, described in CONSUMERS.items():
            family = described.family()
            for one in found:
                labels = [one.info.stream, one.info.name]
                family.add_metric(labels, float(getattr(one.facts, attribute)))
            yield family
        up = CONSUMER_UP.family()
        for one in found:
            up.add_metric([one.info.stream, one.info.name], float(not one.part.problems))
        yield up


def _refused(reason: str, since: float) -> Failure:
    return Failure("refused", reason, "Correct the consumer.", since)
