"""What waits for the requests of one credential. Pure, no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from penstock.syncs.connectors.contract import Kind
from penstock.syncs.entry import FIRST, Entry
from penstock.syncs.progress import CollectionRun

Place = Literal["first", "later"]


def place_of(run: CollectionRun) -> Place:
    """Return where the jobs of a run wait."""
    return "first" if run.kind in FIRST else "later"


@dataclass(slots=True)
class Queue:
    """What waits for one credential: what comes first, and backfills and sweeps; and how many run."""

    first: deque[Entry] = field(default_factory=deque)
    later: deque[Entry] = field(default_factory=deque)
    firsts: int = 0
    laters: int = 0

    @property
    def waits(self) -> bool:
        """Whether anything waits."""
        return bool(self.first or self.later)

    def add(self, entry: Entry, run: CollectionRun) -> None:
        """Have an entry wait for a job of a run.

        One whose job was cut is the first: a batch waits for the jobs that it has when it is due.
        """
        entry.queued = place_of(run)
        queue = self.of(entry.queued)
        (queue.appendleft if entry.was_cut else queue.append)(entry)

    def of(self, which: Place) -> deque[Entry]:
        """Return one of both."""
        return self.first if which == "first" else self.later

    def count(self, kind: Kind, by: int) -> int:
        """Count what runs; return by how much backfills and sweeps have changed."""
        if kind in FIRST:
            self.firsts += by
            return 0
        self.laters += by
        return by

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self.waits or self.firsts or self.laters)
