"""Processes of `penstock`, forked from one that has loaded what they need: a third of their CPU.

`main` is that process, whose standard input is a socket. A request brings three files: standard
output, standard error, and a socket for the process id and, once the process has ended, its exit code.
What differs between processes by design is loaded by each anew. All are killed with the last who asked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from penstock.core import memory
from penstock.spark import fork_server

from .warm_jvm import CAN_BE_LENT, WarmJvms, use

_LOADED: Final = (
    "httpx", "psycopg", "pyarrow.compute", "rich.console", "rich.table", "sqlglot", "structlog.dev",
    "penstock.cli.main", "penstock.cli.service", "penstock.cli.api_tools", "penstock.config.file",
    "penstock.api.app", "penstock.runtime.run", "penstock.runtime.source_runner",
    "penstock.spark.session", *fork_server.NEEDED,
)  # fmt: skip
_OF_ITS_PROCESS: Final = ("penstock.core.startup", "penstock.streams.claim")


class Forked:
    """A process, with what tests use of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], answers: socket.socket) -> None:
        self.returncode: int | None = None
        self._arguments = arguments
        self._answers = answers
        self._lock = threading.Lock()
        self.pid, *shared = (self._number() for _ in range(3))
        self.shared = [pid for pid in shared if pid]
        """The JVM's processes, where it has one that other runs have, too."""

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once there is one; raises `subprocess.TimeoutExpired`."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], timeout)[0]:
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._number()
                    self._answers.close()
        return self.returncode

    def _number(self) -> int:
        received = self._answers.recv(4, socket.MSG_WAITALL)
        assert len(received) == 4, "the process that forks has ended"
        return int.from_bytes(received, "big", signed=True)


class Commands:
    """The process that others are forked from, which is started with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        timeout: float,
        own_jvm: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; raises `subprocess.TimeoutExpired`."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self.start(arguments, cwd=cwd, env=env, out=out, err=err, own_jvm=own_jvm)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                raise
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
            return subprocess.CompletedProcess(["penstock", *arguments], code, *texts)

    def start(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        out: IO[bytes],
        err: IO[bytes],
        session: bool = False,
        own_jvm: bool = False,
    ) -> Forked:
        """Start a command; with `session` it leads a session, and so a group, of its own.

        With `own_jvm` it starts Java as it does at a user's, else it may get a JVM that runs already.
        """
        asked = {
            "arguments": list(arguments),
            "cwd": str(cwd),
            "env": dict(env),
            "session": session,
            "warm": not own_jvm and arguments[0] in {"run", "relay"} and CAN_BE_LENT,
        }
        ours, its = socket.socketpair()
        with its, self._lock:
            if self._socket is None:
                self._socket = self._begin()
            socket.send_fds(self._socket, [b"x"], [out.fileno(), err.fileno(), its.fileno()])
            self._socket.sendall(json.dumps(asked).encode() + b"\n")
        return Forked(arguments, ours)

    @staticmethod
    def _begin() -> socket.socket:
        ours, its = socket.socketpair()
        with its:
            command = [sys.executable, "-c", f"from {__name__} import main; main()"]
            root = Path(__file__).parents[1]
            subprocess.Popen(command, cwd=root, stdin=its.fileno(), stdout=subprocess.DEVNULL)
        return ours


class _Server:
    """Forks a process for each request, and reports its end."""

    def __init__(self) -> None:
        self._connection = socket.socket(fileno=os.dup(0))
        self._requests = self._connection.makefile("rb", buffering=0)
        self._answers: dict[int, socket.socket] = {}
        self._jvms = WarmJvms()
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)

    def serve(self) -> tuple[Mapping[str, Any], Sequence[int]] | None:
        """Return a request and its files in the process that is to be it; None at the end."""
        while True:
            ready, _, _ = select.select([self._connection, self._woken], [], [])
            if self._woken in ready:
                self._woken.recv(4096)
                self._reap()
            if self._connection in ready:
                head, files, _, _ = socket.recv_fds(self._connection, 1, 3)
                if not head:
                    for pid in self._answers:
                        os.kill(pid, signal.SIGKILL)
                    self._jvms.close()
                    return None
                *files, answers = files
                request = json.loads(self._requests.readline())
                jvm = self._jvms.take() if request["warm"] else None
                pid = os.fork()
                if pid == 0:
                    os.close(answers)
                    self._leave()
                    if jvm is not None:
                        use(jvm)
                    return request, files
                for file in files:
                    os.close(file)
                self._answers[pid] = socket.socket(fileno=answers)
                pids = [0, 0]
                if jvm is not None:
                    self._jvms.lend(jvm, pid)
                    pids = [process.pid for process in jvm.processes]
                for number in (pid, *pids):
                    self._answer(pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = ended[0], os.waitstatus_to_exitcode(ended[1])
                if pid in self._answers:  # else a JVM, or the like
                    self._jvms.give_back(pid, code)
                    self._answer(pid, code)
                    self._answers.pop(pid).close()

    def _answer(self, pid: int, number: int) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            self._answers[pid].sendall(number.to_bytes(4, "big", signed=True))

    def _leave(self) -> None:
        """Have nothing of the server's any more."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._requests.close()
        for own in (self._connection, self._woken, self._wakes, *self._answers.values()):
            own.close()


def main() -> None:
    """Serve until the socket's other end is closed; in each process, be what was asked for."""
    memory.give_back()
    for name in _LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    asked = _Server().serve()
    if asked is None:
        os._exit(0)
    _become(*asked)


def _become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Be `python -m penstock`, from here to the end of the process."""
    with Path(os.devnull).open() as nothing:
        for number, file in enumerate((nothing.fileno(), *files)):
            os.dup2(file, number)
    for file in files:
        os.close(file)
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    for name in _OF_ITS_PROCESS:
        importlib.reload(sys.modules[name])
    sys.argv = ["penstock", *request["arguments"]]
    runpy.run_module("penstock", run_name="__main__", alter_sys=True)
