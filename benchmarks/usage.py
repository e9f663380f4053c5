"""CPU and memory of a process and all it started, read from /proc.

Memory is the sum of the PSS: pages that processes share are split between them, so forked Python
workers are not counted twice. The RSS sum, which counts them each time, stands beside it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes over a process tree."""

    pss: int = 0
    rss: int = 0
    java: int = 0  # the part of `pss` that JVMs hold
    processes: int = 0

    def most(self, other: Memory) -> Memory:
        """Return the greater of each figure."""
        return Memory(
            max(self.pss, other.pss),
            max(self.rss, other.rss),
            max(self.java, other.java),
            max(self.processes, other.processes),
        )


def tree(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants that live now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def cpu_seconds(pid: int) -> float:
    """Return the CPU time the tree has used so far, children that have ended included."""
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def memory(pid: int) -> Memory:
    """Return what the tree holds now."""
    pss = rss = java = 0
    processes = tree(pid)
    for process in processes:
        # A process that ends meanwhile has no file any more, or an empty one.
        with contextlib.suppress(OSError, KeyError, psutil.NoSuchProcess):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            sizes = dict(line.split()[:2] for line in rollup.splitlines()[1:])
            mine = int(sizes["Pss:"]) * 1024
            pss += mine
            rss += int(sizes["Rss:"]) * 1024
            java += mine if process.name() == "java" else 0
    return Memory(pss, rss, java, len(processes))


class Strangers:
    """How busy the machine was meanwhile with what is none of ours, from here to `percent`.

    A benchmark on a machine that others use measures the others too; the reader must be told. Ours are
    looked at every second: of a process that ends without its parent, as a JVM may, nothing else tells.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._ours: dict[tuple[int, float], float] = {}
        self._sample()
        self._before = _busy() - sum(self._ours.values())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def percent(self) -> float:
        """Return the strangers' mean share of one core, in percent, since this was made."""
        self._ended.set()
        self._thread.join()
        self._sample()
        used = _busy() - sum(self._ours.values()) - self._before
        return max(0.0, 100 * used / (time.monotonic() - self._start))

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self._sample()

    def _sample(self) -> None:
        for process in tree(os.getpid()):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._ours[process.pid, process.create_time()] = times.user + times.system


def _busy() -> float:
    """Return the seconds that the machine's cores have worked, all together."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


class PeakMemory:
    """Samples a tree's memory in a thread, for as long as the `with` block runs."""

    def __init__(self, pid: int, every: float = 0.5) -> None:
        self._pid = pid
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak = Memory()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._every):
            self.peak = self.peak.most(memory(self._pid))


def cpu_percent(pid: int, seconds: float) -> float:
    """Return the share of one core, in percent, that the tree uses for the next `seconds`."""
    before, start = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - start)
