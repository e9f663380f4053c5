"""What the API can do beside the store: checks, and replays of sinks' dead letters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config.document import Key
    from penstock.config.settings import Config
    from penstock.core.finding import Finding
    from penstock.desired.entities import Snapshot
    from penstock.desired.plan import Plan
    from penstock.streams.records import StoredLetter
    from penstock.streams.store import Store


class ApiTools:
    """The `penstock.api.manage.context.Tools` of a process: imported at the first use."""

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

    def replay(self, store: Store, config: Config, letter: StoredLetter) -> None:
        """Deliver a sink's dead letter again and record it; raises `PenstockError`."""
        from penstock.trial.replay import Replay

        with Replay(store, lambda: config) as replay:
            replay.send(letter)
