"""What all parts of a run need to know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.contenders import ContenderError
from benchmarks.rig import say


@dataclass(slots=True)
class Run:
    """Sizes and sides; failures are collected."""

    peers_python: str
    sides: Sequence[str]
    rounds: int
    seconds: float  # that are measured, of each side each time
    messages: int
    groups: int
    failures: list[str] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        """Whether anything reads a stream."""
        return any(side != "pgmq" for side in self.sides)

    @contextmanager
    def tolerate(self, work: str) -> Iterator[None]:
        """Note a failure inside the block and go on."""
        try:
            yield
        except ContenderError as error:
            self.failures.append(f"{work}: {error}")
            say(f"{work}: FAILED: {error}")
