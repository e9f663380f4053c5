"""What goes wrong: each fault by its name, done to a running `World`."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import psutil
import psycopg

from penstock.embedded.handles import Database
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

from ..pipeline import CAPTURE, PATIENCE, WORKER, Penstock, kill, runs
from ..waits import await_end
from .changes import Changes

_STALL_SECONDS = 7.0  # longer than a sink waits for an ack
_AWAY_SECONDS = 25.0  # long enough to be reported, and for the witness to judge the reports


class Supervisor(threading.Thread):
    """Starts the pipeline again whenever it has ended, as a service manager would."""

    def __init__(self, pipeline: Penstock) -> None:
        super().__init__(name="supervisor", daemon=True)
        self.pipeline = pipeline
        self.exits: list[int] = []
        self.starts = 1
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(Exception):
                code = self.pipeline.process.wait(0.2)
                if self._stopping.wait(0.2):
                    return
                self.exits.append(code)
                self.starts += 1
                self.pipeline.start()

    def stop(self) -> None:
        self._stopping.set()
        await_end(self)


@dataclass
class World:
    """All that a fault can be done to."""

    postgres: EmbeddedPostgres
    nats: EmbeddedNats
    database: Database
    pipelines: list[Penstock]
    supervisors: list[Supervisor]
    random: random.Random
    changes: Changes | None = None
    """Changes the configuration, where the pipeline's is in a store."""

    @property
    def pipeline(self) -> Penstock:
        """The one that works: others stand by."""
        for pipeline in self.pipelines[1:]:
            relays: dict[str, dict[str, Any]] = pipeline.status().get("relays", {})
            groups = [group for of in relays.values() for group in of.values()]
            if any(group["state"] in ("starting", "running") for group in groups):
                return pipeline
        return self.pipelines[0]

    def log(self) -> str:
        """The end of what each has logged since its last start; repeats stand there once."""
        found = []
        for pipeline in self.pipelines:
            newest: dict[str, str] = {}
            for line in pipeline.log().splitlines():
                form = re.sub(r', "timestamp": .*|[0-9.]+', "", line)
                newest.pop(form, None)
                newest[form] = line
            found.append("\n".join(newest.values())[-8000:])
        return "\n--\n".join(found)


def _kill_run(world: World) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(world.pipeline.process.pid, signal.SIGKILL)


def _kill_tree(world: World) -> None:
    kill(world.pipeline.tree())


def _kill_one(world: World, chosen: Callable[[psutil.Process], bool]) -> None:
    """Kill one process below the pipeline's own, as soon as there is one of that kind."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = []
        for process in world.pipeline.tree()[1:]:
            with contextlib.suppress(psutil.Error):
                if chosen(process):
                    found.append(process)
        if found:
            kill([world.random.choice(found)])
            return
        threading.Event().wait(0.2)
    raise AssertionError("no such process below the pipeline's")


def _kill_jvm(world: World) -> None:
    _kill_one(world, lambda process: "org.apache.spark.deploy.SparkSubmit" in process.cmdline())


def _kill_worker(world: World) -> None:
    _kill_one(world, lambda process: runs(process, WORKER))


def _kill_capture(world: World) -> None:
    _kill_one(world, lambda process: runs(process, CAPTURE))


def _sigterm(world: World) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(world.pipeline.process.pid, signal.SIGTERM)


def _postgres_kill(world: World) -> None:
    world.postgres.kill()
    world.postgres.start()


def _walsenders(world: World) -> None:
    """End every walsender; under a starting pipeline there may be none."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(psycopg.OperationalError),
            psycopg.connect(world.postgres.url, autocommit=True) as admin,
        ):
            ended = admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
            if ended.fetchall():
                return
        threading.Event().wait(0.1)


