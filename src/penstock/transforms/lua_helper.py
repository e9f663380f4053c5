"""The process that runs an operator's Lua, for one Spark worker: batches come in, results go out.

It is a process of its own because no limit inside one is a real one: a pattern over a long text can keep
a single C call busy for ever, which no hook interrupts and no thread can end; and memory that runs out
outside of a protected call aborts. This process can be killed for it, at the cost of one message.

Started by `penstock.transforms.lua`, which kills it no more than the timer does that it sets for each
message, in CPU time: a machine that is busy elsewhere makes no message fail. It has an empty
environment, can open no file, and ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec
from lupa import lua54  # type: ignore[import-untyped]  # it has no types

from penstock.transforms.json_values import UNREADABLE, Values, as_float, unreadable

_LENGTH: Final = struct.Struct("<I")
_COUNTER: Final = struct.Struct("<q")
# The answer goes out in pieces, so that little is done again where a message ends the process.
_PIECE: Final = 256
_PIECE_SECONDS: Final = 0.02
# Beside the program's own memory: what Python needs for the messages' text.
_SLACK: Final = 512 << 20
_NOTHING: Final = (None, None, None, None)
_INTEGERS: Final = range(-(1 << 63), 1 << 63)
_DEPTH: Final = 200
# How much memory a message takes in Lua, for each byte of its text, at the most that is let in.
_BYTES: Final = 3

_CODE: Final = files(__package__).joinpath("sandbox.lua").read_text(encoding="utf-8")


class EndedError(Exception):
    """The other side is gone."""


LOWERED_AFTER: Final = 20
"""How many messages in a row must have been stopped before the others get less time."""
_LOWERED: Final = 10
_GRACE: Final = 0.2
"""What the kernel adds to the hook's limit: it counts in ticks, on a busy machine others' too."""


class Limits:
    """The time that a message gets.

    A program that does not end for any message would hold all sinks of its source back by the whole
    limit each time. After `LOWERED_AFTER` of them it gets a tenth, until a message ends in time.
    """

    def __init__(self, seconds: float) -> None:
        self.stopped = 0
        """How many messages in a row were stopped."""
        self._seconds = seconds

    @property
    def is_lowered(self) -> bool:
        """Whether messages get less time than the setting allows."""
        return self.stopped >= LOWERED_AFTER

    @property
    def seconds(self) -> float:
        """The CPU time after which the hook stops a message."""
        return self._seconds / _LOWERED if self.is_lowered else self._seconds

    @property
    def hard(self) -> float:
        """The CPU time after which the kernel does, where one call of a library takes it all."""
        return self.seconds + max(self.seconds / 2, _GRACE)

    def count(self, *, stopped: bool) -> None:
        """Record how a message has ended."""
        self.stopped = self.stopped + 1 if stopped else 0


class Start(msgspec.Struct, array_like=True):
    """What a helper is started with.

    `seconds` of CPU time and bytes of `memory` are each message's limits. `reserved` names the metadata
    that is not the program's.
    """

    program: str
    seconds: float
    memory: int
    reserved: tuple[str, ...]


Row = tuple[str, str | None, str, str]
"""Record, changes, action and metadata."""
Request = tuple[int, list[Row]]
"""How many messages were stopped in a row before these."""
TIME: Final = "time"
"""The kind of failure of a message that was stopped."""
Fields = tuple[str | None, str | None, str | None, str | None]
Result = list[Fields] | tuple[str, str] | None
"""The messages made of one, as `penstock.transforms.base.Output`; what failed, and its text; or None
where the message stays as it was."""


def read_frame(fd: int) -> bytes:
    """Return what one `write_frame` wrote; raises `EndedError` where there is no more."""
    size = _LENGTH.unpack(_read(fd, _LENGTH.size))[0]
    return _read(fd, size)


def _read(fd: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        piece = os.read(fd, min(size - len(parts), 1 << 20))
        if not piece:
            raise EndedError
        parts += piece
    return bytes(parts)


def write_frame(fd: int, data: bytes) -> None:
    """Write `data`, its length first; raises `BrokenPipeError` without a reader."""
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


class Progress:
    """Which row of a request is at work, in memory that both processes share; -1 before the first."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _COUNTER.size)

    def set(self, row: int) -> None:
        """Show that `row` begins."""
        _COUNTER.pack_into(self._map, 0, row)

    def get(self) -> int:
        """Return the row that began last."""
        row: int = _COUNTER.unpack_from(self._map, 0)[0]
        return row


