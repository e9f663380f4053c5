"""Which consumers may have changed since the last look: one at rest need not be looked at again."""

from __future__ import annotations

import time
from typing import Final

_UNHEARD: Final = 6.0
"""Seconds for which other processes may not know that this one listens, and send no notices."""


class Moved:
    """The consumers that may have changed; one event loop uses it, and one caller of `take`."""

    def __init__(self) -> None:
        self._all_until = 0.0
        self._all = True
        self._sources: set[str] = set()
        self._consumers: set[int] = set()

    def note_all(self) -> None:
        """Note that notices may have been missed."""
        self._all, self._all_until = True, time.monotonic() + _UNHEARD

    def note_source(self, number: str) -> None:
        """Note that the streams of a source have new messages."""
        self._sources.add(number)

    def note(self, consumer: int) -> None:
        """Note that a consumer was changed by a request."""
        self._consumers.add(consumer)

    def take(self) -> Moved:
        """Return what was noted, and forget it."""
        found = Moved()
        found._all = self._all or time.monotonic() < self._all_until
        found._sources, found._consumers = self._sources, self._consumers
        self._all, self._sources, self._consumers = False, set(), set()
        return found

    def has(self, consumer: int, source: int) -> bool:
        """Return whether a consumer may have changed; `source` is that of its stream."""
        return self._all or consumer in self._consumers or str(source) in self._sources
