"""Webhook deliveries a second to an endpoint on this machine, by `penstock push`."""

from __future__ import annotations

import base64
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import usage
from benchmarks.contenders import HERE, ContenderError
from benchmarks.rig import say
from benchmarks.streams.bed import SQL, Bed
from benchmarks.streams.crew import WARM_UP_S, penstock, start
from benchmarks.streams.progress import Progress, rate
from benchmarks.streams.run import Run
from penstock.embedded.process import free_port
from penstock.streams.records import StreamRecord

CASES = ((4, 1), (16, 1), (4, 100))  # concurrency, and messages a request
_START_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Pushed:
    """One round of one case."""

    concurrency: int
    batch: int
    requests: float  # a second
    messages: float  # different ones, a second
    postgres_us: float  # a request, as the next two
    push_us: float
    endpoint_us: float

    def __str__(self) -> str:
        return (
            f"{self.requests:,.0f} requests/s, {self.messages:,.0f} msgs/s; CPU a request:"
            f" {self.postgres_us:.0f} + {self.push_us:.0f} + {self.endpoint_us:.0f} µs"
        )


def measure(run: Run, bed: Bed) -> list[Pushed]:
    """Push a backlog, signed, so many rounds of each case."""
    results = []
    stream = bed.stream(run.messages, run.groups)
    for turn in range(run.rounds):
        for concurrency, batch in CASES:
            work = f"webhook, {concurrency} at a time, {batch} a request, round {turn + 1}"
            with run.tolerate(work):
                results.append(_run(bed, stream, concurrency, batch, run.seconds))
                say(f"{work}: {results[-1]}")
    return results


def _run(bed: Bed, stream: StreamRecord, concurrency: int, batch: int, seconds: float) -> Pushed:
    name = f"hook-{bed.number()}"
    folder = bed.folder / name
    folder.mkdir()
    port, first_request = free_port(), folder / "first-request"
    command = [sys.executable, "-m", "benchmarks.streams.endpoint"]
    command += [str(port), str(folder / "progress"), str(first_request)]
    settings = {
        "url": f"http://127.0.0.1:{port}/hook",
        "allow_private": True,
        "secrets": ["whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()],
        "concurrency": concurrency,
        "batch": batch > 1,
        "batch_size": batch,
        "max_ack_pending": 10_000,
    }
    with (
        Progress.create(folder / "progress", 2) as progress,
        start("endpoint", command, folder / "endpoint.log", HERE.parent, talks=True) as endpoint,
    ):
        assert endpoint.process.stdout is not None
        endpoint.process.stdout.readline()
        bed.store.register_consumer(stream.name, name, "webhook", settings)
        pusher = penstock(bed, folder, "push")
        try:
            with start("penstock push", pusher, folder / "push.log", folder) as push:
                deadline = time.monotonic() + _START_TIMEOUT_S
                while not progress.marks()[0].acked:
                    push.check()
                    if time.monotonic() > deadline:
                        raise ContenderError(f"penstock push delivers nothing: {push.tail()}")
                    time.sleep(0.05)
                time.sleep(WARM_UP_S)
                pids = (bed.server.pid or 0, push.pid, endpoint.pid)
                before, used = progress.marks(), [usage.cpu_seconds(pid) for pid in pids]
                time.sleep(seconds)
                after = progress.marks()
                used = [usage.cpu_seconds(p) - u for p, u in zip(pids, used, strict=True)]
                push.check()
        finally:
            _delete(bed, name)
    _check_signature(first_request)
    if after[0].acked < after[1].acked:
        raise ContenderError(f"{after[1].acked} requests brought {after[0].acked} messages")
    requests = after[1].acked - before[1].acked
    postgres, pushing, answering = (1e6 * u / max(requests, 1) for u in used)
    return Pushed(
        concurrency, batch, rate(before[1:], after[1:]), rate(before[:1], after[:1]),
        postgres, pushing, answering,
    )  # fmt: skip


def _check_signature(head: Path) -> None:
    if b"webhook-signature:" not in head.read_bytes().lower():
        raise ContenderError("the webhook's requests are not signed")


def _delete(bed: Bed, consumer: str) -> None:
    """Drop the consumer: the next `penstock push` is to find its own alone."""
    with bed.connect() as connection:
        connection.execute(SQL["delete_consumer"], [consumer])
