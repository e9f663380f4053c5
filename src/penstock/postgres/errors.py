"""What keeps a capture or its setup from going on, in a form that says what to do about it."""

from __future__ import annotations

from typing import Any


class CaptureError(Exception):
    """A source cannot go on: what was wrong, with which value, and what to do about it.

    `code` is a stable word for logs, metrics and tests (`connection_refused`, `slot_invalidated`,
    ...); `remedy` a statement or a setting; `transient` whether trying again can help by itself;
    `is_gap` whether changes may be missed, so that the source needs `penstock recover`. No secret
    ever stands in it.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        remedy: str = "",
        transient: bool = False,
        is_gap: bool = False,
    ):
        super().__init__(f"{message} {remedy}".strip())
        self.code = code
        self.message = message
        self.remedy = remedy
        self.transient = transient
        self.is_gap = is_gap

    def recovered_by(self, command: str | None) -> CaptureError:
        """Return the error with the command that recovers its source as the remedy of a gap."""
        if not self.is_gap or command is None:
            return self
        return type(self)(self.code, self.message, remedy=recovery_remedy(command), is_gap=True)

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark carries errors between processes by pickling them; keyword arguments need help.
        return _rebuild, (
            type(self), self.code, self.message, self.remedy, self.transient, self.is_gap
        )  # fmt: skip


def _rebuild(
    cls: type[CaptureError], code: str, message: str, remedy: str, transient: bool, is_gap: bool
) -> CaptureError:
    return cls(code, message, remedy=remedy, transient=transient, is_gap=is_gap)


def recovery_remedy(command: str) -> str:
    """Return what to do about a gap; the command stands at the end, ready to paste."""
    return (
        "Stop `penstock run` if it still runs, and recover the source: slot and publication are "
        f"made anew, what was missed is reported, a backfill is offered. Run: {command}"
    )


class SetupError(CaptureError):
    """The server, its publication or its slot is not ready for a capture."""
