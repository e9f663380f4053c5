"""The dead letters of a consumer in memory."""

from __future__ import annotations

from dataclasses import replace

from penstock.streams.consumers.log import dead_letter_reason
from penstock.streams.consumers.types import ConsumerLetter
from penstock.streams.records import commit_position
from penstock.testing.clock import Clock
from penstock.testing.stream import InMemoryStream


class InMemoryDeadLetters:
    """Dead letters by the positions of their messages, each with a number."""

    def __init__(self, stream: InMemoryStream, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._letters: dict[tuple[int, int], ConsumerLetter] = {}

    def add(self, position: tuple[int, int], count: int, cause: str) -> None:
        """Add a message that failed for ever; one that was replayed keeps its number."""
        known = self._letters.get(position)
        self._letters[position] = ConsumerLetter(
            id=len(self._letters) + 1 if known is None else known.id,
            position=commit_position(*position),
            deliver_count=count,
            code="max_deliver",
            reason=dead_letter_reason(count, cause),
            message=self._stream.stored(position).message.decode(),
            at=self._clock.now,
            replayed_at=None,
        )

    def replay(self, number: int) -> tuple[int, int] | None:
        """Mark a dead letter as replayed; return its message's position, None where there is none."""
        for position, letter in self._letters.items():
            if letter.id == number:
                self._letters[position] = replace(letter, replayed_at=self._clock.now)
                return position
        return None

    def all(self) -> list[ConsumerLetter]:
        """Return all dead letters, the oldest first."""
        return sorted(self._letters.values(), key=lambda letter: letter.id)

    def waiting(self) -> list[ConsumerLetter]:
        """Return those that were not replayed, the oldest first."""
        return [letter for letter in self.all() if letter.replayed_at is None]
