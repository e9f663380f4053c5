"""Makes the JetStream streams of sinks with `create_stream`, when these start.

A server that can't be reached is asked again until it answers. What it refuses is logged once, and the
sink then fails as one without a stream does. A stream that is deleted later is not made again.
"""

from __future__ import annotations

import threading
from typing import Final

import structlog

from penstock.config.sinks import NatsSinkSettings, Sink
from penstock.core.backoff import Backoff
from penstock.core.errors import SinkError
from penstock.sinks.nats.make_stream import ensure_stream

_BACKOFF_SECONDS: Final = (0.5, 30.0)
START_SECONDS: Final = 10.0
"""Seconds that a start waits for the streams; slower servers are waited for beside it."""

log = structlog.get_logger("penstock")


class StreamMaker:
    """Makes streams in a thread, which ends when all are there or refused, or when `stopping` is set."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._pending: dict[str, NatsSinkSettings] = {}
        self._untried: set[str] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, name: str, settings: Sink) -> None:
        """Make the stream of the sink `name`, if it has `create_stream`; returns at once."""
        if not isinstance(settings, NatsSinkSettings) or not settings.create_stream:
            return
        with self._changed:
            self._pending[name] = settings
            self._untried.add(name)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._make_all, name="stream maker", daemon=True
                )
                self._thread.start()

    def wait(self, seconds: float = START_SECONDS) -> bool:
        """Wait until each stream was tried once, for so long at the most; return whether they were."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._untried, seconds)

    def _make_all(self) -> None:
        backoff, logged = Backoff(*_BACKOFF_SECONDS), dict[str, str]()
        while True:
            with self._changed:
                pending = dict(self._pending)
                if not pending or self._stopping.is_set():
                    self._thread = None
                    self._untried.clear()
                    self._changed.notify_all()
                    return
            for name, settings in pending.items():
                if self._stopping.is_set():
                    break
                done = self._make(name, settings, logged)
                with self._changed:
                    # The sink may have other settings by now: then these are tried, too.
                    if self._pending.get(name) is settings:
                        self._untried.discard(name)
                        if done:
                            del self._pending[name]
                    self._changed.notify_all()
            with self._changed:
                if self._pending:
                    delay = backoff.after_failure()
                    self._changed.wait_for(lambda: bool(self._untried), delay)

    @staticmethod
    def _make(name: str, settings: NatsSinkSettings, logged: dict[str, str]) -> bool:
        """Make one sink's stream; return whether there is nothing left to do."""
        try:
            made = ensure_stream(settings, name)
        except SinkError as error:
            if logged.get(name) != error.code:
                logged[name] = error.code
                level = log.warning if error.transient else log.error
                level("the sink's stream is not made", sink=name, code=error.code, error=str(error))
            return not error.transient
        if made is not None:
            log.info("made the sink's stream", sink=name, stream=made.name, subjects=made.subjects,
                     storage=made.config.get("storage"), retention=made.config.get("retention"),
                     replicas=made.config.get("num_replicas"))  # fmt: skip
        return True
