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
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

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
    Row,
    Start,
)
from penstock.transforms.lua_process import PATIENCE, LuaProcess

_AT: Final = re.compile(r"transform:(\d+): ?(.*)", re.S)
_TRIES: Final = 3

Answer = Sequence[Output] | str


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
        self._process = self._begin()

    def __call__(self, batch: pa.RecordBatch) -> Transformed:
        """Return what the messages of `batch` become; see `MessageTransform`."""
        columns = captured(batch)
        rows: list[Row] = list(zip(*columns, strict=True))
        return assemble(batch, columns, self._answers(rows))

    def close(self) -> None:
        """End the process."""
        self._process.end()

    def _begin(self) -> LuaProcess:
        for _ in range(_TRIES):
            process = LuaProcess()
            try:
                problem = process.start(self._start)
            except EndedError:
                if process.end() == -signal.SIGPROF:
                    raise TransformError(
                        f"{self._file}the program ran for more than {self._milliseconds} ms before "
                        "it had defined transform(message)"
                    ) from None
                continue
            if problem is None:
                return process
            process.end()
            raise TransformError(self._refusal(*problem))
        raise TransformError(
            f"the process that runs Lua ended at once ({process.end()}): is memory short?"
        )

    def _refusal(self, kind: str, text: str) -> str:
        if kind != "none":
            return self._reason(kind, text)
        found = "" if text == "nil" else f": `transform` is a {text} there"
        return f"{self._file}the program has no function transform(message){found}"

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
            ended = done + max(self._process.row, 0)
            status = self._process.end()
            self._process = self._begin()
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
        pieces = self._process.run(self._limits.stopped, rows, PATIENCE + 2 * self._limits.hard)
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
            return f"{self._file}did not end in {PATIENCE:.0f} seconds"
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


def _status(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
    return f"exit code {status}"
