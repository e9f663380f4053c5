"""A lane's connectors and sessions: syncs share them, and few are kept."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.spark.sync_loop import SyncLoop
from penstock.syncs import lane as lanes
from penstock.syncs.connectors.contract import Kind
from penstock.syncs.errors import SyncError
from penstock.syncs.jobs import Job
from penstock.syncs.lane import JobClient, JobLane
from penstock.syncs.setup import Setup

KEY = SyncError("credential", "no key")
SECONDS = 60


class Session:
    """Notes its end."""

    def __init__(self, events: queue.SimpleQueue[str]) -> None:
        self._events = events
        events.put("made")

    def close(self) -> None:
        self._events.put("closed")


@pytest.fixture
def events() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def lane(events: queue.SimpleQueue[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[JobLane]:
    connector = SimpleNamespace(access=None)
    monkeypatch.setattr(lanes, "connector_of", lambda *_: connector)
    monkeypatch.setattr(lanes, "session_of", lambda *_, **__: Session(events))
    monkeypatch.setattr(lanes, "run", lambda *_: events.put("run"))
    made = JobLane("", "", 1, lambda _: None)
    yield made
    made.close()


def client(credential: str) -> JobClient:
    return JobClient(credential, "crm", None, {}, KEY)


def did(events: queue.SimpleQueue[str], count: int) -> list[str]:
    return [events.get(timeout=SECONDS) for _ in range(count)]


def test_few_sessions_are_kept_however_many_credentials_there_are(
    lane: JobLane, events: queue.SimpleQueue[str]
) -> None:
    for number in range(lanes._IDLE + 2):
        lane.define(number, client(f"c{number}"))

    def give(number: int, job: int) -> None:
        lane.give(number, Job(job, "s", "crm:contacts", Kind.POLL))

    for number in range(lanes._IDLE):
        give(number, number)
        assert did(events, 2) == ["made", "run"]
    give(0, 1000)
    assert did(events, 1) == ["run"], "the one that is kept"
    give(lanes._IDLE, 1001)
    assert did(events, 3) == ["made", "run", "closed"]
    give(0, 1002)
    assert did(events, 1) == ["run"], "it was used since, and another one gave way"
    give(1, 1003)
    assert did(events, 3) == ["made", "run", "closed"]


def test_the_syncs_of_a_credential_share_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.spark.sync_loop.States", lambda *_: SimpleNamespace(close=print))
    loop = SyncLoop(
        host="127.0.0.1", store_url="", records_url="", seconds=1.0, on_shown=lambda _: None
    )

    def numbers(**clients: JobClient) -> dict[str, Any]:
        loop._configure(Setup((), clients), {}, 0.0)
        return {name: loop._numbers[name] for name in clients}

    first = numbers(a=client("x"), b=client("x"), c=client("y"))
    assert first["a"] == first["b"] != first["c"]
    assert numbers(a=client("x"), b=client("x"), c=client("y")) == first
    rotated = JobClient("x", "crm", None, {"token": "new"}, KEY)
    second = numbers(a=rotated, b=rotated, c=client("y"))
    assert second["a"] == second["b"] not in first.values()
    assert second["c"] == first["c"]
    loop._server.close()
