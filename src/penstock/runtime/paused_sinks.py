"""Sinks that a run starts paused: their messages wait in their backlogs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.core.errors import SinkError

_ON_PURPOSE: Final = frozenset({"disabled", "starting"})


@dataclass(frozen=True)
class PausedSinks:
    """The paused sinks of a run.

    Attributes:
        reasons: Why each sink is paused, by the sink's name.
        starting: Sinks whose backfill is still to come. What the backfill reads is delivered although
            they are paused: it goes before what waits.
    """

    reasons: Mapping[str, SinkError] = field(default_factory=dict)
    starting: frozenset[str] = frozenset()

    def error(self, sink: str) -> str | None:
        """Return the text of what fails a paused sink, None where it is paused on purpose."""
        reason = self.reasons[sink]
        return None if reason.code in _ON_PURPOSE else str(reason)


NONE_PAUSED: Final = PausedSinks()
