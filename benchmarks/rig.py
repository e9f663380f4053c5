"""The servers that a benchmark runs against, and what all its parts need to know."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import source
from benchmarks.contenders import Contender, ContenderError, Job, Running
from benchmarks.probe import Probe, ProbeError
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

POLL_S = 0.02
_STALL_S = 60  # without a message after the first

POSTGRES_SETTINGS = {
    "shared_buffers": "512MB",
    # A checkpoint in the middle of one contender's run would be charged to it alone.
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    # The rounds read the same WAL again and again; autovacuum would add to it.
    "autovacuum": "off",
    # A backfill's first and last message of a stream are found by it.
    "track_commit_timestamp": "on",
    # 1,000 consumers are made at once.
    "max_locks_per_transaction": "256",
}


@dataclass(slots=True)
class Rig:
    """Servers that run, the contenders of this run, and a folder for their files."""

    postgres_url: str
    nats_url: str
    folder: Path
    peers_python: str
    contenders: Sequence[Contender]
    pgbench: Path
    failures: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextmanager
    def tolerate(self, work: str) -> Iterator[None]:
        """Note a failure inside the block and go on: the other contenders still have their run."""
        try:
            yield
        except (ContenderError, ProbeError) as error:
            self.failures.append(f"{work}: {error}")
            say(f"{work}: FAILED: {error}")

    @contextmanager
    def start(
        self, contender: Contender, table: source.Table, store: str = ""
    ) -> Iterator[tuple[Running, str]]:
        """Run a contender on a fresh copy of the template slot, into a fresh stream.

        `store` is the URL of Penstock's store, where not its own. Yields the contender and the
        stream's name; slot and stream are gone afterwards.
        """
        with self.stream() as stream:
            folder = self.folder / f"{stream}-{contender.name}"
            job = Job(table, stream, self.nats_url, stream, folder, store)
            source.copy_slot(self.postgres_url, job.slot)
            try:
                with contender.run(job, self.peers_python) as running:
                    yield running, stream
            finally:
                source.drop_slot(self.postgres_url, job.slot)

    @contextmanager
    def stream(self) -> Iterator[str]:
        """Make a fresh stream, gone afterwards; yields its name, which nothing else in this run has."""
        name = f"bench_{next(self._numbers)}"
        with Probe(self.nats_url) as probe:
            probe.create_stream(name)
        try:
            yield name
        finally:
            with Probe(self.nats_url) as probe:
                probe.delete_stream(name)


@contextmanager
def servers(peers_python: str, chosen: Sequence[Contender]) -> Iterator[Rig]:
    """Start Postgres and NATS in a temporary folder; ends both and removes it."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        with (
            EmbeddedPostgres(folder / "postgres", settings=POSTGRES_SETTINGS) as postgres,
            # Room for a whole stream in one connection, when the probe reads it back.
            EmbeddedNats(folder / "nats", "max_pending: 1073741824\n") as nats,
        ):
            yield Rig(
                postgres.url, nats.url, folder / "runs", peers_python, chosen,
                postgres.bin_dir / "pgbench",
            )  # fmt: skip


def say(text: str) -> None:
    """Tell who waits what is going on; results go to standard output alone."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def wait_for_count(
    running: Running, probe: Probe, stream: str, wanted: int, timeout: float
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Wait until `wanted` messages are there; return the first and the last (ns, count) seen.

    For a counting contender these are its first and its last batch.
    """
    began = time.monotonic()
    first: tuple[int, int] | None = None
    count, since = 0, began
    while time.monotonic() < began + timeout:
        if running.batches is not None:
            count, now = running.batches.count, 0
        else:
            before, count = count, probe.count(stream)
            now = time.monotonic_ns()
            if count != before or not count:
                since = time.monotonic()
            elif time.monotonic() - since > _STALL_S:
                break
            if count and first is None:
                first = now, count
        if count >= wanted:
            if running.batches is not None:
                times, sizes = running.batches.times_ns, running.batches.sizes
                return (times[0], sizes[0]), (times[-1], count)
            return first or (now, count), (now, count)
        running.check()
        time.sleep(POLL_S)
    raise ContenderError(
        f"{running.name}: {count} of {wanted} messages after {time.monotonic() - began:.0f} s;"
        f" its last output:\n{running.tail()}"
    )
