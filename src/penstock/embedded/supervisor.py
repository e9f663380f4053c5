"""Keeps the embedded store running: one thread in each process that uses it.

Each of them sees that the server has ended, and the first to have the lock on its start starts it
again, on its port: the URL that sinks, drainers and consumers have stays valid.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from penstock.core.backoff import Backoff
from penstock.core.errors import EmbeddedError

_LOOK_SECONDS: Final = 0.5
_BACKOFF_SECONDS: Final = (0.5, 30.0)
_STABLE_SECONDS: Final = 60.0
"""A server that has run for so long is started at once where it ends."""
_STOP_SECONDS: Final = 60.0

log = structlog.get_logger("penstock")

OnOutage = Callable[[str | None], object]
"""Called with what is wrong while the server is away, and with None when it is back."""


class Supervised(Protocol):
    """What is supervised."""

    @property
    def name(self) -> str:
        """What to call it in the log."""

    def runs(self) -> bool:
        """Whether it runs now, or is about to."""

    def ending(self) -> str:
        """How it ended, as far as that is known."""

    def restart(self) -> None:
        """Have it running again; raises `EmbeddedError`."""


class Supervisor:
    """Starts a server again whenever it has ended, from `start` until `stop`."""

    def __init__(self, server: Supervised, on_outage: OnOutage) -> None:
        self._server = server
        self._on_outage = on_outage
        self._stopping = threading.Event()
        self._backoff = Backoff(*_BACKOFF_SECONDS)
        self._started_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; a restart under way is waited for."""
        self._stopping.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            try:
                if not self._server.runs():
                    self._restore()
            except Exception:  # whatever it is: without this thread the store would stay away
                log.exception(f"{self._server.name} could not be looked after; trying again")

    def _restore(self) -> None:
        """Start the server again, however many tries that takes; the causes are logged once each."""
        name, began, logged = self._server.name, time.monotonic(), ""
        self._on_outage(f"{name} has ended and is being restarted.")
        ending = self._server.ending()
        self._on_outage(f"{name} has ended ({ending}) and is being restarted.")
        delay = 0.0
        if began - self._started_at < _STABLE_SECONDS:
            delay = self._backoff.after_failure()
        else:
            self._backoff.reset()
        log.error(f"{name} ended; starting it again", cause=ending, retry_in=delay)
        self._stopping.wait(delay)
        while not self._stopping.is_set():
            try:
                self._server.restart()
            except (EmbeddedError, OSError) as error:
                cause = str(error)
                self._on_outage(f"{name} has ended and does not start: {cause}")
                if cause != logged:
                    logged = cause
                    log.error(f"{name} does not start; trying again", error=cause)
                self._stopping.wait(self._backoff.after_failure())
            else:
                self._started_at = time.monotonic()
                seconds = round(self._started_at - began, 1)
                self._on_outage(None)
                log.info(f"{name} runs again", seconds=seconds)
                return
