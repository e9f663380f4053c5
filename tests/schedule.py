"""Which worker of pytest-xdist runs which file: the longest first, so that none begins at the end.

`seconds.txt` has how long each file took when it was last written, by `pytest --write-seconds`. A file
that it lacks is taken for a short one.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter
    from xdist.workermanage import WorkerController

KNOWN: Final = Path(__file__).with_name("seconds.txt")
_LEAST: Final = 5.0
_SOON: Final = 5.0
_SHOWN: Final = 20
_CPU: Final = "cpu"


@cache
def known() -> dict[str, float]:
    """Return the seconds of the files that are not short."""
    lines = (line.split() for line in KNOWN.read_text().splitlines())
    return {file: float(seconds) for seconds, file in lines}


def longest_first(items: list[pytest.Item]) -> None:
    """Order tests by their files' seconds; those of a file, and of files alike, stay as they are."""
    seconds = known()
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def _cpu() -> float:
    """Return the seconds of CPU that this process has used, with those below it that have ended."""
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(of.ru_utime + of.ru_stime for of in used)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives a worker that is about to be idle the longest file that is left.

    A worker has to know its next test before it begins the last one of a file. As that may take
    minutes, the file that it gets ahead of time is a short one.
    """

    def _reschedule(self, node: WorkerController) -> None:
        if not node.shutting_down and self.workqueue:
            if self._pending_of(self.assigned_work[node]) > 1:
                return
            if self._seconds_left(node) > _SOON:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._reschedule(node)

    def _seconds_left(self, node: WorkerController) -> float:
        """Return how long a worker may be busy with the files that it has begun or is to begin."""
        seconds = known()
        return sum(
            seconds.get(file, 0.0)
            for file, tests in self.assigned_work[node].items()
            if not all(tests.values())
        )


class Cpu:
    """Notes with each report of a worker what CPU its process used for it, and those that have ended."""

    def __init__(self) -> None:
        self._last = _cpu()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = _cpu()
        report.user_properties.append((_CPU, now - self._last))
        self._last = now
        return report


class Seconds:
    """Sums up how long each file took, and its CPU, and shows the longest."""

    def __init__(self, config: pytest.Config) -> None:
        self._write = bool(config.getoption("write_seconds"))
        self._files: Counter[str] = Counter()
        self._cpu: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self._files[file] += report.duration  # type: ignore[assignment]  # the counter is of whole numbers
        self._cpu[file] += sum(
            float(str(used)) for of, used in report.user_properties if of == _CPU
        )  # type: ignore[assignment]  # the counter is of whole numbers

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        found = [(f"{seconds:7.1f}", file) for file, seconds in self._files.most_common()]
        terminalreporter.section(f"slowest {_SHOWN} files, of {self._cpu.total():.0f} s of CPU")
        for seconds, file in found[:_SHOWN]:
            terminalreporter.line(f"{seconds} s {self._cpu[file]:7.1f} s of CPU  {file}")
        if self._write:
            took = {
                file: s for file, s in {**known(), **self._files}.items() if Path(file).exists()
            }
            longest = sorted(took.items(), key=lambda each: -each[1])
            lines = [f"{s:7.1f} {file}\n" for file, s in longest if s >= _LEAST]
            KNOWN.write_text("".join(lines))
