"""A server as a child process that nothing can orphan: start, signal, wait.

Each server runs in a session of its own, so that Ctrl-C reaches us alone and we decide the order of
shutdown, and under a guard process (`_guard.py`) that ends it when this process ends in any way.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from penstock.core.errors import EmbeddedError

_GUARD = Path(__file__).with_name("_guard.py")
_LOG_TAIL = 2000


class GuardedProcess:
    """One running server and its guard.

    `orphan_signal` is what the server gets if this process dies first; `patience` the seconds that
    it then has before SIGKILL goes to its whole process group. With `while_locked` it lives on until
    no process holds a shared lock (`flock`) on that file any more, whatever ended them. `user` is the
    numbers of a user and its group.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | int,
        user: tuple[int, int] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        orphan_signal: int = signal.SIGTERM,
        patience: float = 10.0,
        while_locked: Path | None = None,
    ) -> None:
        self._log = log
        guard = [sys.executable, "-I", "-S", str(_GUARD), f"--orphan-signal={int(orphan_signal)}"]
        as_user = [f"--user={user[0]}", f"--group={user[1]}"] if user else []
        guard += [f"--patience={patience}", *as_user]
        guard += [*([f"--while-locked={while_locked}"] if while_locked else []), "--", *command]
        self._log_start = 0
        with contextlib.ExitStack() as stack:
            stderr = log if isinstance(log, int) else stack.enter_context(log.open("ab"))
            if not isinstance(stderr, int):
                self._log_start = stderr.tell()
            self._guard = subprocess.Popen(  # noqa: S603 - commands of ours alone
                guard,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(env) if env is not None else None,
                cwd=cwd,
                start_new_session=True,
            )
        assert self._guard.stdout is not None  # noqa: S101 - for the type checker
        word, _, rest = self._guard.stdout.readline().decode().strip().partition(" ")
        if word != "pid":
            self._close()
            raise EmbeddedError(f"cannot start {command[0]}: {rest or 'its guard died'}")
        self.pid = int(rest)
        self._code: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._watch, args=(self._guard.stdout,), daemon=True).start()

    def _watch(self, stdout: IO[bytes]) -> None:
        with contextlib.suppress(ValueError):
            word, _, rest = stdout.readline().decode().strip().partition(" ")
            self._code = int(rest) if word == "exit" else -signal.SIGKILL
        self._ended.set()

    @property
    def returncode(self) -> int | None:
        """The server's exit code (negative: the signal that ended it), None while it runs."""
        return self._code if self._ended.is_set() else None

    def signal(self, number: int) -> None:
        """Send a signal to the server's main process; nothing happens if it has ended."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end and return the exit code, or None if it still runs after `timeout`."""
        if not self._ended.wait(timeout):
            return None
        self._close()
        return self._code

    def stop(self, *signals: int, patience: float = 10.0) -> int | None:
        """Send each signal in turn, waiting `patience` seconds after each, and SIGKILL at last."""
        for number in (*signals, signal.SIGKILL):
            self.signal(number)
            if self.wait(patience) is not None:
                break
        return self.wait(0)

    def log_tail(self) -> str:
        """Return the last lines that this server has logged, for an error message."""
        if isinstance(self._log, int) or not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")[-_LOG_TAIL:].strip()

    def _close(self) -> None:
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait()


def await_ready(process: GuardedProcess, ready: Callable[[], bool], timeout: float) -> bool:
    """Poll `ready` until it is true; False if the process ends first or time runs out."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if ready():
            return True
        if process.wait(0.02) is not None:
            return False
    return False


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now and likely to stay so through a restart.

    It is below the range that the kernel hands out to clients: a port of that range may be taken by
    an outgoing connection while its server is down, even by a client that connects to itself.
    """
    for _ in range(200):
        port = random.randint(20_000, 32_000)  # noqa: S311 - not a secret
        with socket.socket() as probe:
            # As the servers do: connections in TIME_WAIT must not make a port look taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise EmbeddedError(
        "no free port on 127.0.0.1 between 20000 and 32000 in 200 tries; "
        "stop what listens there (`ss -ltnp` lists it)"
    )
