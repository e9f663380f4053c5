"""Commands of `penstock`, forked from a process that has loaded what they need: most of their CPU.

Run by path it is that process, whose standard input is a socket. A request brings the files for standard
output and standard error; its answer is a process id, and the exit code once that process has ended.
What differs between processes by design is loaded by each itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_LOADED: Final = (
    "httpx", "psycopg", "pyarrow.compute", "rich.console", "rich.table", "sqlglot", "structlog.dev",
    "penstock.cli.main", "penstock.config.file",
)  # fmt: skip
_OF_ITS_PROCESS: Final = ("penstock.streams.claim", "penstock.core.startup")


class Commands:
    """The process that commands are forked from; one command at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def run(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str] | None:
        """Run a command to its end; return None where another one is under way.

        Raises `subprocess.TimeoutExpired`.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                code = self._run(arguments, cwd, env, timeout, (out.fileno(), err.fileno()))
                texts = []
                for file in (out, err):
                    file.seek(0)
                    texts.append(file.read().decode())
                return subprocess.CompletedProcess(["penstock", *arguments], code, *texts)
        finally:
            self._lock.release()

    def _run(
        self,
        arguments: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        timeout: float,
        files: Sequence[int],
    ) -> int:
        if self._socket is None:
            self._socket = self._start()
        connection = self._socket
        connection.settimeout(None)
        socket.send_fds(connection, [b"x"], files)
        asked = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        with connection.makefile("rb", buffering=0) as answers:
            pid = int(answers.readline())
            connection.settimeout(timeout)
            try:
                return int(answers.readline())
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                connection.settimeout(None)
                self._socket = None  # what it still answers is of this command
                raise subprocess.TimeoutExpired(arguments, timeout) from None

    @staticmethod
    def _start() -> socket.socket:
        ours, its = socket.socketpair()
        with its:
            command = [sys.executable, "-P", __file__]
            subprocess.Popen(command, stdin=its.fileno(), stdout=subprocess.DEVNULL)
        return ours


def main() -> None:
    """Fork a process for each request until the socket's other end is closed."""
    for name in _LOADED:
        importlib.import_module(name)
    assert not sys.modules.keys() & set(_OF_ITS_PROCESS)
    connection = socket.socket(fileno=os.dup(0))
    requests = connection.makefile("rb")
    while True:
        head, files, _, _ = socket.recv_fds(connection, 1, 2)
        if not head:
            return
        request = json.loads(requests.readline())
        pid = os.fork()
        if pid == 0:
            requests.close()
            connection.close()
            _become(request, files)
            return
        for file in files:
            os.close(file)
        connection.sendall(b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Be `python -m penstock`, from here to the end of the process."""
    with Path(os.devnull).open() as nothing:
        for number, file in enumerate((nothing.fileno(), *files)):
            os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    sys.path.insert(0, request["cwd"])
    sys.argv = ["penstock", *request["arguments"]]
    runpy.run_module("penstock", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
