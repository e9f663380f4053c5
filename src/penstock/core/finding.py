"""What `penstock check` finds: one fact, how bad it is, and the command that repairs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing.

    `subject` is what was checked (`source shop: slot penstock_shop`), `message` what was seen,
    `fix` the statement or command to run, ready to paste, or empty.
    """

    level: Literal["ok", "warning", "error"]
    subject: str
    message: str
    fix: str = ""
