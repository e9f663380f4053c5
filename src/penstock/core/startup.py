"""What a process does until it is ready, logged step by step: when each begins, and how long it took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

import structlog

_BEGAN: Final = time.monotonic()  # of the process, as nearly as Python knows it

log = structlog.get_logger("penstock")


def seconds() -> float:
    """Return for how long the process has been starting."""
    return round(time.monotonic() - _BEGAN, 1)


class Step:
    """One step, which has begun; `fields` go into its two lines of the log."""

    def __init__(self, name: str, **fields: Any) -> None:
        self._fields: Final = {"step": name, **fields}
        self._began = time.monotonic()
        log.info("starting", **self._fields)

    def done(self, **fields: Any) -> None:
        """Log that it is over, and how many seconds it took."""
        log.info("started", **self._fields, **fields,
                 seconds=round(time.monotonic() - self._began, 1))  # fmt: skip


@contextlib.contextmanager
def step(name: str, **fields: Any) -> Iterator[None]:
    """Log what the context does as a step; one that fails is not logged as over."""
    begun = Step(name, **fields)
    yield
    begun.done()
