"""`penstock run` as a process of its own, as a user starts it: started, asked, ended, killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from penstock.embedded.process import free_port

from .commands import Commands, Forked

PATIENCE = 240.0
"""How many seconds what is awaited may take on a busy machine; a healthy one needs few."""
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of http addresses: httpx reads all certificate authorities for each that has no other."""
COMMAND = (sys.executable, "-m", "penstock")
_COMMANDS = Commands()


def penstock(
    *arguments: str,
    cwd: Path,
    timeout: float = PATIENCE,
    environment: Mapping[str, str] | None = None,
    own_jvm: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, standard input closed, output taken as text."""
    env = {**os.environ, **(environment or {})}
    return _COMMANDS.run(arguments, cwd=cwd, env=env, timeout=timeout, own_jvm=own_jvm)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def holds(condition: Callable[[], object], pause: float) -> bool:
    """Return whether `condition` holds; pause if not, so long that asking takes a sixth of the time."""
    began = time.monotonic()
    if condition():
        return True
    took = time.monotonic() - began
    threading.Event().wait(max(pause, min(5 * took, 0.5)))
    return False


class Penstock:
    """One `penstock run`, or another `command`, in a session and so a group of its own.

    `folder` is where it runs and where `penstock.yaml` stands; what it logs is appended to
    `stdout.log` and `stderr.log` there. Leaving the context kills what is left of it. Tests of its
    processes, or of their environment, give it its `own_jvm`; else it may run in that of others.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        command: str = "run",
        listen: str | None = None,
        environment: Mapping[str, str] | None = None,
        own_jvm: bool = False,
    ) -> None:
        self.folder = folder
        self._own_jvm = own_jvm
        self._command = command
        self.listen = listen or f"127.0.0.1:{free_port()}"
        self._options = options
        self._environment = {
            **os.environ, "SPARK_LOCAL_DIRS": str(folder / "spark"), **(environment or {})
        }  # fmt: skip
        self._process: Forked | None = None
        self._offset = 0

    def start(self) -> Penstock:
        """Start it; `wait_ready` waits until it is."""
        assert self._process is None or self._process.poll() is not None, "it runs already"
        if self.stderr_path.exists():
            self._offset = self.stderr_path.stat().st_size
        with (
            (self.folder / "stdout.log").open("ab") as out,
            self.stderr_path.open("ab") as err,
        ):
            listen = () if self._command == "push" else ("--listen", self.listen)
            self._process = _COMMANDS.start(
                [self._command, *listen, *self._options],
                cwd=self.folder, out=out, err=err, session=True, env=self._environment,
                own_jvm=self._own_jvm,
            )  # fmt: skip
        return self

    @property
    def stderr_path(self) -> Path:
        return self.folder / "stderr.log"

    @property
    def process(self) -> Forked:
        assert self._process is not None, "it was never started"
        return self._process

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """What this start has written to standard error so far."""
        with self.stderr_path.open("rb") as file:
            file.seek(self._offset)
            return file.read().decode(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """The log's objects; what else is in it, `stray` gives."""
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def stray(self) -> list[str]:
        """The lines of all that it ever wrote that are no JSON object of the log's form."""
        out = (self.folder / "stdout.log").read_text(errors="replace").splitlines()
        return out + strays(self.stderr_path.read_text(errors="replace"))

    # -- asking

    def get(self, path: str) -> tuple[int, str]:
        """Return the status code and the body of a request; 0 where nothing answers."""
        try:
            with urllib.request.urlopen(f"http://{self.listen}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def status(self) -> dict[str, Any]:
        code, body = self.get("/status")
        return json.loads(body) if code == 200 else {}

    def wait_ready(self, timeout: float = PATIENCE) -> Penstock:
        self.wait_for(lambda: self.get("/readyz")[0] == 200, timeout, "ready")
        return self

    def wait_for(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Poll until `condition` holds; fails with the log's end if the process ends before."""
        deadline = time.monotonic() + timeout
        while not holds(condition, 0.05):
            if not self.running:
                code = self.process.returncode
                raise AssertionError(f"not {what}: ended with {code}\n{self.log()[-3000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not {what} after {timeout:g} s\n{self.log()[-3000:]}")

    # -- ending

    def tree(self) -> list[psutil.Process]:
        """The process and all that descend from it and live: the JVM, Python daemons, workers.

        The shell that started the JVM may leave it a child that has ended, and that nobody waits for.
        """
        found: list[psutil.Process] = []
        for pid in (self.process.pid, *self.process.shared) if self.running else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                found += [p for p in (root, *root.children(recursive=True)) if _lives(p)]
        return found

    def stop(self, number: int = signal.SIGTERM, timeout: float = PATIENCE) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = PATIENCE) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {timeout:g} s\n{self.log()[-3000:]}"
            ) from None

    def kill_tree(self) -> None:
        """SIGKILL to every process of it at once."""
        kill(self.tree())
        if self._process is not None:
            self._process.wait(PATIENCE)

    def __enter__(self) -> Penstock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            family = self.tree()
            kill(family)
            self._process.wait(PATIENCE)


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to each, the gone ones passed by."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


WORKER = "penstock.spark.daemon"
"""What runs tasks of Spark's, and the daemon that forks it."""
CAPTURE = "pyspark.sql.streaming.python_streaming_source_runner"
"""What captures a source."""
# A fork has another's command line, and a name of its own.
_NAMES = {WORKER: "worker", CAPTURE: "python_streamin"}


def runs(process: psutil.Process, module: str) -> bool:
    """Whether it runs `WORKER` or `CAPTURE`; one that is gone does not."""
    with contextlib.suppress(psutil.Error, OSError):
        command = process.cmdline()
        name = Path(f"/proc/{process.pid}/comm").read_text().strip()
        # A fork's client has the module among its arguments.
        return name == _NAMES[module] or command[1:3] == ["-m", module]
    return False


def spark_workers(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those of a tree that run tasks of Spark's, without the daemon that they were forked from."""
    daemons = {process.pid for process in processes if runs(process, WORKER)}
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.ppid() in daemons:
                found.append(process)
    return found


def left_of(family: list[psutil.Process], timeout: float = PATIENCE) -> list[str]:
    """Wait for processes to end, and name those that don't."""
    _, alive = psutil.wait_procs(family, timeout)
    return [_command(process) for process in alive]


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


@contextlib.contextmanager
def started(folder: Path, *options: str, own_jvm: bool = False) -> Iterator[Penstock]:
    """A pipeline that is ready; whatever is left of it is killed at the end."""
    with Penstock(folder, *options, own_jvm=own_jvm) as pipeline:
        yield pipeline.start().wait_ready()


def strays(log: str) -> list[str]:
    """Return the lines of a log that are no JSON object of its form."""
    found = []
    for line in log.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or not {"event", "level", "timestamp"} <= set(event):
            found.append(line)
    return found
