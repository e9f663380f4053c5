"""Sides of the comparison, their crews of workers, and what they took of the machine."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import usage
from benchmarks.contenders import HERE, ContenderError, Running
from benchmarks.rig import say
from benchmarks.streams.bed import Bed
from benchmarks.streams.keepalive import Client, HttpError
from benchmarks.streams.progress import Harvest, Mark, Progress, acked, rate
from benchmarks.streams.worker import Spec
from penstock.embedded.process import free_port
from penstock.streams.records import StreamRecord

SIDES = {
    "http": "`penstock api`, a process of its own; each worker a process with one connection",
    "engine": "what the API stands on; engine and workers in one process",
    "pgmq": "SQL: pgmq.read and pgmq.delete, prepared; each worker a process with one connection",
}
WARM_UP_S = 1.0
_START_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 60
_SLOW_STOP_S = 10
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds so far, or µs a message."""

    postgres: float
    api: float
    workers: float

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.postgres + self.api + self.workers

    def since(self, before: Cost, messages: int) -> Cost:
        """Return the µs a message from `before` to here."""
        factor = 1e6 / max(messages, 1)
        return Cost(
            (self.postgres - before.postgres) * factor,
            (self.api - before.api) * factor,
            (self.workers - before.workers) * factor,
        )

    def __str__(self) -> str:
        return f"{self.postgres:.1f} + {self.api:.1f} + {self.workers:.1f} µs"


@dataclass(frozen=True, slots=True)
class Sample:
    """Where the workers are at a moment, and what was used by then."""

    marks: list[Mark]
    cost: Cost

    @property
    def acked(self) -> int:
        """Return how many messages were acked."""
        return acked(self.marks)

    def rate_since(self, before: Sample) -> float:
        """Return messages a second from `before` to here."""
        return rate(before.marks, self.marks)

    def cost_since(self, before: Sample) -> Cost:
        """Return the CPU a message from `before` to here, in µs."""
        return self.cost.since(before.cost, self.acked - before.acked)


