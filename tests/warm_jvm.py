"""JVMs of local sessions that serve one run after the other: a start of Java and Spark takes seconds.

They stand where `penstock.spark.launch` starts one. Each belongs to one run at a time, and is used again
where that has ended well: its session has stopped then.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.spark import launch
from penstock.spark.jvm import Jvm
from penstock.spark.settings import local_master, settings_of

_MASTER: Final = local_master("local[*]")
_SETTINGS: Final = settings_of(_MASTER)
CAN_BE_LENT: Final = hasattr(os, "pidfd_open")
"""Linux alone tells how a process is that is no child."""
_RUNS: Final = 12
"""How many runs a JVM serves: something of each stays in its memory."""
_GATEWAY, _KEPT = "gateway", "kept"


class _Process:
    """A process that is no child of those who ask about it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._file = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return None while it runs; how it ended, its parent alone learns."""
        return -signal.SIGKILL if select.select([self._file], [], [], 0)[0] else None

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, signal.SIGKILL)


class WarmJvm(Jvm):
    """A JVM of the process that forks runs; a run connects to it as to one of its own."""

    def __init__(self) -> None:
        launch._prepare(_MASTER)
        super().__init__(_MASTER, _SETTINGS, fork=True)
        atexit.unregister(self._leave)  # a fork's end is not its end
        super().fork()
        assert self.process is not None
        assert self._forks is not None
        assert self._forks.pid is not None
        self._started = self.process  # has its standard input open
        self.processes = [_Process(self._started.pid), _Process(self._forks.pid)]
        """The JVM's, and the one that its Python processes are forked from."""
        self.process = self.processes[0]  # type: ignore[assignment]
        self.runs = 0

    @property
    def lives(self) -> bool:
        """Whether none of its processes has ended."""
        return all(process.poll() is None for process in self.processes)

    def end(self) -> None:
        """Kill it, and what its Python processes are forked from, which takes them along."""
        for process in self.processes:
            process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def fork(self) -> None:
        """Do nothing: the process that forks has done it."""

    def _address(self) -> tuple[int, str] | None:
        """Return it each time, though it is deleted by each that has connected."""
        gateway, kept = self._folder / _GATEWAY, self._folder / _KEPT
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(kept, gateway)
        found = super()._address()
        if found is not None:
            with contextlib.suppress(FileExistsError):
                os.link(gateway, kept)
        return found


class WarmJvms:
    """Those of one process that forks, which gets a folder of its own for what they write."""

    def __init__(self) -> None:
        # No TemporaryDirectory: each fork's end would delete it.
        self._folder = tempfile.mkdtemp(prefix="penstock-test-jvms-")
        os.chdir(self._folder)
        os.environ["SPARK_LOCAL_DIRS"] = self._folder
        self._idle: list[WarmJvm] = []
        self._busy: dict[int, WarmJvm] = {}

    def take(self) -> WarmJvm:
        """Return one for the run that is forked next."""
        self._idle = [jvm for jvm in self._idle if jvm.lives]
        return self._idle.pop() if self._idle else WarmJvm()

    def lend(self, jvm: WarmJvm, pid: int) -> None:
        """Take in which run has it."""
        self._busy[pid] = jvm

    def give_back(self, pid: int, code: int) -> None:
        """Have the JVM of a run that has ended serve another, or end it with that one."""
        if (jvm := self._busy.pop(pid, None)) is None:
            return
        jvm.runs += 1
        if code == 0 and jvm.runs < _RUNS and jvm.lives:
            self._idle.append(jvm)
        else:
            jvm.end()

    def close(self) -> None:
        """End all of them."""
        for jvm in (*self._idle, *self._busy.values()):
            jvm.end()
        shutil.rmtree(self._folder, ignore_errors=True)


def use(jvm: WarmJvm) -> None:
    """Have this process, a fork, run its session in `jvm`, where that fits its settings."""

    def made(
        master: str, settings: Mapping[str, str], record: Path | None = None, *, fork: bool = False
    ) -> Jvm:
        own = {name: value for name, value in settings.items() if name.startswith("spark.driver.")}
        if record is None and master == _MASTER and own.items() <= _SETTINGS.items():
            return jvm
        return Jvm(master, settings, record, fork=fork)

    launch.Jvm = made  # type: ignore[assignment, attr-defined]
