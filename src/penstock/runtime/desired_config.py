"""The configuration that one source is to have: the newest one, and the last good one."""

from __future__ import annotations

import threading
import time

from penstock.config.settings import Config
from penstock.core.errors import PenstockError
from penstock.core.health import Failure
from penstock.runtime.reconcile import runs_alike
from penstock.runtime.runner_context import RunnerContext


class DesiredConfig:
    """The configuration of the source `name`; any thread may read and change it.

    What can't be run is refused as a whole: until it changes, the last good one is to be run, or at a
    start the part of it that can be.
    """

    def __init__(self, name: str, config: Config, context: RunnerContext) -> None:
        self._name = name
        self._context = context
        self._lock = threading.Lock()
        self._newest: Config | None = config
        # What was refused, why, and the part of it that is run, if any.
        self._refused: tuple[Config, Failure, Config | None] | None = None
        self.good: Config | None = None
        """The last one that was run."""

    @property
    def newest(self) -> Config | None:
        """What is desired; None: the source is to be run no longer."""
        return self._newest

    @newest.setter
    def newest(self, config: Config | None) -> None:
        self._newest = config

    def next(self) -> Config | None:
        """Return what the next run is of."""
        with self._lock:
            if self._refused is not None and self._refused[0] is self._newest:
                return self._refused[2] or self.good
            return self._newest

    def is_wanted(self, config: Config) -> bool:
        """Return whether the next run is still of `config`, whatever its consumers."""
        wanted = self.next()
        return wanted is not None and runs_alike(wanted, config, self._name)

    def runs(self, config: Config | None) -> bool:
        """Return whether the last good one runs as `config` would."""
        good = self.good
        return good is not None and config is not None and runs_alike(good, config, self._name)

    @property
    def refusal(self) -> Failure | None:
        """Why the newest one is not run, where it was refused."""
        return None if self._refused is None else self._refused[1]

    def refuse(self, config: Config, error: PenstockError, part: Config | None = None) -> None:
        """Note why a configuration can't be run; `part` of it is, or else the one before goes on."""
        what, runs = (
            ("changed configuration", "the one before goes on")
            if part is None
            else ("configuration", "the rest of it is run")
        )
        failure = Failure(
            "change_refused",
            f"The {what} of source {self._name} is refused, and {runs} ({error.code}): {error.message}",
            error.remedy or "Correct it.",
            time.time(),
        )
        with self._lock:
            self._refused = config, failure, part
        self._context.refused(self._name, error)

    def take(self, config: Config) -> None:
        """Note that a configuration is run now."""
        with self._lock:
            self.good = config
            if self._refused is not None and self._refused[0] is not self._newest:
                self._refused = None

    def accept(self) -> None:
        """Note that what is desired runs."""
        with self._lock:
            self._refused = None
        self._context.accepted(self._name)
