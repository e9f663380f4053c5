"""The inboxes of one group of pipelines: one reader for each pipeline that shall run."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import PipelineError
from penstock.core.health import Failure
from penstock.outbox.inbox.inbox import InboxPipeline, InboxReader
from penstock.outbox.inbox.nats import InboxSettings, durable_name, read_settings
from penstock.outbox.relay.wanted import DISABLED


class Inboxes:
    """The readers of one group: those of the desired pipelines, while active. Its methods do not wait.

    Args:
        url: The inboxes' database.
        database: Its name.
    """

    def __init__(self, url: str, database: str) -> None:
        self._url = url
        self._database = database
        self._changing = threading.Lock()
        self._desired: dict[str, tuple[InboxPipeline, InboxSettings | Failure]] = {}
        self._readers: dict[str, InboxReader] = {}
        self._stopped: list[InboxReader] = []
        self._active = False

    def as_json(self) -> dict[str, Any]:
        """Return what `/status` reports of the pipelines."""
        return {
            name: {"enabled": reader.pipeline.enabled, "state": reader.state}
            for name, reader in list(self._readers.items())
        }

    def failures(self) -> dict[str, Failure]:
        """Return the failures of pipelines that should be read and are not."""
        return {
            name: failure
            for name, reader in list(self._readers.items())
            if (failure := reader.failure) is not None
        }

    def set_desired(
        self, pipelines: Sequence[InboxPipeline], environ: Mapping[str, str] = os.environ
    ) -> None:
        """Set the desired pipelines; a reader whose pipeline has not changed goes on."""
        with self._changing:
            self._desired = {p.pipeline: (p, self._settings(p, environ)) for p in pipelines}
            self._apply()

    def activate(self, active: bool) -> None:
        """Start the readers, or let them end."""
        with self._changing:
            if active != self._active:
                self._active = active
                self._apply()

    def join(self) -> None:
        """Wait for the readers that were stopped."""
        with self._changing:
            stopped, self._stopped = self._stopped, []
        for reader in stopped:
            reader.join()

    def _settings(
        self, pipeline: InboxPipeline, environ: Mapping[str, str]
    ) -> InboxSettings | Failure:
        if not pipeline.enabled:
            return Failure(DISABLED, "The pipeline is disabled.")
        try:
            durable = durable_name(pipeline.system, self._database, pipeline.pipeline)
            return read_settings(pipeline.config, durable, environ)
        except PipelineError as error:
            return Failure.by(error)

    def _apply(self) -> None:
        desired = self._desired if self._active else {}
        for name, reader in list(self._readers.items()):
            if desired.get(name) != (reader.pipeline, reader.settings):
                reader.stop()
                self._stopped.append(self._readers.pop(name))
        self._stopped = [reader for reader in self._stopped if reader.alive]
        for name in desired.keys() - self._readers.keys():
            before = [reader for reader in self._stopped if reader.pipeline.pipeline == name]
            reader = InboxReader(self._url, *desired[name], after=before[-1] if before else None)
            self._readers[name] = reader
            reader.start()
