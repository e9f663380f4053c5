"""What `penstock check` finds: one fact, how bad it is, and the command that repairs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.core.errors import Mistake


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing.

    `subject` is what was checked (`source shop: slot penstock_shop`), `message` what was seen,
    `fix` the statement or command to run, ready to paste, or empty. `mistake` is the same of an
    entity as data, where a reader of findings needs it.
    """

    level: Literal["ok", "warning", "error"]
    subject: str
    message: str
    fix: str = ""
    mistake: Mistake | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as a check reports it."""
        return {
            "level": self.level, "subject": self.subject, "message": self.message, "fix": self.fix
        }  # fmt: skip
