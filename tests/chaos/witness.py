"""Watches what a pipeline reports of itself, each second, and compares it with what really moved.

The truth is the test's own: how many messages the writers have committed, how many the stream holds,
whether other sinks got any meanwhile, and when a fault was under way. Two rules:

* never better: where no sink got anything for `STILL` seconds though messages waited all the while,
  `/readyz` is not 200 and `penstock status` does not exit with 0, but for the first `FRESH` seconds
  after they reported otherwise: what was got over has begun to move, and may first repeat messages;
* never worse: where everything committed was delivered promptly for `CALM` seconds, and no fault was
  under way meanwhile, `/readyz` is 200 and `penstock status` exits with 0. It may exit with 1 for
  consumers that publish what their stream holds, and for syncs of an API that fails: those are not
  counted here.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from ..pipeline import Penstock, penstock
from ..waits import await_end

STILL: Final = 15.0
FRESH: Final = 12.0
CALM: Final = 10.0
PROMPT: Final = 3.0
"""Seconds after its commit by which a message is delivered where nothing is wrong."""
_TICK: Final = 1.0


@dataclass(frozen=True)
class Sample:
    """What moved until `at`: messages committed and delivered, and how far other sinks are."""

    at: float
    committed: int
    delivered: int
    elsewhere: int = 0


@dataclass(frozen=True)
class Report:
    """What was reported: asked at `asked`, answered at `at`; `good` is 200, or exit code 0."""

    by: str
    asked: float
    at: float
    good: bool
    text: str = ""

    @property
    def of_others(self) -> bool:
        """Whether `penstock status` names only consumers that are behind, and syncs of a failing API."""
        problems = [line for line in self.text.splitlines() if line.startswith("! ")]
        return bool(problems) and all(
            (line.startswith("! consumer ") and "It is behind." in line)
            or line.startswith("! sync ")
            for line in problems
        )


@dataclass
class Evidence:
    """All that was seen; `faults` are the spans in which something was broken on purpose."""

    samples: list[Sample] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    faults: list[tuple[float, float]] = field(default_factory=list)

    def lies(self) -> Iterator[tuple[str, Report]]:
        """Yield each report that was not true, with `better` or `worse`."""
        bad: dict[str, float] = {}
        for report in self.reports:
            if not report.good:
                bad[report.by] = report.at
            fresh = report.asked - bad.get(report.by, -FRESH) < FRESH
            if report.good and not fresh and self._still(report.asked - STILL, report.at):
                yield "reported better than it was", report
            elif (
                not report.good
                and not report.of_others
                and self._calm(report.asked - CALM, report.at)
            ):
                yield "reported worse than it was", report

    def _still(self, first: float, end: float) -> bool:
        """Whether messages waited at `first`, and no sink got any until `end`."""
        span = self._between(first, end)
        if span is None or span[-1].elsewhere != span[0].elsewhere:
            return False
        return span[-1].delivered == span[0].delivered < span[0].committed

    def _calm(self, first: float, end: float) -> bool:
        """Whether each message was delivered promptly, with no fault, from `first` to `end`."""
        span = self._between(first, end)
        if span is None or any(begin < end and over > first for begin, over in self.faults):
            return False
        return all(self._committed(sample.at - PROMPT) <= sample.delivered for sample in span)

    def _between(self, first: float, end: float) -> Sequence[Sample] | None:
        """Return the samples that cover a span, None where some of it was not watched."""
        before = bisect.bisect_right(self.samples, first, key=lambda sample: sample.at) - 1
        after = bisect.bisect_left(self.samples, end, key=lambda sample: sample.at)
        if before < 0 or after == len(self.samples):
            return None
        return self.samples[before : after + 1]

    def _committed(self, at: float) -> int:
        found = bisect.bisect_left(self.samples, at, key=lambda sample: sample.at)
        return self.samples[max(found - 1, 0)].committed


Ask = Callable[[], tuple[bool, str]]
"""Returns whether what was asked is well, and what it answered."""


class Witness:
    """Counts and asks, each in a thread of its own, from `start` to `stop`.

    `committed` and `delivered` count messages; `elsewhere` grows as other sinks get some. What can't be
    counted as its server is away may raise: then nothing was delivered meanwhile. `asks` are the ways to
    ask, by name.
    """

    def __init__(
        self,
        committed: Callable[[], int],
        delivered: Callable[[], int],
        elsewhere: Callable[[], int],
        asks: Mapping[str, Ask],
    ) -> None:
        self.evidence = Evidence()
        self._committed = committed
        self._delivered = delivered
        self._elsewhere = elsewhere
        self._stopping = threading.Event()
        looks = {"samples": self._sample} | {
            name: partial(self._report, name, ask) for name, ask in asks.items()
        }
        self._threads = [
            threading.Thread(target=self._each_second, args=(look,), name=name, daemon=True)
            for name, look in looks.items()
        ]

    def start(self) -> None:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def fault(self) -> Iterator[None]:
        """Mark a span in which something is broken, or not yet got over."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.evidence.faults.append((begin, time.monotonic()))

    def stop(self) -> None:
        """Watch no more."""
        self._stopping.set()
        await_end(*self._threads)

    def _each_second(self, look: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            look()
            self._stopping.wait(max(0.0, began + _TICK - time.monotonic()))

    def _sample(self) -> None:
        committed = self._committed()
        last = self.evidence.samples[-1] if self.evidence.samples else Sample(0.0, 0, 0)
        delivered, elsewhere = last.delivered, last.elsewhere
        with contextlib.suppress(Exception):  # the server may be gone, stopped or coming up
            delivered = max(delivered, self._delivered())
        with contextlib.suppress(Exception):
            elsewhere = max(elsewhere, self._elsewhere())
        self.evidence.samples.append(Sample(time.monotonic(), committed, delivered, elsewhere))

    def _report(self, by: str, ask: Ask) -> None:
        asked = time.monotonic()
        good, text = ask()
        self.evidence.reports.append(Report(by, asked, time.monotonic(), good, text))


def ask_readyz(pipeline: Penstock) -> tuple[bool, str]:
    """Ask `/readyz` of a pipeline; what does not answer is not ready."""
    code, body = pipeline.get("/readyz")
    return code == 200, f"{code} {body[:300]}"


def ask_command(*arguments: str, cwd: Path) -> tuple[bool, str]:
    """Run a command of Penstock's that exits with 0 where all is well."""
    ran = penstock(*arguments, cwd=cwd)
    return ran.returncode == 0, f"{ran.returncode} {ran.stdout[-600:]} {ran.stderr[-300:]}"