def _drop_slot(world: World) -> None:
    """Drop the slot that is read, and end its reader: what was not delivered has no WAL any more."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(psycopg.OperationalError, psycopg.errors.UndefinedObject),
            psycopg.connect(world.database.url, autocommit=True) as admin,
        ):
            found = admin.execute(
                "SELECT slot_name, pg_terminate_backend(active_pid, 5000)"
                " FROM pg_replication_slots WHERE database = current_database()"
            ).fetchall()
            for slot, _ in found:
                admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            if found:
                return
        threading.Event().wait(0.05)
    raise AssertionError("no slot could be dropped")


def _nats_kill(world: World) -> None:
    world.nats.kill()
    threading.Event().wait(world.random.uniform(0, 2))
    world.nats.start()


def _nats_stall(world: World) -> None:
    """Stop the server's process for a while: messages are sent again, and must not arrive twice."""
    assert world.nats.pid is not None
    _stopped([psutil.Process(world.nats.pid)], _STALL_SECONDS)


def _nats_away(world: World) -> None:
    """Take the only sink's server away for a while."""
    world.nats.kill()
    threading.Event().wait(_AWAY_SECONDS)
    world.nats.start()


def _stall_workers(world: World) -> None:
    """Stop every Python worker of Spark's for a while: nothing moves, and no process has ended."""
    found = [process for process in world.pipeline.tree()[1:] if runs(process, WORKER)]
    _stopped(found, _AWAY_SECONDS)


def _stopped(processes: list[psutil.Process], seconds: float) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        threading.Event().wait(seconds)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _store(world: World) -> psutil.Process | None:
    """Return the postmaster of the embedded store, None while there is none."""
    path = world.pipeline.folder / ".penstock" / "store" / "postmaster.pid"
    with contextlib.suppress(OSError, IndexError, ValueError, psutil.NoSuchProcess):
        process = psutil.Process(int(path.read_text().splitlines()[0]))
        return process if process.name() == "postgres" else None
    return None


def _store_kill(world: World) -> None:
    """Kill the embedded store's postmaster, which is the pipeline's own to start again."""
    if (found := _store(world)) is not None:
        kill([found])


def _store_away(world: World) -> None:
    """Kill the embedded store's postmaster whenever there is one, for a while."""
    deadline = time.monotonic() + _AWAY_SECONDS
    while time.monotonic() < deadline:
        _store_kill(world)
        threading.Event().wait(0.1)


def _store_stall(world: World) -> None:
    """Stop all processes of the embedded store: it neither answers nor refuses."""
    if (found := _store(world)) is not None:
        _stopped([found, *found.children()], _AWAY_SECONDS)


def _change(world: World) -> None:
    """Change the configuration several times, and wait for all but the last."""
    assert world.changes is not None
    world.changes()


CHANGED: Final = "configuration: changed"
FAULTS: Final[dict[str, Callable[[World], None]]] = {
    "pipeline: SIGKILL": _kill_run,
    "pipeline: SIGKILL to the whole tree": _kill_tree,
    "pipeline: SIGKILL to the JVM": _kill_jvm,
    "pipeline: SIGKILL to a Python worker": _kill_worker,
    "pipeline: SIGKILL to the capture": _kill_capture,
    "pipeline: SIGTERM": _sigterm,
    "Postgres: fast restart": lambda world: world.postgres.restart("fast"),
    "Postgres: immediate restart": lambda world: world.postgres.restart("immediate"),
    "Postgres: SIGKILL": _postgres_kill,
    "Postgres: walsenders terminated": _walsenders,
    "NATS: SIGKILL": _nats_kill,
    "NATS: stalled": _nats_stall,
    "NATS: away": _nats_away,
    "pipeline: Python workers stalled": _stall_workers,
}
STORE_FAULTS: Final[dict[str, Callable[[World], None]]] = {
    "store: SIGKILL": _store_kill,
    "store: away": _store_away,
    "store: stalled": _store_stall,
}
TABLE_FAULTS: Final = {**FAULTS, **STORE_FAULTS, CHANGED: _change}
# A table's source reports that its slot is gone, and stops: an outbox still has what the slot had.
OUTBOX_FAULTS: Final = {**FAULTS, "Postgres: slot dropped": _drop_slot}
