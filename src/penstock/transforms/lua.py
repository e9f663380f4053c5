"""Transforms in Lua: the operator's program in a sandbox, in a process of its own.

It is Lua 5.4, by measurement. LuaJIT's compiled code runs without the hook that looks at the time, so
its compiler would have to be off, and then a message costs 11 µs there and 16 here; its integers end at
2^53, where bigints go on, and text made of one loses digits (`"a." .. id`); and it gives up where memory
is short, while Lua 5.4 collects garbage first.

The process is what makes the limits real (see `lua_helper`). Batches go to it over a pipe: half a
microsecond a message.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import pyarrow as pa

from penstock.transforms.base import (
    RESERVED,
    SAME,
    Output,
    Transformed,
    TransformError,
    assemble,
    captured,
    known_action,
)
from penstock.transforms.lua_helper import (
    TIME,
    EndedError,
    Limits,
    Progress,
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
_AT: Final = re.compile(r"transform:(\d+): ?(.*)", re.S)
# Seconds in which a message must end by the clock, whatever its CPU time: the process may be stopped.
_PATIENCE: Final = 30.0
_TRIES: Final = 3

Row = tuple[str, str | None, str, str]
Answer = Sequence[Output] | str

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode


class LuaTransform:
    """Calls `transform(message)` of a Lua program for each message.

    Args:
        code: The program.
        name: The file that it is from, for errors; None for one that stands in the configuration.
        time_limit: Seconds of CPU time that a message may take.
        memory_limit: Bytes that the program may hold.

    Raises:
        TransformError: The program does not load, or has no function `transform`.
    """

    def __init__(
        self,
        code: str,
        *,
        name: str | None = None,
        time_limit: float = 0.1,
        memory_limit: int = 64 << 20,
    ) -> None:
        self._file = "" if name is None else f"{Path(name).name}, "
        self._time = time_limit
        self._memory = memory_limit
        self._start = Start(code, time_limit, memory_limit, RESERVED)
        self._limits = Limits(time_limit)
        self._helper = self._begin()

    def __call__(self, batch: pa.RecordBatch) -> Transformed:
        """Return what the messages of `batch` become; see `MessageTransform`."""
        columns = captured(batch)
        rows: list[Row] = list(zip(*columns, strict=True))
        return assemble(batch, columns, self._answers(rows))

    def close(self) -> None:
        """End the process."""
        self._helper.end()

    def _begin(self) -> _Helper:
        for _ in range(_TRIES):
            helper = _Helper()
            try:
                problem = helper.start(self._start)
            except EndedError:
                if helper.end() == -signal.SIGPROF:
                    raise TransformError(
                        f"{self._file}the program ran for more than {self._milliseconds} ms before "
                        "it had defined transform(message)"
                    ) from None
                continue
            if problem is None:
                return helper
            helper.end()
            raise TransformError(self._refusal(*problem))
        raise TransformError(
            f"the process that runs Lua ended at once ({helper.end()}): is memory short?"
        )

    def _refusal(self, kind: str, text: str) -> str:
        if kind == "none":
            return (
                f"{self._file}the program has no function transform(message): `transform` is a "
                f"{text} there" if text != "nil" else
                f"{self._file}the program has no function transform(message)"
            )  # fmt: skip
        return self._reason(kind, text)

    def _answers(self, rows: list[Row]) -> list[Answer]:
        """Return what came of each row; one that ends the process is failed, and the rest go on."""
        answers: list[Answer] = []
        fatal: tuple[int, int] | None = None
        doubted = -1
        while (done := len(answers)) < len(rows):
            # What was answered before the process ended may have been lost on the way: up to the row
            # that has ended it, all is sent again.
            stop = len(rows) if fatal is None else fatal[0]
            answers += self._request(rows[done:stop])
            if len(answers) == stop:
                if fatal is not None:
                    answers.append(self._death(fatal[1]))
                    fatal = None
                continue
            ended = done + max(self._helper.row, 0)
            status = self._helper.end()
            self._helper = self._begin()
            if status in _OWN_DEATHS or doubted == ended:
                fatal = (ended, status)
            else:
                # Another process has ended it: the message is tried once more.
                doubted = ended
        return answers

    def _request(self, rows: list[Row]) -> list[Answer]:
        """Return the answers to `rows`, fewer where the process has ended."""
        if not rows:
            return []
        pieces = self._helper.run(self._limits.stopped, rows, _PATIENCE + 2 * self._limits.hard)
        # While these are read, the process is at work on the next.
        return [self._answer(result) for results in pieces for result in results]

    def _answer(self, result: list[Any] | None) -> Answer:
        failed = result is not None and bool(result) and isinstance(result[0], str)
        reason = self._reason(*result) if result is not None and failed else ""
        self._limits.count(stopped=result is not None and failed and result[0] == TIME)
        if result is None:
            return SAME
        if failed:
            return reason
        outputs = [Output(*fields) for fields in result]
        for i, output in enumerate(outputs):
            if output.action is not None and (problem := known_action(output.action)):
                return f"[{i + 1}].{problem}" if len(outputs) > 1 else problem
        return outputs

    def _death(self, status: int) -> str:
        if status == -signal.SIGPROF:
            reason = (
                f"{self._file}{self._stopped}, inside one call of a library function: a pattern over "
                f"a long text, or a very large text?{self._lowered}"
            )
            self._limits.count(stopped=True)
            return reason
        if status == -signal.SIGSTOP:
            return f"{self._file}did not end in {_PATIENCE:.0f} seconds"
        return (
            f"{self._file}ended the process that runs Lua ({_status(status)}): most likely the "
            f"message and what is made of it are too large for {self._mebibytes} MiB"
        )

    def _reason(self, kind: str, text: str) -> str:
        if kind == "time":
            at = f"line {text}: " if text else ""
            return f"{self._file}{at}{self._stopped}{self._lowered}"
        if kind == "memory":
            return f"{self._file}took more than {self._mebibytes} MiB of memory"
        if kind == "large":
            return (
                f"the message has {int(text):,} bytes of text: too large for a memory limit of "
                f"{self._mebibytes} MiB"
            )
        if kind == "unreadable":
            return text
        # Lua's own traceback, which it adds where its parser fails.
        match = _AT.match(text := text.partition("\nstack traceback:")[0])
        if match is None:
            return f"{self._file}{text}"
        return f"{self._file}line {match[1]}: {match[2]}"

    @property
    def _milliseconds(self) -> int:
        return round(self._time * 1_000)

    @property
    def _stopped(self) -> str:
        return f"stopped after {1_000 * self._limits.seconds:g} ms of CPU time"

    @property
    def _lowered(self) -> str:
        if not self._limits.is_lowered:
            return ""
        return f" (of {self._milliseconds} ms: lowered while message after message is stopped)"

    @property
    def _mebibytes(self) -> int:
        return self._memory >> 20


# The timer, an abort where memory has run out outside of a protected call, a C stack that overflowed,
# and the mark for what was killed for being stuck.
_OWN_DEATHS: Final = frozenset(
    {-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGSTOP}
)


class _Helper:
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
        problem = _decode(self._receive(_PATIENCE))
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


def _status(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
    return f"exit code {status}"
