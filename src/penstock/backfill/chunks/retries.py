"""What becomes of a backfill's failures: which are tried again, when, and what is reported of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from penstock.backfill.chunks.commands import Start
from penstock.backfill.events import Delayed, Event
from penstock.backfill.session import FEW_TIMES
from penstock.core.backoff import Backoff
from penstock.core.errors import BackfillError

_BACKOFF_SECONDS: Final = (0.2, 15.0)
_JITTER: Final = 0.3

log = structlog.get_logger("penstock.backfill")


class Retries:
    """The failures since the last start, and since the last chunk. `send` takes the events."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self._backoff = Backoff(*_BACKOFF_SECONDS, jitter=_JITTER)
        self._failures: dict[str, int] = {}
        self._delayed = False
        self.retry_at = 0.0
        """When an attempt may begin, by the monotonic clock."""

    def start(self) -> None:
        """Forget what was: another start was asked for."""
        self._backoff.reset()
        self._failures.clear()
        self.retry_at = 0.0

    def failed(self, start: Start, error: BackfillError) -> bool:
        """Report a failure that is tried again at `retry_at`; return False if it ends the backfill."""
        count = self._failures[error.code] = self._failures.get(error.code, 0) + 1
        if not error.transient and count > FEW_TIMES.get(error.code, 0):
            return False
        log.warning("backfill interrupted", code=error.code, error=str(error))
        self._report(start, error.code, str(error))
        self.retry_at = time.monotonic() + self._backoff.after_failure()
        return True

    def waits(self, start: Start, code: str, reason: str) -> None:
        """Report, once, that an attempt waits for something."""
        if not self._delayed:
            log.warning("backfill waits", code=code, reason=reason)
            self._report(start, code, reason)

    def planned(self, start: Start) -> None:
        """Report, if a delay was reported, that a chunk is planned after all."""
        if self._delayed:
            self._backoff.reset()
            self._report(start, None, None)

    def delivered(self) -> None:
        """Count failures anew: a chunk was delivered."""
        self._failures.clear()

    def _report(self, start: Start, code: str | None, message: str | None) -> None:
        self._delayed = code is not None
        self._send(Delayed(start.spec.id, start.attempt, code, message))
