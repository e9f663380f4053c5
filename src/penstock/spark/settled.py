"""What the tasks of long batches report of their parts, until it is confirmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.core.counting import Counts
from penstock.core.message import Position, RoundPart


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
