"""The inboxes of a relay group: which pipelines fill them, and a reader for each."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import PipelineError
from penstock.core.health import Failure
from penstock.outbox.inbox.reader import InboxReader
from penstock.outbox.inbox.settings import InboxSettings, durable_name, read_settings
from penstock.outbox.pipelines import DISABLED, InboxPipeline


class Inboxes:
    """The readers of one group's inboxes, which run while it is active. Only `join` blocks.

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
        """Return the pipelines' part of `/status`."""
        return {
            name: {"enabled": reader.pipeline.enabled, "state": reader.state}
            for name, reader in list(self._readers.items())
        }

    def failures(self) -> dict[str, Failure]:
        """Return why pipelines are not read that should be."""
        return {
            name: failure
            for name, reader in list(self._readers.items())
            if (failure := reader.failure) is not None
        }

    def set_desired(
        self, pipelines: Sequence[InboxPipeline], environ: Mapping[str, str] = os.environ
    ) -> None:
        """Set the pipelines that run from now on; only those that have changed are started again."""
        with self._changing:
            self._desired = {p.pipeline: (p, self._settings(p, environ)) for p in pipelines}
            self._apply()

    def activate(self, active: bool) -> None:
        """Start the readers, or end them."""
        with self._changing:
            if active != self._active:
                self._active = active
                self._apply()

    def join(self) -> None:
        """Wait until the readers that were ended have ended."""
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
            last = [reader for reader in self._stopped if reader.pipeline.pipeline == name]
            reader = InboxReader(self._url, *desired[name], after=last[-1] if last else None)
            self._readers[name] = reader
            reader.start()
