"""One run of the fault test: servers, writers and pipeline up, faults, catching up, verdict."""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from penstock.embedded.handles import Database, JetStream, Msg
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

from ..pipeline import PATIENCE, Penstock
from .changes import Changes
from .expected import bodies, judge, said_by
from .faults import Supervisor, World
from .syncs import add_stream
from .verdict import Verdict, compare, read_all
from .witness import Witness
from .workloads import Tables, Workload
from .writer import Writer

STREAM = "CHAOS"
_RECOVERY_SECONDS = 400.0
_WRITERS = 2
_PROOF = 20  # messages from after a fault that show that it was got over
_OVERLAP = 0.25  # of the faults come before the last one is got over


@dataclass
class Outcome:
    """What a run did and found."""

    seed: int
    verdict: Verdict
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    starts: int = 1
    exits: list[int] = field(default_factory=list)
    writers: dict[str, int] = field(default_factory=dict)
    reports: int = 0
    syncs: str = ""
    """What the syncs beside the tables have done."""
    log_tail: str = ""

    @property
    def passed(self) -> bool:
        return not self.verdict.violations

    def as_dict(self) -> dict[str, Any]:
        """Return it for a JSON report."""
        return {
            "seed": self.seed,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "committed": self.verdict.committed,
            "delivered": self.verdict.delivered,
            "keys": self.verdict.keys,
            "writers": self.writers,
            "reports_judged": self.reports,
            "syncs": self.syncs,
            "faults": dict(self.faults),
            "recovery_seconds": {
                name: {"median": round(median(times), 1), "max": round(max(times), 1)}
                for name, times in self.recoveries.items()
            },
            "pipeline_starts": self.starts,
            "pipeline_exit_codes": dict(Counter(map(str, self.exits))),
            "violations": dict(self.verdict.violations),
            "examples": self.verdict.examples,
        }


def _answers(pipeline: Penstock) -> bool:
    return pipeline.get("/healthz")[0] != 0


