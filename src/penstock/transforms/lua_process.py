"""The process that runs a Lua program, as `lua` uses it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from typing import IO, Any, Final

import msgspec

from penstock.transforms.lua_helper import (
    EndedError,
    Progress,
    Row,
    Start,
    read_frame,
    write_frame,
)

_COMMAND: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from penstock.transforms.lua_helper import main; main()"
)
# What an interpreter needs to start; nothing else of the environment reaches the program's process.
_ENVIRONMENT: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")
PATIENCE: Final = 30.0
"""Seconds in which a message must end by the clock: the process may be stopped, and use no CPU time."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode


class LuaProcess:
    """A process of `lua_helper`."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as shared:
            shared.write(bytes(8))
            shared.flush()
            self._progress = Progress(shared.fileno())
            self._progress.set(-1)
            environment = {k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and our own module
                [sys.executable, "-I", "-c", _COMMAND, json.dumps(sys.path), str(shared.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Lua prints there when it aborts; the exit status shows as much.
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=(shared.fileno(),),
                bufsize=0,
            )
        # Neither a transform that is forgotten nor an error leaves it behind.
        self._finish = weakref.finalize(self, _end, self._process)
        self._stuck = False

    @property
    def row(self) -> int:
        """The row of the last request that was begun with last, -1 before the first."""
        return self._progress.get()

    def start(self, start: Start) -> tuple[str, str] | None:
        """Load the program; returns what is wrong with it, its kind and text, or None."""
        self._send(_encode(start))
        problem = _decode(self._receive(PATIENCE))
        return None if problem is None else tuple(problem)

    def run(self, stopped: int, rows: list[Row], patience: float) -> Iterator[list[Any]]:
        """Yield the results of `rows` as they come, fewer where the process ends or is stuck.

        Before these, so many messages in a row were `stopped`.
        """
        left = len(rows)
        self._progress.set(-1)
        with contextlib.suppress(EndedError):
            self._send(_encode((stopped, rows)))
            while left:
                results = _decode(self._receive(patience))
                left -= len(results)
                yield results

    def end(self) -> int:
        """End the process if it runs, and return how it ended, as `subprocess` reports it."""
        if self._stuck:
            self._finish()
            return -signal.SIGSTOP
        # A process that has closed its pipes is about to end, and its status shows why.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._pipe(self._process.stdin).close()
            self._process.wait(1)
        self._finish()
        return self._process.returncode

    def _send(self, data: bytes) -> None:
        try:
            write_frame(self._pipe(self._process.stdin).fileno(), data)
        except BrokenPipeError:
            raise EndedError from None

    def _receive(self, patience: float) -> bytes:
        fd = self._pipe(self._process.stdout).fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        row, since = self.row, time.monotonic()
        while not poll.poll(1_000):
            if self.row != row:
                row, since = self.row, time.monotonic()
            elif time.monotonic() - since > patience:
                self._stuck = True
                self._process.kill()
                raise EndedError
        return read_frame(fd)

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None  # noqa: S101 - both are pipes
        return pipe


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
