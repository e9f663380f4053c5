"""The orderly end of a run's captures: nothing more is handed out, and all that was is delivered."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, Literal

from penstock.core.monitor import Monitor
from penstock.runtime.state import RunState

DRAIN_SECONDS: Final = 15.0
_STORE_DOWN_SECONDS: Final = 3.0
"""The same where the store is down and the batch can't be finished."""

Mark = Literal["released", "drained"]
"""What a capture reports: that it has left its slot, and later that its last batch has ended."""


def await_captures(
    monitor: Monitor, state: RunState, sources: Sequence[str], mark: Mark, wake: threading.Event
) -> bool:
    """Drain the captures of these sources, and return whether all of the run have reported `mark`.

    `wake` is set when something was reported.
    """
    started = time.monotonic()
    states = state.sources
    while True:
        patience = DRAIN_SECONDS if state.store_error is None else _STORE_DOWN_SECONDS
        if time.monotonic() - started > patience:
            break
        monitor.drain(leave=mark == "released")
        if all(getattr(states[name], mark) for name in sources):
            break
        wake.wait(0.1)
        wake.clear()
    return all(getattr(of, mark) for of in states.values())
