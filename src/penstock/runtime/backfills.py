"""The backfills beside the queries of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from penstock.backfill.supervisor import BackfillSupervisor, log_left_out
from penstock.config.settings import Config
from penstock.core.errors import StoreError
from penstock.core.monitor import Monitor, Report
from penstock.runtime.paused_sinks import PausedSinks
from penstock.runtime.state import RunState


class RunBackfills:
    """The backfills of a run's sources, from `start` until `close`; there may be none.

    Args:
        config: What runs.
        store_url: The store's URL.
        sources: The run's sources.
        state: The run's state, which shows them.
        paused: The sinks that the run has started paused.
    """

    def __init__(
        self,
        config: Config,
        store_url: str,
        sources: Sequence[str],
        state: RunState,
        paused: PausedSinks,
    ) -> None:
        self._config = config
        self._store_url = store_url
        self._sources = sources
        self._state = state
        self._paused = paused
        self._supervisor: BackfillSupervisor | None = None

    def leave_out(self) -> None:
        """Log those that are not read by a run that ends by itself: one may take longer than that."""
        with contextlib.suppress(StoreError):  # the next write to the store reports it
            log_left_out(self._config, self._store_url, self._sources)

    def start(self, monitor: Monitor) -> None:
        """Begin; `monitor` reaches the sources' readers. Raises `StoreError`."""
        self._supervisor = BackfillSupervisor(
            self._config, self._store_url, self._sources, monitor.command,
            self._adds_to_backlog, self._state.show_backfills,
        )  # fmt: skip
        self._supervisor.start()

    def handle(self, report: Report) -> None:
        """Take a report of the run."""
        if self._supervisor is not None:
            self._supervisor.handle(report)

    def drain(self) -> None:
        """Begin nothing more."""
        if self._supervisor is not None:
            self._supervisor.drain()

    def close(self) -> None:
        """End."""
        if self._supervisor is not None:
            self._supervisor.close()

    def _adds_to_backlog(self, sink: str) -> bool:
        """Return whether a backfill would only add to what waits for a sink."""
        return self._state.sinks[sink].behind and sink not in self._paused.starting
