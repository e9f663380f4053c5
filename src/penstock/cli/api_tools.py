"""What the API can do beside the store: checks, and replays of sinks' dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config.settings import Config
    from penstock.core.finding import Finding
    from penstock.streams.records import StoredLetter
    from penstock.streams.store import Store


class ApiTools:
    """The `penstock.api.manage.context.Tools` of a process: imported at the first use."""

    def check(self, config: Config) -> Sequence[Finding]:
        """Return what `penstock check` finds in a configuration, but for Java."""
        from penstock.check.config import inspect_config

        return list(inspect_config(config))

    def replay(self, store: Store, config: Config, letter: StoredLetter) -> None:
        """Deliver a sink's dead letter again and record it; raises `PenstockError`."""
        from penstock.trial.replay import Replay

        with Replay(store, config) as replay:
            replay.send(letter)
