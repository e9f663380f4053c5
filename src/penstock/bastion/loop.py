"""The thread in which a process's tunnels live: one event loop for all of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import asyncssh

_Result = TypeVar("_Result")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def submit(work: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
    """Begin `work` in the thread and return what gives its result, to any thread."""
    global _loop
    with _lock:
        if _loop is None:
            # Each connection is a line of its log; errors come back to who connects.
            asyncssh.set_log_level(logging.ERROR)
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="bastions", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, _loop)


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do `work` in the thread and wait for what it gives; an interrupted wait ends it."""
    future = submit(work)
    try:
        return future.result()
    finally:
        future.cancel()


def _forget() -> None:
    """Leave the thread to the parent: a process that was forked has none."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
