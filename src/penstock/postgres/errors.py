"""What keeps a capture or its setup from going on, in a form that says what to do about it."""

from __future__ import annotations

from typing import Any


class CaptureError(Exception):
    """A source cannot go on: what was wrong, with which value, and what to do about it.

    `code` is a stable word for logs, metrics and tests (`connection_refused`, `slot_invalidated`,
    ...); `remedy` a statement or a setting; `transient` tells whether trying again can help by
    itself. No secret ever stands in it.
    """

    def __init__(self, code: str, message: str, *, remedy: str = "", transient: bool = False):
        super().__init__(f"{message} {remedy}".strip())
        self.code = code
        self.message = message
        self.remedy = remedy
        self.transient = transient

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark carries errors between processes by pickling them; keyword arguments need help.
        return _rebuild, (type(self), self.code, self.message, self.remedy, self.transient)


def _rebuild(
    cls: type[CaptureError], code: str, message: str, remedy: str, transient: bool
) -> CaptureError:
    return cls(code, message, remedy=remedy, transient=transient)


class SetupError(CaptureError):
    """The server, its publication or its slot is not ready for a capture."""
