"""What waits for the requests of one credential. Pure, no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from penstock.syncs.entry import Entry


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

    def of(self, which: Literal["first", "later"]) -> deque[Entry]:
        """Return one of both."""
        return self.first if which == "first" else self.later

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self.waits or self.firsts or self.laters)
