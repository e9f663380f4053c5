"""Waits for what has no event: each has a limit, and reports what did not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from .pipeline import PATIENCE

_PAUSE: Final = 0.02


def await_true(
    condition: Callable[[], object],
    timeout: float = PATIENCE,
    *,
    what: str = "what this waits for",
) -> None:
    """Poll until `condition` holds; `what` is the sentence of what does not come otherwise."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        pause.wait(_PAUSE)


def await_end(*threads: threading.Thread, timeout: float = PATIENCE) -> None:
    """Wait until threads have ended; one that does not is named."""
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), f"not within {timeout:g} s: the end of {thread.name}"
