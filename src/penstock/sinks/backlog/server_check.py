"""Checks that the servers of sinks answer: a sink that gets no messages has no other check."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import structlog

from penstock.core.delivery import Sink, Unfinished, Written
from penstock.core.errors import SinkError
from penstock.core.monitor import Report
from penstock.sinks import reports
from penstock.sinks.backlog.drainer import PATIENCE, Drainer

_SECONDS: Final = 2.0
_FAILED_SECONDS: Final = 5.0

log = structlog.get_logger("penstock")


class ServerCheck:
    """Checks, over one connection, the server of all sinks that have one login, in a thread.

    What it finds is reported of those that are not behind: a drainer reports of the others.
    """

    def __init__(self, target: Sink, on_report: Callable[[Report], object]) -> None:
        self._target = target
        self._on_report = on_report
        self._drainers: list[Drainer] = []
        self._failed: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="check", daemon=True)

    def add(self, drainer: Drainer) -> None:
        """Check for another sink, too."""
        self._drainers.append(drainer)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask_to_end(self) -> None:
        """Have the thread end, without waiting for it."""
        self._stopping.set()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            pause = _SECONDS
            try:
                self._check()
            except Exception:
                log.exception("the server of sinks can't be checked")
                pause = _FAILED_SECONDS
        self._target.close()

    def _check(self) -> None:
        drainers = [drainer for drainer in list(self._drainers) if not drainer.is_busy]
        if not drainers:
            return
        error: SinkError | None = None
        try:
            self._target.check(PATIENCE)
        except Unfinished as unfinished:
            error = unfinished.error
        for drainer in drainers:
            if drainer.is_busy:
                continue
            if error is not None:
                self._failed.add(drainer.sink)
                self._on_report(reports.retry(drainer.sink, error, _SECONDS))
            elif drainer.sink in self._failed:
                self._failed.discard(drainer.sink)
                self._on_report(reports.outcome(drainer.sink, Written()))
