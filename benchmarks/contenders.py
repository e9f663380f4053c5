"""The contenders: how each is configured, started and ended.

Each runs as a process of its own, in its own process group, with its output in a log file that an
error quotes. The peers run under another interpreter; nothing here imports them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import yaml

from benchmarks import source, usage
from penstock.embedded.process import free_port

HERE = Path(__file__).resolve().parent
STOP_TIMEOUT_S = 20
PENSTOCK = (sys.executable, "-m", "penstock")
CONFIGURATION = "penstock.yaml"
SINK = "bench"


class ContenderError(Exception):
    """A contender ended by itself, or did not do its work in time."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a contender has to do: this slot into that stream."""

    table: source.Table
    slot: str
    nats_url: str
    stream: str
    folder: Path
    store: str = ""  # URL of Penstock's store, where not its own


@dataclass(slots=True)
class Batches:
    """What a counting contender reports: when each batch reached its handler, and its size."""

    times_ns: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    count: int = 0

    def read(self, descriptor: int) -> None:
        """Take the reports until the contender ends."""
        with os.fdopen(descriptor, "rb") as lines:
            for line in lines:
                when, size = line.split()
                self.times_ns.append(int(when))
                self.sizes.append(int(size))
                self.count += int(size)


@dataclass(slots=True)
class Running:
    """A contender at work."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    batches: Batches | None = None  # only where it counts instead of publishing
    url: str = ""  # where Penstock serves HTTP

    @property
    def pid(self) -> int:
        """Return the root of the process tree."""
        return self.process.pid

    def check(self) -> None:
        """Raise if it has ended by itself."""
        code = self.process.poll()
        if code is not None:
            raise ContenderError(
                f"{self.name} ended with code {code}; its last output:\n{self.tail()}"
            )

    def tail(self, lines: int = 15) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the whole tree: SIGTERM to the root, SIGKILL to what is left."""
        everything = usage.tree(self.pid)
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        for process in everything:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everything, timeout=5)


@dataclass(frozen=True, slots=True)
class Contender:
    """One product in one configuration."""

    name: str
    note: str
    kind: str  # penstock, relay, mq-bridge or debezium
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def counts_only(self) -> bool:
        """Return whether it publishes nothing and reports its batches instead."""
        return self.kind == "debezium"

    @contextmanager
    def run(self, job: Job, peers_python: str) -> Iterator[Running]:
        """Run it on `job`; ends it, however the block is left."""
        job.folder.mkdir(parents=True, exist_ok=True)
        log = job.folder / "output.log"
        batches: Batches | None = None
        pass_fds: tuple[int, ...] = ()
        url = ""
        if self.kind in ("penstock", "relay"):
            listen = f"127.0.0.1:{free_port()}"
            url = f"http://{listen}"
            command = [*PENSTOCK, "relay", "--url", job.table.url, "--group", job.stream]
            if self.kind == "penstock":
                file = _write(job.folder / CONFIGURATION, penstock_yaml(job, self.settings))
                command = [*PENSTOCK, "run", "-c", file]
            command += ["--listen", listen]
        elif self.kind == "mq-bridge":
            spec = _write(job.folder / "spec.json", json.dumps(mq_bridge_spec(job, self.settings)))
            command = [peers_python, str(HERE / "peer_mq_bridge.py"), spec]
        else:
            spec = _write(job.folder / "spec.json", json.dumps(debezium_spec(job, self.settings)))
            reader, writer = os.pipe()
            batches, pass_fds = Batches(), (writer,)
            command = [peers_python, str(HERE / "peer_debezium.py"), spec, str(writer)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=job.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
                # A Python transform is imported from here; the working directory is its own.
                env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            )
        if batches is not None:
            os.close(writer)
            threading.Thread(target=batches.read, args=(reader,), daemon=True).start()
        running = Running(self.name, process, log, batches, url)
        try:
            yield running
        finally:
            running.stop()


ALL = (
    Contender("penstock", "defaults", "penstock"),
    # 512, its default, is not its best.
    Contender("mq-bridge", "batch_size 4096", "mq-bridge", {"batch_size": 4096}),
    Contender("debezium", "counting only, defaults", "debezium"),
    Contender(
        "debezium-tuned",
        "counting only, poll.interval.ms 10, batches of 20480, no schema in the messages",
        "debezium",
        {
            "poll.interval.ms": "10",
            "max.batch.size": "20480",
            "max.queue.size": "81920",
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
        },
    ),
)


def penstock_yaml(job: Job, settings: dict[str, Any]) -> str:
    """Return the configuration of `penstock run`: what the job says, and settings of its sink."""
    jetstream = {
        "type": "nats",
        "url": job.nats_url,
        "subject": job.stream + ".{schema}.{table}.{action}",
    }
    sink = {} if settings.get("type") == "stream" else jetstream
    return yaml.safe_dump(
        {
            **({"store": job.store} if job.store else {}),
            "sources": {
                "bench": {
                    "type": "postgres",
                    "url": job.table.url,
                    "tables": [job.table.qualified],
                    "slot": job.slot,
                    "publication": source.PUBLICATION,
                }
            },
            "sinks": {SINK: {**sink, "source": "bench", **settings}},
            "spark": {"checkpoint": str(job.folder / "checkpoints")},
        }
    )


def mq_bridge_spec(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what `peer_mq_bridge.py` reads."""
    return {
        "url": job.table.url,
        "publication": source.PUBLICATION,
        "slot": job.slot,
        "nats_url": job.nats_url,
        "stream": job.stream,
        "subject": f"{job.stream}.changes",
        "settings": settings,
    }


def debezium_spec(job: Job, settings: dict[str, str]) -> dict[str, Any]:
    """Return what `peer_debezium.py` reads."""
    parts = urlsplit(job.table.url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "database": parts.path.lstrip("/"),
        "slot": job.slot,
        "publication": source.PUBLICATION,
        "table": job.table.qualified,
        "settings": settings,
    }


def _write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)
