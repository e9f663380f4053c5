"""Warns of pipelines that send one outbox's messages to the same stream, which drops the copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import structlog

from penstock.outbox.relay.desired_state import DesiredPipelines
from penstock.outbox.settings import OutboxSinkSettings
from penstock.sinks.nats.shared import shared_streams_of_outboxes

_EVERY_SECONDS: Final = 60.0

log = structlog.get_logger("penstock")


class SharedStreams:
    """Checks the servers every minute, in a thread, as one may be slow to answer; stops nothing."""

    def __init__(self) -> None:
        self._warnings: dict[str, str] = {}
        self._checked: dict[str, OutboxSinkSettings] = {}
        self._due = 0.0
        self._thread: threading.Thread | None = None

    def check(self, groups: Iterable[DesiredPipelines]) -> None:
        """Check the pipelines of the groups, where they have changed or a minute has passed."""
        sinks = {
            name: sink
            for desired in groups
            for name, sink in desired.sinks.items()
            if isinstance(sink, OutboxSinkSettings) and name not in desired.paused
        }
        if self._thread is not None and self._thread.is_alive():
            return
        if sinks == self._checked and time.monotonic() < self._due:
            return
        self._checked, self._due = sinks, time.monotonic() + _EVERY_SECONDS
        self._thread = threading.Thread(
            target=self._check, args=(sinks,), name="shared streams", daemon=True
        )
        self._thread.start()

    def with_warnings(self, groups: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the groups' part of `/status` with each pipeline's warning."""
        for group in groups.values():
            for name, pipeline in group["pipelines"].items():
                pipeline["warning"] = self._warnings.get(name)
        return groups

    def _check(self, sinks: dict[str, OutboxSinkSettings]) -> None:
        warnings: dict[str, str] = {}
        try:
            for finding in shared_streams_of_outboxes(sinks):
                name = finding.subject.removeprefix("pipeline ")
                warnings[name] = f"{finding.message}; {finding.fix}."
        except Exception:
            log.exception("the pipelines' streams could not be checked")
            return
        for name, warning in warnings.items():
            if self._warnings.get(name) != warning:
                log.warning("pipelines share a stream", pipeline=name, code="shared_stream",
                            error=warning)  # fmt: skip
        self._warnings = warnings
