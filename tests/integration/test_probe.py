"""The probe of a store: it reports within seconds that the store is away, hangs, and is back."""

from __future__ import annotations

import os
import signal
from queue import SimpleQueue
from typing import Any

from penstock.embedded.handles import Database
from penstock.embedded.process import free_port
from penstock.streams.probe import Probe

from .capturing import eventually

SESSIONS = (
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'penstock probe'"
    " AND datname = current_database()"
)


def session(database: Database) -> int:
    eventually(lambda: len(database.execute(SESSIONS)) == 1)
    ((pid,),) = database.execute(SESSIONS)
    return int(pid)


def test_a_session_that_ends_and_one_that_hangs(database: Database) -> None:
    reports: SimpleQueue[dict[str, Any]] = SimpleQueue()
    with Probe(database.url, reports.put) as probe:
        database.execute("SELECT pg_terminate_backend(%s)", [session(database)])
        lost = reports.get(timeout=10)
        assert lost["store"]
        assert lost["code"]
        assert reports.get(timeout=10) == {"store": None}
        pid = session(database)
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(lambda: probe.asked_at() is not None)
            hangs = reports.get(timeout=30)
            assert "no answer" in hangs["store"]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert reports.get(timeout=30) == {"store": None}
        eventually(lambda: probe.asked_at() is None)
        assert reports.empty()


def test_no_server() -> None:
    reports: SimpleQueue[dict[str, Any]] = SimpleQueue()
    with Probe(f"postgresql://x@127.0.0.1:{free_port()}/x", reports.put):
        away = reports.get(timeout=10)
        assert away["code"] == "connection_refused"
        assert away["remedy"]
        assert reports.get(timeout=10) == away  # again and again
