"""What the API can do beside the store: checks, and replays of dead letters that are published."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config.document import Key
    from penstock.config.settings import Config
    from penstock.config.sources import PostgresSource
    from penstock.core.finding import Finding
    from penstock.core.tables import TablePattern
    from penstock.desired.entities import Snapshot
    from penstock.desired.plan import Plan
    from penstock.streams.connection import Also
    from penstock.streams.records import StoredLetter
    from penstock.streams.store import Store
    from penstock.trial.apart import TrialProcess


class ApiTools:
    """The `penstock.api.manage.context.Tools` of a process: imported at the first use."""

    def __init__(self) -> None:
        self._trials: TrialProcess | None = None
        self._lock = threading.Lock()

    def check(self, config: Config, refused: Mapping[Key, str]) -> Sequence[Finding]:
        """Return what `penstock check` finds, but for Java."""
        from penstock.check.config import inspect_config, refusals

        return [*refusals(refused), *inspect_config(config)]

    def check_source(self, config: Config, source: str) -> Sequence[Finding]:
        """Return what a check of a source's server, role, publication, slot and tables finds."""
        from penstock.check import postgres

        return postgres.inspect(
            source,
            config.sources[source],
            config.sinks_of(source),
            recover=config.recover_command(source),
            has_run=config.checkpoint_folder(source).is_dir(),
        )

    def inspect(self, plan: Plan, snapshot: Snapshot, store: Store) -> Sequence[Finding]:
        """Return warnings about a plan's sinks, checked against their sources; raises `ConfigError`."""
        from penstock.check.changes import inspect_plan

        return inspect_plan(plan, snapshot, os.environ, store)

    def replay(self, store: Store, config: Config, letter: StoredLetter, also: Also) -> None:
        """Publish a dead letter again and record it, with `also`; raises `PenstockError`."""
        from penstock.trial.replay import Replay

        with Replay(store, lambda: config) as replay:
            replay.send(letter, also)

    def try_sink(self, config: Config, sink: str, messages: bytes) -> Sequence[Mapping[str, Any]]:
        """Return what a sink would make of messages in JSON; raises `TrialRefusal`."""
        from penstock.api.manage.context import TrialRefusal
        from penstock.trial.apart import TrialError, TrialProcess
        from penstock.trial.trial import described

        with self._lock:
            trials = self._trials = self._trials or TrialProcess()
        try:
            outcomes = trials(config, sink, messages)
        except TrialError as error:
            raise TrialRefusal(error.key, error.text) from None
        return [described(outcome) for outcome in outcomes]

    def next_changes(
        self, source: PostgresSource, tables: Sequence[TablePattern], count: int, seconds: float
    ) -> Sequence[Mapping[str, Any]]:
        """Return the next changes of a source's tables, as messages; raises `PenstockError`."""
        from penstock.trial.live import messages

        return messages(source, tables, count, seconds)

    def close(self) -> None:
        """End the process of trials."""
        with self._lock:
            if self._trials is not None:
                self._trials.close()
