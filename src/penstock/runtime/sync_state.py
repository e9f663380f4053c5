"""What the query of the syncs has reported: for `/status`, `/metrics` and the health of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from prometheus_client.core import Metric

from penstock.core.health import Part
from penstock.runtime.metric_list import CREDENTIALS, SYNC_RECORDS, SYNCS
from penstock.syncs.shown import Shown, part_of

_COUNTED: Final = ("records_read", "inserted", "changed", "deleted", "unreadable", "skipped")


class SyncState:
    """The syncs of a process. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._syncs: dict[str, tuple[str, Collection[str]]] = {}
        self._shown: dict[str, dict[str, Shown]] = {}
        self.budgets: Mapping[str, list[float]] = {}

    def set_syncs(self, syncs: Mapping[str, tuple[str, Collection[str]]]) -> None:
        """Take the names and the collections of the syncs, by id."""
        with self._lock:
            self._syncs = dict(syncs)

    def update(self, shown: Iterable[tuple[str, str, Shown]]) -> None:
        """Take what is shown of collections that have changed."""
        with self._lock:
            for sync, collection, of in shown:
                self._shown.setdefault(sync, {})[collection] = of

    def parts(self) -> list[Part]:
        """Return how each sync is."""
        return [part_of(name, of) for name, of in self._all()]

    def as_json(self) -> dict[str, Any]:
        """Return each sync by name, with its collections; and what is used of each budget."""
        return {
            "syncs": {
                name: {"level": part_of(name, of).level.word, "collections": _aged(of)}
                for name, of in self._all()
            },
            "budgets": {
                name: {"used": used, "allowed_requests": most, "interval_seconds": seconds,
                       "refused": refused}
                for name, (used, most, seconds, refused) in self.budgets.items()
            },
        }  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        counted, requests = SYNC_RECORDS.family(), SYNCS["requests"].family()
        up, lag = SYNCS["up"].family(), SYNCS["lag_seconds"].family()
        for name, of in self._all():
            for collection, shown in _aged(of).items():
                at = [name, collection]
                for what in _COUNTED:
                    counted.add_metric([*at, what], shown[what])
                requests.add_metric(at, shown["requests"])
                up.add_metric(at, float(shown["health"] is None))
                if shown["lag_seconds"] is not None:
                    lag.add_metric(at, shown["lag_seconds"])
        used, refused = CREDENTIALS["used"].family(), CREDENTIALS["refused"].family()
        for name, (now, _, _, limited) in self.budgets.items():
            used.add_metric([name], now)
            refused.add_metric([name], limited)
        yield from (counted, requests, up, lag, used, refused)

    def _all(self) -> list[tuple[str, dict[str, Shown]]]:
        with self._lock:
            return [
                (
                    name,
                    {key: of for key, of in self._shown.get(id_, {}).items() if key in collections},
                )
                for id_, (name, collections) in self._syncs.items()
            ]


def _aged(of: Mapping[str, Shown]) -> dict[str, Shown]:
    """Return what is shown with the lag of now: it was reported when something had changed."""
    found = {}
    for collection, shown in of.items():
        last = shown["last_run"]
        lag = None
        if last is not None:
            lag = round(max(0.0, time.time() - datetime.fromisoformat(last).timestamp()), 1)
        found[collection] = {**shown, "lag_seconds": lag}
    return found
