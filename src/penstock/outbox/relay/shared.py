"""Warns of pipelines that put one outbox's messages into the same stream, which keeps the first's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import structlog

from penstock.outbox.relay.wanted import Wanted
from penstock.outbox.settings import OutboxSinkSettings
from penstock.sinks.nats.shared import shared_streams_of_outboxes

_AGAIN_SECONDS: Final = 60.0

log = structlog.get_logger("penstock")


class SharedStreams:
    """Asks the servers now and then, in a thread, as one may be slow to answer; stops nothing."""

    def __init__(self) -> None:
        self._warnings: dict[str, str] = {}
        self._asked: dict[str, OutboxSinkSettings] = {}
        self._due = 0.0
        self._thread: threading.Thread | None = None

    def look(self, planned: Iterable[Wanted]) -> None:
        """Ask for the pipelines that run by `planned`, where they are others or a while has passed."""
        sinks = {
            name: sink
            for wanted in planned
            for name, sink in wanted.sinks.items()
            if isinstance(sink, OutboxSinkSettings) and name not in wanted.held
        }
        if self._thread is not None and self._thread.is_alive():
            return
        if sinks == self._asked and time.monotonic() < self._due:
            return
        self._asked, self._due = sinks, time.monotonic() + _AGAIN_SECONDS
        self._thread = threading.Thread(
            target=self._ask, args=(sinks,), name="shared streams", daemon=True
        )
        self._thread.start()

    def told(self, groups: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return what `/status` says of groups, with each pipeline's warning."""
        for group in groups.values():
            for name, pipeline in group["pipelines"].items():
                pipeline["warning"] = self._warnings.get(name)
        return groups

    def _ask(self, sinks: dict[str, OutboxSinkSettings]) -> None:
        warnings: dict[str, str] = {}
        try:
            for finding in shared_streams_of_outboxes(sinks):
                name = finding.subject.removeprefix("pipeline ")
                warnings[name] = f"{finding.message}; {finding.fix}."
        except Exception:
            log.exception("the pipelines' streams could not be looked at")
            return
        for name, warning in warnings.items():
            if self._warnings.get(name) != warning:
                log.warning("pipelines share a stream", pipeline=name, code="shared_stream",
                            error=warning)  # fmt: skip
        self._warnings = warnings
