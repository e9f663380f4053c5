"""What runners find out about entities in their own threads, for the thread that follows a feed."""

from __future__ import annotations

import queue
from collections.abc import Callable

from penstock.core.errors import Concern, PenstockError
from penstock.runtime.following import Following


class Refusals:
    """The entities of each source that can't be run as they are; nothing is noted without a `feed`.

    The feed is for one thread. Any thread may call `refuse` and `accept`, which wake that one, and it
    calls `pass_on`.
    """

    def __init__(self, feed: Following | None) -> None:
        self._feed = feed
        self._noted: queue.SimpleQueue[Callable[[Following], None]] = queue.SimpleQueue()
        self._refused: dict[str, set[tuple[str, str]]] = {}

    def refuse(self, source: str, error: PenstockError) -> None:
        """Note that a source can't be run as it is, for the entity that the error concerns."""
        kind, name, _ = error.concerns or Concern("source", source)

        def note(feed: Following) -> None:
            self._refused.setdefault(source, set()).add((kind, name))
            feed.refused(kind, name, str(error))

        self._note(note)

    def accept(self, source: str) -> None:
        """Note that a source runs with its newest configuration."""

        def note(feed: Following) -> None:
            for kind, name in self._refused.pop(source, ()):
                feed.accepted(kind, name)

        self._note(note)

    @property
    def waiting(self) -> bool:
        """Whether something is to be passed on."""
        return not self._noted.empty()

    def pass_on(self) -> None:
        """Give the feed what was noted."""
        while self._feed is not None and self.waiting:
            self._noted.get()(self._feed)

    def _note(self, note: Callable[[Following], None]) -> None:
        if self._feed is not None:
            self._noted.put(note)
            self._feed.wake()