class Session:
    """Runs until `duration` is over, or until each of `faults` was done once where that is given."""

    def __init__(
        self,
        *,
        duration: float,
        seed: int,
        faults: Sequence[str] | None = None,
        keys: int = 200,
        rate: float = 300,
        workload: Workload | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._duration = duration
        self._seed = seed
        self._fixed = faults
        self._keys = keys
        self._rate = rate
        self._workload = workload or Tables()
        self._syncs = self._workload.syncs
        self._report = report
        self._random = random.Random(seed)
        self._writers: list[Writer] = []
        self._outcome = Outcome(seed, Verdict())

    def run(self) -> Outcome:
        started = self._started = time.monotonic()
        with contextlib.ExitStack() as stack:
            folder = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(
                        prefix="penstock-chaos-", ignore_cleanup_errors=True
                    )
                )
            )
            world = self._start(folder, stack)
            self._stream = stack.enter_context(JetStream(world.nats.url, error_cb=_ignore_error))
            # Longer than the run: nothing may be there twice.
            window = self._duration + 3600
            self._stream.add_stream(STREAM, "chaos.>", duplicate_window=window)
            if world.changes is not None:
                world.changes.streams = self._stream
            if self._syncs is not None:
                add_stream(self._stream, window)
            for pipeline, supervisor in zip(world.pipelines, world.supervisors, strict=True):
                pipeline.start()
                stack.callback(supervisor.stop)
                supervisor.start()
            for pipeline in world.pipelines:
                pipeline.wait_ready(_RECOVERY_SECONDS)
            self._report(f"ready after {time.monotonic() - started:.0f} s; seed {self._seed}")
            changes = world.changes
            self._witness = Witness(
                self._committed, self._delivered, lambda: changes.streamed() if changes else 0,
                self._workload.asks(world),
            )  # fmt: skip
            self._write_and_break(world)
            self._end(world)
        self._outcome.seconds = time.monotonic() - started
        return self._outcome

    def _start(self, folder: Path, stack: contextlib.ExitStack) -> World:
        postgres = stack.enter_context(EmbeddedPostgres(folder / "postgres"))
        nats = stack.enter_context(EmbeddedNats(folder / "nats"))
        database = Database("chaos", postgres.create_database("chaos"))
        stack.callback(database.close)
        self._workload.prepare(database, nats.url)
        if self._syncs is not None:
            stack.enter_context(self._syncs)
        found = self._workload.processes(folder, database, nats.url)
        pipelines = [stack.enter_context(pipeline) for pipeline in found]
        self._writers = [
            self._workload.writer(
                database.url, number, self._keys // _WRITERS, self._rate / _WRITERS, self._seed
            )
            for number in range(_WRITERS)
        ]
        supervisors = [Supervisor(pipeline) for pipeline in pipelines]
        changes = self._workload.changes(pipelines, database, nats.url, self._random)
        return World(postgres, nats, database, pipelines, supervisors, self._random, changes)

    # -- faults

    def _write_and_break(self, world: World) -> None:
        deadline = time.monotonic() + self._duration
        for writer in self._writers:
            writer.start()
        self._witness.start()
        try:
            names = list(self._fixed or ())
            faults = list(self._workload.faults)
            while names or (self._fixed is None and time.monotonic() < deadline):
                if not names:
                    names = self._random.sample(faults, len(faults))
                self._pause(self._random.uniform(0.3, 3.0))
                with self._witness.fault():
                    self._fault(world, names.pop(0))
                if self._outcome.verdict.violations or any(w.error for w in self._writers):
                    return
        finally:
            for writer in self._writers:
                writer.stop()
            for writer in self._writers:
                writer.join(PATIENCE)

    def _fault(self, world: World, name: str) -> None:
        outcome = self._outcome
        outcome.faults[name] += 1
        try:
            self._workload.faults[name](world)
        except AssertionError as error:
            outcome.log_tail = world.log()
            outcome.verdict.blame("fault", f"{name}: {error}")
            return
        ended = time.monotonic()
        # What was committed before may have been on its way: some more has to arrive.
        committed = self._committed() + _PROOF
        if self._fixed is None and self._random.random() < _OVERLAP:
            self._report(f"{name}; the next one follows at once")
            return
        with contextlib.suppress(psycopg.OperationalError):
            self._workload.disturb(world.database)
        if not self._caught_up(committed, _RECOVERY_SECONDS):
            outcome.log_tail = world.log()
            outcome.verdict.blame(
                "not recovered", f"{_RECOVERY_SECONDS:g} s after {name} rows were outstanding"
            )
            return
        took = time.monotonic() - ended
        outcome.recoveries.setdefault(name, []).append(took)
        self._report(f"{name}: recovered in {took:.1f} s, {self._committed()} messages committed")

    def _committed(self) -> int:
        return sum(writer.committed for writer in self._writers)

    def _delivered(self) -> int:
        """Return how many messages the stream has; raises where its server does not answer."""
        return self._stream.info(STREAM).state.last_seq

    def _caught_up(self, count: int, timeout: float) -> bool:
        """Wait until the stream has as many messages as were committed."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # the server may be coming up
                if self._delivered() >= count:
                    return True
            self._pause(0.1)
        return False

    @staticmethod
    def _pause(seconds: float) -> None:
        threading.Event().wait(seconds)

    # -- the end

    def _end(self, world: World) -> None:
        outcome, blame = self._outcome, self._outcome.verdict.blame
        caught_up = self._caught_up(self._committed(), _RECOVERY_SECONDS)
        if not caught_up:
            blame("not caught up", f"{_RECOVERY_SECONDS:g} s after the last fault")
            outcome.log_tail = outcome.log_tail or world.log()
        elif world.changes is not None:
            try:
                world.changes.end()
            except AssertionError as error:
                blame("not caught up", f"after changes of the configuration: {error}")
                outcome.log_tail = outcome.log_tail or world.log()
        if self._syncs is not None:
            self._syncs.settle(world.database.url, world.nats.url)
        self._witness.stop()
        for supervisor in world.supervisors:
            supervisor.stop()
        outcome.starts = sum(supervisor.starts for supervisor in world.supervisors)
        outcome.exits = [code for supervisor in world.supervisors for code in supervisor.exits]
        working = world.pipeline
        for pipeline in sorted(world.pipelines, key=lambda it: it is working):
            # It may come up this moment: it takes signals once it answers, and what it still delivers
            # is judged too.
            if not pipeline.running:
                continue
            pipeline.wait_for(partial(_answers, pipeline), PATIENCE, "up")
            if (code := pipeline.stop()) != 0:
                blame("exit code", f"{code} after SIGTERM")
        histories = {key: steps for w in self._writers for key, steps in w.histories.items()}
        messages = read_all(world.nats.url, STREAM)
        found = compare(histories, messages, self._workload.read)
        if world.changes is not None and world.changes.made:
            self._judge_changes(world.changes, world.nats.url, messages, found)
        found.violations += outcome.verdict.violations
        found.examples = outcome.verdict.examples + found.examples
        outcome.verdict = found
        if self._syncs is not None:
            outcome.syncs = self._syncs.judge(world.database.url, world.nats.url, found)
        if found.violations and not outcome.log_tail:
            outcome.log_tail = world.log()
        outcome.reports = len(self._witness.evidence.reports)
        for kind, report in self._witness.evidence.lies():
            found.blame(kind, f"{report.by} at {report.asked - self._started:.1f} s: {report.text}")
        for writer in self._writers:
            if writer.error is not None:
                found.blame("writer", f"{type(writer.error).__name__}: {writer.error}")
            if writer.is_alive():
                found.blame("writer", f"{writer.name} did not end")
            for name in ("transactions", "rolled_back", "unknown", "reconnects"):
                outcome.writers[name] = outcome.writers.get(name, 0) + getattr(writer, name)
        world.database.close()  # a restart of the server broke it
        for difference in self._workload.differences(world.database, self._writers):
            found.blame("model", difference)

    @staticmethod
    def _judge_changes(changes: Changes, url: str, messages: list[Msg], found: Verdict) -> None:
        """Judge what was made in the middle by what the sink of the file has."""
        committed = dict(said_by(bodies(messages)))
        for name, expected in changes.made.items():
            judge(name, expected, committed, said_by(bodies(read_all(url, expected.stream))), found)
        for name, expected in changes.pulled.items():
            if expected.got is not None:
                judge(name, expected, committed, said_by(expected.got), found)


async def _ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that we killed."""
