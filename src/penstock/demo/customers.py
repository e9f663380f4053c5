"""Changes the customers of the demo's fake API, and enters in the ledgers what it did."""

from __future__ import annotations

import random
import time
from typing import Final

from penstock.demo.background import Background
from penstock.demo.fake_stripe import COLLECTION, FakeStripe
from penstock.demo.ledger import DELETED, Change
from penstock.demo.shop import Committed

CHANGES_A_SECOND: Final = 5.0
FIRST: Final = 40
"""So many customers are there before the sync begins: its backfill reads them."""
_MOST: Final = 200
"""So many there may be: where no poll comes, no more are made."""
_NAMES: Final = ("Aylin", "Bram", "Carlota", "Dmitri", "Esi", "Freja", "Goro", "Hana")


class CustomerWriter(Background):
    """Makes, changes and deletes customers; at its end every change is recorded."""

    def __init__(self, api: FakeStripe, committed: Committed) -> None:
        super().__init__("customers")
        self._api = api
        self._committed = committed
        self._random = random.Random(4)  # noqa: S311 - a shop, not a secret
        self._versions: dict[int, int] = {}
        self._next = 1

    def write_first(self) -> None:
        """Make those that are there before the sync begins."""
        for _ in range(FIRST):
            self._make()

    def run(self) -> None:
        """Write until `stop`."""
        while not self._stopping.wait(1 / CHANGES_A_SECOND):
            self.step()

    def step(self) -> None:
        """Make, change or delete one customer."""
        settled = self._api.settled()
        draw = self._random.random()
        if not settled or draw < 0.25:
            if len(self._versions) < _MOST:
                self._make()
        elif draw < 0.45:
            self._remove(self._random.choice(settled))
        else:
            self._change(self._random.choice(settled))

    def _make(self) -> None:
        number, self._next = self._next, self._next + 1
        self._versions[number] = 1
        self._put(number, "insert")

    def _change(self, number: int) -> None:
        self._versions[number] += 1
        self._put(number, "update")

    def _put(self, number: int, action: str) -> None:
        version = self._versions[number]
        self._api.put(number, version, self._random.choice(_NAMES))
        self._committed([Change(COLLECTION, number, action, version)], time.perf_counter())

    def _remove(self, number: int) -> None:
        del self._versions[number]
        self._api.delete(number)
        self._committed([Change(COLLECTION, number, "delete", DELETED)], time.perf_counter())