@dataclass(slots=True)
class Crew:
    """Workers that are ready to begin."""

    bed: Bed
    running: Running
    api: Running | None
    spec: Spec
    progress: Progress

    def go(self) -> None:
        """Begin."""
        assert self.running.process.stdin is not None
        self.running.process.stdin.write(b"go\n")
        self.running.process.stdin.flush()

    def sample(self) -> Sample:
        """Return where they are now."""
        pid = self.bed.server.pid
        return Sample(
            self.progress.marks(),
            Cost(
                usage.cpu_seconds(pid) if pid else 0.0,
                usage.cpu_seconds(self.api.pid) if self.api else 0.0,
                usage.cpu_seconds(self.running.pid),
            ),
        )

    def run_for(self, seconds: float) -> Sample:
        """Let them work for a while; return where they are then."""
        deadline = time.monotonic() + seconds
        while self.running.process.poll() is None and time.monotonic() < deadline:
            time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0)))
        self.running.check()
        return self.sample()

    def warm_up(self) -> Sample:
        """Let them begin, until each has acked something; return where they are then."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        sample = self.run_for(WARM_UP_S)
        while any(not mark.acked for mark in sample.marks) and time.monotonic() < deadline:
            sample = self.run_for(_POLL_S)
        return sample

    def wait(self, timeout: float) -> Sample:
        """Wait until they have nothing left; return where they are then."""
        assert self.running.process.stdout is not None
        ready, _, _ = select.select([self.running.process.stdout], [], [], timeout)
        if not ready:
            raise ContenderError(f"{self.running.name} are not done after {timeout:.0f} s")
        _expect(self.running, b"done\n")
        return self.sample()

    def stop(self) -> Sample:
        """Have them end after the batch that they have; return where they are then."""
        self.progress.stop()
        return self.wait(_STOP_TIMEOUT_S)

    def harvests(self) -> list[Harvest]:
        """Return what each received, once they are done; raises if a message came twice."""
        count = 1 if self.spec.kind == "engine" else self.spec.workers
        harvests = [Harvest.read(self.spec.harvest_of(number)) for number in range(count)]
        if len(self.spec.consumers) <= 1:
            ids = [number for harvest in harvests for number in harvest.ids]
            if len(set(ids)) != len(ids):
                raise ContenderError(
                    f"{self.running.name}: {len(ids)} deliveries of {len(set(ids))} messages"
                )
        return harvests


@contextmanager
def backlog(
    bed: Bed, side: str, stream: StreamRecord | None, messages: int, groups: int
) -> Iterator[list[str]]:
    """Have a whole backlog before the workers of a side; gives the consumers to use."""
    if side != "pgmq":
        assert stream is not None
        yield bed.consumers(stream)
        return
    bed.fill_queue(messages, groups)
    try:
        yield []
    finally:
        bed.empty_queue()


@contextmanager
def crew(
    bed: Bed,
    side: str,
    consumers: Sequence[str],
    *,
    batch: int,
    workers: int,
    wait_ms: int = 1000,
    for_ever: bool = False,
    limit: int = sys.maxsize,
    url: str | None = None,
) -> Iterator[Crew]:
    """Start the workers of a side, and the API where they need one (and `url` names none)."""
    folder = bed.folder / f"{bed.number()}-{side}"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        api = None
        if side == "http" and url is None:
            api, url = stack.enter_context(run_api(bed, folder))
        spec = Spec(
            kind=side,
            url=url or bed.url,
            token=bed.token,
            consumers=list(consumers),
            batch=batch,
            wait_ms=wait_ms,
            for_ever=for_ever,
            limit=limit,
            workers=workers,
            progress=folder / "progress",
            harvest=folder / "harvest",
        )
        progress = stack.enter_context(Progress.create(spec.progress, workers))
        command = [sys.executable, "-m", "benchmarks.streams.worker", spec.model_dump_json()]
        running = stack.enter_context(
            start(f"workers of {side}", command, folder / "workers.log", HERE.parent, talks=True)
        )
        _expect(running, b"ready\n")
        yield Crew(bed, running, api, spec, progress)


@contextmanager
def run_api(bed: Bed, folder: Path) -> Iterator[tuple[Running, str]]:
    """Run `penstock api` over the store; gives it and its URL."""
    url = f"http://127.0.0.1:{free_port()}"
    command = penstock(bed, folder, "api", "--listen", url.removeprefix("http://"))
    with start("penstock api", command, folder / "api.log", folder) as running:
        wait_for_api(running, url, b"/v1/http-consumers", bed.token)
        yield running, url


def penstock(bed: Bed, folder: Path, *arguments: str) -> list[str]:
    """Return the command line of `penstock` over the store."""
    file = folder / "penstock.yaml"
    file.write_text(json.dumps({"store": bed.url}))  # JSON is YAML
    return [sys.executable, "-m", "penstock", *arguments, "-c", str(file)]


def wait_for_api(running: Running, url: str, path: bytes, token: str) -> None:
    """Wait until a GET of `path` is answered with 200."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        running.check()
        try:
            with Client(url, token, timeout=5) as client:
                client.get(path)
                return
        except HttpError as error:
            if time.monotonic() > deadline:
                raise ContenderError(
                    f"{running.name} does not answer: {error}; its last output:\n{running.tail()}"
                ) from None
        time.sleep(_POLL_S)


def _expect(running: Running, line: bytes) -> None:
    assert running.process.stdout is not None
    got = running.process.stdout.readline()
    if got != line:
        running.process.wait(_STOP_TIMEOUT_S)
        running.check()


@contextmanager
def start(
    name: str, command: Sequence[str], log: Path, cwd: Path, *, talks: bool = False
) -> Iterator[Running]:
    """Run a process of ours with its output in a log; ends it with all that it started.

    One that `talks` has a standard output for its reader.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if talks else output,
            stderr=output,
            start_new_session=True,
        )
    running = Running(name, process, log)
    try:
        yield running
    finally:
        began = time.monotonic()
        running.stop()
        if time.monotonic() - began > _SLOW_STOP_S:
            say(
                f"{name} was slow to end, or had to be killed; the end of its log:\n{running.tail()}"
            )
