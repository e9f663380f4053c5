"""How fast what a live part shows goes, from one look at it to the next."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

from penstock.backfill.pace import Pace

_MOST: Final = 1000
_BETWEEN: Final = 0.5  # seconds: a search looks more often, and would measure noise


class Paces:
    """The paces of the things that were looked at last, by a key that only one thing has."""

    def __init__(self) -> None:
        self._paces: OrderedDict[str, tuple[Pace, float]] = OrderedDict()

    def look(self, key: str, done: int) -> Pace:
        """Return the pace of a thing that is `done` so far."""
        now = time.monotonic()
        pace, at = self._paces.pop(key, (Pace(), float("-inf")))
        if now - at >= _BETWEEN:
            pace.add(now, done)
            at = now
        self._paces[key] = pace, at
        if len(self._paces) > _MOST:
            self._paces.popitem(last=False)
        return pace
