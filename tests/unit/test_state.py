"""What a run tells of its sinks: counts, backlogs, rates, errors."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.state import Rate, State
from penstock.streams.backfills import Backfill

DELIVERED = {"sink": "jetstream", "delivered": 5, "duplicates": 1, "bytes": 100, "dead": []}
ERROR = {"sink": "jetstream", "error": "Nothing listens.", "code": "connection_refused"}


@pytest.fixture
def state() -> State:
    return State(["shop"], {"jetstream": ("nats", "shop"), "events": ("stream", "shop")})


def behind(state: str, messages: int) -> dict[str, Any]:
    return {
        "sink": "jetstream", "state": state, "backlog": messages, "backlog_bytes": 10 * messages,
        "since": None if state == "attached" else 1_800_000_000.0,
    }  # fmt: skip


def metric(state: State, name: str, /, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(state)
    return registry.get_sample_value(f"penstock_{name}", labels)


def test_a_sink_that_falls_behind_and_comes_back(state: State) -> None:
    state.update(DELIVERED)
    state.update({**ERROR, "behind": True})
    state.update(behind("behind", 7))
    found = state.as_json()["sinks"]["jetstream"]
    assert (found["state"], found["backlog"], found["backlog_bytes"]) == ("behind", 7, 70)
    assert found["since"] == "2027-01-15T08:00:00+00:00"
    assert found["error"] == ERROR["error"]
    assert metric(state, "sink_behind", sink="jetstream") == 1
    assert metric(state, "sink_detached", sink="jetstream") == 0
    assert metric(state, "sink_up", sink="jetstream") == 0
    state.update(behind("detached", 9))
    assert metric(state, "sink_behind", sink="jetstream") == 1
    assert metric(state, "sink_detached", sink="jetstream") == 1
    assert metric(state, "backlog_messages", sink="jetstream") == 9
    state.update(behind("attached", 0))
    found = state.as_json()["sinks"]["jetstream"]
    assert (found["state"], found["backlog"], found["error"]) == ("attached", 0, None)
    assert found["since"] is None
    assert found["delivered"] == 5
    assert metric(state, "sink_up", sink="jetstream") == 1


def test_a_stream_has_a_head_and_no_backlog(state: State) -> None:
    assert state.as_json()["sinks"]["events"]["head"] is None
    state.update({"capture": "shop", "done": [0x16B3748, 3]})
    found = state.as_json()["sinks"]["events"]
    assert found["head"] == "0/16B3748"
    assert "backlog" not in found
    assert metric(state, "backlog_messages", sink="events") is None


def test_the_store(state: State) -> None:
    assert metric(state, "store_up") == 1
    state.update({"store": "The store is gone.", "code": "connection_lost"})
    assert state.as_json()["store"] == {"error": "The store is gone."}
    assert metric(state, "store_up") == 0
    state.update({"store": None})
    assert metric(state, "store_up") == 1


def test_backfills(state: State) -> None:
    now = datetime.now(UTC)
    backfill = Backfill(
        7, "shop", "events", "public", "Odd One", None, None, None, False, "running", ["5"], 5, 10,
        None, now, now, None, True,
    )  # fmt: skip
    unknown = replace(backfill, id=8, state="failed", rows_total=None, error="No such column.")
    state.show_backfills([backfill, unknown])
    assert state.as_json()["backfills"] == [
        {
            "number": 7, "source": "shop", "sink": "events", "table": 'public."Odd One"',
            "state": "running", "rows_done": 5, "rows_total": 10, "error": None,
        },
        {
            "number": 8, "source": "shop", "sink": "events", "table": 'public."Odd One"',
            "state": "failed", "rows_done": 5, "rows_total": None, "error": "No such column.",
        },
    ]  # fmt: skip
    labels = {"sink": "events", "table": 'public."Odd One"'}
    running = {**labels, "number": "7", "state": "running"}
    assert metric(state, "backfill_rows_done", **running) == 5
    assert metric(state, "backfill_rows_estimated", **running) == 10
    failed = {**labels, "number": "8", "state": "failed"}
    assert metric(state, "backfill_rows_done", **failed) == 5
    assert metric(state, "backfill_rows_estimated", **failed) is None


def test_the_rate_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rate = Rate()
    assert rate.per_second(0) == 0
    for count in range(100, 3100, 100):
        now += 1
        rate.note(count)
    assert rate.per_second(3000) == pytest.approx(100)
    now += 60  # nothing came since
    assert rate.per_second(3000) < 10
