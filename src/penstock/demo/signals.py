"""The signals that end the demo in order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from penstock.core.self_pipe import SelfPipe


@contextlib.contextmanager
def signals(stop: threading.Event) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP request the end; a second SIGINT interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requested = False

    def request(number: int, _frame: Any) -> None:
        nonlocal requested
        if (requested or stop.is_set()) and number == signal.SIGINT:
            raise KeyboardInterrupt
        requested = True
        pipe.notify()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with SelfPipe(stop.set) as pipe:
        before = {number: signal.signal(number, request) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
