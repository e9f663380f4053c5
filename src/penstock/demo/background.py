"""A thread of the demo: a writer of the shop or of the API, or a worker."""

from __future__ import annotations

import threading


class Background(threading.Thread):
    """Does what a subclass has `run` do, until `stop`; nothing of it outlives the process."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"demo-{name}", daemon=True)
        self._stopping = threading.Event()

    @property
    def is_started(self) -> bool:
        """Whether `start` was called."""
        return self.ident is not None

    def stop(self) -> None:
        """Request the end, after what is under way; `join` waits for it."""
        self._stopping.set()
