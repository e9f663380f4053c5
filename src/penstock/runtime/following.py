"""What a process follows, as its runners see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from penstock.config.document import Key
from penstock.config.settings import Config


class Following(Protocol):
    """The configuration as it changes; see `penstock.desired.feed`."""

    @property
    def unusable(self) -> Mapping[Key, str]:
        """The entities that are left out, and why."""

    def wait(self, seconds: float) -> Config | None:
        """Return the next configuration, None where there is none in time."""

    def wake(self) -> None:
        """Have `wait` return, from any thread."""

    def refused(self, kind: str, name: str, reason: str) -> None:
        """Note that an entity can't be run as it is."""

    def accepted(self, kind: str, name: str) -> None:
        """Note that an entity runs."""
