"""What the endpoints share: the store for calls that block, and the settings of sources."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from fastapi import Request

from penstock.api.manage.access import door_of, grant_of
from penstock.api.problems import AWAY, Problem
from penstock.config.document import Key
from penstock.config.settings import Config
from penstock.config.sources import PostgresSource
from penstock.core.finding import Finding
from penstock.core.tables import TablePattern
from penstock.desired.actions import Action, Actor, note_action
from penstock.desired.entities import Snapshot
from penstock.desired.plan import Plan
from penstock.desired.state import DesiredState
from penstock.streams.connection import Also
from penstock.streams.consumers.registry import Consumers
from penstock.streams.records import StoredLetter
from penstock.streams.store import Store

SOURCE_SECONDS: Final = 5.0
"""How long a request waits for a source's server."""
_TEST_SECONDS: Final = 15.0
"""How long a test of a connection waits: longer than a bastion may take to answer."""
_STORE_THREADS: Final = 4
_SOURCE_THREADS: Final = 8
_TRIAL_THREADS: Final = 4

P = ParamSpec("P")
T = TypeVar("T")


class TrialRefusal(Exception):  # noqa: N818 - it is an answer
    """A trial that can't be made: which key is wrong, if one is, and why."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key
        self.text = text


class Tools(Protocol):
    """What the process around the API lends it: parts that lie above it, or know Spark's modules."""

    def check(self, config: Config, refused: Mapping[Key, str]) -> Sequence[Finding]:
        """Return what `penstock check` finds in a configuration, and of what can't be used."""

    def check_source(self, config: Config, source: str) -> Sequence[Finding]:
        """Return what a check of a source's server, role, publication, slot and tables finds."""

    def inspect(self, plan: Plan, snapshot: Snapshot, store: Store) -> Sequence[Finding]:
        """Return warnings about a plan's sinks, checked against their sources.

        Raises `ConfigError` where an expression can't be planned.
        """

    def replay(self, store: Store, config: Config, letter: StoredLetter, also: Also) -> None:
        """Publish a dead letter again and record it, with `also`; raises `PenstockError`."""

    def try_sink(self, config: Config, sink: str, messages: bytes) -> Sequence[Mapping[str, Any]]:
        """Return what a sink would make of messages in JSON; raises `TrialRefusal`."""

    def next_changes(
        self, source: PostgresSource, tables: Sequence[TablePattern], count: int, seconds: float
    ) -> Sequence[Mapping[str, Any]]:
        """Return the next changes of a source's tables, as messages; raises `PenstockError`."""

    def close(self) -> None:
        """End what the tools have started."""


def actor_of(request: Request) -> Actor:
    """Return whom the audit log names for a request."""
    return Actor(grant_of(request).name, door_of(request))


class Context:
    """The store at `url` and what serves it; calls that block run in threads of its own.

    `records_url` is where the records table is, None where it is in the store.
    """

    def __init__(
        self, url: str, consumers: Consumers, tools: Tools | None, records_url: str | None = None
    ) -> None:
        self.consumers = consumers
        self.records_url = records_url or url
        self.store = Store(url)
        self._state_store = Store(url)  # a long change keeps no list waiting
        self.state = DesiredState(self._state_store)
        self.tools = tools
        self._store_threads = ThreadPoolExecutor(_STORE_THREADS, "api-store")
        self._change_threads = ThreadPoolExecutor(_STORE_THREADS, "api-change")
        self._source_threads = ThreadPoolExecutor(_SOURCE_THREADS, "api-source")
        self._long_threads = ThreadPoolExecutor(1, "api-check")
        self._trial_threads = ThreadPoolExecutor(_TRIAL_THREADS, "api-trial")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a call of the store gives, which does not block the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._store_threads, lambda: call(*args, **kwargs))

    async def act(
        self,
        request: Request,
        action: Action,
        call: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return what a call does in `store`, and add it to the audit log: both, or neither."""

        def both() -> T:
            with self.store.transaction():
                found = call(*args, **kwargs)
                note_action(self.store, *action, by=actor_of(request))
            return found

        return await self.run(both)

    async def run_change(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a change gives, which may ask sources too: no read waits for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._change_threads, lambda: call(*args, **kwargs))

    async def run_test(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a test of a connection gives, which reports itself who did not answer."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_TEST_SECONDS):
                return await loop.run_in_executor(
                    self._source_threads, lambda: call(*args, **kwargs)
                )
        except TimeoutError:
            raise Problem(
                AWAY,
                f"There was no answer within {_TEST_SECONDS:.0f} s: check hosts and ports, and"
                " firewalls.",
                headers={"Retry-After": "5"},
            ) from None

    async def run_at_source(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a call of a source's server gives; raises `Problem` after `SOURCE_SECONDS`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SOURCE_SECONDS):
                return await loop.run_in_executor(
                    self._source_threads, lambda: call(*args, **kwargs)
                )
        except TimeoutError:
            raise Problem(
                AWAY,
                f"The source's server did not answer within {SOURCE_SECONDS:.0f} s: check host and"
                " port in its url, and firewalls.",
                headers={"Retry-After": "5"},
            ) from None

    def inspect(self, plan: Plan, snapshot: Snapshot) -> list[str]:
        """Return what a check of a plan's sinks against their sources warns of; it blocks.

        Raises `ConfigError` where an expression can't be planned.
        """
        if self.tools is None:
            return []
        try:
            asked = self._source_threads.submit(self.tools.inspect, plan, snapshot, self.store)
            found = asked.result(SOURCE_SECONDS)
        except TimeoutError:
            return [
                "the sinks' expressions are not checked: a source's server did not answer within"
                f" {SOURCE_SECONDS:.0f} s"
            ]
        return [f"{finding.subject}: {finding.message}" for finding in found]

    async def run_long(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a call gives that may take long; one runs at a time."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._long_threads, lambda: call(*args, **kwargs))

    async def run_trial(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a trial gives, which may wait for changes, or for Spark."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._trial_threads, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """Close the connection; calls under way are not waited for."""
        for threads in (
            self._store_threads, self._change_threads, self._source_threads, self._long_threads,
            self._trial_threads,
        ):  # fmt: skip
            threads.shutdown(wait=False, cancel_futures=True)
        if self.tools is not None:
            self.tools.close()
        self.store.close()
        self._state_store.close()
