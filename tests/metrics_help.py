"""The state of a process that has a sample of each metric: all of it well, or all of it failing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from penstock.backfill.request import Backfill
from penstock.config.consumers import ConsumerSettings
from penstock.core.health import Failure
from penstock.runtime.consumer_watch import ConsumerWatch
from penstock.runtime.process_state import ProcessState
from penstock.runtime.state import RunState
from penstock.runtime.sync_state import SyncState
from penstock.streams.consumers.facts import ConsumerFacts
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerInfo
from penstock.syncs.connectors.contract import Kind
from penstock.syncs.entry import Entry
from penstock.syncs.progress import CollectionFailure, CollectionProgress
from penstock.syncs.shown import shown
from penstock.syncs.sync import SyncSettings

_NOW = datetime.now(UTC)
_SYNC = SyncSettings("1", "customers", "crm", "key", "1", ("crm:a",))
_LSN = 0x16B3748


class _Facts:
    """Stands for `Consumers`."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    async def refusals(self) -> dict[str, tuple[str, float]]:
        return {}

    async def known(self) -> list[ConsumerInfo]:
        return [info for info, _ in await self.facts()]

    def moved(self) -> Callable[[ConsumerInfo], bool]:
        return lambda _: True

    async def facts(
        self, _: Sequence[ConsumerInfo] | None = None
    ) -> list[tuple[ConsumerInfo, ConsumerFacts]]:
        fails = self._fails
        found = []
        for number, name in enumerate(("orders", "mail")):  # the stream's own group, and a consumer
            info = ConsumerInfo(
                number,
                name,
                "orders",
                "pull",
                name == "orders",
                ConsumerSettings(),
                None,
                _NOW,
                uuid="",
            )
            facts = ConsumerFacts(
                lag_messages=7 * fails, lag_seconds=7_000.0 * fails, in_flight=2 * fails,
                waiting_for_retry=2 * fails, redeliveries=9 * fails, failures=9 * fails,
                dead_letters=1 * fails, most_failed=9 * fails, last_failure=None,
                failing_since=_NOW.timestamp() if fails else None, failed_in_a_row=9 * fails,
            )  # fmt: skip
            found.append((info, facts))
        return found


def _run(*, fails: bool) -> RunState:
    run = RunState(["shop"], {"jetstream": ("nats", "shop"), "orders": ("stream", "shop")})
    source = {
        "capture": "shop", "state": "streaming", "error": None, "code": None, "captured": 5,
        "confirmed": 5, "waiting": 0, "waited": None, "warm": True, "unread_bytes": 0,
        "received_lsn": _LSN, "confirmed_lsn": _LSN,
    }  # fmt: skip
    run.update(source)
    run.update({"sink": "jetstream", "delivered": 5, "duplicates": 1, "bytes": 90, "dead": []})
    number = 7
    backfill = Backfill(
        number, "shop", "orders", "public", "orders", None, None, None, False, "running", None, 5, 10,
        None, _NOW, _NOW, None, True,
    )  # fmt: skip
    run.show_backfills([backfill])
    if fails:
        ago = time.time() - 3_600
        run.update({"store": "The store is gone.", "code": "connection_lost"})
        run.store_failure = Failure("connection_lost", "The store is gone.", "Start it.", ago)
        run.update(
            source
            | {"state": "error", "error": "Gone.", "code": "connection_lost", "waited": 3_600.0,
               "waiting": 9, "received_lsn": _LSN + (2 << 30)}
        )  # fmt: skip
        run.sources["shop"].failure = Failure("connection_lost", "Gone.", "Start it.", ago)
        run.update({"sink": "jetstream", "error": "Gone.", "code": "refused", "behind": True})
        run.update(
            {
                "sink": "jetstream",
                "state": "detached",
                "backlog": 9,
                "backlog_bytes": 900,
                "since": ago,
            }
        )
    return run


def _syncs(*, fails: bool) -> SyncState:
    at = time.time() - (7_200 if fails else 1)
    progress = CollectionProgress(sync="1", collection="crm:a", backfilled_at=at, polled_at=at)
    if fails:
        progress.failed[Kind.POLL] = CollectionFailure(
            "unauthorized", "Refused.", "Rotate it.", at, credential="1"
        )
    state = SyncState()
    state.set_syncs({"1": ("customers", ["crm:a"])})
    state.update([("1", "crm:a", shown(Entry(_SYNC, progress), time.time()))])
    state.budgets = {"key": [1.0, 10.0, 1.0, 0.0]}
    return state


class Process:
    """A process that is well until `fail` is called."""

    def __init__(self) -> None:
        self.run, self.syncs = _run(fails=False), _syncs(fails=False)
        self.watch = ConsumerWatch()
        asyncio.run(self.watch.look(cast(Consumers, _Facts(fails=False))))
        self.state = ProcessState(lambda: [self.run], dict, tuple, self.watch, syncs=self)

    def as_json(self) -> dict[str, Any]:
        return self.syncs.as_json()

    def collect(self) -> Any:
        return self.syncs.collect()

    def fail(self) -> None:
        """Have everything fail, as if it had failed for an hour."""
        restarts, dead = 9, 3
        self.run, self.syncs = _run(fails=True), _syncs(fails=True)
        self.run.sources["shop"].restarts = restarts
        self.run.sinks["jetstream"].dead_lettered = dead
        asyncio.run(self.watch.look(cast(Consumers, _Facts(fails=True))))
