"""CPU and memory of a process and all it started, read from /proc.

Memory is the sum of the PSS: pages that processes share are split between them, so forked Python
workers are not counted twice. The RSS sum, which counts them each time, stands beside it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes over a process tree."""

    pss: int
    rss: int


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
    pss = rss = 0
    for process in tree(pid):
        # A process that ends meanwhile has no file any more, or an empty one.
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    pss += int(line.split()[1]) * 1024
                elif line.startswith("Rss:"):
                    rss += int(line.split()[1]) * 1024
    return Memory(pss, rss)


class PeakMemory:
    """Samples a tree's memory in a thread, for as long as the `with` block runs."""

    def __init__(self, pid: int, every: float = 0.5) -> None:
        self._pid = pid
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak = Memory(0, 0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._every):
            now = memory(self._pid)
            self.peak = Memory(max(self.peak.pss, now.pss), max(self.peak.rss, now.rss))


def cpu_percent(pid: int, seconds: float) -> float:
    """Return the share of one core, in percent, that the tree uses for the next `seconds`."""
    before, start = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - start)
