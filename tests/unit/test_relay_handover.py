"""A group's current run, and how the next one replaces it; without Spark and servers."""

from __future__ import annotations

import dataclasses
import threading
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.settings import SparkSettings
from penstock.outbox.pipelines import StoredPipeline, source_name
from penstock.outbox.relay import handover
from penstock.outbox.relay.desired_state import DesiredPipelines, GroupPlanner
from penstock.outbox.relay.handover import Handover

URL = "postgresql://app@db/shop"
PLAIN = {"sink_type": "nats", "url": "nats://n", "subject": "s"}
NO_SPARK: Any = None


class Query:
    """The next query, as a run would take it over."""

    made: list[Query]

    def __init__(self, _spark: object, config: object, _target: object, _uuids: object) -> None:
        self.config = config
        self.closed = False
        Query.made.append(self)

    def start(self) -> None: ...

    def wait(self, _seconds: float) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class FakeRun:
    """A run that is stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.store = SimpleNamespace(
            end_drainers=lambda: None, target=lambda _: None, uuids=lambda *_: {}
        )

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture(autouse=True)
def queries(monkeypatch: pytest.MonkeyPatch) -> list[Query]:
    Query.made = []
    monkeypatch.setattr(handover, "NextQuery", Query)
    return Query.made


def desired(subject: str = "s", delivered: int = 0) -> DesiredPipelines:
    config = PLAIN | {"subject": subject}
    noon = datetime(2024, 1, 1, 12, tzinfo=UTC)
    row = StoredPipeline("p", "box", "g", config, True, True, None, delivered, noon)
    return GroupPlanner(URL, "shop", URL, SparkSettings(), source_name).plan([row], {})["g"]


def running(of: Handover, state: DesiredPipelines) -> Any:
    run: Any = FakeRun()
    of.set_desired(state)
    assert of.register(run, state)
    assert (of.run, of.running) == (run, state)
    return run


def test_a_changed_state_ends_the_run_once_the_next_query_waits(queries: list[Query]) -> None:
    of = Handover("g", NO_SPARK)
    run = running(of, desired())
    changed = desired("other")
    of.set_desired(changed)
    assert run.stopped.wait(60)
    of.unregister()
    (query,) = queries
    assert query.config == changed.config
    taken: Any = of.take_next()
    assert (taken, query.closed) == (query, False)
    assert of.take_next() is None


def test_a_state_that_runs_as_the_current_one_ends_nothing(queries: list[Query]) -> None:
    of = Handover("g", NO_SPARK)
    run = running(of, desired())
    of.set_desired(desired(delivered=7))
    assert of.register(run, desired())
    assert not run.stopped.is_set()
    assert queries == []


def test_a_group_without_outboxes_ends_its_run_and_prepares_nothing(queries: list[Query]) -> None:
    of = Handover("g", NO_SPARK)
    run = running(of, desired())
    of.set_desired(None)
    assert run.stopped.wait(60)
    assert queries == []


def test_a_run_of_an_earlier_state_is_refused() -> None:
    of = Handover("g", NO_SPARK)
    run: Any = FakeRun()
    assert not of.is_known
    of.set_desired(desired("other"))
    assert of.is_known
    assert not of.register(run, desired())
    of.stop()
    assert not of.register(run, dataclasses.replace(desired("other")))
    assert of.run is None


def test_a_query_that_no_run_takes_is_closed(queries: list[Query]) -> None:
    of = Handover("g", NO_SPARK)
    run = running(of, desired())
    of.set_desired(desired("other"))
    assert run.stopped.wait(60)
    of.discard_next()
    assert [query.closed for query in queries] == [True]


def test_a_stop_ends_the_run() -> None:
    of = Handover("g", NO_SPARK)
    run = running(of, desired())
    of.stop()
    assert run.stopped.is_set()
    assert of.stopping
