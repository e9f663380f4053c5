"""Which worker of pytest-xdist runs which file: the longest first, so that none begins at the end.

`seconds.txt` has how long each file took when it was last written, by `pytest --write-seconds`. A file
that it lacks is taken for a short one.
"""

from __future__ import annotations

from collections import Counter
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


@cache
def known() -> dict[str, float]:
    """Return the seconds of the files that are not short."""
    lines = (line.split() for line in KNOWN.read_text().splitlines())
    return {file: float(seconds) for seconds, file in lines}


def longest_first(items: list[pytest.Item]) -> None:
    """Order tests by their files' seconds; those of a file, and of files alike, stay as they are."""
    seconds = known()
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


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


class Seconds:
    """Sums up how long each file took, and shows the longest."""

    def __init__(self, config: pytest.Config) -> None:
        self._write = bool(config.getoption("write_seconds"))
        self._files: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files[file_of(report.nodeid)] += report.duration  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        found = [(f"{seconds:7.1f}", file) for file, seconds in self._files.most_common()]
        terminalreporter.section(f"slowest {_SHOWN} files")
        for seconds, file in found[:_SHOWN]:
            terminalreporter.line(f"{seconds}s {file}")
        if self._write:
            lines = [f"{seconds} {file}\n" for seconds, file in found if float(seconds) >= _LEAST]
            KNOWN.write_text("".join(lines))
