"""What a relay's run does about a gap: it ends, and its group starts again with a new slot."""

from __future__ import annotations

from penstock.core.health import Failure
from penstock.runtime.guard import FATAL_CODES
from penstock.runtime.recovery import GAP_CODES


class RelayGuard:
    """The guard of a relay's run. The outboxes' tables hold what a lost slot has missed."""

    def refuse_gap(self, source: str) -> None:
        """Refuse nothing: the slot may be made anew."""

    def refuse_noted_gap(self, source: str) -> None:
        """Refuse nothing: a gap ends the run."""

    def has_gap(self, source: str) -> bool:  # noqa: ARG002 - a `Guard`'s
        """Return False: a gap ends the run."""
        return False

    def shared_stream(self) -> Failure | None:
        """Return None: one pipeline must not end the others."""
        return None

    def confirmed(self, source: str, lsn: int, time: int) -> None:
        """Note nothing: the relay writes how far its pipelines are."""

    def query_failed(self, source: str, failure: Failure) -> bool:  # noqa: ARG002 - a `Guard`'s
        """Return whether the failure ends the run; every gap does."""
        return failure.code in FATAL_CODES | GAP_CODES

    def close(self) -> None:
        """End; nothing is noted."""
