"""The way from a signal's handler to what the signal asks for: a pipe, and a thread that reads it.

Python runs a handler in the main thread between any two instructions, so also inside `Event.set()` or
`Event.wait()` while these hold the event's lock. A handler that sets the same event waits for itself.
Here the handler takes no lock: it writes a byte, and the thread calls what may take any.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Self


class SelfPipe:
    """Calls `on_signal` in a thread of its own, once or more, after `notify` was called.

    A context manager: after its end, `notify` does nothing. The handler that calls that may stay.
    """

    def __init__(self, on_signal: Callable[[], object]) -> None:
        self._on_signal = on_signal
        self._owner = os.getpid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._open = True
        self._thread = threading.Thread(target=self._call, name="signals", daemon=True)
        self._thread.start()

    def notify(self, *_: object) -> None:
        """Have `on_signal` called; a handler of `signal.signal`."""
        # A fork has the pipe too, and its signals are its own.
        if self._open and os.getpid() == self._owner:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread anyway
                os.write(self._write, b"\0")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False  # before the file is closed: a handler may come in between
        os.close(self._write)

    def _call(self) -> None:
        with open(self._read, "rb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor, no path
            while pipe.read(4096):
                self._on_signal()
