"""What the tasks of long batches report of their parts, until it is confirmed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from penstock.core.counting import Counts
from penstock.core.message import Position, RoundPart

_SECONDS: Final = 0.1
"""How long what is done may wait for its confirmation, so that several rounds share one."""


class Settled(NamedTuple):
    """What is done since the last one: all in (start, end], and what became of it, by sink."""

    part: RoundPart
    counts: dict[str, Counts]
    outcomes: dict[str, tuple[int, int]]
    """How many messages a sink has taken, and how many of these it had already."""

    def fields(self) -> dict[str, Any]:
        """Return a report's fields."""
        return {
            "part": self.part.to_json(),
            "done": [*self.part.end],
            "counts": {name: [*counts] for name, counts in self.counts.items()},
            "outcomes": {name: [*of] for name, of in self.outcomes.items()},
        }


class Outcomes:
    """Adds up what is reported: counts by the end of their round, as rounds are confirmed in order."""

    def __init__(self) -> None:
        self._counts: dict[Position, dict[str, Counts]] = {}
        self._outcomes: dict[str, tuple[int, int]] = {}

    def add(
        self,
        end: Position,
        counts: Mapping[str, Sequence[int]],
        outcomes: Mapping[str, tuple[int, int]],
    ) -> None:
        """Take a report of a part of the round that ends at `end`."""
        of_round = self._counts.setdefault(end, {})
        for sink, values in counts.items():
            of_round[sink] = of_round.get(sink, Counts()).plus(Counts(*values))
        for sink, (delivered, duplicates) in outcomes.items():
            before = self._outcomes.get(sink, (0, 0))
            self._outcomes[sink] = before[0] + delivered, before[1] + duplicates

    def settle(self, start: Position, done: Position) -> Settled:
        """Return, once, what was reported of the rounds up to `done`."""
        counts: dict[str, Counts] = {}
        for end in [end for end in self._counts if end <= done]:
            for sink, of in self._counts.pop(end).items():
                counts[sink] = counts.get(sink, Counts()).plus(of)
        outcomes, self._outcomes = self._outcomes, {}
        return Settled(RoundPart(start, done, 0, 1), counts, outcomes)


class Settlement:
    """Passes on what is done, and confirms it, not more often than need be.

    `on_settled` is called before what is done is confirmed to the server.
    """

    def __init__(self, on_settled: Callable[[Settled], None]) -> None:
        self.settled: Position | None = None
        """Up to where it is passed on; None before `begin`."""
        self._on_settled = on_settled
        self._outcomes = Outcomes()
        self.add: Final = self._outcomes.add
        self._confirm: Callable[[Position], None]
        self._due = 0.0

    def begin(self, start: Position, confirm: Callable[[Position], None]) -> None:
        """Settle what is done behind `start`."""
        self.settled, self._confirm = start, confirm

    def due_in(self, done: Position, now: float) -> float:
        """Return in how many seconds what is done up to here is to be settled."""
        if self.settled is None or done <= self.settled:
            return math.inf
        return self._due - now

    def settle(self, done: Position, *, now: bool) -> bool:
        """Settle what is done up to here if it is due, or `now`; return whether there was anything."""
        time_ = time.monotonic()
        if self.settled is None or done <= self.settled:
            self._due = time_ + _SECONDS
            return False
        if not now and time_ < self._due:
            return False
        self._due = time_ + _SECONDS
        self._on_settled(self._outcomes.settle(self.settled, done))
        self.settled = done
        self._confirm(done)
        return True
