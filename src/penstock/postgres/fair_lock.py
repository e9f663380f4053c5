"""The lock between a thread that works in rounds and other threads, which go first.

Python's locks are not fair: a thread that releases one and acquires it again at once, as the capture's
does between rounds, keeps others out until it has nothing left to read. So the others hold `_turn` while
they wait for the lock, and the working thread waits for it between rounds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class FairLock:
    """A lock, and the event that what it guards has changed."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._changed = threading.Event()
        self._condition = threading.Condition()

    # -- the others

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Hold the lock, before the working thread acquires it again."""
        with self._turn:
            self._condition.acquire()
        try:
            yield
        finally:
            self._condition.release()

    def pause(self, seconds: float) -> None:
        """Wait, outside the lock that is held, until `notify` or for so many seconds."""
        self._changed.clear()
        self._condition.release()
        try:
            self._changed.wait(seconds)
        finally:
            with self._turn:
                self._condition.acquire()

    # -- the working thread

    def give_way(self) -> None:
        """Let those go first that wait for the lock."""
        with self._turn:
            pass

    def held(self) -> contextlib.AbstractContextManager[bool]:
        """Hold the lock."""
        return self._condition

    # -- both, with the lock held

    def wait_for(self, predicate: Callable[[], bool], seconds: float) -> bool:
        """Wait, outside the lock, until `predicate` holds; return whether it does."""
        return self._condition.wait_for(predicate, seconds)

    def notify(self) -> None:
        """Wake all that wait: something has changed."""
        self._changed.set()
        self._condition.notify_all()