class Sandbox:
    """A Lua runtime with the program in it.

    `problem` is None, or why the program does not load: its kind and text.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self.problem: tuple[str, str] | None = None
        self._values = Values()
        # Half of a message's cost, for nothing where the program does not look.
        self._metadata = "metadata" in start.program
        self._fill()

    def _fill(self) -> None:
        start = self._start
        lua = lua54.LuaRuntime(
            unpack_returned_tuples=True,
            register_eval=False,
            register_builtins=False,
            attribute_filter=_no_attributes,
            max_memory=start.memory,
        )
        names = lua.table_from(start.reserved)
        self._table: Callable[..., Any] = lua.table_from
        try:
            made = lua.compile(_CODE)(start.program, start.seconds, names)
        except lua54.LuaMemoryError:
            self.problem = ("memory", "")
            return
        if made[0] is None:
            self.problem = (made[1], str(made[2]))
            return
        self._run, self._take, self._array, self._null = made

    def run(self, row: Row, seconds: float) -> Result:
        """Return what becomes of a message that may take so many seconds."""
        record, changes, action, metadata = row
        if _BYTES * (len(record) + len(changes or "")) > self._start.memory:
            return ("large", str(len(record) + len(changes or "")))
        try:
            old = None if changes is None else self._fields(changes)
            meta = self._fields(metadata) if self._metadata else None
            answer = self._run(self._fields(record), old, action, meta, seconds)
            if isinstance(answer, int):
                return [self._output(row, self._take(i)) for i in range(1, answer + 1)]
            count, *out = answer
            if count == 1:
                fields = self._output(row, out)
                return None if fields == _NOTHING else [fields]
            kind, text = out
            if kind == "memory":
                self._refill()
            return (kind, str(text))
        except UNREADABLE as error:
            return ("unreadable", unreadable(error))
        except lua54.LuaMemoryError:
            self._refill()
            return ("memory", "")

    def _refill(self) -> None:
        """Make a new runtime: whatever the program holds on to is lost."""
        self._fill()
        if self.problem is not None:
            raise SystemExit(1)

    def _fields(self, text: str) -> Any:
        value = self._values.decode(text)
        if "null" in text or "[]" in text or text.count("{") + text.count("[") > _DEPTH:
            value = self._converted(value, 0)
        try:
            return self._table(value, recursive=True)
        except OverflowError:
            return self._table(self._converted(value, 0, integers=True), recursive=True)

    def _converted(self, value: Any, depth: int, *, integers: bool = False) -> Any:
        """Return `value` with what Lua has no own form for: null, empty arrays, and large `integers`."""
        if depth > _DEPTH:
            raise RecursionError
        if value is None:
            return self._null
        if isinstance(value, dict):
            return {
                name: item
                if type(item) is str
                else self._converted(item, depth + 1, integers=integers)
                for name, item in value.items()
            }
        if isinstance(value, list):
            if not value:
                return self._array()
            return [self._converted(item, depth + 1, integers=integers) for item in value]
        if integers and isinstance(value, int) and value not in _INTEGERS:
            return as_float(value)
        return value

    def _output(self, row: Row, out: Sequence[Any]) -> Fields:
        fields, dropped, changes, changes_dropped, action, extras = out
        record = self._values.merged(row[0], fields, dropped)
        if changes is False:
            changes = None if row[1] is None else "null"
        else:
            changes = self._values.merged(row[1] or "{}", changes, changes_dropped)
        return record, changes, action, extras


def _no_attributes(*_: object) -> object:
    raise AttributeError("no Python object is to be reached from Lua")


def confine(memory: int) -> None:
    """Take from this process what it does not need: files, children, core dumps, endless memory."""
    import resource  # noqa: PLC0415 - there is none on Windows

    def limit(what: int, value: int) -> None:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (value, value))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NPROC, 0)
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + 4 * memory + _SLACK)
    limit(resource.RLIMIT_NOFILE, 0)


def main() -> None:
    """Serve one parent: its program first, then its batches, until it closes the pipe."""
    # Ctrl-C reaches the whole group; the parent decides when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    progress = Progress(int(sys.argv[2]))
    with contextlib.suppress(EndedError, BrokenPipeError):
        start = msgspec.msgpack.decode(read_frame(0), type=Start)
        limits = Limits(start.seconds)
        requests = msgspec.msgpack.Decoder(Request)
        encode = msgspec.msgpack.Encoder().encode
        timer, kind = signal.setitimer, signal.ITIMER_PROF
        timer(kind, limits.hard)
        sandbox = Sandbox(start)
        timer(kind, 0)
        write_frame(1, encode(sandbox.problem))
        if sandbox.problem is not None:
            return
        confine(start.memory)
        while True:
            limits.stopped, rows = requests.decode(read_frame(0))
            results: list[Result] = []
            written = time.monotonic()
            for number, row in enumerate(rows):
                progress.set(number)
                timer(kind, limits.hard)
                result = sandbox.run(row, limits.seconds)
                results.append(result)
                stopped = type(result) is tuple and result[0] == TIME
                limits.count(stopped=stopped)
                if len(results) == _PIECE or stopped or time.monotonic() - written > _PIECE_SECONDS:
                    timer(kind, 0)
                    write_frame(1, encode(results))
                    results, written = [], time.monotonic()
            timer(kind, 0)
            if results:
                write_frame(1, encode(results))
