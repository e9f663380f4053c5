"""The wait of a source that can't begin, where the source or the store does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from penstock.core.backoff import Backoff
from penstock.core.errors import PenstockError
from penstock.core.health import Failure

_BACKOFF_SECONDS: Final = (1.0, 30.0)

log = structlog.get_logger("penstock")


class StartDelay:
    """Why the source `name` could not begin, and how long it waits for the next try.

    `noticed` is called when that has changed; `stopping` ends a wait.
    """

    def __init__(self, name: str, stopping: threading.Event, noticed: Callable[[], object]) -> None:
        self._name = name
        self._stopping = stopping
        self._noticed = noticed
        self._backoff = Backoff(*_BACKOFF_SECONDS)
        self.failure: Failure | None = None
        """Why it could not begin; None once it has begun."""

    def wait(self, error: PenstockError) -> None:
        """Wait before the next try to begin."""
        failure = Failure.by(error)
        if self.failure is None or self.failure.cause != failure.cause:
            log.warning("the source can't be run now; trying again", source=self._name,
                        code=error.code, error=str(error))  # fmt: skip
        self.failure = failure.lasting(self.failure, time.time())
        self._noticed()
        self._stopping.wait(self._backoff.after_failure())

    def end(self) -> None:
        """Note that it has begun."""
        self.failure = None
        self._backoff.reset()
