"""What keeps the demo from going on."""

from __future__ import annotations

from typing import Any

from penstock.core.errors import PenstockError


class DemoError(PenstockError):
    """The demo cannot go on: what happened, and the last log lines of the failing part."""

    def __init__(self, message: str) -> None:
        super().__init__("demo", message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,)
