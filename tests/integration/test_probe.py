"""The probe of a store: it reports within seconds that the store is away, hangs, and is back."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from tests.integration.nats_servers import freeze
from tests.waits import await_true

from penstock.core.health import GRACE_SECONDS
from penstock.embedded.handles import Database
from penstock.embedded.process import free_port
from penstock.streams.probe import Probe

SESSIONS = (
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'penstock probe'"
    " AND datname = current_database()"
)


def session(database: Database) -> int:
    await_true(lambda: len(database.execute(SESSIONS)) == 1)
    ((pid,),) = database.execute(SESSIONS)
    return int(pid)


def test_a_session_that_ends_and_one_that_hangs(database: Database) -> None:
    reports: SimpleQueue[dict[str, Any]] = SimpleQueue()
    with Probe(database.url, reports.put):
        database.execute("SELECT pg_terminate_backend(%s)", [session(database)])
        lost = reports.get(timeout=60)
        assert lost["store"]
        assert lost["code"]
        assert reports.get(timeout=60) == {"store": None}
        pid = session(database)
        freeze(pid)
        try:
            hangs = reports.get(timeout=60)
            assert (hangs["code"], "has not answered" in hangs["store"]) == ("no_answer", True)
            assert time.time() - hangs["since"] >= GRACE_SECONDS  # so the store has failed at once
        finally:
            os.kill(pid, signal.SIGCONT)
        assert reports.get(timeout=60) == {"store": None}
        assert reports.empty()


@pytest.fixture
def many_files() -> Iterator[None]:
    """So many open files that the next one has a number that `select` does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for file in held:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_process_with_many_connections(database: Database) -> None:
    reports: SimpleQueue[dict[str, Any]] = SimpleQueue()
    with Probe(database.url, reports.put):
        for _ in range(2):
            database.execute("SELECT pg_terminate_backend(%s)", [session(database)])
            assert reports.get(timeout=60)["store"]
            assert reports.get(timeout=60) == {"store": None}


def test_no_server() -> None:
    reports: SimpleQueue[dict[str, Any]] = SimpleQueue()
    with Probe(f"postgresql://x@127.0.0.1:{free_port()}/x", reports.put):
        away = reports.get(timeout=60)
        assert away["code"] == "connection_refused"
        assert away["remedy"]
        assert reports.get(timeout=60) == away  # again and again
