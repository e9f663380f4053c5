"""What passes between Penstock and the process that runs manifests: a part of `worker`.

An order comes in and messages go out, in lines of JSON, and each message but an order's last has an
answer. Waits are such messages, too.
"""

import json
import os
import queue
import shutil
import sys
import threading
import time
from typing import Any, Final

import orjson

_OUT: Final = os.fdopen(os.dup(1), "wb", buffering=0)
os.dup2(2, 1)  # what the manifest's code prints is no message
_FOLDER: Final = sys.argv[1]
os.chdir(_FOLDER)  # airbyte-cdk puts downloads into files of the working directory


class StoppedError(BaseException):
    """The order is given up; no `except Exception` of a library keeps it."""


class Channel:
    """What passes between Penstock and this process; the main thread alone talks."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        # Of `sys.stdin` it would hold the lock that the interpreter wants when it ends.
        parts: list[bytes] = []
        while data := os.read(0, 1 << 20):
            *ends, rest = data.split(b"\n")
            for end in ends:
                self._lines.put(b"".join((*parts, end)))
                parts.clear()
            parts.append(rest)
        shutil.rmtree(_FOLDER, ignore_errors=True)
        os._exit(0)  # whatever the main thread does: it is not waited for

    def order(self) -> dict[str, Any]:
        """Return the next order, or the answer to what was asked."""
        found: dict[str, Any] = json.loads(self._lines.get())
        return found

    def send(self, do: str, **fields: Any) -> None:
        """Send a message."""
        _OUT.write(_encoded({"do": do, **fields}) + b"\n")

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send a message and return the answer; raises `StoppedError`."""
        self.send(do, **fields)
        answer = self.order()
        if answer.get("stop"):
            raise StoppedError
        return answer


def _encoded(message: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(message, default=str)
    except TypeError:  # whole numbers of more than 64 bits
        return json.dumps(message, default=str, ensure_ascii=False).encode("utf-8", "replace")


CHANNEL: Final = Channel()
_sleep: Final = time.sleep


def is_main() -> bool:
    """Whether this is the thread that talks."""
    return threading.current_thread() is threading.main_thread()


def _wait(seconds: float) -> None:
    if is_main():
        CHANNEL.ask("wait", seconds=float(seconds))
    else:
        _sleep(seconds)


time.sleep = _wait  # type: ignore[assignment]  # for all of the process
