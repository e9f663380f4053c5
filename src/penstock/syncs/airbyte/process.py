"""The processes that run manifests: a few for all syncs of a process, each with one order at a time."""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import orjson

from penstock.syncs.airbyte.environment import VARIABLE, interpreter
from penstock.syncs.errors import SyncError

_WORKER: Final = Path(__file__).with_name("worker.py")
_MOST: Final = 4
"""So many processes there are at once; each takes some 100 MB."""
_IDLE_SECONDS: Final = 120.0
"""So long a process without an order is kept: its start takes seconds."""
_START_SECONDS: Final = 120.0
SILENT_SECONDS: Final = 300.0
"""So long a process may compute; all that it waits for goes through Penstock."""
_CHUNK: Final = 1 << 20
_ENVIRONMENT: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "TEMP", "SYSTEMROOT")
"""What a process sees of the environment: no secrets."""


class Said(msgspec.Struct):
    """A message of a process; which fields it has follows from `do`."""

    do: str
    method: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    body: str | None = None
    ending: bool = False
    seconds: float = 0.0
    records: list[msgspec.Raw] = []
    times: list[str | None] = []
    bad: list[tuple[int, str]] = []
    done: list[str] = []
    newest: str | int | float | None = None
    cursor: dict[str, Any] | None = None
    streams: list[tuple[str, list[str], str | None]] = []
    access: str = ""
    refresh: str = ""
    ends: float = 0.0
    text: str = ""
    code: str = ""
    remedy: str = ""


_DECODE: Final = msgspec.json.Decoder(Said).decode


class Process:
    """One process, used by one thread at a time."""

    def __init__(self) -> None:
        self._errors: Final[IO[bytes]] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with it
        self._buffer = bytearray()
        python = interpreter()
        self._folder: Final = tempfile.mkdtemp(prefix="penstock-airbyte-")
        environ = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        try:
            # -I: neither the user's packages nor Penstock's are seen.
            self._child: Final = subprocess.Popen(  # noqa: S603 - the operator's Python
                [python, "-I", _WORKER, self._folder],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0,
                env=environ, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise SyncError(
                "connector",
                f"{python} can't be started: {error.strerror}.",
                remedy=f"Let {VARIABLE} name a Python that has airbyte-cdk.",
            ) from None
        try:
            self.receive(_START_SECONDS)
        except SyncError as error:
            self.kill()
            if error.code == "timed_out":
                raise
            raise SyncError(
                "connector",
                f"airbyte-cdk does not start with {python}: {error.message}",
                remedy=f"Let {VARIABLE} name a Python that has airbyte-cdk 7.39, or unset it and run"
                " `penstock sync airbyte install`.",
            ) from None
        self.used_at = time.monotonic()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._child.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send an order, or an answer."""
        assert self._child.stdin is not None  # noqa: S101 - it is a pipe
        data = memoryview(orjson.dumps(message) + b"\n")
        try:
            while data:
                data = data[self._child.stdin.write(data) :]
        except OSError:
            raise self._died() from None

    def receive(self, patience: float | None = None) -> Said:
        """Return the next message; raises `SyncError` where none comes."""
        limit = time.monotonic() + (SILENT_SECONDS if patience is None else patience)
        assert self._child.stdout is not None  # noqa: S101 - it is a pipe
        out = self._child.stdout.fileno()
        searched = 0
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while (end := self._buffer.find(b"\n", searched)) < 0:
                searched = len(self._buffer)
                if not selector.select(max(limit - time.monotonic(), 0.0)):
                    raise SyncError(
                        "timed_out",
                        "The process of airbyte-cdk does not answer: it is ended.",
                        transient=True,
                    )
                data = os.read(out, _CHUNK)
                if not data:
                    raise self._died()
                self._buffer += data
        line = bytes(memoryview(self._buffer)[:end])
        del self._buffer[: end + 1]
        return _DECODE(line)

    def _died(self) -> SyncError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(10.0)
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 2000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        why = f": {lines[-1][:300]}" if lines else ""
        code = self._child.returncode
        return SyncError(
            "unavailable",
            f"The process of airbyte-cdk has ended with {code}{why}.",
            remedy="Penstock starts another one. If it lasts, see whether the machine has the memory.",
            transient=True,
        )

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(OSError):
            self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Processes:
    """Lends processes, and ends those that are not needed any more."""

    def __init__(self, most: int = _MOST, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._most: Final = most
        self._idle_seconds: Final = idle_seconds
        self._lock: Final = threading.Lock()
        self._idle: list[Process] = []
        self._lent: set[Process | object] = set()
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def lent(self, wait: Callable[[float], object]) -> Iterator[Process]:
        """Lend a process; `wait` waits while all are lent.

        It is ended where what is done with it raises.
        """
        while (place := self._place()) is None:
            wait(0.25)
        process: Process | None = None
        try:
            process = self._take() or Process()
            yield process
        except BaseException:
            if process is not None:
                process.kill()
            raise
        else:
            self._put_back(process)
        finally:
            with self._lock:
                self._lent.discard(place)

    def close(self) -> None:
        """End all that have no order."""
        with self._lock:
            idle, self._idle = self._idle, []
            if self._timer is not None:
                self._timer.cancel()
        for process in idle:
            process.kill()

    def _place(self) -> object | None:
        with self._lock:
            if len(self._lent) >= self._most:
                return None
            place = object()
            self._lent.add(place)
            return place

    def _take(self) -> Process | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _put_back(self, process: Process) -> None:
        process.used_at = time.monotonic()
        with self._lock:
            self._idle.append(process)
            self._look_later()

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._idle_seconds, self._tidy)
            self._timer.daemon = True
            self._timer.start()

    def _tidy(self) -> None:
        before = time.monotonic() - self._idle_seconds / 2
        with self._lock:
            self._timer = None
            gone = [each for each in self._idle if each.used_at < before]
            self._idle = [each for each in self._idle if each.used_at >= before]
            if self._idle:
                self._look_later()
        for process in gone:
            process.kill()


PROCESSES: Final = Processes()
atexit.register(PROCESSES.close)
