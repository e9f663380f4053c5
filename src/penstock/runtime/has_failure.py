"""What the state of a source and the state of a sink share: a failure, or none."""

from __future__ import annotations

from penstock.core.health import Failure


class HasFailure:
    """The error and the code of a `failure`, both None without one."""

    failure: Failure | None

    @property
    def error(self) -> str | None:
        """The failure's text, cause first."""
        return None if self.failure is None else self.failure.text

    @property
    def code(self) -> str | None:
        """The failure's code."""
        return None if self.failure is None else self.failure.code
